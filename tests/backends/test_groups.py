"""`LaneGroups` against a dictionary: whoever comes and goes, seats hold their lanes and changes carry their content,
and where memory is limited, no more is taken than was said to be needed.
"""

from collections.abc import Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backends.groups import SMALLEST_CLASS, Change, LaneGroups, Move, Resize, Seat, capacity_class, longest_lane

SEATS = frozenset(range(10))
SLOTS = st.integers(0, 9)
LENGTHS = st.one_of(st.integers(1, 300), st.sampled_from([256, 257, 512, 513, 1024, 1025, 2049]))

Content = tuple[int, int]
"""What stands in a row: whose lane it is (a number never used twice) and how many of its positions."""


class SimulatedMemory:
    """Group buffers as lists of rows. Written by the machine, which applies every change in order."""

    def __init__(self) -> None:
        self.plenty = True
        """Whether nothing was ever limited."""
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
            assert change.rows >= 2 * len(held_rows) or not self.plenty, "growth must at least double"
            del held_rows[change.rows :]
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
        assert all(isinstance(change, Resize) and change.rows == 0 for change in changes) or not self.memory.plenty
        self.apply(changes)
        for content in (self.numbers, self.needed, self.held):
            content.pop(slot, None)
        assert {other: self.groups.seat(other) for other in before} == before or not self.memory.plenty
        assert self.groups.leave(slot) == []

    @precondition(lambda self: self.needed)
    @rule()
    def clear(self) -> None:
        self.apply(self.groups.clear())
        for content in (self.numbers, self.needed, self.held):
            content.clear()
        assert self.memory.rows == {}

    @invariant()
    def held_is_what_the_rows_take(self) -> None:
        assert self.groups.held == sum(capacity * len(rows) for capacity, rows in self.memory.rows.items())

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


class LimitedLanes(Lanes):
    """With a limit that changes: it is kept wherever it can be, and nobody is copied for it who need not be."""

    @initialize()
    def unlimited(self) -> None:
        self.most: int | None = None

    @rule(most=st.integers(0, 40).map(lambda rows: rows * SMALLEST_CLASS))
    def limit(self, most: int) -> None:
        self.most, self.memory.plenty = most, False
        self.apply(self.groups.limit(most))

    def check_moves(self, changes: Sequence[Change], before: dict[int, Seat], needs: dict[int, int]) -> None:
        if self.most is None:
            super().check_moves(changes, before, needs)
        elif not any(isinstance(change, Resize) and 0 < change.rows < self.rows_of(change) for change in changes):
            outgrown = {slot for slot, needed in needs.items() if slot in before and needed > before[slot].capacity}
            moved = {slot for slot, seat in before.items() if self.groups.seat(slot) != seat}
            assert self.together or moved <= outgrown, "copied, though no row was given back"

    def rows_of(self, change: Resize) -> int:
        return len(self.memory.rows.get(change.capacity, ()))

    @invariant()
    def no_more_is_held_than_may_or_must_be(self) -> None:
        lanes = {slot: self.groups.seat(slot).capacity for slot in self.needed}
        tight = len(lanes) * max(lanes.values(), default=0) if self.together else sum(lanes.values())
        assert self.groups.needed(self.needed) == tight
        if self.most is not None:
            assert self.groups.held <= max(self.most, tight)


TestLanes = Lanes.TestCase
TestLimitedLanes = LimitedLanes.TestCase
for _machine in (TestLanes, TestLimitedLanes):
    _machine.settings = settings(max_examples=120, stateful_step_count=30)


TURNS = st.lists(
    st.one_of(st.dictionaries(SLOTS, LENGTHS, min_size=1, max_size=6), SLOTS, st.just("clear")), max_size=8
)
"""Lanes that are placed, one that leaves, or all."""


