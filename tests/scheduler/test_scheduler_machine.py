"""The scheduler, driven at random, against a simple model of what must hold whatever happens in which order."""

from collections.abc import Sequence
from itertools import takewhile

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.admission import Pool
from scheduler.draft import Draft
from scheduler.events import Event, Finished, Tokens
from scheduler.pace import Headlong, Offer
from scheduler.request import DraftCount, FinishReason, Request, Sampling
from scheduler.round import Drawn, LaneResult, Round, Window
from scheduler.scheduler import Departure, Limits, Scheduler
from scheduler.suspects import Suspects
from tests.scheduler.memory import PlainLanes, class_of
from tests.scheduler.plain import replay
from tests.scheduler.tales import Tale, by_position
from tests.scheduler.turns import Turns

EOS = 5
TOKENS = st.integers(0, EOS)
SOURCES = ("one", "two")


class Anything:
    """A constraint, as far as the scheduler can tell."""

    summary = "anything"


REQUESTS = st.builds(
    Request,
    request_id=st.just(""),
    prompt=st.lists(TOKENS, min_size=1, max_size=12).map(tuple),
    max_tokens=st.integers(1, 12),
    sampling=st.sampled_from([Sampling(1.0, 0), Sampling(1.0, 1), Sampling(1.0, top_p=0.5), Sampling(logprobs=0)]),
    stop_tokens=st.sampled_from([frozenset(), frozenset({EOS}), frozenset({0, EOS})]),
    ignore_eos=st.booleans(),
    constraint=st.sampled_from([None, None, None, Anything()]),
    owner=st.sampled_from(["", "", "a", "b"]),
    draft_tokens=st.none() | st.integers(0, 3),
    priority=st.integers(-1, 1),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Whose turn it is and who is suspected is told by models that have tests of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.tales: dict[str, Tale] = {}
        self.turns: Turns[Tale] = Turns()
        self.lanes: list[Tale] = []
        """In order of admission."""
        self.admitted = 0
        self.preempted = 0
        self.failed = 0
        self.offers: dict[str, tuple[Offer, ...]] = {}
        """What could be drafted in the round in flight."""
        self.flying: tuple[Window, ...] | None = None
        self.ahead: tuple[Window, ...] | None = None
        self.left: list[tuple[Departure, bool]] = []
        """Lanes that left and are not yet told as departures, and whether they had a slot that nobody saw."""
        self.rounds: list[list[Window]] = []
        self.drafts: list[tuple[str, int, int]] = []

    @initialize(
        lanes=st.integers(1, 5),
        more_rows=st.integers(1, 12),
        draft_tokens=st.integers(0, 4),
        pipelines=st.sampled_from([True, True, False]),
        pool=st.sampled_from([None, 32, 40, 64]),
    )
    def begin(self, lanes: int, more_rows: int, draft_tokens: int, pipelines: bool, pool: int | None) -> None:
        """The longest text has just room in the smallest pool."""
        self.limits = Limits(lanes, lanes + more_rows, draft_tokens, pipelines=pipelines)
        self.pool = pool
        self.suspects = Suspects(lanes)
        room = Pool(pool, PlainLanes()) if pool is not None else None
        self.scheduler = Scheduler(self.limits, Headlong(), room=room)

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    # ---- requests come and go -------------------------------------------------------------------------------------

    @rule(
        wishes=st.lists(REQUESTS, min_size=1, max_size=4), times=st.lists(st.none() | st.integers(1, 150), min_size=4)
    )
    def submit(self, wishes: list[Request], times: list[int | None]) -> None:
        """Some at once. Whoever has a name says what it said before. Where memory is short, answers are long."""
        short = self.pool is not None
        for wish, time in zip(wishes, times, strict=False):
            said = [
                tale.request.prompt for tale in self.tales.values() if wish.owner and tale.request.owner == wish.owner
            ]
            request = msgspec.structs.replace(
                wish,
                request_id=f"r{len(self.tales)}",
                prompt=said[0] if said else wish.prompt,
                max_tokens=wish.max_tokens + 8 * short,
                ignore_eos=wish.ignore_eos or short,
                deadline=None if time is None else self.now + time,
            )
            self.scheduler.submit(request, self.tick())
            tale = self.tales[request.request_id] = Tale(request, self.now)
            self.turns.come(tale)

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

    @rule()
    def expire(self) -> None:
        """Whoever has had its time ends, and nobody before."""
        events = self.scheduler.expire(self.tick())
        late = [tale for tale in self.tales.values() if tale.end is None and tale.is_late(self.now)]
        assert [event.request_id for event in events] == [tale.request.request_id for tale in late]
        self.hear(events)
        for tale in late:
            self.leave(tale, FinishReason.DEADLINE)

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
        if tale in self.lanes:
            self.depart(tale, returns=False)
        else:
            self.turns.take(tale)
            if tale.admitted is not None:
                self.left.append((Departure(None, tale.request.request_id), False))
        self.turns.close(tale.request.owner)

    def depart(self, tale: Tale, *, returns: bool) -> None:
        """A lane leaves its slot."""
        self.lanes.remove(tale)
        self.suspects.forget(tale.request.request_id)
        self.left.append((Departure(tale.slot, tale.request.request_id, returns), tale.slot is None))
        tale.slot = None

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
        self.admit()
        self.make_room()
        if planned is None:
            assert not self.lanes
            return
        assert not planned.ahead
        self.check_round(planned)
        self.offer(planned, data)
        self.flying = self.scheduler.drafting.draft(planned).windows
        self.check_drafts(planned.windows, self.flying)
        self.check_kind(self.flying)

    def admit(self) -> None:
        """Whose turn it is comes in, or nobody."""
        while (tale := self.turns.next()) is not None and self.may_come(tale):
            self.turns.take(tale)
            if tale.admitted is None:
                tale.admitted, tale.turn = self.now, self.admitted
            self.admitted += 1
            self.lanes.append(tale)
            self.arrange(tale)

    def may_come(self, tale: Tale) -> bool:
        """With room to grow to twice its length, unless it is alone."""
        length = len(tale.text)
        grown = length + min(max(length, 1 + self.most_drafted(tale)), tale.remaining)
        free = min(self.limits.max_lanes, self.suspects.most) - len(self.lanes)
        return free > 0 and (not self.lanes or self.fit([*self.lengths(), grown]))

    def make_room(self) -> None:
        while len(self.lanes) > self.suspects.most:
            self.give_way()
        while not self.fit(self.lengths()):
            assert len(self.lanes) > 1, "a lane alone has room"
            self.give_way()

    def give_way(self) -> None:
        """The youngest goes, and begins again later."""
        tale = max(self.lanes, key=lambda tale: tale.turn)
        self.preempted += 1
        self.depart(tale, returns=True)
        tale.begin_again()
        self.turns.give_way(tale)
        assert not any(other.donor is not None and other.donor[0] is tale for other in self.lanes)

    def lengths(self, ahead: int = 1) -> list[int]:
        """What each lane may have when it has gone on by so many tokens and a draft."""
        return [len(tale.text) + min(ahead + self.most_drafted(tale), tale.remaining) for tale in self.lanes]

    def fit(self, lengths: Sequence[int]) -> bool:
        return self.pool is None or sum(map(class_of, lengths)) <= self.pool

    def most_drafted(self, tale: Tale) -> int:
        own = tale.request.draft_tokens
        return self.limits.draft_tokens if own is None else min(own, self.limits.draft_tokens)

    def budget(self, tale: Tale) -> int:
        return min(self.most_drafted(tale), tale.remaining - 1)

    def offer(self, coming: Round, data: st.DataObject) -> None:
        """The sources say something for some of the lanes that may be drafted for."""
        asks = self.scheduler.drafting.asks(coming)
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
        self.scheduler.drafting.offer(coming, self.offers)

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
        assert self.fit([max(window.reach, window.end + window.budget) for window in planned.windows])
        going_on = [tale for tale in self.lanes if not self.suspects.pauses(tale.request.request_id)]
        feeds = [(tale, *start) for tale in going_on if (start := self.start_of(tale)) is not None]
        decoding = [tale.request.request_id for tale, start, _ in feeds if start == len(tale.text) - 1]
        assert [window.request_id for window in planned.windows if window.samples] == decoding
        prefilling = [(tale, start) for tale, start, _ in feeds if start < len(tale.text) - 1]
        by_id = {window.request_id: window.rows for window in planned.windows}
        fed = [by_id.get(tale.request.request_id, 0) for tale, _ in prefilling]
        wanted = [len(tale.text) - 1 - start for tale, start in prefilling]
        self.check_shares(fed, wanted, spare - kept_for_drafts)

    def check_shares(self, fed: Sequence[int], wanted: Sequence[int], rows: int) -> None:
        """Who is fed how much of what, those that were admitted first named first."""
        assert sum(fed) == min(rows, sum(wanted)), "prefill takes all that is left"
        if wanted:
            assert fed[0] >= min(wanted[0], max(1, rows // 4)), "the eldest comes to its end"
        for have, want in zip(fed, wanted, strict=True):
            longer = [more for more, other in zip(fed[1:], wanted[1:], strict=True) if other > want]
            assert have == want or not any(longer), "the shortest goes first"

    def arrange(self, tale: Tale) -> None:
        """The first of the lanes before it with the longest beginning in common; all of the text, or much of it."""
        whole = len(tale.text) - 1
        tale.donor = None
        if self.suspects.trying:
            return
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
            and not (self.turns.waiting and len(self.lanes) < self.limits.max_lanes)
            and self.fit(self.lengths(2))
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
        self.suspects.survived()
        ends = dict(ended)
        for result in results:
            tale = self.tales[result.window.request_id]
            self.suspects.passed(tale.request.request_id, result.cached)
            if (end := ends.get(tale.request.request_id)) is not None:
                self.leave(tale, end)

    def walk(
        self,
        window: Window,
        tale: Tale,
        data: st.DataObject,
        expected: list[tuple[str, tuple[int, ...], FinishReason | None]],
    ) -> LaneResult:
        """Draw for one window, and take its tokens into the model."""
        if window.copies is not None:
            tale.donor = None
            tale.given = tale.given if tale.generated else window.start
        if not tale.generated:
            tale.fed_from = min(window.start, tale.fed_from if tale.fed_from is not None else window.start)
        if not window.samples:
            tale.cached = window.end
            self.turns.charge(tale.request.owner, window.rows, 0)
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
        self.turns.charge(tale.request.owner, 0, len(walk.emitted))
        tale.eos_drawn = walk.ended_by_token
        tale.cached = window.start + window.real + walk.accepted
        assert walk.end is not None or tale.cached == len(tale.text) - 1, "cached == len(tokens) - 1 while decoding"
        if window.draft:
            tale.drafts.append((window.source, len(window.draft), walk.accepted))
            self.drafts.append(tale.drafts[-1])
        end = FinishReason.DEADLINE if tale.is_late(self.now) else walk.end
        expected.append((window.request_id, walk.emitted, end))
        return LaneResult(window, walk, tale.cached)

    @rule(data=st.data(), rounds=st.integers(1, 12), piped=st.booleans())
    def serve(self, data: st.DataObject, rounds: int, piped: bool) -> None:
        """A few rounds without anybody coming or going."""
        for _ in range(rounds):
            if self.flying is None:
                self.plan(data)
            if self.flying is not None:
                if piped and self.ahead is None:
                    self.plan_ahead(data)
                self.land(data)

    @precondition(lambda self: self.failed < len(self.rounds) / 2)
    @rule(data=st.data(), times=st.integers(1, 4))
    def fail(self, data: st.DataObject, times: int) -> None:
        """Some forwards raise, one after the other."""
        for _ in range(times):
            if self.flying is None:
                self.plan(data)
            if self.flying is not None:
                if self.ahead is None and data.draw(st.booleans()):
                    self.plan_ahead(data)
                self.fail_once(self.flying, self.ahead)

    def fail_once(self, flying: tuple[Window, ...], ahead: tuple[Window, ...] | None) -> None:
        """Everybody starts again from nothing cached, but for whoever is known to be guilty."""
        self.flying = self.ahead = None
        self.offers = {}
        self.failed += 1
        lost = [flying, ahead] if ahead is not None else [flying]
        aboard = [(self.tales[window.request_id], window.start + window.real) for each in lost for window in each]
        ends = {tale.request.request_id: end for tale, end in aboard if tale in self.lanes}
        guilty = self.suspects.failed(ends, alone=len(flying) == 1)
        events = self.scheduler.fail([Round(each) for each in lost], "boom", self.tick())
        assert [event.request_id for event in events] == ([guilty] if guilty is not None else [])
        for tale in self.lanes:
            tale.begin_again()
        self.hear(events)
        if guilty is not None:
            self.leave(self.tales[guilty], FinishReason.ERROR)
        for tale in self.lanes:
            self.arrange(tale)

    @rule()
    def collect_departures(self) -> None:
        """Rule 22: each lane that left is told once, in order, with the slot that it had, and whether it returns."""
        for departure, (expected, unseen) in zip(self.scheduler.departures(), self.left, strict=True):
            assert (departure.request_id, departure.returns) == (expected.request_id, expected.returns)
            assert departure.slot == expected.slot or unseen, "a lane without a window keeps its slot to itself"
            assert (departure.slot is None) == (expected.slot is None and not unseen)
        self.left = []

    # ---- at every moment ------------------------------------------------------------------------------------------

    @invariant()
    def lanes_are_few_and_have_slots_of_their_own(self) -> None:
        slots = [tale.slot for tale in self.lanes if tale.slot is not None]
        assert len(self.lanes) <= self.limits.max_lanes
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(self.limits.max_lanes))
        turns = [tale.turn for tale in self.lanes]
        assert turns == sorted(turns), "the youngest is the last one, and nobody waits for a younger one's prefill"

    @invariant()
    def texts_are_the_prompt_and_what_was_delivered(self) -> None:
        for tale in self.lanes:
            assert list(self.scheduler.tokens(tale.request.request_id)) == tale.text
            assert tale.told == tale.generated

    @invariant()
    def stats_add_up(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting) == (len(self.lanes), len(self.turns.waiting))
        assert (stats.preemptions, stats.failed_forwards) == (self.preempted, self.failed)
        assert self.scheduler.idle == (not self.lanes and not self.turns.waiting)
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
            if (tale := self.tales[request_id]) in self.lanes or tale in self.turns.waiting:
                self.leave(tale, FinishReason.CANCELLED)
        assert self.scheduler.idle
        assert self.scheduler.plan(self.tick()) is None
        assert all(tale.end is not None for tale in self.tales.values())
        self.collect_departures()
        assert self.scheduler.departures() == []


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=300, stateful_step_count=40)
