"""The planner against an oracle that knows the true chances and the true costs, on machines of all shapes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost import RoundShape
from scheduler.draft import Draft
from scheduler.pace import Choice, LaneOffers, Offer, Pace

NO_PREFILL = RoundShape(0, False, 0)
Cost = Callable[[RoundShape], float]


def linear(shape: RoundShape) -> float:
    """As on a CPU: 40 ms and 2 ms a row."""
    return 0.038 + 0.002 * shape.rows


def flat_then_steep(shape: RoundShape) -> float:
    """As on a GPU: rows are free until the units are busy."""
    return 0.02 + 0.001 * max(0, shape.rows - 24)


def cliff(shape: RoundShape) -> float:
    """A second row per lane takes another kernel."""
    return 0.02 + 0.0001 * shape.rows + 0.015 * shape.wide


def heavy_attention(shape: RoundShape) -> float:
    return 0.02 + 0.0005 * shape.rows + 2e-6 * shape.attention


MACHINES = [linear, flat_then_steep, cliff, heavy_attention]


@dataclass
class World:
    """Lanes whose guesses come true with known chances, on a machine with known costs; time passes only as it says."""

    cost: Cost
    chances: list[float]
    """Per lane: that a guess is right, given those before it."""
    depth: int = 6
    rectangle: bool = False
    cached: int = 300
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.pace = Pace(rectangle=self.rectangle)
        for rows in (1, 2, 4, 8, 16, 32, 64):
            for wide in (False, True):
                for keys in (0, 0, 0, 1000):
                    shape = RoundShape(rows, wide, rows * keys)
                    self.pace.timed(shape, self.cost(shape))

    def lanes(self) -> list[LaneOffers]:
        """Token 1 is right, 0 is wrong; every lane has a mark of its own."""
        draft = Draft((1,) * self.depth, (0,) * self.depth)
        return [
            LaneOffers(str(place), self.cached, (Offer(f"source {place}", draft),), self.depth)
            for place in range(len(self.chances))
        ]

    def shape(self, chosen: dict[str, Choice]) -> RoundShape:
        widths = [
            len(chosen[str(place)].draft.tokens) if str(place) in chosen else 0 for place in range(len(self.chances))
        ]
        if self.rectangle:
            widths = [max(widths)] * len(widths)
        rows = sum(widths) + len(widths)
        return RoundShape(rows, max(widths) > 0, self.cached * rows)

    def round(self) -> dict[str, Choice]:
        lanes = self.lanes()
        chosen = self.pace.choose(lanes, NO_PREFILL, 1000)
        for lane, chance in zip(lanes, self.chances, strict=True):
            came = [1 if self.rng.random() < chance else 0 for _ in range(self.depth)]
            self.pace.observe(lane, came)
        shape = self.shape(chosen)
        self.pace.timed(shape, self.cost(shape) * self.rng.uniform(0.95, 1.05))
        return chosen

    def speed(self, lengths: Sequence[int]) -> float:
        """Tokens a second in truth."""
        tokens = sum(
            1 + sum(chance ** (position + 1) for position in range(length))
            for chance, length in zip(self.chances, lengths, strict=True)
        )
        widths = [max(lengths)] * len(lengths) if self.rectangle else list(lengths)
        rows = sum(widths) + len(widths)
        return tokens / self.cost(RoundShape(rows, max(widths) > 0, self.cached * rows))

    def best_speed(self) -> float:
        """What an oracle gets: slots in the order of their true chances, every number of them tried."""
        if self.rectangle:
            return max(self.speed([width] * len(self.chances)) for width in range(self.depth + 1))
        slots = sorted(
            (
                (chance ** (position + 1), lane)
                for lane, chance in enumerate(self.chances)
                for position in range(self.depth)
            ),
            reverse=True,
        )
        lengths = [0] * len(self.chances)
        best = self.speed(lengths)
        for _, lane in slots:
            lengths[lane] += 1
            best = max(best, self.speed(lengths))
        return best

    def lengths(self, chosen: dict[str, Choice]) -> list[int]:
        return [len(chosen[str(lane)].draft.tokens) if str(lane) in chosen else 0 for lane in range(len(self.chances))]


def share_of_the_oracle(world: World) -> float:
    """Its speed after a while, over the best that there is."""
    for _ in range(150):
        world.round()
    speeds = [world.speed(world.lengths(world.round())) for _ in range(60)]
    return sum(speeds) / len(speeds) / world.best_speed()


CHANCES = [0.0, 0.1, 0.3, 0.6, 0.85, 0.97, 1.0]


@pytest.mark.parametrize("rectangle", [False, True])
@pytest.mark.parametrize("cost", MACHINES)
def test_after_a_while_the_choice_is_as_good_as_the_oracles(cost: Cost, rectangle: bool) -> None:
    """Within 5% in each of 25 worlds, and within 1% on average."""
    rng = random.Random(7)
    worlds = [World(cost, rng.choices(CHANCES, k=rng.randint(1, 10)), rectangle=rectangle) for _ in range(25)]
    shares = [share_of_the_oracle(world) for world in worlds]
    assert min(shares) >= 0.95
    assert sum(shares) / len(shares) >= 0.99


@settings(max_examples=25)
@given(
    cost=st.sampled_from(MACHINES),
    rectangle=st.booleans(),
    chances=st.lists(st.sampled_from(CHANCES), min_size=1, max_size=10),
)
def test_in_the_worst_world_that_can_be_found_it_is_not_far_behind(
    cost: Cost, rectangle: bool, chances: list[float]
) -> None:
    """What is left is the error of chances that are known from a few dozen guesses."""
    assert share_of_the_oracle(World(cost, chances, rectangle=rectangle)) >= 0.92


@pytest.mark.parametrize("rectangle", [False, True])
@pytest.mark.parametrize("cost", [linear, cliff, heavy_attention])
def test_where_nothing_comes_true_all_lanes_park_and_wake_when_it_does(cost: Cost, rectangle: bool) -> None:
    world = World(cost, [0.0] * 4, rectangle=rectangle)
    for _ in range(60):
        world.round()
    assert world.round() == {}
    world.chances = [0.98] * 4
    woke = next(turn for turn in range(100) if len(world.round()) == 4)
    assert woke <= 40
    world.chances = [0.0] * 4
    parked = next(turn for turn in range(100) if not world.round())
    assert parked <= 40


@given(
    budgets=st.lists(st.integers(0, 8), min_size=1, max_size=8),
    rows=st.integers(0, 30),
    prefill=st.integers(0, 100),
    rectangle=st.booleans(),
)
def test_no_lane_exceeds_its_budget_and_no_round_its_rows(
    budgets: list[int], rows: int, prefill: int, rectangle: bool
) -> None:
    world = World(flat_then_steep, [1.0] * len(budgets), depth=8, rectangle=rectangle)
    for _ in range(10):
        world.round()
    lanes = [
        LaneOffers(lane.request_id, lane.cached, lane.offers, budget)
        for lane, budget in zip(world.lanes(), budgets, strict=True)
    ]
    chosen = world.pace.choose(lanes, RoundShape(prefill, True, prefill * 50), rows)
    lengths = world.lengths(chosen)
    assert all(length <= budget for length, budget in zip(lengths, budgets, strict=True))
    assert (len(lengths) * max(lengths) if rectangle else sum(lengths)) <= rows
    for name, choice in chosen.items():
        offer = lanes[int(name)].offers[0]
        assert choice.draft.tokens == offer.draft.tokens[: len(choice.draft.tokens)] != ()
        assert len(choice.chances) == len(choice.draft.tokens) == len(choice.draft.marks)


@given(chances=st.lists(st.sampled_from([0.1, 0.6, 0.97]), min_size=2, max_size=8), rectangle=st.booleans())
def test_the_same_observations_give_the_same_choices(chances: list[float], rectangle: bool) -> None:
    first, second = (World(linear, chances, rectangle=rectangle) for _ in range(2))
    for _ in range(30):
        assert first.round() == second.round()


def test_nothing_is_drafted_before_any_round_was_timed() -> None:
    lane = LaneOffers("a", 1, (Offer("s", Draft((1, 2), (0, 0))),), 2)
    assert Pace().choose([lane], NO_PREFILL, 10) == {}


def test_the_source_that_promises_most_is_drafted_from() -> None:
    world = World(flat_then_steep, [0.0])
    for _ in range(30):
        world.pace.observe(
            LaneOffers("0", 9, (Offer("bad", Draft((1,), (0,))), Offer("good", Draft((2,), (0,)))), 3), [2]
        )
    offers = (Offer("bad", Draft((1, 1, 1), (0, 0, 0))), Offer("good", Draft((2, 2), (0, 0))))
    chosen = world.pace.choose([LaneOffers("0", 9, offers, 3)], NO_PREFILL, 10)
    assert chosen["0"].source == "good"


def test_a_lane_that_differs_from_the_others_is_judged_by_itself() -> None:
    """One lane of eight copies; all draw from one source, with one mark."""
    pace = World(linear, [0.0] * 8).pace
    draft = Draft((1,) * 6, (0,) * 6)
    lanes = [LaneOffers(str(place), 300, (Offer("suffix", draft),), 6) for place in range(8)]
    for _ in range(60):
        for lane in lanes:
            pace.observe(lane, [1 if lane.request_id == "3" else 0] * 6)
    chosen = pace.choose(lanes, NO_PREFILL, 100)
    assert set(chosen) == {"3"}
    assert len(chosen["3"].draft.tokens) >= 4


def asked_for(pace: Pace, rounds: int, right: int) -> list[int]:
    """How deep a costly source is asked, of whose guesses so many are right."""
    depths = []
    lane = LaneOffers("a", 300, (), 6)
    for _ in range(rounds):
        depth = pace.depth("costly", [lane], {"a"})
        depths.append(depth)
        if depth:
            pace.asked("costly", 1, depth, 0.004 + 0.002 * (depth - 1))
            offer = Offer("costly", Draft((1,) * depth, tuple(range(depth))))
            pace.observe(LaneOffers("a", 300, (offer,), 6), [int(place < right) for place in range(6)])
    return depths


def test_what_was_wrong_at_some_depth_for_a_while_is_found_to_be_right_there() -> None:
    """Once, nobody looked there again."""
    pace = World(linear, [0.0]).pace
    assert sorted(set(asked_for(pace, 100, right=1)[20:])) == [1, 2]
    assert min(asked_for(pace, 400, right=6)[-20:]) >= 4
