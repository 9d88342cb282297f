"""A forward that raises: its lanes end with one error each, the others and the next one are served."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.fake import EOS, FakeBackend
from engine.config import EngineConfig
from engine.loop import Loop
from engine.messages import Cancel, Finish, Message, Submit
from scheduler.draft import Draft, DraftAsk
from scheduler.events import Finished, Tokens
from scheduler.pace import Headlong
from scheduler.request import FinishReason, Request, Sampling
from scheduler.suffix import SuffixDrafts
from tests.engine.served import Guest, Leave, Served, Step, StopString, Terse, decode, serve

STOPS = frozenset({EOS})
NEXT = Guest(Request("next", (7, 7, 9), 20, Sampling(1.0, 5), STOPS), arrives=300)
"""Comes when everything is over."""


@pytest.fixture(autouse=True, scope="module")
def _no_tracebacks() -> Iterator[None]:
    """The engine logs each failure at length."""
    logger = logging.getLogger("paceline.engine")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


def party(count: int, length: int = 9, max_tokens: int = 20, goes: Leave | StopString | None = None) -> list[Guest]:
    """The first of them goes as told."""
    return [
        Guest(
            Request(
                f"r{place}",
                tuple((place * 31 + step * 7) % 256 for step in range(length)),
                max_tokens,
                Sampling(0.9 * (place % 2), place),
                STOPS,
                ignore_eos=True,
            ),
            goes=goes if place == 0 else None,
        )
        for place in range(count)
    ]


def is_plain(run: Served, name: str) -> bool:
    plain = decode(run.guests[name].request)
    return (run.tokens(name), run.end(name).reason) == (plain.tokens, plain.reason)


def ended(run: Served, reason: FinishReason) -> set[str]:
    return {name for name in run.guests if run.end(name).reason is reason}


def released_once(run: Served) -> bool:
    return Counter(run.backend.released) == Counter(run.backend.opened) == Counter(set(run.backend.opened))


@st.composite
def arrivals(draw: st.DrawFn) -> list[Guest]:
    goes = st.none() | st.builds(Leave, st.integers(0, 20)) | st.builds(StopString, st.integers(4, 20), st.just(0))
    return [
        Guest(
            Request(
                f"r{place}",
                tuple(draw(st.lists(st.integers(0, 255), min_size=1, max_size=20))),
                draw(st.integers(1, 25)),
                Sampling(draw(st.sampled_from([0.0, 1.0])), place),
                STOPS,
            ),
            draw(st.integers(0, 20)),
            draw(goes),
        )
        for place in range(draw(st.integers(1, 7)))
    ]


@settings(max_examples=100)
@given(
    guests=arrivals(),
    lanes=st.integers(1, 5),
    more_rows=st.integers(1, 20),
    draft_tokens=st.sampled_from([0, 0, 3]),
    at=st.integers(0, 25),
    in_read=st.booleans(),
)
def test_the_lanes_of_a_failed_forward_end_and_nobody_else(
    guests: list[Guest], lanes: int, more_rows: int, draft_tokens: int, at: int, in_read: bool
) -> None:
    config = EngineConfig(lanes, lanes + more_rows, draft_tokens)
    fails = {"fail_read": [at]} if in_read else {"fail_verify": [at]}
    run = serve([*guests, NEXT], config, "prophet", **fails)
    backend = run.backend
    hurt: set[str] = set()
    if backend.failed:
        hurt = aboard(run, at, in_read)
        when = step_of(run, at, in_read)
        earlier = [event for step in run.steps[: run.steps.index(when)] for event in step.events]
        assert backend.resets == 1
        for name in hurt:
            had_gone = run.end(name) in earlier
            went = run.end(name) in when.events and run.guests[name].goes is not None
            assert had_gone or went or run.end(name).reason is FinishReason.ERROR
        assert not [event for event in when.events if isinstance(event, Tokens)]
    assert ended(run, FinishReason.ERROR) <= hurt
    for name in run.undisturbed():
        assert is_plain(run, name)
    for name in run.guests:
        assert decode(run.guests[name].request).tokens[: len(run.tokens(name))] == run.tokens(name)
    assert "next" in hurt or is_plain(run, "next")
    assert released_once(run)
    assert backend.faults == []
    assert backend.model.lanes == {}


def aboard(run: Served, failed: int, in_read: bool) -> set[str]:
    """Whose windows were in the failed forward, or in one that hung on it or that it hung on."""
    forwards = run.backend.forwards
    neighbour = failed + 1 if in_read else failed - 1
    linked = forwards[max(failed, neighbour)].piped if 0 <= neighbour < len(forwards) else False
    return forwards[failed].request_ids | (forwards[neighbour].request_ids if linked else set())


def step_of(run: Served, failed: int, in_read: bool) -> Step:
    """The step in which it failed: a piped forward is read one step after its launch."""
    forward = run.backend.forwards[failed]
    (launched,) = (at for at, step in enumerate(run.steps) if step.first < forward.mails <= step.last + 1)
    return run.steps[launched + (in_read and forward.piped)]


FAILURES = [
    pytest.param({"fail_verify": [4]}, id="in verify"),
    pytest.param({"fail_read": [4]}, id="in read"),
    pytest.param({"fail_keep": [4]}, id="in keep"),
]


@pytest.mark.parametrize("draft_tokens", [0, 3], ids=["piped", "drafted"])
@pytest.mark.parametrize("failure", FAILURES)
def test_everyone_aboard_gets_exactly_one_error_and_the_next_request_is_served(
    failure: dict[str, list[int]], draft_tokens: int
) -> None:
    run = serve([*party(3), NEXT], EngineConfig(4, 40, draft_tokens), "prophet", **failure)
    assert ended(run, FinishReason.ERROR) == {"r0", "r1", "r2"}
    for name in ("r0", "r1", "r2"):
        end = run.end(name)
        assert end.error is not None
        assert "RuntimeError" in end.error
        assert "no more memory" not in end.error, "inner words stay inside"
        assert end.usage.completion_tokens == len(run.tokens(name))
    assert is_plain(run, "next")
    assert released_once(run)
    assert run.backend.resets == 1


def test_a_failed_launch_ahead_takes_the_round_in_flight_with_it() -> None:
    run = serve([*party(2, max_tokens=10), NEXT], EngineConfig(2, 40), fail_verify=[6])
    assert run.backend.forwards[6].piped
    assert "read 5" not in run.backend.log
    assert ended(run, FinishReason.ERROR) == {"r0", "r1"}
    assert is_plain(run, "next")


def test_a_failed_read_discards_the_round_ahead_of_it() -> None:
    run = serve([*party(2, max_tokens=10), NEXT], EngineConfig(2, 40), fail_read=[5])
    assert "verify 6" in run.backend.log
    assert "read 6" not in run.backend.log
    assert ended(run, FinishReason.ERROR) == {"r0", "r1"}
    assert is_plain(run, "next")


@pytest.mark.parametrize("failure", ["fail_verify", "fail_read"])
def test_lanes_that_were_not_aboard_are_served_as_if_nothing_had_been(failure: str) -> None:
    run = serve(party(3, length=30), EngineConfig(3, 8), "", **{failure: [2]})
    assert run.backend.forwards[2].request_ids == {"r0"}
    assert ended(run, FinishReason.ERROR) == {"r0"}
    assert is_plain(run, "r1")
    assert is_plain(run, "r2")
    assert released_once(run)


def test_those_who_wait_do_not_notice() -> None:
    run = serve(party(4), EngineConfig(1, 40), "", fail_read=[3])
    assert ended(run, FinishReason.ERROR) == {"r0"}
    assert all(is_plain(run, name) for name in ("r1", "r2", "r3"))


def test_it_may_happen_again_and_again() -> None:
    guests = [Guest(guest.request, 40 * place) for place, guest in enumerate(party(5))]
    run = serve([*guests, NEXT], EngineConfig(2, 40, 2), "overeager", fail_verify=[3, 9], fail_read=[20, 21])
    assert run.backend.resets == len(run.backend.failed) == 4
    assert len(ended(run, FinishReason.ERROR)) == 4
    assert is_plain(run, "next")
    assert released_once(run)


@pytest.mark.parametrize("failure", ["fail_verify", "fail_read"])
def test_a_cancel_that_came_before_the_failed_forward_is_not_lost_with_it(failure: str) -> None:
    run = serve(party(2, goes=Leave(4)), EngineConfig(2, 40, 2), "overeager", **{failure: [2]})
    assert run.end("r0") in run.steps[2].events
    assert run.end("r0").reason is FinishReason.CANCELLED
    assert run.end("r1") in run.steps[2].events
    assert run.end("r1").reason is FinishReason.ERROR


@pytest.mark.parametrize("failure", ["fail_verify", "fail_read"])
def test_rule_12_a_cancel_that_came_during_the_forward_outranks_its_failure(failure: str) -> None:
    run = serve(party(2, goes=Leave(1)), EngineConfig(2, 40, 2), "overeager", **{failure: [0]})
    assert run.end("r0").reason is FinishReason.CANCELLED
    assert run.end("r1").reason is FinishReason.ERROR
    assert len(run.steps) == 1
    assert released_once(run)


def test_rule_12_a_stop_string_that_came_during_the_forward_outranks_its_failure() -> None:
    run = serve(party(2, goes=StopString(7, 0)), EngineConfig(2, 40, 2), "overeager", fail_read=[3])
    end = run.end("r0")
    assert (end.reason, end.usage.completion_tokens) == (FinishReason.STOP, len(run.tokens("r0")))
    assert run.stopped == {"r0": end.usage.completion_tokens}
    assert run.end("r1").reason is FinishReason.ERROR


def test_rule_12_a_cancel_outranks_the_stop_string_that_came_with_it() -> None:
    mail: list[Message] = [Submit(party(1)[0].request)]
    loop = Loop(
        FakeBackend(),
        EngineConfig(2, 40),
        sources=(),
        mailbox=lambda: [mail.pop(0) for _ in range(len(mail))],
        clock=lambda: 0.0,
    )
    loop.step()
    mail.extend([Finish("r0", 0), Cancel("r0")])
    ends = [event.reason for event in loop.step() if isinstance(event, Finished)]
    assert ends == [FinishReason.CANCELLED]


class Broken:
    """A `DraftSource` that always fails."""

    name = "broken"
    costly = False

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        raise LookupError(f"nothing for {len(asks)}")

    def forget(self, request_id: str) -> None:
        """Remembers nothing."""


def test_a_draft_source_that_raises_costs_its_drafts_and_nothing_else() -> None:
    guests = party(3)
    mail: list[Message] = [Submit(guest.request) for guest in guests]
    loop = Loop(
        Terse(),
        EngineConfig(3, 40, 4),
        sources=(Broken(), SuffixDrafts()),
        mailbox=lambda: [mail.pop(0) for _ in range(len(mail))],
        clock=lambda: 0.0,
        pace=Headlong(),
    )
    told: dict[str, list[int]] = {guest.request.request_id: [] for guest in guests}
    while mail or not loop.idle:
        for event in loop.step():
            if isinstance(event, Tokens):
                told[event.request_id].extend(event.tokens)
    assert {name: tuple(tokens) for name, tokens in told.items()} == {
        guest.request.request_id: decode(guest.request).tokens for guest in guests
    }
