"""The scheduler, driven at random, against a simple model of what must hold whatever happens in which order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.draft import Draft
from scheduler.events import Event, Finished, Tokens
from scheduler.pace import Headlong, Offer
from scheduler.request import DraftCount, FinishReason, Request, Sampling
from scheduler.round import Drawn, LaneResult, Round, Window
from scheduler.scheduler import Limits, Scheduler
from tests.scheduler.plain import replay

EOS = 5
TOKENS = st.integers(0, EOS)
SOURCES = ("one", "two")


class Anything:
    """A constraint, as far as the scheduler can tell."""

    summary = "anything"


@dataclass
class Tale:
    """One request as a client and an attentive observer see it."""

    request: Request
    submitted: float
    admitted: float | None = None
    first_token: float | None = None
    slot: int | None = None
    cached: int = 0
    donor: "tuple[Tale, int] | None" = None
    """Whom it copies its beginning from, and how much, until it has done so."""
    reused: int = 0
    generated: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    """What the events delivered."""
    eos_drawn: bool = False
    drafts: list[tuple[str, int, int]] = field(default_factory=list)
    """Source, drafted, accepted."""
    end: Finished | None = None

    @property
    def text(self) -> list[int]:
        return [*self.request.prompt, *self.generated]

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - len(self.generated)

    @property
    def stop_tokens(self) -> frozenset[int]:
        ignores = self.request.ignore_eos and self.request.constraint is None
        return frozenset() if ignores else self.request.stop_tokens


def by_position(drafts: Sequence[tuple[str, int, int]]) -> dict[str, DraftCount]:
    counts = {}
    for source in {source for source, _, _ in drafts}:
        mine = [(drafted, accepted) for name, drafted, accepted in drafts if name == source]
        places = range(max(drafted for drafted, _ in mine))
        counts[source] = DraftCount(
            source,
            len(mine),
            tuple(sum(drafted > place for drafted, _ in mine) for place in places),
            tuple(sum(accepted > place for _, accepted in mine) for place in places),
        )
    return counts


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.tales: dict[str, Tale] = {}
        self.waiting: list[Tale] = []
        self.lanes: list[Tale] = []
        """In order of admission."""
        self.offers: dict[str, tuple[Offer, ...]] = {}
        """What could be drafted in the round in flight."""
        self.flying: tuple[Window, ...] | None = None
        self.ahead: tuple[Window, ...] | None = None
        self.left: list[Tale] = []
        """Lanes that left and are not yet told as departures."""
        self.rounds: list[list[Window]] = []
        self.drafts: list[tuple[str, int, int]] = []

    @initialize(
        lanes=st.integers(1, 4),
        more_rows=st.integers(1, 12),
        draft_tokens=st.integers(0, 4),
        pipelines=st.sampled_from([True, True, False]),
    )
    def begin(self, lanes: int, more_rows: int, draft_tokens: int, pipelines: bool) -> None:
        self.limits = Limits(lanes, lanes + more_rows, draft_tokens, pipelines=pipelines)
        self.scheduler = Scheduler(self.limits, Headlong())

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    # ---- requests come and go -------------------------------------------------------------------------------------

    @rule(
        prompt=st.lists(TOKENS, min_size=1, max_size=12).map(tuple),
        max_tokens=st.integers(1, 12),
        stop_tokens=st.frozensets(st.sampled_from([0, EOS])),
        ignore_eos=st.booleans(),
        sampling=st.sampled_from([Sampling(1.0, 0), Sampling(1.0, 1), Sampling(1.0, top_p=0.5), Sampling(logprobs=0)]),
        constraint=st.sampled_from([None, None, None, Anything()]),
        family=st.sampled_from(["", "", "a", "b"]),
        draft_tokens=st.none() | st.integers(0, 3),
    )
    def submit(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        stop_tokens: frozenset[int],
        ignore_eos: bool,
        sampling: Sampling,
        constraint: Anything | None,
        family: str,
        draft_tokens: int | None,
    ) -> None:
        for tale in self.tales.values():
            if family and tale.request.owner == family:
                prompt = tale.request.prompt
        name = f"r{len(self.tales)}"
        request = Request(
            name, prompt, max_tokens, sampling, stop_tokens, ignore_eos, constraint, family, draft_tokens=draft_tokens
        )
        self.scheduler.submit(request, self.tick())
        tale = self.tales[request.request_id] = Tale(request, self.now)
        self.waiting.append(tale)

    @rule(data=st.data(), kept=st.none() | st.integers(1, 8))
    def go(self, data: st.DataObject, kept: int | None) -> None:
        """Somebody cancels or has found a stop string: a stranger, one who waits, one who is served, one who ended."""
        request_id = data.draw(st.sampled_from(["unknown", *self.tales]))
        if kept is None:
            self.cancel(request_id)
        else:
            self.finish(request_id, kept)

    def cancel(self, request_id: str) -> None:
        was_open = request_id in self.tales and self.tales[request_id].end is None
        events = self.scheduler.cancel(request_id, self.tick())
        assert len(events) == was_open
        self.hear(events)
        if was_open:
            self.leave(self.tales[request_id], FinishReason.CANCELLED)

    def finish(self, request_id: str, kept: int) -> None:
        was_open = request_id in self.tales and self.tales[request_id].end is None
        events = self.scheduler.finish(request_id, kept, self.tick())
        assert len(events) == was_open
        self.hear(events)
        if was_open:
            tale = self.tales[request_id]
            self.leave(tale, FinishReason.STOP, completed=min(kept, len(tale.generated)))

    def leave(self, tale: Tale, reason: FinishReason, completed: int | None = None) -> None:
        """The model's half of an end that `hear` has noted."""
        assert tale.end is not None
        assert tale.end.reason is reason
        usage = tale.end.usage
        assert usage.prompt_tokens == len(tale.request.prompt)
        assert usage.cached_tokens == tale.reused
        assert usage.completion_tokens == (len(tale.told) + tale.eos_drawn if completed is None else completed)
        assert {count.source: count for count in usage.drafts} == by_position(tale.drafts)
        assert (tale.end.error is not None) == (reason is FinishReason.ERROR)
        self.check_timing(tale, tale.end)
        if tale in self.waiting:
            self.waiting.remove(tale)
            return
        self.lanes.remove(tale)
        self.left.append(tale)

    def check_timing(self, tale: Tale, end: Finished) -> None:
        gates = end.timing
        assert (gates.submitted, gates.admitted) == (tale.submitted, tale.admitted)
        assert (gates.first_token, gates.finished) == (tale.first_token, self.now)

    def hear(self, events: Sequence[Event]) -> None:
        """Rule 9 for every event there ever is, and rules 2, 3 and 11 with it."""
        for event in events:
            tale = self.tales[event.request_id]
            assert tale.end is None, "an event after the terminal one"
            if isinstance(event, Finished):
                tale.end = event
                continue
            assert event.tokens
            tale.told += event.tokens
            assert len(tale.told) <= tale.request.max_tokens
            assert not set(event.tokens) & tale.stop_tokens

    # ---- rounds ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.flying is None)
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        planned = self.scheduler.plan(self.tick())
        free = self.limits.max_lanes - len(self.lanes)
        for tale in self.waiting[:free]:
            tale.admitted = self.now
            self.lanes.append(tale)
            self.arrange(tale)
        self.waiting = self.waiting[free:]
        if planned is None:
            assert not self.lanes
            return
        assert not planned.ahead
        self.check_round(planned)
        self.offer(planned, data)
        self.flying = self.scheduler.draft(planned).windows
        self.check_drafts(planned.windows, self.flying)
        self.check_kind(self.flying)

    def budget(self, tale: Tale) -> int:
        own = tale.request.draft_tokens
        limit = self.limits.draft_tokens if own is None else min(own, self.limits.draft_tokens)
        return min(limit, tale.remaining - 1)

    def offer(self, coming: Round, data: st.DataObject) -> None:
        """The sources say something for some of the lanes that may be drafted for."""
        asks = self.scheduler.asks(coming)
        drawing = [self.tales[window.request_id] for window in coming.windows if window.samples]
        wanted = [tale for tale in drawing if tale in self.lanes and self.budget(tale) > 0]
        assert [ask.request_id for ask in asks] == [tale.request.request_id for tale in wanted]
        for ask, tale in zip(asks, wanted, strict=True):
            assert (list(ask.tokens), ask.prompt) == (tale.text, len(tale.request.prompt))
            assert ask.budget == self.budget(tale)
        self.offers = {}
        for ask in asks:
            tokens = tuple(data.draw(st.lists(TOKENS, max_size=ask.budget)))
            if tokens:
                source = data.draw(st.sampled_from(SOURCES))
                self.offers[ask.request_id] = (Offer(source, Draft(tokens, (0,) * len(tokens))),)
        self.scheduler.offer(coming, self.offers)

    def check_drafts(self, planned: Sequence[Window], drafted: Sequence[Window]) -> None:
        assert sum(window.rows for window in drafted) <= self.limits.round_rows
        for bare, window in zip(planned, drafted, strict=True):
            assert msgspec.structs.replace(window, draft=(), source="") == bare
            if window.draft:
                (offer,) = self.offers[window.request_id]
                assert window.source == offer.source
                assert window.draft == offer.draft.tokens[: len(window.draft)]
                assert len(window.draft) <= bare.budget

    def check_round(self, planned: Round) -> None:
        ids = [window.request_id for window in planned.windows]
        assert len(set(ids)) == len(ids), "one window per lane"
        rows = sum(window.rows for window in planned.windows)
        assert 0 < rows <= self.limits.round_rows
        spare = self.limits.round_rows - sum(window.samples for window in planned.windows)
        kept_for_drafts = min(sum(window.budget for window in planned.windows), spare // 2)
        for window in planned.windows:
            self.check_window(window, self.tales[window.request_id])
        by_id = {window.request_id: window for window in planned.windows}
        feeds = [(tale, *start) for tale in self.lanes if (start := self.start_of(tale)) is not None]
        decoding = [tale.request.request_id for tale, start, _ in feeds if start == len(tale.text) - 1]
        assert [window.request_id for window in planned.windows if window.samples] == decoding
        prefilling = [(tale, start) for tale, start, _ in feeds if start < len(tale.text) - 1]
        fed = [by_id[tale.request.request_id].rows if tale.request.request_id in by_id else 0 for tale, _ in prefilling]
        wanted = [len(tale.text) - 1 - start for tale, start in prefilling]
        if fed != wanted:
            assert rows == self.limits.round_rows - kept_for_drafts, "prefill takes all that is left"
            whole = [have == want for have, want in zip(fed, wanted, strict=True)]
            first_short = whole.index(False)
            assert not any(fed[first_short + 1 :]), "first come, first served"
        assert not wanted or any(fed), "prefill never starves"

    def arrange(self, tale: Tale) -> None:
        """The first of the lanes before it with the longest beginning in common; all of the prompt, or much of it."""
        whole = len(tale.request.prompt) - 1
        tale.donor = None
        for other in self.lanes[: self.lanes.index(tale)]:
            if other.request.owner != tale.request.owner:
                continue
            pairs = zip(tale.text[:whole], other.text, strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            worth = common >= 16 or common == whole > 0
            if worth and (tale.donor is None or common > tale.donor[1]):
                tale.donor = (other, common)

    def start_of(self, tale: Tale) -> tuple[int, int | None] | None:
        """Where a lane goes on and which slot it copies so far; None if it waits for another one's prefill."""
        while tale.donor is not None:
            donor, common = tale.donor
            if donor in self.lanes:
                return (common, donor.slot) if donor.cached >= common else None
            self.arrange(tale)
        return tale.cached, None

    def check_window(self, window: Window, tale: Tale) -> None:
        assert tale in self.lanes
        assert (window.start, window.copies) == self.start_of(tale)
        if tale.slot is None:
            tale.slot = window.slot
        assert window.slot == tale.slot, "a lane stays in its slot"
        assert window.tokens == tuple(tale.text[window.start : window.end])
        assert window.sampling == tale.request.sampling
        assert window.end <= window.reach <= len(tale.text) + 1
        assert not window.carried
        assert window.draft == ()
        assert (window.constraint is not None) == (window.samples and tale.request.constraint is not None)
        if window.samples:
            assert window.start == len(tale.text) - 1
            assert window.tokens == (tale.text[-1],)
            assert window.budget == self.budget(tale)
        else:
            assert window.tokens
            assert window.budget == 0
            assert window.end <= len(tale.text) - 1, "the last token heads a decode window"

    def check_kind(self, windows: tuple[Window, ...]) -> None:
        samples = {window.samples for window in windows}
        kind = {frozenset({True}): "decode", frozenset({False}): "prefill"}.get(frozenset(samples), "mixed")
        assert Round(windows).kind == kind

    @precondition(lambda self: self.flying is not None and self.ahead is None)
    @rule(data=st.data())
    def plan_ahead(self, data: st.DataObject) -> None:
        assert self.flying is not None
        if self.flying[0].carried:
            self.offer(Round(self.flying), data)
        planned = self.scheduler.plan_ahead(Round(self.flying))
        aboard = {window.request_id for window in self.flying if window.samples}
        going_on = [tale for tale in self.lanes if tale.remaining > 1]
        allowed = (
            self.limits.pipelines
            and not self.offers
            and all(window.samples and not window.draft for window in self.flying)
            and all(tale.request.request_id in aboard for tale in self.lanes)
            and not (self.waiting and len(self.lanes) < self.limits.max_lanes)
            and bool(going_on)
            and all(self.plain(tale) for tale in self.lanes)
        )
        assert (planned is not None) == allowed
        if planned is None:
            return
        assert planned.ahead
        for window, tale in zip(planned.windows, going_on, strict=True):
            assert (window.request_id, window.slot) == (tale.request.request_id, tale.slot)
            assert (window.start, window.tokens, window.carried) == (len(tale.text), (), True)
            assert (window.samples, window.draft, window.budget, window.copies) == (True, (), 0, None)
            assert (window.real, window.rows, window.end) == (1, 1, len(tale.text) + 1)
            assert window.sampling == tale.request.sampling
            assert window.reach >= window.end
        self.ahead = planned.windows

    def plain(self, tale: Tale) -> bool:
        """Nothing about its next draw needs the host."""
        return tale.request.constraint is None and tale.request.sampling in (Sampling(1.0, 0), Sampling(1.0, 1))

    @precondition(lambda self: self.flying is not None)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        assert self.flying is not None
        windows, self.flying, self.ahead = self.flying, self.ahead, None
        self.offers = {}
        self.tick()
        results = []
        expected: list[tuple[str, tuple[int, ...], FinishReason | None]] = []
        for window in windows:
            tale = self.tales[window.request_id]
            assert self.scheduler.serves(window) == (tale in self.lanes)
            if tale not in self.lanes:
                continue
            results.append(self.walk(window, tale, data, expected))
        events = self.scheduler.commit(results, self.now)
        self.hear(events)
        if results:
            self.rounds.append([result.window for result in results])
        heard = [(event.request_id, event.tokens if isinstance(event, Tokens) else event.reason) for event in events]
        said = [(request_id, tokens) for request_id, tokens, _ in expected if tokens]
        ended = [(request_id, end) for request_id, _, end in expected if end]
        assert [pair for pair in heard if isinstance(pair[1], tuple)] == said
        assert [pair for pair in heard if not isinstance(pair[1], tuple)] == ended
        for request_id, end in ended:
            assert end is not None
            self.leave(self.tales[request_id], end)

    def walk(
        self,
        window: Window,
        tale: Tale,
        data: st.DataObject,
        expected: list[tuple[str, tuple[int, ...], FinishReason | None]],
    ) -> LaneResult:
        """Draw for one window, and take its tokens into the model."""
        if window.copies is not None:
            tale.donor, tale.reused = None, window.start
        if not window.samples:
            tale.cached = window.end
            return LaneResult(window, None, window.end)
        if window.constraint is not None and data.draw(st.integers(0, 9)) == 9:
            tale.cached = window.end
            expected.append((window.request_id, (), FinishReason.ERROR))
            return LaneResult(window, None, window.end, "its grammar failed")
        right = data.draw(st.integers(0, len(window.draft)))
        drawn = (*window.draft[:right], *(data.draw(TOKENS) for _ in range(len(window.draft) + 1 - right)))
        walk = self.scheduler.accept(window, Drawn(drawn))
        assert walk == replay(window.draft, drawn, tale.stop_tokens, tale.remaining)
        if tale.first_token is None:
            tale.first_token = self.now
        tale.generated += walk.emitted
        tale.eos_drawn = walk.ended_by_token
        tale.cached = window.start + window.real + walk.accepted
        assert walk.end is not None or tale.cached == len(tale.text) - 1, "cached == len(tokens) - 1 while decoding"
        if window.draft:
            tale.drafts.append((window.source, len(window.draft), walk.accepted))
            self.drafts.append(tale.drafts[-1])
        expected.append((window.request_id, walk.emitted, walk.end))
        return LaneResult(window, walk, tale.cached)

    @rule(data=st.data(), rounds=st.integers(1, 6), piped=st.booleans())
    def serve(self, data: st.DataObject, rounds: int, piped: bool) -> None:
        """A few rounds without anybody coming or going."""
        for _ in range(rounds):
            if self.flying is None:
                self.plan(data)
            if self.flying is not None:
                if piped and self.ahead is None:
                    self.plan_ahead(data)
                self.land(data)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A forward raised: its lanes end, and everybody else starts again from nothing cached."""
        aboard = [window.request_id for window in [*(self.flying or ()), *(self.ahead or ())]]
        if not aboard and self.lanes:
            aboard = [data.draw(st.sampled_from([tale.request.request_id for tale in self.lanes]))]
        hit = [tale for request_id in dict.fromkeys(aboard) if (tale := self.tales[request_id]) in self.lanes]
        self.flying = self.ahead = None
        events = self.scheduler.fail(dict.fromkeys(aboard), "boom", self.tick())
        assert [event.request_id for event in events] == [tale.request.request_id for tale in hit]
        self.hear(events)
        for tale in hit:
            self.leave(tale, FinishReason.ERROR)
        for tale in self.lanes:
            tale.cached = tale.reused = 0
        for tale in self.lanes:
            self.arrange(tale)

    @rule()
    def collect_departures(self) -> None:
        """Rule 22: each lane that left is told once, in order, with the slot that it had."""
        for departure, tale in zip(self.scheduler.departures(), self.left, strict=True):
            assert departure.request_id == tale.request.request_id
            assert tale.slot in (departure.slot, None), "a lane that never had a window keeps its slot to itself"
        self.left = []

    # ---- at every moment ------------------------------------------------------------------------------------------

    @invariant()
    def lanes_are_few_and_have_slots_of_their_own(self) -> None:
        slots = [tale.slot for tale in self.lanes if tale.slot is not None]
        assert len(self.lanes) <= self.limits.max_lanes
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(self.limits.max_lanes))

    @invariant()
    def texts_are_the_prompt_and_what_was_delivered(self) -> None:
        for tale in self.lanes:
            assert list(self.scheduler.tokens(tale.request.request_id)) == tale.text
            assert tale.told == tale.generated

    @invariant()
    def stats_add_up(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting) == (len(self.lanes), len(self.waiting))
        assert self.scheduler.idle == (not self.lanes and not self.waiting)
        kinds = [Round(tuple(windows)).kind for windows in self.rounds]
        assert stats.rounds == {kind: kinds.count(kind) for kind in ("prefill", "decode", "mixed")}
        assert stats.lanes_per_round.total == sum(len(windows) for windows in self.rounds)
        assert stats.rows_per_round.total == sum(window.rows for windows in self.rounds for window in windows)
        assert sum(stats.lanes_per_round.counts) == sum(stats.rows_per_round.counts) == len(self.rounds)
        told = {draft.source: DraftCount(draft.source, *msgspec.structs.astuple(draft)[1:]) for draft in stats.drafts}
        assert told == by_position(self.drafts)

    def teardown(self) -> None:
        """However it stands: let everything end, and see that nothing is left and every request ended once."""
        if not hasattr(self, "limits"):
            return
        self.flying = self.ahead = None
        for request_id in list(self.tales):
            self.hear(self.scheduler.cancel(request_id, self.tick()))
            if (tale := self.tales[request_id]) in self.lanes or tale in self.waiting:
                self.leave(tale, FinishReason.CANCELLED)
        assert self.scheduler.idle
        assert self.scheduler.plan(self.tick()) is None
        assert all(tale.end is not None for tale in self.tales.values())
        self.collect_departures()
        assert self.scheduler.departures() == []


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=300, stateful_step_count=40)
