"""Batched, drafted, cancelled and stopped at random, on the real loop over the fake model: everyone gets what they
would have got alone, one token at a time. Each test is one line of the round's contract.
"""

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.fake import EOS
from engine.config import EngineConfig
from scheduler.events import Finished, Tokens
from scheduler.request import FinishReason, Request, Sampling
from tests.engine.grammars import Chart, random_chart
from tests.engine.served import Guest, Leave, Served, StopString, agreement, decode, serve

STOPS = frozenset({EOS})
TOKEN = st.integers(0, 255)
SOURCES = st.sampled_from(["", "suffix", "prophet", "suffix+prophet", "prophet+suffix"])

PLAIN_SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
)
SAMPLINGS = PLAIN_SAMPLINGS | st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    seed=st.integers(0, 2**64 - 1),
    top_k=st.sampled_from([0, 0, 1, 7]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.5]),
    logit_bias=st.just(())
    | st.lists(st.tuples(TOKEN, st.floats(-9, 9)), max_size=4, unique_by=lambda b: b[0]).map(tuple),
    logprobs=st.sampled_from([None, None, 0, 3]),
)
CONSTRAINTS = st.none() | st.none() | st.builds(random_chart, st.integers(0, 10_000))
GOES = st.none() | st.builds(Leave, st.integers(0, 40)) | st.builds(StopString, st.integers(4, 40), st.integers(0, 3))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Short or longer than a round, and often repeating themselves, so that lookup has something to find."""
    text = draw(st.lists(TOKEN, min_size=1, max_size=12))
    return tuple(text * draw(st.integers(1, 4)))


@st.composite
def guests(draw: st.DrawFn) -> list[Guest]:
    """Some of them are siblings, who have their prompt in common."""
    names = [f"r{place}" for place in range(draw(st.integers(1, 9)))]
    families = {family: draw(prompts()) for family in ("a", "b")}
    return [
        Guest(
            Request(
                name,
                families.get(family := draw(st.sampled_from(["", "", "a", "b"]))) or draw(prompts()),
                draw(st.integers(1, 40)),
                draw(SAMPLINGS),
                STOPS,
                draw(st.booleans()),
                draw(CONSTRAINTS),
                family,
            ),
            draw(st.integers(0, 30)),
            draw(GOES),
        )
        for name in names
    ]


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    lanes = draw(st.integers(1, 6))
    rows = lanes + draw(st.integers(1, 40))
    return EngineConfig(lanes, rows, draw(st.sampled_from([0, 0, 1, 3, 6])))


@st.composite
def runs(draw: st.DrawFn) -> Served:
    return serve(draw(guests()), draw(configs()), draw(SOURCES), seed=draw(st.integers(0, 99)))


CROWDS = st.lists(
    st.builds(
        Guest,
        st.builds(
            Request,
            request_id=st.uuids().map(str),
            prompt=prompts(),
            max_tokens=st.integers(20, 60),
            sampling=SAMPLINGS,
            stop_tokens=st.just(STOPS),
            ignore_eos=st.just(True),
        ),
    ),
    min_size=3,
    max_size=6,
)
"""Guests who come together and stay for long."""

examples = settings(max_examples=80)


@examples
@given(run=runs())
def test_rules_1_and_3_everyone_who_stays_gets_the_plain_answer(run: Served) -> None:
    for name in run.undisturbed():
        plain = decode(run.guests[name].request)
        assert (run.tokens(name), run.end(name).reason) == (plain.tokens, plain.reason)
        assert run.logprobs(name) == plain.logprobs
        assert len(plain.tokens) <= run.guests[name].request.max_tokens


@examples
@given(run=runs())
def test_rule_2_an_eos_is_never_delivered_unless_ignored(run: Served) -> None:
    for name, guest in run.guests.items():
        ignored = guest.request.ignore_eos and guest.request.constraint is None
        assert ignored or EOS not in run.tokens(name)


@examples
@given(run=runs())
def test_rule_4_a_lane_ends_where_its_grammar_can_only_end(run: Served) -> None:
    for name, guest in run.guests.items():
        chart = guest.request.constraint
        if not isinstance(chart, Chart):
            continue
        matcher = chart.matcher()
        for token in run.tokens(name):
            assert not matcher.finished, "something was sampled behind the end"
            assert matcher.accept(token)
        if matcher.finished and name in run.undisturbed():
            assert run.end(name).reason is FinishReason.STOP


@examples
@given(run=runs())
def test_rule_5_rejected_drafts_leave_no_trace_in_a_matcher(run: Served) -> None:
    """`serve` looks at every matcher after every round."""
    assert run.strayed == []


@examples
@given(run=runs(), config=configs(), sources=SOURCES)
def test_rule_7_a_draw_depends_on_the_request_alone(run: Served, config: EngineConfig, sources: str) -> None:
    """The same requests in another order, other slots, other widths, other drafts."""
    again = serve([Guest(guest.request) for guest in reversed(run.guests.values())], config, sources)
    for name in run.undisturbed():
        assert again.tokens(name) == run.tokens(name)


@examples
@given(crowd=CROWDS, draft_tokens=st.integers(1, 4), sources=SOURCES)
def test_rule_8_rounds_mix_prefill_and_windows_of_any_width(
    crowd: list[Guest], draft_tokens: int, sources: str
) -> None:
    run = serve(crowd, EngineConfig(8, 12, draft_tokens), sources)
    for name in run.guests:
        assert run.tokens(name) == decode(run.guests[name].request).tokens
    for forward in run.backend.forwards:
        assert sum(window.rows for window in forward.windows) <= 12


@examples
@given(run=runs())
def test_rule_9_tokens_come_in_order_then_one_terminal_event(run: Served) -> None:
    for name in run.guests:
        events = run.events(name)
        assert [isinstance(event, Finished) for event in events] == [False] * (len(events) - 1) + [True]
        plain = decode(run.guests[name].request)
        assert plain.tokens[: len(run.tokens(name))] == run.tokens(name)


@examples
@given(run=runs())
def test_rules_11_and_21_a_cancel_is_seen_before_the_next_forward_and_the_next_delivery(run: Served) -> None:
    for name, guest in run.guests.items():
        if not isinstance(guest.goes, Leave):
            continue
        look = guest.arrives + guest.goes.after
        assert not [
            forward for forward in run.backend.forwards if forward.mails > look and name in forward.request_ids
        ], "a forward was started for a lane whose cancel had been read"
        late = [event for step in run.steps if step.last >= look for event in step.events if event.request_id == name]
        assert not [event for event in late if isinstance(event, Tokens)]
        assert [event.reason for event in late if isinstance(event, Finished)] in ([], [FinishReason.CANCELLED])


@examples
@given(run=runs())
def test_rule_12_a_stop_string_outranks_later_ends_and_cuts_the_account(run: Served) -> None:
    for name, kept in run.stopped.items():
        end = run.end(name)
        plain = decode(run.guests[name].request)
        assert (end.reason, end.usage.completion_tokens) == (FinishReason.STOP, kept)
        assert plain.tokens[: len(run.tokens(name))] == run.tokens(name)
        assert len(run.tokens(name)) >= kept


@examples
@given(run=runs())
def test_rule_13_the_accounts_are_exact_and_add_up_to_the_counters(run: Served) -> None:
    drafted: Counter[tuple[str, int]] = Counter()
    accepted: Counter[tuple[str, int]] = Counter()
    drafts: Counter[str] = Counter()
    for name, guest in run.guests.items():
        usage = run.end(name).usage
        windows = [each for forward in run.backend.forwards for each in forward.windows if each.request_id == name]
        copied = [window.start for window in windows if window.copies is not None]
        assert (usage.prompt_tokens, usage.cached_tokens) == (len(guest.request.prompt), max(copied, default=0))
        if name not in run.stopped:
            assert usage.completion_tokens - len(run.tokens(name)) in (0, run.end(name).reason is FinishReason.STOP)
            if name in run.undisturbed():
                assert usage.completion_tokens == decode(guest.request).completion_tokens
        for count in usage.drafts:
            drafts[count.source] += count.drafts
            assert count.drafts == count.drafted[0]
            for place, (of, how_many) in enumerate(zip(count.drafted, count.accepted, strict=True)):
                drafted[count.source, place] += of
                accepted[count.source, place] += how_many
    assert run.stats is not None
    counters = {counter.source: counter for counter in run.stats.drafts}
    assert {source: counter.drafts for source, counter in counters.items()} == dict(drafts)
    for source, counter in counters.items():
        places = range(len(counter.drafted))
        assert counter.drafted == tuple(drafted[source, place] for place in places)
        assert counter.accepted == tuple(accepted[source, place] for place in places)


@examples
@given(run=runs())
def test_rules_15_and_16_every_cache_holds_exactly_the_kept_tokens(run: Served) -> None:
    """`Watched` holds each window's start and tokens, and each cache before it, against the plain text."""
    assert run.backend.faults == []
    assert run.backend.failed == []


