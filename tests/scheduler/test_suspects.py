"""Who is guilty of a failed forward, in worlds as simple as can be: lanes with texts to be read, of which some have a
place that no forward gets over, or forwards that fail when there are too many of them.
"""

from dataclasses import dataclass, field
from itertools import combinations
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.suspects import Suspects

FORWARDS = 50_000
"""Whatever takes more than these is taken to be stuck."""


@dataclass
class World:
    """Lanes that read their texts, some at once; a failure takes everybody's caches along."""

    texts: dict[str, int]
    """How many tokens each has."""
    poison: dict[str, int] = field(default_factory=dict)
    """Whose token at which place makes every forward fail that it is in."""
    crowd: int = 1000
    """So many lanes do not fail for being many."""
    rows: int = 8
    """Of a forward, shared by those aboard."""
    failures: int = 0
    ended: list[str] = field(default_factory=list)
    guilty: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.suspects = Suspects(len(self.texts))
        self.most = [self.suspects.most]
        self.cached = dict.fromkeys(self.texts, 0)
        self.order = list(self.texts)

    def aboard(self) -> dict[str, tuple[int, int]]:
        """The windows of a forward: those that the first lanes that may be there have, and that do not pause."""
        for name in self.order[self.suspects.most :]:
            self.suspects.forget(name)
            self.cached[name] = 0
        lanes = [name for name in self.order[: self.suspects.most] if not self.suspects.pauses(name)]
        share = max(1, self.rows // max(1, len(lanes)))
        return {name: (self.cached[name], min(self.cached[name] + share, self.texts[name])) for name in lanes}

    def forward(self, windows: dict[str, tuple[int, int]]) -> None:
        """Run it, for those that have not left since it was planned."""
        hit = [name for name, (start, end) in windows.items() if start <= self.poison.get(name, -1) < end]
        if hit or len(windows) > self.crowd:
            self.fail(windows)
            return
        self.suspects.survived()
        for name, (_, end) in windows.items():
            if name in self.order:
                self.cached[name] = end
                self.suspects.passed(name, end)
                if end == self.texts[name]:
                    self.ended.append(name)
                    self.leave(name)
        self.most.append(self.suspects.most)

    def fail(self, windows: dict[str, tuple[int, int]]) -> None:
        self.failures += 1
        ends = {name: end for name, (_, end) in windows.items() if name in self.order}
        guilty = self.suspects.failed(ends, alone=len(windows) == 1)
        if guilty is not None:
            self.guilty.append(guilty)
            self.leave(guilty)
        self.cached = dict.fromkeys(self.cached, 0)
        self.most.append(self.suspects.most)

    def leave(self, name: str) -> None:
        self.order.remove(name)
        self.suspects.forget(name)

    def run(self) -> None:
        """To everybody's end."""
        for _ in range(FORWARDS):
            if not self.order:
                assert not self.suspects.trying
                return
            windows = self.aboard()
            assert windows, "nobody may go on"
            self.forward(windows)
        raise AssertionError("stuck")


@st.composite
def worlds(draw: st.DrawFn) -> World:
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=9))
    texts = {f"r{place}": length for place, length in enumerate(lengths)}
    poisonous = draw(st.lists(st.sampled_from(sorted(texts)), max_size=3, unique=True))
    poison = {name: draw(st.integers(0, texts[name] - 1)) for name in poisonous}
    return World(texts, poison, rows=draw(st.integers(1, 40)))


@given(world=worlds())
def test_every_guilty_lane_is_found_and_nobody_else(world: World) -> None:
    world.run()
    assert sorted(world.guilty) == sorted(world.poison)
    assert sorted(world.ended) == sorted(world.texts.keys() - world.poison.keys())
    assert set(world.most) == {len(world.texts)}, "no failure is taken for the doing of too many lanes"
    assert world.failures <= len(world.poison) * (ceil(log2(len(world.texts))) + 2)


@pytest.mark.parametrize("lanes", range(1, 8))
def test_whoever_they_are(lanes: int) -> None:
    texts = {f"r{place}": 3 for place in range(lanes)}
    for count in range(min(lanes, 3) + 1):
        for guilty in combinations(texts, count):
            world = World(texts, dict.fromkeys(guilty, 1))
            world.run()
            assert set(world.guilty) == set(guilty)
            assert len(world.ended) == lanes - count


@given(lanes=st.integers(2, 16), crowd=st.integers(1, 8), length=st.integers(1, 30), rows=st.integers(1, 64))
def test_where_lanes_are_too_many_they_become_fewer_and_everybody_ends(
    lanes: int, crowd: int, length: int, rows: int
) -> None:
    texts = {f"r{place}": length * (place + 1) for place in range(lanes)}
    world = World(texts, crowd=crowd, rows=rows)
    world.run()
    assert not world.guilty
    assert sorted(world.ended) == sorted(texts)


