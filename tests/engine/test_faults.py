"""Forwards that raise, and numbers that are none: whoever is guilty ends with one error, and nobody else notices."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backends.base import Flight, Masks
from backends.fake import EOS, FakeBackend, FakeFlight
from engine.config import EngineConfig
from engine.executor import BrokenBackendError
from engine.loop import Loop
from engine.messages import Cancel, Finish, Message, Submit
from scheduler.draft import Draft, DraftAsk
from scheduler.events import Finished, Tokens
from scheduler.pace import Headlong
from scheduler.pieces import Key, Piece
from scheduler.prefix import Tier
from scheduler.request import FinishReason, Request, Sampling
from scheduler.round import Window
from scheduler.suffix import SuffixDrafts
from tests.engine.grammars import literal, random_chart
from tests.engine.served import PROBE, Guest, Harm, Leave, Served, StopString, Terse, decode, serve
from tests.engine.shelves import MemorySpill, Shelf

STOPS = frozenset({EOS})
NEXT = Guest(Request("next", (7, 7, 9), 20, Sampling(1.0, 5), STOPS), arrives=600)
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
    plain, end = decode(run.guests[name].request), run.end(name)
    told = (run.tokens(name), run.logprobs(name), end.reason, end.usage.completion_tokens)
    return told == (plain.tokens, plain.logprobs, plain.reason, plain.completion_tokens)


def ended(run: Served, reason: FinishReason) -> set[str]:
    return {name for name in run.guests if run.end(name).reason is reason}


def released_once(run: Served) -> bool:
    """As often as each was opened: once, and once more where it had given way."""
    assert run.stats is not None
    again = len(run.backend.opened) - len(set(run.backend.opened))
    return Counter(run.backend.released) == Counter(run.backend.opened) and again <= run.stats.preemptions


def assert_others_are_plain(run: Served, guilty: set[str]) -> None:
    """Whoever was not guilty had no error, and whoever stayed got all; the guilty ones were told nothing wrong."""
    assert ended(run, FinishReason.ERROR) <= guilty
    for name in run.undisturbed():
        assert is_plain(run, name)
    for name in run.guests:
        assert decode(run.guests[name].request).tokens[: len(run.tokens(name))] == run.tokens(name)
    assert released_once(run)
    assert (run.backend.faults, run.strayed) == ([], [])
    assert run.backend.model.lanes == {}
    assert run.backend.probes == run.backend.resets == len(run.backend.failed)


@st.composite
def arrivals(draw: st.DrawFn) -> list[Guest]:
    goes = st.none() | st.builds(Leave, st.integers(0, 20)) | st.builds(StopString, st.integers(4, 20), st.just(0))
    charts = st.none() | st.none() | st.builds(random_chart, st.integers(0, 10_000))
    return [
        Guest(
            Request(
                f"r{place}",
                tuple(draw(st.lists(st.integers(0, 255), min_size=1, max_size=20))),
                draw(st.integers(1, 25)),
                Sampling(draw(st.sampled_from([0.0, 1.0])), place, logprobs=draw(st.sampled_from([None, None, 2]))),
                STOPS,
                constraint=draw(charts),
            ),
            draw(st.integers(0, 20)),
            draw(goes),
        )
        for place in range(draw(st.integers(1, 7)))
    ]


CONFIGS = st.builds(
    lambda lanes, more_rows, drafts: EngineConfig(lanes, lanes + more_rows, drafts),
    st.integers(1, 5),
    st.integers(1, 20),
    st.sampled_from([0, 0, 3]),
)

# ---- it fails once ---------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(guests=arrivals(), config=CONFIGS, at=st.integers(0, 25).map(lambda n: frozenset({n})), where=st.integers(0, 2))
def test_a_forward_that_fails_once_hurts_nobody(
    guests: list[Guest], config: EngineConfig, at: frozenset[int], where: int
) -> None:
    harm = (Harm(verify=at), Harm(read=at), Harm(keep=at))[where]
    run = serve([*guests, NEXT], config, "prophet", harm=harm)
    assert_others_are_plain(run, set())
    assert run.stats is not None
    assert run.stats.failed_forwards == len(run.backend.failed) <= 1


FAILURES = [
    pytest.param(Harm(verify=frozenset({4})), id="in verify"),
    pytest.param(Harm(read=frozenset({4})), id="in read"),
    pytest.param(Harm(keep=frozenset({4})), id="in keep"),
]


@pytest.mark.parametrize("draft_tokens", [0, 3], ids=["piped", "drafted"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_transient_failure_changes_no_token(failure: Harm, draft_tokens: int) -> None:
    run = serve([*party(3), NEXT], EngineConfig(4, 40, draft_tokens), "prophet", harm=failure)
    assert all(is_plain(run, name) for name in run.guests)
    assert released_once(run)
    assert run.backend.resets == len(run.backend.failed) == 1


def test_a_failed_launch_ahead_takes_the_round_in_flight_with_it() -> None:
    run = serve([*party(2, max_tokens=10), NEXT], EngineConfig(2, 40), harm=Harm(verify=frozenset({6})))
    assert run.backend.forwards[6].piped
    assert "read 5" not in run.backend.log
    assert all(is_plain(run, name) for name in run.guests)


def test_a_failed_read_discards_the_round_ahead_of_it() -> None:
    run = serve([*party(2, max_tokens=10), NEXT], EngineConfig(2, 40), harm=Harm(read=frozenset({5})))
    assert "verify 6" in run.backend.log
    assert "read 6" not in run.backend.log
    assert all(is_plain(run, name) for name in run.guests)


def test_a_lane_that_failed_alone_is_tried_once_more_before_it_is_blamed() -> None:
    once = serve(party(1), EngineConfig(1, 40), harm=Harm(verify=frozenset({3})))
    assert is_plain(once, "r0")
    twice = serve(party(1), EngineConfig(1, 40), harm=Harm(verify=frozenset({3, 4})))
    assert ended(twice, FinishReason.ERROR) == {"r0"}


def test_it_may_happen_again_and_again() -> None:
    """Far enough apart for all who were aboard to be cleared."""
    guests = [Guest(guest.request, 40 * place) for place, guest in enumerate(party(5, max_tokens=60))]
    harm = Harm(verify=frozenset({3, 60}), read=frozenset({90, 150}))
    run = serve([*guests, NEXT], EngineConfig(2, 40, 2), "overeager", harm=harm)
    assert len(run.backend.failed) == 4
    assert all(is_plain(run, name) for name in run.guests)
    assert released_once(run)


def test_a_matcher_does_not_go_on_by_tokens_of_a_round_that_failed() -> None:
    """Once, it had moved when the caches could not be cut, and the lane was given the same tokens again."""
    chart = literal(bytes(range(97, 121)))
    guest = Guest(Request("r0", (1, 2, 3), 40, Sampling(0), STOPS, constraint=chart))
    run = serve([guest], EngineConfig(1, 40, 3), harm=Harm(keep=frozenset({3})))
    assert run.strayed == []
    assert bytes(run.tokens("r0")) == bytes(range(97, 121))


# ---- somebody is guilty ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_tokens", [0, 3], ids=["piped", "drafted"])
@pytest.mark.parametrize("since", [0, 9, 17], ids=["at once", "with its first draw", "in its answer"])
@pytest.mark.parametrize("culprit", range(4))
def test_a_raising_forward_with_4_lanes_the_culprit_ends_three_finish_unchanged(
    culprit: int, since: int, draft_tokens: int
) -> None:
    guests = party(4)
    name = guests[culprit].request.request_id
    run = serve([*guests, NEXT], EngineConfig(4, 40, draft_tokens), "prophet", harm=Harm(poison={name: since}))
    assert ended(run, FinishReason.ERROR) == {name}
    assert_others_are_plain(run, {name})
    end = run.end(name)
    assert end.error is not None
    assert "RuntimeError" in end.error
    assert "no more memory" not in end.error, "inner words stay inside"
    assert end.usage.completion_tokens == len(run.tokens(name)) <= max(0, since - 8)
    assert draft_tokens or len(run.tokens(name)) == max(0, since - 8), "all that could be computed was delivered"
    assert run.stats is not None
    tries = 1 + math.log2(4)
    assert run.stats.failed_forwards == len(run.backend.failed) <= (2 * tries if draft_tokens else tries)


@example(
    guests=[Guest(Request("r0", (1,), 2, Sampling(0), STOPS, constraint=literal(b"ab")))],
    config=EngineConfig(1, 2),
    culprits={"r0": 2},
).via("an answer that its grammar ends: no forward draws the stop token behind it")
@settings(max_examples=150)
@given(
    guests=arrivals(),
    config=CONFIGS,
    culprits=st.dictionaries(st.integers(0, 6).map("r{}".format), st.integers(0, 30), min_size=1, max_size=3),
)
def test_whoever_makes_forwards_fail_ends_and_nobody_else(
    guests: list[Guest], config: EngineConfig, culprits: dict[str, int]
) -> None:
    run = serve([*guests, NEXT], config, "prophet", harm=Harm(poison=culprits))
    assert_others_are_plain(run, set(culprits))
    for name in culprits.keys() & run.guests.keys():
        request = run.guests[name].request
        computed = len(request.prompt) + decode(request).completion_tokens - 1
        if computed > culprits[name]:
            assert name not in run.undisturbed(), "it got through"


@pytest.mark.parametrize("leaves", ["r0", "r1"])
@pytest.mark.parametrize("culprit", ["r0", "r1"])
@pytest.mark.parametrize("after", range(14))
def test_who_leaves_while_it_is_tried_leaves_no_blame_behind(after: int, culprit: str, leaves: str) -> None:
    """Once, the failure of a round whose last lane had just been cancelled was laid to whoever was to be tried next."""
    guests = [
        Guest(guest.request, 0, Leave(after) if guest.request.request_id == leaves else None) for guest in party(3)
    ]
    run = serve(guests, EngineConfig(3, 40), harm=Harm(poison={culprit: 0}))
    assert ended(run, FinishReason.ERROR) <= {culprit}
    assert all(is_plain(run, name) for name in {"r0", "r1", "r2"} - {culprit, leaves})


def test_those_who_wait_do_not_notice() -> None:
    run = serve(party(4), EngineConfig(1, 40), harm=Harm(poison={"r0": 12}))
    assert ended(run, FinishReason.ERROR) == {"r0"}
    assert all(is_plain(run, name) for name in ("r1", "r2", "r3"))


def test_newcomers_are_served_while_others_are_tried() -> None:
    guests = [*party(4), *(Guest(guest.request, 9) for guest in party(6)[4:])]
    run = serve(guests, EngineConfig(6, 12), harm=Harm(poison={"r2": 5}))
    assert_others_are_plain(run, {"r2"})
    assert ended(run, FinishReason.ERROR) == {"r2"}


def guilty_party(goes: Leave | StopString) -> Served:
    """Two lanes; the first one is guilty of a failure in each round, and its client goes."""
    return serve(party(2, goes=goes), EngineConfig(2, 40, 2), "overeager", harm=Harm(poison={"r0": 0}))


@pytest.mark.parametrize("after", range(6))
def test_rule_12_a_cancel_outranks_a_failure_that_it_came_with(after: int) -> None:
    """Two forwards fail before the first lane is blamed; each step looks twice into the mailbox."""
    run = guilty_party(Leave(after))
    assert run.end("r0").reason is (FinishReason.CANCELLED if after < 4 else FinishReason.ERROR)
    assert is_plain(run, "r1")
    assert released_once(run)


@pytest.mark.parametrize(("look", "failing"), [(7, {3}), (9, {3, 4})], ids=["with all", "alone"])
def test_rule_12_a_stop_string_that_came_during_the_forward_outranks_its_failure(look: int, failing: set[int]) -> None:
    harm = Harm(read=frozenset(failing))
    run = serve(party(2, goes=StopString(look, 0)), EngineConfig(2, 40, 2), "overeager", harm=harm)
    end = run.end("r0")
    assert (end.reason, end.usage.completion_tokens) == (FinishReason.STOP, len(run.tokens("r0")))
    assert run.stopped == {"r0": end.usage.completion_tokens}
    assert is_plain(run, "r1")


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


# ---- nothing works any more ------------------------------------------------------------------------------------------


class Failing(Terse):
    """Raises in the forwards that it is told to, which are counted from 0, probes included."""

    def __init__(self, failing: Mapping[int, Exception]) -> None:
        super().__init__()
        self._failing = failing
        self.rounds: list[tuple[Window, ...]] = []

    def verify(self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None) -> FakeFlight:
        self.rounds.append(tuple(windows))
        error = self._failing.get(len(self.rounds) - 1)
        if error is not None:
            raise error
        return super().verify(windows, after, masks)


def play(backend: FakeBackend, guests: Sequence[Guest]) -> dict[str, list[int]]:
    """What everybody is told, if all get to their end."""
    mail: list[Message] = [Submit(guest.request) for guest in guests]
    loop = Loop(
        backend,
        EngineConfig(4, 40, 0),
        sources=(),
        mailbox=lambda: [mail.pop(0) for _ in range(len(mail))],
        clock=lambda: 0.0,
    )
    told: dict[str, list[int]] = {guest.request.request_id: [] for guest in guests}
    while mail or not loop.idle:
        for event in loop.step():
            if isinstance(event, Tokens):
                told[event.request_id].extend(event.tokens)
            else:
                assert event.reason is FinishReason.LENGTH
    return told


def test_a_backend_that_always_fails_is_broken_and_nobody_is_blamed() -> None:
    backend = Failing({number: MemoryError("none") for number in range(99)})
    with pytest.raises(BrokenBackendError, match="MemoryError") as broken:
        play(backend, party(3))
    assert isinstance(broken.value.__cause__, MemoryError)
    assert [windows[0].request_id == PROBE for windows in backend.rounds] == [False, True, True, True]


def test_a_probe_may_fail_too_as_long_as_not_all_do() -> None:
    backend = Failing({number: MemoryError("none") for number in (5, 6, 7)})
    guests = party(3)
    told = play(backend, guests)
    assert {name: tuple(tokens) for name, tokens in told.items()} == {
        guest.request.request_id: decode(guest.request).tokens for guest in guests
    }
    assert backend.lanes == {}


# ---- numbers that are none -------------------------------------------------------------------------------------------

LONG = tuple(range(40))


@pytest.mark.parametrize("draft_tokens", [0, 3], ids=["piped", "drafted"])
@pytest.mark.parametrize("since", [0, 15], ids=["at once", "in its answer"])
@pytest.mark.parametrize("culprit", range(3))
def test_a_lane_without_numbers_ends_and_the_others_do_not_notice(culprit: int, since: int, draft_tokens: int) -> None:
    guests = party(3)
    name = guests[culprit].request.request_id
    run = serve(guests, EngineConfig(3, 40, draft_tokens), "prophet", harm=Harm(nan={name: since}))
    end = run.end(name)
    assert (end.reason, end.error) == (FinishReason.ERROR, "the model's logits are no finite numbers")
    assert end.usage.completion_tokens == len(run.tokens(name))
    assert_others_are_plain(run, {name})
    assert all(is_plain(run, other) for other in run.guests if other != name)
    (when,) = [step for step in run.steps if end in step.events]
    assert [event for event in when.events if event.request_id == name] == [end], "nothing of its last round is told"
    assert run.backend.failed == [], "nobody was computed again for it"


@settings(max_examples=100)
@given(
    guests=arrivals(),
    config=CONFIGS,
    struck=st.dictionaries(st.integers(0, 6).map("r{}".format), st.integers(0, 40), min_size=1, max_size=3),
)
def test_any_lanes_may_be_without_numbers(guests: list[Guest], config: EngineConfig, struck: dict[str, int]) -> None:
    run = serve([*guests, NEXT], config, "prophet", harm=Harm(nan=struck))
    assert_others_are_plain(run, set(struck))


@pytest.mark.parametrize("cuttable", [True, False])
@pytest.mark.parametrize("earlier", [(), (12,), (30, 12, 31)], ids=["alone", "after another", "after several"])
def test_nothing_of_a_text_without_numbers_is_kept(earlier: tuple[int, ...], cuttable: bool) -> None:
    """Not what others left of it either, in memory or on the SSD; a later request computes it anew."""
    files: dict[Key, tuple[Piece, bytes, bytes]] = {}
    before = [
        Guest(Request(f"e{place}", LONG[:length], 3, Sampling(0.0)), arrives=60 * place)
        for place, length in enumerate(earlier)
    ]
    other = Guest(Request("other", (200, *LONG), 3, Sampling(0.0)))
    bad = Guest(Request("bad", LONG, 20, Sampling(0.0)), arrives=60 * len(earlier))
    later = Guest(Request("later", LONG, 20, Sampling(0.0)), arrives=60 * len(earlier) + 200)
    shelf = Shelf(ssd=10**6, disk=MemorySpill(files), cuttable=cuttable)
    harm = Harm(nan={"bad": len(LONG) + 8})
    run = serve([*before, other, bad, later], EngineConfig(2, 20), harm=harm, shelf=shelf)
    assert ended(run, FinishReason.ERROR) == {"bad"}
    assert len(run.tokens("bad")) == 9, "its text had begun to be kept"
    assert run.end("later").usage.cached_tokens == 0
    assert all(is_plain(run, name) for name in run.guests if name != "bad")
    assert run.prefix is not None
    again = serve(
        [Guest(Request("other", (200, *LONG, 7), 3, Sampling(0.0)))],
        EngineConfig(2, 20),
        shelf=Shelf(ssd=10**6, disk=MemorySpill(files), cuttable=cuttable),
    )
    assert again.end("other").usage.cached_tokens >= 40, "what is of other texts is still there"


@pytest.mark.parametrize("cuttable", [True, False])
def test_the_cache_holds_nothing_of_it_when_it_ends(cuttable: bool) -> None:
    files: dict[Key, tuple[Piece, bytes, bytes]] = {}
    bad = Guest(Request("bad", LONG, 20, Sampling(0.0)))
    run = serve(
        [bad],
        EngineConfig(1, 20),
        harm=Harm(nan={"bad": len(LONG) + 8}),
        shelf=Shelf(ssd=10**6, disk=MemorySpill(files), cuttable=cuttable),
    )
    assert run.prefix is not None
    assert run.prefix.index.pieces(Tier.RAM) == run.prefix.index.pieces(Tier.SSD) == []
    assert (files, run.prefix._held) == ({}, {})


# ---- smaller faults --------------------------------------------------------------------------------------------------


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