@examples
@given(run=runs(), crowd=CROWDS)
def test_rule_19_those_who_join_and_leave_change_nobody_else(run: Served, crowd: list[Guest]) -> None:
    regulars = [Guest(guest.request) for guest in crowd]
    visited = serve([*regulars, *run.guests.values()], EngineConfig(4, 16, 3), "suffix")
    for guest in regulars:
        name = guest.request.request_id
        assert visited.tokens(name) == decode(guest.request).tokens
    assert visited.backend.faults == []


@examples
@given(run=runs())
def test_rule_22_whatever_happens_each_lane_is_released_once(run: Served) -> None:
    assert Counter(run.backend.released) == Counter(run.backend.opened)
    assert max(Counter(run.backend.opened).values(), default=1) == 1
    assert run.backend.holders == {}
    assert run.backend.model.lanes == {}
    assert sum(entry.startswith("read") for entry in run.backend.log) == len(run.backend.forwards), (
        "none is left flying"
    )
    assert run.stats is not None
    assert (run.stats.running, run.stats.waiting) == (0, 0)
    for prophet in run.prophets:
        assert max(Counter(prophet.forgotten).values(), default=1) == 1
        assert set(run.backend.opened) <= set(prophet.forgotten)


# ---- the runs above do reach what they claim to test -----------------------------------------------------------------