@pytest.mark.parametrize(("lanes", "crowd", "rows"), [(8, 7, 8), (8, 3, 8), (16, 1, 64), (12, 5, 1)])
def test_as_many_as_there_can_be_is_found_out_soon(lanes: int, crowd: int, rows: int) -> None:
    """However long it takes to read everything again in smaller groups: what is tried does not count as time passed."""
    world = World({f"r{place}": 30_000 for place in range(lanes)}, rows=rows)
    for _ in range(400):
        world.forward(world.aboard())
    world.crowd = crowd
    while world.suspects.most > crowd:
        assert world.failures < 2 * lanes * ceil(log2(lanes))
        world.forward(world.aboard())
    assert world.suspects.most >= crowd // 2


def test_lanes_that_go_well_become_more_again() -> None:
    world = World({f"r{place}": 100_000 for place in range(4)}, crowd=2)
    while world.suspects.most > 2:
        world.forward(world.aboard())
    world.crowd = 4
    for _ in range(2 * 128 + 20):
        world.forward(world.aboard())
    assert world.suspects.most == 4


def test_where_there_cannot_be_more_that_is_tried_ever_more_seldom() -> None:
    suspects = Suspects(4)
    failures = [0, 0, 0, 0]
    for turn in range(4 * 2000):
        if suspects.most <= 2:
            suspects.survived()
            continue
        failures[turn // 2000] += 1
        aboard = "abcd"[: suspects.most]
        suspects.failed(dict.fromkeys(aboard, 1), alone=False)
        for name in aboard:
            suspects.passed(name, 1)
    assert failures[3] < failures[0] / 2


def test_it_is_tried_again_in_the_end_however_often_it_went_wrong() -> None:
    suspects = Suspects(2)
    for _ in range(40):
        suspects.failed({"a": 1, "b": 1}, alone=False)
        suspects.passed("a", 1)
        suspects.passed("b", 1)
    assert suspects.most == 1
    for _ in range(5000):
        suspects.survived()
    assert suspects.most == 2


def test_one_alone_is_tried_once_more_and_says_nothing_of_how_many_there_may_be() -> None:
    suspects = Suspects(4)
    for _ in range(3):
        assert suspects.failed({"a": 5}, alone=True) is None
        suspects.passed("a", 4)
        assert suspects.trying, "not yet past the point where it failed"
        suspects.passed("a", 5)
        assert not suspects.trying
    assert suspects.most == 4
    assert suspects.failed({"a": 5}, alone=True) is None
    assert suspects.failed({"a": 5}, alone=True) == "a"


def test_who_is_left_over_of_a_failed_group_was_not_alone() -> None:
    suspects = Suspects(4)
    suspects.failed(dict.fromkeys("abcd", 1), alone=False)
    suspects.forget("a")
    assert suspects.failed({"b": 1}, alone=False) is None, "it may have been the one that left"
    assert suspects.failed({"b": 1}, alone=True) == "b"


def test_a_forward_of_those_that_have_left_is_nobodys_fault() -> None:
    suspects = Suspects(2)
    suspects.failed(dict.fromkeys("ab", 1), alone=False)
    suspects.forget("a")
    assert not suspects.pauses("b")
    assert suspects.failed({}, alone=True) is None
    assert not suspects.pauses("b")
    suspects.passed("b", 1)
    assert not suspects.trying


def test_one_that_was_cleared_and_fails_in_a_forward_begun_before_is_tried_again() -> None:
    suspects = Suspects(2)
    suspects.failed(dict.fromkeys("ab", 1), alone=False)
    suspects.passed("a", 1)
    assert suspects.failed({"a": 2}, alone=True) is None
    assert suspects.pauses("b")
    assert suspects.failed({"a": 2}, alone=True) == "a"
    assert not suspects.pauses("b")


@given(world=worlds(), data=st.data())
def test_whoever_leaves_and_whenever_nobody_is_blamed_for_another_and_nobody_is_stuck(
    world: World, data: st.DataObject
) -> None:
    for _ in range(data.draw(st.integers(0, 12))):
        if not world.order:
            break
        windows = world.aboard()
        assert windows
        for name in data.draw(st.lists(st.sampled_from(world.order), max_size=2, unique=True)):
            world.leave(name)
        if data.draw(st.booleans()):
            world.forward(windows)
    world.run()
    assert set(world.guilty) <= world.poison.keys()
