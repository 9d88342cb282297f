"""Memory so small that lanes give way again and again, on the real loop over the fake model: everyone gets what they
would have got alone, nothing outgrows the pool, and nobody is forgotten in the queue.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from backends import groups
from backends.fake import EOS, FakeBackend
from backends.groups import capacity_class
from engine.config import EngineConfig
from scheduler.events import Finished
from scheduler.request import FinishReason, Request, Sampling
from tests.engine.grammars import Chart, random_chart
from tests.engine.served import TOKEN_BYTES, Guest, Harm, Leave, Served, StopString, decode, serve
from tests.engine.shelves import MemorySpill, Shelf
from tests.engine.test_oracle import configs, guests
from tests.engine.test_prefix import assert_tidy

STOPS = frozenset({EOS})


@pytest.fixture(autouse=True, scope="module")
def _small_classes() -> Iterator[None]:
    """Lanes of 8, 16, 32... positions: short texts outgrow them too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "SMALLEST_CLASS", 8)
        yield


def room_for(crowd: Sequence[Guest], share: float) -> int:
    """A pool that holds the longest of them, and `share` times as much beside it."""
    longest = max(len(guest.request.prompt) + guest.request.max_tokens for guest in crowd)
    return int(capacity_class(longest) * TOKEN_BYTES * (1 + share))


def timed(guest: Guest, seconds: int | None) -> Guest:
    """With so many looks into the mailbox from its arrival on."""
    deadline = None if seconds is None else float(guest.arrives + 1 + seconds)
    return Guest(msgspec.structs.replace(guest.request, deadline=deadline), guest.arrives, guest.goes)


SHELVES = st.none() | st.builds(
    Shelf,
    ram=st.sampled_from([0, 200, 3000, 10**6]),
    ssd=st.sampled_from([0, 10**6]),
    disk=st.none() | st.builds(MemorySpill, st.just({}), st.integers(0, 99)),
    cuttable=st.booleans(),
)
ONCE = st.sets(st.integers(0, 60), max_size=1).map(frozenset)
HARMS = st.builds(Harm, verify=ONCE) | st.builds(Harm, read=ONCE) | st.builds(Harm, keep=ONCE)
POISONS = st.builds(Harm, poison=st.dictionaries(st.sampled_from(["r0", "r3"]), st.integers(0, 60)))
SOURCES = st.sampled_from(["", "suffix", "prophet"])


@st.composite
def runs(draw: st.DrawFn, harms: st.SearchStrategy[Harm] = HARMS) -> Served:
    patience = st.none() | st.none() | st.integers(0, 60)
    crowd = [timed(guest, draw(patience)) for guest in draw(guests())]
    pool = room_for(crowd, draw(st.sampled_from([0.0, 0.3, 0.9, 2.0])))
    run = serve(crowd, draw(configs()), draw(SOURCES), harm=draw(harms), shelf=draw(SHELVES), pool=pool)
    assert run.stats is not None
    event(f"{min(run.stats.preemptions, 5)} lanes gave way, or more")
    event("with a prefix cache" if run.prefix is not None else "without")
    return run


def pool_of(run: Served) -> int:
    budget = run.backend.info.budget
    assert budget is not None
    return budget.pool


def assert_plain(run: Served) -> None:
    for name in run.guests:
        plain, end = decode(run.guests[name].request), run.end(name)
        told = run.tokens(name)
        assert plain.tokens[: len(told)] == told
        assert plain.logprobs[: len(run.logprobs(name))] == run.logprobs(name)
        if name in run.undisturbed():
            assert (told, end.reason, end.usage.completion_tokens) == (
                plain.tokens,
                plain.reason,
                plain.completion_tokens,
            )
    assert (run.backend.faults, run.strayed) == ([], [])


def assert_clean(run: Served) -> None:
    """Whatever was taken was given back, as often as it was taken; the pool held all of it."""
    assert run.backend.most_bytes <= pool_of(run)
    assert Counter(run.backend.released) == Counter(run.backend.opened)
    assert (run.backend.holders, run.backend.model.lanes) == ({}, {})
    assert run.stats is not None
    assert (run.stats.running, run.stats.waiting) == (0, 0)
    for prophet in run.prophets:
        assert max(Counter(prophet.forgotten).values(), default=1) == 1, "who comes back is not forgotten"
    if run.prefix is not None:
        assert_tidy(run)


@settings(max_examples=150, deadline=None)
@given(run=runs())
def test_any_traffic_in_too_little_memory_gets_the_plain_answers_and_gives_everything_back(run: Served) -> None:
    assert_plain(run)
    assert_clean(run)
    assert not [name for name in run.guests if run.end(name).reason is FinishReason.ERROR]
    for name in run.guests:
        events = run.events(name)
        assert [isinstance(each, Finished) for each in events] == [False] * (len(events) - 1) + [True]


@settings(max_examples=60, deadline=None)
@given(run=runs(POISONS))
def test_who_makes_forwards_fail_is_found_in_little_memory_too(run: Served) -> None:
    assert_plain(run)
    assert_clean(run)
    assert {name for name in run.guests if run.end(name).reason is FinishReason.ERROR} <= {"r0", "r3"}