def crowd_of(count: int, max_tokens: int = 40, *, length: int = 9) -> list[Guest]:
    return [
        Guest(
            Request(
                f"r{place}",
                tuple((place * 37 + step * step) % 256 for step in range(length + place)),
                max_tokens,
                Sampling(0.8 * (place % 2), seed=place),
                STOPS,
                ignore_eos=True,
            )
        )
        for place in range(count)
    ]


@pytest.mark.parametrize("sources", ["prophet", "prophet+suffix"])
def test_rule_16_one_round_accepts_none_some_and_all(sources: str) -> None:
    run = serve(crowd_of(8, 120), EngineConfig(8, 64, 5), sources, seed=3)
    assert all(run.tokens(name) == decode(guest.request).tokens for name, guest in run.guests.items())
    kinds = set()
    for forward in run.backend.forwards:
        here = set()
        for window in forward.windows:
            agreed = agreement(window, run.backend.texts[window.request_id])
            if window.draft:
                here.add("none" if agreed == 0 else "all" if agreed == len(window.draft) else "some")
        kinds.add(frozenset(here))
    assert set(chain(*kinds)) == {"none", "some", "all"}
    assert frozenset({"none", "some", "all"}) in kinds


@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_rule_8_a_newcomers_prefill_shares_rounds_with_decoding_lanes(draft_tokens: int) -> None:
    guests = [*crowd_of(3), Guest(Request("late", tuple(range(50)), 5, Sampling(0), STOPS, ignore_eos=True), 20)]
    run = serve(guests, EngineConfig(8, 16, draft_tokens), "prophet")
    mixed = [forward for forward in run.backend.forwards if len({window.samples for window in forward.windows}) == 2]
    assert len(mixed) > 2
    assert run.stats is not None
    assert run.stats.rounds["mixed"] == len(mixed)
    assert run.tokens("late") == decode(guests[-1].request).tokens


def test_rule_2_an_eos_ends_lanes_as_an_accepted_draft_too() -> None:
    guests = [Guest(Request(f"r{seed}", (seed, 1), 400, Sampling(1.0, seed), STOPS)) for seed in range(12)]
    run = serve(guests, EngineConfig(12, 200, 6), "prophet", seed=1)
    ended_by_draft = set()
    for forward in run.backend.forwards:
        for window in forward.windows:
            text = run.backend.texts[window.request_id]
            if window.draft and window.start + window.real + agreement(window, text) == len(text):
                ended_by_draft.add(window.request_id)
    assert ended_by_draft
    for guest in guests:
        name = guest.request.request_id
        plain = decode(guest.request)
        assert plain.reason is FinishReason.STOP
        assert (run.tokens(name), run.end(name).usage.completion_tokens) == (plain.tokens, plain.completion_tokens)


# ---- the ladder of sources -------------------------------------------------------------------------------------------


def test_a_source_that_drafts_more_than_it_may_is_cut() -> None:
    run = serve(crowd_of(6, 60), EngineConfig(6, 16, 4), "overeager")
    assert run.backend.faults == []
    assert max(sum(window.rows for window in forward.windows) for forward in run.backend.forwards) <= 16
    assert all(run.tokens(name) == decode(guest.request).tokens for name, guest in run.guests.items())


