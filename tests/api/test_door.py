"""The door by itself: never more open than there are places, everybody's share kept, every place given back once."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from api.door import Door
from api.errors import ApiError
from api.metrics import Refusal


def refusal(call: Callable[[], object]) -> ApiError | None:
    try:
        call()
    except ApiError as error:
        return error
    return None


class Visit:
    """A request that was let in."""

    def __init__(self, owner: str, choices: int, stack: ExitStack) -> None:
        self.owner = owner
        self.choices = choices
        self.stack = stack


class DoorMachine(RuleBasedStateMachine):
    """Against a list of who is inside."""

    @initialize(places=st.integers(1, 24), keys=st.integers(0, 6) | st.integers(20, 30), per_key=st.integers(0, 6))
    def make(self, places: int, keys: int, per_key: int) -> None:
        self.places, self.keys, self.per_key, self.now = places, keys, per_key, 0.0
        self.owners = [f"key {number}" for number in range(keys)] or [""]
        self.refused: list[Refusal] = []
        self.inside: list[Visit] = []
        self.door = Door(places, per_key, keys, self.refused.append, lambda: self.now)

    def held(self, owner: str) -> int:
        return sum(visit.choices for visit in self.inside if visit.owner == owner)

    @rule(who=st.integers(0, 29), choices=st.integers(1, 4) | st.integers(1, 30))
    def knock(self, who: int, choices: int) -> None:
        owner = self.owners[who % len(self.owners)]
        stack, before, refusals = ExitStack(), len(self.door), len(self.refused)
        held, share = self.held(owner), self.places // (2 * max(1, self.keys))
        over = bool(self.per_key) and held + choices > self.per_key
        error = refusal(lambda: stack.enter_context(self.door.let_in(owner, choices, "n")))
        if error is None:
            assert not over
            self.inside.append(Visit(owner, choices, stack))
            return
        assert len(self.door) == before
        if error.status == 400:
            assert (choices > self.door.largest, error.param, len(self.refused)) == (True, "n", refusals)
            return
        assert (error.status, error.code, len(self.refused)) == (429, self.refused[-1], refusals + 1)
        assert 1 <= int(error.headers["retry-after"]) <= 60
        assert over == (error.code == "key_limit")
        assert over or held + choices > share

    @precondition(lambda self: self.inside)
    @rule(which=st.integers(0, 100), seconds=st.floats(0, 100))
    def leave(self, which: int, seconds: float) -> None:
        self.now += seconds
        self.inside.pop(which % len(self.inside)).stack.close()

    @invariant()
    def counted(self) -> None:
        if hasattr(self, "door"):
            assert len(self.door) == sum(visit.choices for visit in self.inside) <= self.places

    @precondition(lambda self: self.keys <= self.places)
    @rule()
    def everybody_gets_in(self) -> None:
        """Whoever has nothing open has a place, whatever the others have."""
        for owner in self.owners if self.keys > 1 else ():
            if not self.held(owner):
                self.door.check(owner)

    def teardown(self) -> None:
        for visit in getattr(self, "inside", ()):
            visit.stack.close()
        if hasattr(self, "door"):
            assert len(self.door) == 0


TestDoorMachine = DoorMachine.TestCase


def door(places: int, per_key: int = 0, keys: int = 0) -> Door:
    return Door(places, per_key, keys, lambda _reason: None)


def test_one_key_takes_half_and_its_share_and_leaves_the_others_theirs() -> None:
    shared = door(16, keys=4)
    with ExitStack() as inside:
        for _ in range(10):
            inside.enter_context(shared.let_in("greedy", 1, "n"))
        with pytest.raises(ApiError) as refused:
            shared.check("greedy")
        assert refused.value.code == "queue_full"
        for owner in ("b", "c", "d"):
            inside.enter_context(shared.let_in(owner, 2, "n"))
        for owner in ("greedy", "b"):
            with pytest.raises(ApiError):
                shared.check(owner)
    assert len(shared) == 0


def test_where_there_is_little_room_each_key_has_one_place() -> None:
    shared = door(4, keys=3)
    with shared.let_in("greedy", 2, "n"):
        with pytest.raises(ApiError):
            shared.check("greedy")
        with shared.let_in("b", 1, "n"), shared.let_in("c", 1, "n"):
            assert len(shared) == 4


@pytest.mark.parametrize(("per_key", "keys", "largest"), [(0, 0, 12), (3, 0, 3), (0, 2, 9), (3, 2, 3), (50, 2, 9)])
def test_more_than_there_would_ever_be_room_for_is_the_requests_own_fault(
    per_key: int, keys: int, largest: int
) -> None:
    empty = door(12, per_key, keys)
    with empty.let_in("a", largest, "prompt"):
        assert len(empty) == largest
    with pytest.raises(ApiError) as refused, empty.let_in("a", largest + 1, "prompt"):
        pass
    assert (refused.value.status, refused.value.param) == (400, "prompt")


def test_without_keys_all_places_are_everybodys() -> None:
    open_to_all = door(3)
    with open_to_all.let_in("", 3, "n"), pytest.raises(ApiError):
        open_to_all.check("")


def test_a_request_that_fails_gives_its_places_back() -> None:
    one = door(2)
    with pytest.raises(ZeroDivisionError), one.let_in("", 2, "n"):
        raise ZeroDivisionError
    assert len(one) == 0


@pytest.mark.parametrize(("seconds", "told"), [(0.0, 1), (0.5, 1), (9.2, 10), (1000.0, 60)])
def test_while_none_has_ended_the_wait_is_what_has_passed(seconds: float, told: int) -> None:
    now = 100.0
    clocked = Door(1, 0, 0, lambda _reason: None, lambda: now)
    with clocked.let_in("", 1, "n"):
        now += seconds
        with pytest.raises(ApiError) as refused:
            clocked.check("")
    assert refused.value.headers["retry-after"] == str(told)


@given(st.integers(1, 40), st.integers(1, 4))
def test_the_wait_follows_the_rate_of_ends(ends: int, choices: int) -> None:
    """`ends` of them in 20 seconds, one place: so long for each of those who want in."""
    now = 0.0
    clocked = Door(4, 0, 0, lambda _reason: None, lambda: now)
    with clocked.let_in("", 4 - 1, "n"):
        for _ in range(ends):
            with clocked.let_in("", 1, "n"):
                now += 20 / ends
        with clocked.let_in("", 1, "n"), pytest.raises(ApiError) as refused:
            clocked.check("", choices)
    told = int(refused.value.headers["retry-after"])
    assert told - 1.001 <= min(60, 20 * choices / ends) <= told