@settings(max_examples=60, deadline=None)
@given(run=runs())
def test_rule_12_nobody_is_served_beyond_its_time(run: Served) -> None:
    """Nor ends for that before it, nor in a round that was planned with it."""
    for name, guest in run.guests.items():
        deadline, end = guest.request.deadline, run.end(name)
        assert (end.reason is FinishReason.DEADLINE) <= (deadline is not None)
        if deadline is None:
            continue
        late = [
            forward for forward in run.backend.forwards if forward.mails >= deadline and name in forward.request_ids
        ]
        assert not late, "a forward was started for a lane whose time was over"
        (when,) = [step for step in run.steps if end in step.events]
        assert when.first <= deadline
        if end.timing.finished >= deadline and name not in run.stopped:
            assert end.reason in (FinishReason.CANCELLED, FinishReason.DEADLINE)
        if end.reason is FinishReason.DEADLINE:
            assert end.timing.finished >= deadline
            assert end.usage.completion_tokens - len(run.tokens(name)) in (0, 1)


@settings(max_examples=60, deadline=None)
@given(run=runs(st.just(Harm())))
def test_rule_13_the_account_of_a_lane_that_gave_way_is_of_one_request(run: Served) -> None:
    """What it is spared when it goes on was its own already."""
    for name, guest in run.guests.items():
        end, prompt = run.end(name), len(guest.request.prompt)
        assert end.usage.prompt_tokens == prompt
        assert 0 <= end.usage.cached_tokens <= prompt - 1
        gates = [end.timing.submitted, end.timing.admitted, end.timing.first_token, end.timing.finished]
        passed = [gate for gate in gates if gate is not None]
        assert passed == sorted(passed)
        copied = {
            window.start
            for forward in run.backend.forwards
            for window in forward.windows
            if window.request_id == name and window.copies is not None
        }
        assert end.usage.cached_tokens in {0, *copied} or run.prefix is not None


# ---- examples --------------------------------------------------------------------------------------------------------


def crowd_of(seed: int, count: int = 6, goes: bool = False) -> list[Guest]:
    """Short prompts and long answers: each outgrows its class some times."""
    rng = random.Random(seed)
    return [
        Guest(
            Request(
                f"r{place}",
                tuple(rng.choices(range(256), k=rng.randint(2, 12))),
                rng.randint(30, 60),
                Sampling(rng.choice([0.0, 1.0]), place, logprobs=rng.choice([None, 2])),
                STOPS,
                ignore_eos=True,
                constraint=random_chart(rng.randint(0, 10_000)) if rng.random() < 0.3 else None,
            ),
            rng.randint(0, 8),
            rng.choice([Leave(rng.randint(4, 60)), StopString(rng.randint(10, 60), 1), None]) if goes else None,
        )
        for place in range(count)
    ]


@pytest.mark.parametrize("shelf", ["none", "cuttable", "checkpoints", "tiny"])
@pytest.mark.parametrize("draft_tokens", [0, 4], ids=["piped", "drafted"])
def test_lanes_that_gave_way_often_got_the_plain_answers(draft_tokens: int, shelf: str) -> None:
    """Also where clients leave and find stop strings while their lanes wait."""
    shelves = {
        "none": None,
        "cuttable": Shelf(),
        "checkpoints": Shelf(cuttable=False),
        "tiny": Shelf(ram=400, ssd=10**6, disk=MemorySpill({})),
    }
    gave_way = 0
    for seed in range(12):
        crowd = crowd_of(seed, goes=seed % 2 == 1)
        config = EngineConfig(6, 20, draft_tokens)
        run = serve(crowd, config, "prophet", seed=seed, shelf=shelves[shelf], pool=room_for(crowd, 0.5))
        assert_plain(run)
        assert_clean(run)
        assert run.stats is not None
        gave_way += run.stats.preemptions
    assert gave_way > 30, "there was too much memory to prove anything"


def growing(name: str, token: int, arrives: int = 0, max_tokens: int = 60, chart: Chart | None = None) -> Guest:
    """From 2 tokens on through every class up to the one of 64."""
    return Guest(Request(name, (token, 7), max_tokens, Sampling(1.0, token), STOPS, True, chart), arrives)


def test_the_youngest_gives_way_and_goes_on_before_who_never_began() -> None:
    crowd = [growing(f"r{place}", place, 2 * place) for place in range(3)]
    run = serve(crowd, EngineConfig(2, 20), pool=room_for(crowd, 0.25))
    assert_plain(run)
    assert Counter(run.backend.opened) == {"r0": 1, "r1": 2, "r2": 2}
    aboard = [forward.request_ids for forward in run.backend.forwards]
    first = next(place for place, names in enumerate(aboard) if "r2" in names)
    assert "r1" in aboard[first]
    assert "r1" not in aboard[first - 1], "there was room for both when the eldest left"


