"""Rule 12: when several ends fall into one round, the stronger one is told, and only that one."""

from collections.abc import Callable, Sequence
from itertools import combinations

import pytest

from scheduler.events import Event, Finished, Tokens
from scheduler.pace import Pace
from scheduler.request import FinishReason, Request
from scheduler.round import Drawn, LaneResult, Round
from scheduler.scheduler import Limits, Scheduler

EOS = 9


class Served:
    """A request whose first window is in flight, beside another one. Its time is over at 3.0."""

    def __init__(self, max_tokens: int) -> None:
        self.scheduler = Scheduler(Limits(2, 16, 2), Pace())
        self.scheduler.submit(Request("a", (1,), max_tokens, stop_tokens=frozenset({EOS}), deadline=3.0), 0.0)
        self.scheduler.submit(Request("other", (1,), 50, stop_tokens=frozenset({EOS})), 0.0)
        planned = self.scheduler.plan(1.0)
        assert planned is not None
        self.planned: Round = planned
        self.events: list[Event] = []

    def cancel(self) -> None:
        self.events += self.scheduler.cancel("a", 2.0)

    def error(self) -> None:
        self.land((3,), error="boom")

    def deadline(self) -> None:
        assert self.scheduler.expire(2.9) == [], "not before its time"
        self.events += self.scheduler.expire(3.0)

    def stop_string(self) -> None:
        self.events += self.scheduler.finish("a", 0, 2.0)

    def land(self, drawn: Sequence[int], *, error: str | None = None, now: float = 2.5) -> None:
        results = []
        for window in self.planned.windows:
            if self.scheduler.serves(window):
                own = window.request_id == "a"
                walk = self.scheduler.accept(window, Drawn(drawn if own else (7,)))
                cached = window.start + window.real + walk.accepted
                results.append(LaneResult(window, walk, cached, error if own else None))
        self.events += self.scheduler.commit(results, now)

    def eos(self) -> None:
        self.land((EOS,))

    def length(self) -> None:
        self.land((3,))

    def told(self) -> list[Event]:
        return [event for event in self.events if event.request_id == "a"]


ENDS: dict[str, tuple[Callable[[Served], None], FinishReason]] = {
    "cancelled": (Served.cancel, FinishReason.CANCELLED),
    "error": (Served.error, FinishReason.ERROR),
    "deadline": (Served.deadline, FinishReason.DEADLINE),
    "stop string": (Served.stop_string, FinishReason.STOP),
    "eos": (Served.eos, FinishReason.STOP),
    "length": (Served.length, FinishReason.LENGTH),
}
PAIRS = [pair for pair in combinations(ENDS, 2) if pair != ("eos", "length")]


@pytest.mark.parametrize(("stronger", "weaker"), PAIRS)
def test_rule_12_the_stronger_end_is_told_and_only_it(stronger: str, weaker: str) -> None:
    served = Served(max_tokens=1)
    end, reason = ENDS[stronger]
    end(served)
    ENDS[weaker][0](served)
    (event,) = served.told()
    assert isinstance(event, Finished)
    assert event.reason is reason


@pytest.mark.parametrize(
    ("drawn", "error", "now", "reason", "tokens"),
    [
        ((EOS,), "boom", 3.0, FinishReason.ERROR, ()),
        ((EOS,), None, 3.0, FinishReason.DEADLINE, ()),
        ((3,), "boom", 3.0, FinishReason.ERROR, ()),
        ((3,), None, 3.0, FinishReason.DEADLINE, (3,)),
        ((3,), None, 2.9, FinishReason.LENGTH, (3,)),
    ],
)
def test_rule_12_of_what_one_commit_finds_the_strongest_is_told(
    drawn: tuple[int, ...], error: str | None, now: float, reason: FinishReason, tokens: tuple[int, ...]
) -> None:
    served = Served(max_tokens=1)
    served.land(drawn, error=error, now=now)
    *said, end = served.told()
    assert isinstance(end, Finished)
    assert (end.reason, end.error) == (reason, error)
    assert said == ([Tokens("a", tokens)] if tokens else [])
    assert served.scheduler.expire(4.0) == []


def test_rule_12_a_cancel_outranks_a_forward_that_failed_and_whoever_is_left_is_not_blamed_for_it() -> None:
    served = Served(max_tokens=1)
    served.cancel()
    for _ in range(2):
        served.events += served.scheduler.fail([served.planned], "boom", 3.0)
    assert [event.request_id for event in served.events] == ["a"]
    assert served.told()[0] == served.events[0]


def test_a_forward_that_fails_ends_who_fails_alone_and_only_that_one() -> None:
    served = Served(max_tokens=1)
    assert served.scheduler.fail([served.planned], "boom", 2.5) == []
    planned = served.scheduler.plan(2.5)
    assert planned is not None
    assert [window.request_id for window in planned.windows] == ["a"]
    (event,) = served.scheduler.fail([planned], "boom", 2.5)
    assert isinstance(event, Finished)
    assert (event.request_id, event.reason, event.error) == ("a", FinishReason.ERROR, "boom")


@pytest.mark.parametrize("end", ENDS)
def test_every_end_alone_is_told(end: str) -> None:
    served = Served(max_tokens=1)
    call, reason = ENDS[end]
    call(served)
    event = served.told()[-1]
    assert isinstance(event, Finished)
    assert event.reason is reason


def test_rule_12_an_eos_on_the_last_allowed_token_outranks_the_length() -> None:
    served = Served(max_tokens=1)
    served.eos()
    (event,) = served.told()
    assert isinstance(event, Finished)
    assert (event.reason, event.usage.completion_tokens) == (FinishReason.STOP, 1)


def test_rule_12_a_later_end_changes_nothing() -> None:
    served = Served(max_tokens=1)
    served.length()
    before = served.told()
    for end in (served.cancel, served.error, served.deadline, served.stop_string):
        end()
    assert served.told() == before
    assert isinstance(before[0], Tokens)
    assert len(before) == 2


@pytest.mark.parametrize("end", ENDS)
def test_an_end_is_its_own_lanes_alone(end: str) -> None:
    served = Served(max_tokens=1)
    ENDS[end][0](served)
    if not any(event.request_id == "other" for event in served.events):
        served.land((3,))
    assert [event for event in served.events if event.request_id == "other"] == [Tokens("other", (7,))]