@pytest.mark.parametrize(
    ("ladder", "heard"), [("overeager+prophet", {"overeager"}), ("suffix+prophet", {"suffix", "prophet"})]
)
def test_a_source_is_asked_only_where_those_before_it_had_no_guess(ladder: str, heard: set[str]) -> None:
    run = serve(crowd_of(6, 60), EngineConfig(6, 64, 4), ladder)
    assert run.stats is not None
    assert {counter.source for counter in run.stats.drafts} == heard


# ---- pipelined rounds ------------------------------------------------------------------------------------------------


def test_plain_rounds_pipeline_a_forward_is_started_before_the_one_before_it_is_read() -> None:
    run = serve(crowd_of(1, 5, length=1), EngineConfig(2, 8))
    log = ["verify 0", "verify 1", "read 0", "verify 2", "read 1", "verify 3", "read 2", "verify 4", "read 3", "read 4"]
    assert run.backend.log == log
    assert run.tokens("r0") == decode(run.guests["r0"].request).tokens


@pytest.mark.parametrize(
    ("draft_tokens", "sources"), [(0, "overeager"), (3, ""), (3, "overeager")], ids=["off", "no guess", "drafting"]
)
def test_pipelining_stops_where_somebody_drafts_and_never_changes_tokens(draft_tokens: int, sources: str) -> None:
    run = serve(crowd_of(4), EngineConfig(4, 64, draft_tokens), sources)
    piped = sum(forward.piped for forward in run.backend.forwards)
    assert piped == 0 if draft_tokens and sources else piped > 30
    for name, guest in run.guests.items():
        assert run.tokens(name) == decode(guest.request).tokens


def test_an_end_found_one_round_late_is_discarded() -> None:
    guests = [Guest(Request(f"r{seed}", (seed, 1), 400, Sampling(1.0, seed), STOPS)) for seed in range(6)]
    run = serve(guests, EngineConfig(6, 64))
    vain = {
        window.request_id
        for forward in run.backend.forwards
        for window in forward.windows
        if window.start >= len(run.backend.texts[window.request_id]) - 1
    }
    assert vain == set(run.guests), "each lane was carried on past its end-of-sequence token"
    for guest in guests:
        assert run.tokens(guest.request.request_id) == decode(guest.request).tokens


def test_no_row_is_spent_behind_max_tokens() -> None:
    run = serve(crowd_of(3, 7), EngineConfig(3, 64))
    assert Counter(
        window.request_id for forward in run.backend.forwards for window in forward.windows if window.samples
    ) == {"r0": 7, "r1": 7, "r2": 7}


def test_a_newcomer_is_not_kept_waiting_by_pipelining() -> None:
    newcomer = Guest(Request("late", (1, 2), 3, Sampling(0), STOPS), arrives=21)
    run = serve([*crowd_of(2, 60), newcomer], EngineConfig(3, 64))
    behind = [forward for forward in run.backend.forwards if forward.mails > newcomer.arrives]
    assert any("late" in forward.request_ids for forward in behind[:2])


# ---- cancels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("after", range(12))
def test_rule_21_one_lane_cancelled_in_a_multi_lane_prefill(after: int, draft_tokens: int) -> None:
    guests = crowd_of(3, 12, length=30)
    guests[1] = Guest(guests[1].request, 0, Leave(after))
    run = serve(guests, EngineConfig(3, 40, draft_tokens), "suffix")
    if after == 1:
        assert run.backend.forwards[0].request_ids == {"r0", "r1"}, "the cancel came while two lanes were prefilled"
    assert run.end("r1").reason is FinishReason.CANCELLED
    assert not [forward for forward in run.backend.forwards if forward.mails > after and "r1" in forward.request_ids]
    for name in ("r0", "r2"):
        assert run.tokens(name) == decode(run.guests[name].request).tokens
    assert run.backend.faults == []


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("after", range(20))
def test_rule_22_a_slot_freed_by_a_cancel_is_cleared_before_the_next_guest_has_it(
    after: int, draft_tokens: int
) -> None:
    """Once, the next guest's caches were released in the cancelled one's name."""
    first, second = crowd_of(2)
    run = serve([Guest(first.request, 0, Leave(after)), second], EngineConfig(1, 8, draft_tokens), "suffix")
    assert run.end("r0").reason is FinishReason.CANCELLED
    assert run.tokens("r1") == decode(second.request).tokens
    assert (run.backend.faults, run.backend.failed) == ([], [])