def test_what_a_lane_that_gave_way_had_cached_is_not_computed_again() -> None:
    """The prefix cache takes it, and the account of its prompt stays what it was."""
    rows = []
    for shelf in (None, Shelf()):
        crowd = [growing("r0", 0, max_tokens=32), growing("r1", 1)]
        run = serve(crowd, EngineConfig(3, 20), shelf=shelf, pool=room_for(crowd, 0.95))
        assert_plain(run)
        assert run.backend.opened == ["r0", "r1", "r1"]
        assert [run.end(name).usage.cached_tokens for name in run.guests] == [0, 0]
        rows.append(sum(window.real for forward in run.backend.forwards for window in forward.windows))
    assert rows[0] - rows[1] >= 8, "the other one has evicted some of it since"


def test_blocks_go_before_lanes_do() -> None:
    """Memory full of earlier texts is not in the way of those that are served now."""
    early = [Guest(guest.request, 70 * place) for place, guest in enumerate(crowd_of(5, 4))]
    late = [
        Guest(msgspec.structs.replace(guest.request, request_id=f"late{place}", constraint=None), 600)
        for place, guest in enumerate(crowd_of(6, 2))
    ]
    pool = room_for([*early, *late], 1.0)
    run = serve([*early, *late], EngineConfig(2, 20), shelf=Shelf(), pool=pool)
    assert run.prefix is not None
    assert run.stats is not None
    assert run.prefix.index.stats(0).evictions > 0
    assert run.stats.preemptions == 0
    assert_plain(run)
    assert_clean(run)


def test_a_lane_that_is_longer_than_others_leave_room_for_waits_for_them() -> None:
    short = [Guest(Request(f"r{place}", (1, place), 30, Sampling(0), STOPS, True)) for place in range(4)]
    long = Guest(Request("long", tuple(range(100)), 20, Sampling(0), STOPS, True), 5)
    after = Guest(Request("after", (9, 9), 5, Sampling(0), STOPS, True), 6)
    crowd = [*short, long, after]
    run = serve(crowd, EngineConfig(6, 60), pool=room_for(crowd, 0.0))
    assert_plain(run)
    assert_clean(run)
    assert run.backend.opened.index("after") > run.backend.opened.index("long"), "no one is passed over for being large"


def test_the_fake_model_raises_where_its_lanes_take_more_than_the_pool() -> None:
    """Else none of these tests would show anything."""
    backend = FakeBackend(budget=None, token_bytes=TOKEN_BYTES)
    backend.memory.limit(16 * TOKEN_BYTES)
    backend.memory.place({0: (16, 0)})
    with pytest.raises(ValueError, match="lanes take"):
        backend.memory.place({1: (1, 0)})


# ---- deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_tokens", [0, 3], ids=["piped", "drafted"])
@pytest.mark.parametrize("patience", [0, 1, 5, 10, 11, 30])
def test_who_is_served_ends_at_its_deadline_with_what_it_has(patience: int, draft_tokens: int) -> None:
    crowd = [guest for guest in crowd_of(2, 3) if guest.request.constraint is None]
    first = timed(Guest(crowd[0].request), patience)
    run = serve([first, *crowd[1:]], EngineConfig(3, 40, draft_tokens), "prophet")
    name = first.request.request_id
    end = run.end(name)
    assert end.reason is FinishReason.DEADLINE
    assert end.usage.completion_tokens == len(run.tokens(name))
    assert (patience < 3) == (not run.tokens(name))
    assert end.timing.finished - (patience + 1) in (0, 1), "each look is one, and a round takes two"
    assert_plain(run)


@pytest.mark.parametrize("patience", range(4, 14))
def test_rule_12_a_deadline_outranks_the_length_that_is_reached_in_the_same_round(patience: int) -> None:
    """Four tokens take one round of prefill and four of one token each, of two looks."""
    guest = timed(growing("r0", 0, max_tokens=4), patience)
    end = serve([guest], EngineConfig(1, 20, 0)).end("r0")
    assert end.reason is (FinishReason.DEADLINE if patience <= 9 else FinishReason.LENGTH)
    assert (end.usage.completion_tokens == 4) == (patience >= 9)


def test_who_waits_ends_at_its_deadline_without_having_been_served() -> None:
    first, second = (guest.request for guest in crowd_of(2, 2))
    run = serve([Guest(first), timed(Guest(second, 2), 9)], EngineConfig(1, 40))
    end = run.end("r1")
    assert (end.reason, end.timing.admitted, end.usage.completion_tokens) == (FinishReason.DEADLINE, None, 0)
    assert run.tokens("r1") == ()
    assert set(run.backend.opened) == {"r0"}


def test_who_had_to_give_way_ends_at_its_deadline_with_what_it_was_told() -> None:
    """It has no slot to give back any more, but a matcher."""
    anything = Chart((dict.fromkeys(range(256), 0),), frozenset())
    crowd = [growing("r0", 0), timed(growing("r1", 1, chart=anything), 95)]
    run = serve(crowd, EngineConfig(2, 20), pool=room_for(crowd, 0.25))
    end = run.end("r1")
    assert run.stats is not None
    assert run.stats.preemptions == 1
    assert end.reason is FinishReason.DEADLINE
    assert 0 < end.usage.completion_tokens == len(run.tokens("r1"))
    assert run.backend.opened.count("r1") == 1, "it ended before it came again"
    assert_plain(run)
    assert_clean(run)
