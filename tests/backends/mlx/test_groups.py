"""`LaneGroups` against a dictionary: whoever comes and goes, seats hold their lanes and changes carry their content."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backends.mlx.caches.groups import SMALLEST_CLASS, Change, LaneGroups, Move, Resize, Seat, capacity_class

SLOTS = st.integers(0, 9)
LENGTHS = st.one_of(st.integers(1, 300), st.sampled_from([256, 257, 512, 513, 1024, 1025, 2049]))

Content = tuple[int, int]
"""What stands in a row: whose lane it is (a number never used twice) and how many of its positions."""


class SimulatedMemory:
    """Group buffers as lists of rows. Written by the machine, which applies every change in order."""

    def __init__(self) -> None:
        self.rows: dict[int, list[Content | None]] = {}

    def apply(self, change: Change) -> None:
        if isinstance(change, Move):
            content = self.rows[change.source.capacity][change.source.row]
            assert change.length <= change.source.capacity
            held = None if content is None else (content[0], min(content[1], change.length))
            self.rows[change.target.capacity][change.target.row] = held
        elif change.rows == 0:
            del self.rows[change.capacity]
        else:
            held_rows = self.rows.setdefault(change.capacity, [])
            assert change.rows >= 2 * len(held_rows), "growth must at least double"
            held_rows += [None] * (change.rows - len(held_rows))


class Lanes(RuleBasedStateMachine):
    """The model: per slot, its lane's number, the most it ever needed, and how many positions it holds."""

    @initialize(together=st.booleans())
    def start(self, together: bool) -> None:
        self.together = together
        self.groups = LaneGroups(together=together)
        self.memory = SimulatedMemory()
        self.numbers: dict[int, int] = {}
        self.needed: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.opened = 0

    def apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self.memory.apply(change)

    @rule(needs=st.dictionaries(SLOTS, LENGTHS, min_size=1, max_size=6), filled=st.floats(0, 1))
    def place(self, needs: dict[int, int], filled: float) -> None:
        needs = {slot: max(needed, self.held.get(slot, 0)) for slot, needed in needs.items()}
        before = {slot: self.groups.seat(slot) for slot in self.needed}
        held = {slot: self.held.get(slot, 0) for slot in needs}
        changes = self.groups.place({slot: (needed, held[slot]) for slot, needed in needs.items()})
        self.check_moves(changes, before, needs)
        self.apply(changes)
        for slot, needed in needs.items():
            if slot not in self.numbers:
                self.opened += 1
                self.numbers[slot] = self.opened
            self.needed[slot] = max(self.needed.get(slot, 0), needed)
            self.held[slot] = max(held[slot], int(filled * needed))
            self.fill(slot)

    def fill(self, slot: int) -> None:
        seat = self.groups.seat(slot)
        self.memory.rows[seat.capacity][seat.row] = (self.numbers[slot], self.held[slot])

    def check_moves(self, changes: Sequence[Change], before: dict[int, Seat], needs: dict[int, int]) -> None:
        """Rule 19: nobody moves who has not outgrown their class, and who moves is copied once, as far as they hold."""
        moves = [change for change in changes if isinstance(change, Move)]
        moved = {slot for slot, seat in before.items() if self.groups.seat(slot) != seat}
        assert sorted((move.source.capacity, move.source.row) for move in moves) == sorted(
            (before[slot].capacity, before[slot].row) for slot in moved
        )
        for slot in moved:
            (move,) = [move for move in moves if move.source == before[slot]]
            assert move.target == self.groups.seat(slot)
            assert move.length >= self.held[slot]
            if slot in needs:
                assert move.length == self.held[slot]
            if not self.together:
                assert needs[slot] > before[slot].capacity

    @rule(slot=SLOTS)
    def leave(self, slot: int) -> None:
        before = {other: self.groups.seat(other) for other in self.needed if other != slot}
        changes = self.groups.leave(slot)
        assert all(isinstance(change, Resize) and change.rows == 0 for change in changes)
        self.apply(changes)
        for content in (self.numbers, self.needed, self.held):
            content.pop(slot, None)
        assert {other: self.groups.seat(other) for other in before} == before
        assert self.groups.leave(slot) == []

    @precondition(lambda self: self.needed)
    @rule()
    def clear(self) -> None:
        self.apply(self.groups.clear())
        for content in (self.numbers, self.needed, self.held):
            content.clear()
        assert self.memory.rows == {}

    @invariant()
    def every_lane_stands_where_its_seat_says(self) -> None:
        for slot, number in self.numbers.items():
            seat = self.groups.seat(slot)
            assert self.memory.rows[seat.capacity][seat.row] == (number, self.held[slot])

    @invariant()
    def no_two_lanes_share_a_seat(self) -> None:
        seats = [self.groups.seat(slot) for slot in self.needed]
        assert len(set(seats)) == len(seats)

    @invariant()
    def lanes_sit_in_the_smallest_class_that_ever_held_them(self) -> None:
        capacities = {slot: self.groups.seat(slot).capacity for slot in self.needed}
        if self.together:
            assert len(set(capacities.values())) <= 1
            assert all(capacities[slot] >= needed for slot, needed in self.needed.items())
        else:
            assert capacities == {slot: capacity_class(needed) for slot, needed in self.needed.items()}

    @invariant()
    def only_groups_with_lanes_have_rows(self) -> None:
        assert set(self.memory.rows) == {self.groups.seat(slot).capacity for slot in self.needed}


TestLanes = Lanes.TestCase
TestLanes.settings = settings(max_examples=120, stateful_step_count=30)


@given(length=st.integers(0, 1 << 20))
def test_a_class_is_the_smallest_power_of_two_times_256_that_holds_a_length(length: int) -> None:
    capacity = capacity_class(length)
    steps = capacity // SMALLEST_CLASS
    assert capacity % SMALLEST_CLASS == 0
    assert steps & (steps - 1) == 0
    assert length <= capacity
    assert capacity == SMALLEST_CLASS or length > capacity // 2


@given(lanes=st.integers(1, 200))
def test_growth_is_amortised_and_bounded(lanes: int) -> None:
    """Lanes that join one by one cause copies of fewer rows than twice their number; under half of the rows is idle."""
    groups = LaneGroups()
    copied = rows = 0
    for slot in range(lanes):
        for change in groups.place({slot: (1, 0)}):
            assert isinstance(change, Resize)
            copied += rows
            rows = change.rows
    assert copied < 2 * lanes
    assert lanes <= rows < 2 * lanes


def test_the_row_of_a_lane_that_left_is_the_next_ones() -> None:
    groups = LaneGroups()
    groups.place(dict.fromkeys(range(4), (10, 0)))
    freed = groups.seat(1)
    groups.leave(1)
    assert groups.place({9: (10, 0)}) == []
    assert groups.seat(9) == freed


def test_a_lane_may_take_the_row_that_another_leaves_in_the_same_step() -> None:
    groups = LaneGroups()
    groups.place({0: (500, 0), 1: (200, 0)})
    changes = groups.place({0: (600, 500), 1: (300, 200)})
    assert [change for change in changes if isinstance(change, Move)] == [
        Move(Seat(512, 0), Seat(1024, 0), 500),
        Move(Seat(256, 0), Seat(512, 0), 200),
    ]
    assert changes[-1] == Resize(256, 0)