def test_a_cancel_of_somebody_who_waits_needs_no_lane() -> None:
    first, second = crowd_of(2)
    run = serve([first, Guest(second.request, 4, Leave(3))], EngineConfig(1, 8))
    assert run.end("r1").reason is FinishReason.CANCELLED
    assert run.end("r1").timing.admitted is None
    assert run.backend.opened == run.backend.released == ["r0"]


# ---- faults seen in other servers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft_tokens", "sources"), [(0, ""), (4, "suffix"), (4, "prophet")])
def test_a_prompt_equal_to_an_earlier_prompt_and_its_completion(draft_tokens: int, sources: str) -> None:
    """Greedy text goes on as if it had never been cut."""
    whole = Request("whole", (10, 20, 30), 60, Sampling(0), STOPS, ignore_eos=True)
    said = decode(whole).tokens
    head = Request("head", whole.prompt, 25, Sampling(0), STOPS, ignore_eos=True)
    tail = Request("tail", (*whole.prompt, *said[:25]), 35, Sampling(0), STOPS, ignore_eos=True)
    run = serve([Guest(head), Guest(tail, 120)], EngineConfig(2, 16, draft_tokens), sources)
    assert run.tokens("head") + run.tokens("tail") == said


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("draft_tokens", "sources"), [(0, ""), (4, "suffix"), (4, "prophet")])
@pytest.mark.parametrize("arrives", [0, 1, 7, 500], ids=["together", "a moment later", "overlapping", "apart"])
def test_two_identical_requests(arrives: int, draft_tokens: int, sources: str, temperature: float) -> None:
    twins = [Request(name, (1, 2, 3, 1, 2), 40, Sampling(temperature, seed=11), STOPS) for name in ("one", "two")]
    run = serve([Guest(twins[0]), Guest(twins[1], arrives)], EngineConfig(2, 16, draft_tokens), sources)
    assert run.tokens("one") == run.tokens("two") == decode(twins[0]).tokens


def test_rule_7_seeds_and_choices_make_the_difference() -> None:
    samplings = [Sampling(1.0, seed, choice) for seed in (0, 1, 2**63) for choice in (0, 1)]
    guests = [
        Guest(Request(f"{place}", (1, 2, 3), 30, sampling, STOPS, ignore_eos=True))
        for place, sampling in enumerate(samplings)
    ]
    run = serve(guests, EngineConfig(6, 16))
    assert len({run.tokens(name) for name in run.guests}) == len(samplings)


# ---- siblings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("lanes", [2, 4, 6])
def test_siblings_share_one_prefill(lanes: int, draft_tokens: int) -> None:
    """Also those who come to a lane when the first ones have left it, as long as one of them is still there."""
    prompt = tuple(range(50))
    siblings = [
        Guest(Request(f"r{choice}", prompt, 20 + 5 * choice, Sampling(1.0, 5, choice), STOPS, True))
        for choice in range(6)
    ]
    run = serve(siblings, EngineConfig(lanes, 20, draft_tokens), "suffix")
    chunks = [window for forward in run.backend.forwards for window in forward.windows if not window.samples]
    assert sum(window.rows for window in chunks) == len(prompt) - 1
    assert {window.request_id for window in chunks} == {"r0"}
    assert run.backend.copies == 5
    assert run.backend.faults == []
    for name, guest in run.guests.items():
        assert run.tokens(name) == decode(guest.request).tokens
    assert len({run.tokens(name) for name in run.guests}) == 6, "choices differ"


def test_choice_0_is_the_request_alone() -> None:
    alone = Request("alone", (1, 2, 3), 30, Sampling(1.0, 7), STOPS, True)
    first = Request("first", (1, 2, 3), 30, Sampling(1.0, 7, 0), STOPS, True)
    second = Request("second", (1, 2, 3), 30, Sampling(1.0, 7, 1), STOPS, True)
    run = serve([Guest(alone), Guest(first), Guest(second)], EngineConfig(4, 20))
    assert run.tokens("alone") == run.tokens("first") != run.tokens("second")


def test_a_sibling_whose_elder_is_cancelled_in_prefill_does_it_itself() -> None:
    prompt = tuple(range(60))
    elder = Guest(Request("elder", prompt, 9, Sampling(0), STOPS, True), 0, Leave(4))
    younger = Guest(Request("younger", prompt, 9, Sampling(0), STOPS, True))
    run = serve([elder, younger], EngineConfig(4, 10))
    assert run.end("elder").reason is FinishReason.CANCELLED
    assert run.backend.copies == 0
    assert run.tokens("younger") == decode(younger.request).tokens