@given(
    turns=TURNS,
    staying=st.dictionaries(SLOTS, LENGTHS, min_size=1, max_size=10),
    order=st.randoms(use_true_random=False),
    together=st.booleans(),
    spare=st.integers(0, 600),
    lane_bytes=st.sampled_from([0, 70]),
)
def test_what_is_said_to_be_needed_is_enough_in_whatever_order_lanes_are_placed(
    turns: list[dict[int, int] | int | str],
    staying: dict[int, int],
    order: Random,
    together: bool,
    spare: int,
    lane_bytes: int,
) -> None:
    """And it is no more than what is held then, if everybody was placed."""
    groups = LaneGroups(together=together)
    groups.lane_bytes = lane_bytes
    play(groups, turns)
    for slot in SEATS - staying.keys():
        groups.leave(slot)
    needed = groups.needed(staying)
    groups.limit(needed + spare)
    slots = list(staying)
    order.shuffle(slots)
    while slots:
        placed = {slots.pop() for _ in range(order.randint(1, len(slots)))}
        expected = groups.needed_with({slot: (staying[slot], 0) for slot in placed})
        groups.place({slot: (staying[slot], 0) for slot in placed})
        assert expected <= groups.held <= needed + spare
    assert groups.needed(staying) == needed <= groups.held


def play(groups: LaneGroups, turns: list[dict[int, int] | int | str]) -> None:
    for turn in turns:
        if isinstance(turn, dict):
            groups.place({slot: (length, 0) for slot, length in turn.items()})
        elif isinstance(turn, int):
            groups.leave(turn)
        else:
            groups.clear()


@given(turns=TURNS, lengths=st.lists(LENGTHS, max_size=6), together=st.booleans())
def test_unnamed_lanes_need_as_much_as_newcomers_but_for_the_common_class(
    turns: list[dict[int, int] | int | str], lengths: list[int], together: bool
) -> None:
    groups = LaneGroups(together=together)
    play(groups, turns)
    named = dict(enumerate(lengths, start=100))
    least = groups.needed_by([1]) if together else 0
    assert groups.needed_by(lengths) == groups.needed({slot: max(length, least) for slot, length in named.items()})


def test_without_room_for_twice_the_rows_as_many_are_taken_as_fit() -> None:
    groups = LaneGroups()
    groups.limit(5 * 256)
    placed = [groups.place({slot: (1, 0)}) for slot in range(6)]
    assert placed == [[Resize(256, 1)], [Resize(256, 2)], [Resize(256, 4)], [], [Resize(256, 5)], [Resize(256, 6)]]
    groups.limit(10 * 256)
    assert groups.place({6: (1, 0)}) == [Resize(256, 10)]


def test_no_more_rows_are_given_back_than_the_limit_asks_for() -> None:
    groups = LaneGroups()
    groups.place(dict.fromkeys(range(4), (1, 0)))
    groups.place({4: (1, 0)})
    assert groups.limit(8 * 256) == []
    assert groups.limit(7 * 256 - 1) == [Resize(256, 6)]


def test_a_lane_is_read_before_another_one_moves_up_into_its_row() -> None:
    groups = LaneGroups()
    groups.place(dict.fromkeys(range(3), (1, 0)))
    groups.limit(4 * 256)
    assert groups.place({0: (500, 200)}) == [
        Resize(512, 1),
        Move(Seat(256, 0), Seat(512, 0), 200),
        Move(Seat(256, 2), Seat(256, 0), 256),
        Resize(256, 2),
    ]


def test_spare_rows_of_others_go_first_and_a_lane_behind_them_moves_up() -> None:
    groups = LaneGroups()
    groups.place(dict.fromkeys(range(4), (1, 0)))
    groups.leave(1)
    groups.leave(2)
    assert groups.limit(4 * 256) == []
    assert groups.place({9: (500, 0)}) == [
        Resize(512, 1),
        Move(Seat(256, 3), Seat(256, 1), 256),
        Resize(256, 2),
    ]
    assert groups.held == 4 * 256


@given(context=st.integers(1, 100_000), most=st.integers(0, 1 << 17))
def test_the_longest_lane_is_the_longest_that_fits(context: int, most: int) -> None:
    longest = longest_lane(context, lambda length: capacity_class(length) <= most)
    lengths = [length for length in range(1, context + 1, 1 + context // 2000) if capacity_class(length) <= most]
    if longest is None:
        assert lengths == []
    else:
        assert capacity_class(longest) <= most
        assert longest == context or capacity_class(longest + 1) > most


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


def test_lanes_without_rows_of_any_size_can_sit_too() -> None:
    """States alone: what a lane takes does not depend on how long it is."""
    groups = LaneGroups(row_bytes=lambda _capacity: 0)
    groups.lane_bytes = 100
    groups.limit(450)
    for slot in range(4):
        groups.place({slot: (1, 0)})
    assert groups.held == groups.needed(dict.fromkeys(range(4), 1)) == 400
