"""Decides: who is served, what each round feeds and drafts, what its draws mean, who leaves.

Owns the queue and every `Lane`. Knows no tensors, threads, clocks (`now` comes in, in seconds) or I/O. The cycle is
`plan -> draft -> accept (per window) -> commit`; `submit`, `cancel` and `finish` may come between any two of them.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from scheduler.accept import accept
from scheduler.draft import DraftAsk
from scheduler.events import Event, Finished, Tokens
from scheduler.lane import Donor, Feed, Lane
from scheduler.pace import Choice, LaneOffers, Offer, Planner
from scheduler.prefix import Match
from scheduler.request import FinishReason, Request, Timing, Usage
from scheduler.reuse import Reuse
from scheduler.round import Acceptance, Drawn, LaneResult, Restore, Round, Store, Window, shape_of
from scheduler.stats import DRAFT_BUCKETS, LANE_BUCKETS, ROW_BUCKETS, DraftCounter, DraftStats, Histogram, Stats


class Limits(msgspec.Struct, frozen=True):
    """How wide a round may be."""

    max_lanes: int
    """Lanes served at once."""
    round_rows: int
    """Rows of one forward; more than lanes."""
    draft_tokens: int
    """Drafted tokens a lane, at most; 0 turns drafting off."""
    inter_token_seconds: float = 0.0
    """Prefill takes no more of a round than leaves it this short, while others decode; 0 for no such limit."""
    cuttable: bool = True
    """Whether caches hold a lane at every length up to its own, so that another can have any of it."""
    pipelines: bool = True
    """Whether rounds can be planned ahead."""


_LEAST_CHUNK = 16
"""Rows that a prefill gets in any case: it must come to an end."""
_WORTH_SHARING = 16
"""Tokens in common for which a lane waits for another one's prefill; fewer only if they are all there is."""
_COMPARED = 256
"""Tokens compared at once."""


class Departure(msgspec.Struct, frozen=True):
    """A lane that left: its slot is to be released, and whatever was kept under its id forgotten."""

    slot: int
    request_id: str


class _Waiting(msgspec.Struct, frozen=True):
    request: Request
    submitted: float


class Scheduler:
    """First come, first served, `max_lanes` at once; all decoding lanes in each round, prefill in what is left."""

    def __init__(self, limits: Limits, pace: Planner, reuse: Reuse | None = None) -> None:
        """`pace` decides how much of what could be drafted is, `reuse` what is taken from a prefix cache."""
        self._limits = limits
        self._pace = pace
        self._reuse = reuse
        self._stores: list[Store] = []
        self._offered: list[LaneOffers] = []
        """What the lanes could draft whose draws come next."""
        self._waiting: dict[str, _Waiting] = {}
        self._lanes: dict[str, Lane] = {}
        """In order of admission."""
        self._free_slots = list(range(limits.max_lanes - 1, -1, -1))
        self._departures: list[Departure] = []
        self._rounds = {"prefill": 0, "decode": 0, "mixed": 0}
        self._lane_counts = Histogram(LANE_BUCKETS)
        self._row_counts = Histogram(ROW_BUCKETS)
        self._draft_counts = Histogram(DRAFT_BUCKETS)
        self._drafts: dict[str, DraftCounter] = {}

    # ---- requests come and go -------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is being served and nothing waits."""
        return not self._lanes and not self._waiting

    def submit(self, request: Request, now: float) -> None:
        """Put a request at the end of the queue."""
        self._waiting[request.request_id] = _Waiting(request, now)
        if self._reuse is not None:
            self._reuse.queued(request)

    def cancel(self, request_id: str, now: float) -> list[Event]:
        """The client left: end its request wherever it is. Unknown ids are ignored."""
        return self._end(request_id, FinishReason.CANCELLED, now)

    def finish(self, request_id: str, kept: int, now: float) -> list[Event]:
        """A stop string ended with generated token number `kept`: end the lane, counting no token behind it."""
        if (lane := self._lanes.get(request_id)) is not None:
            lane.cut(kept)
        return self._end(request_id, FinishReason.STOP, now, completed=kept)

    def fail(self, request_ids: Iterable[str], error: str, now: float) -> list[Event]:
        """A forward failed: end its lanes, and let the others be rebuilt from their tokens, as all caches are lost."""
        events = [
            event for request_id in request_ids for event in self._end(request_id, FinishReason.ERROR, now, error=error)
        ]
        for lane in self._lanes.values():
            lane.cached = lane.reused = 0
        for lane in self._lanes.values():
            self._arrange(lane)
        return events

    def departures(self) -> list[Departure]:
        """The lanes that left since the last call."""
        gone, self._departures = self._departures, []
        return gone

    def stores(self) -> list[Store]:
        """What can be kept in the prefix cache since the last call; to be taken before lanes that left are released."""
        stores, self._stores = self._stores, []
        return stores

    def _end(
        self,
        request_id: str,
        reason: FinishReason,
        now: float,
        *,
        completed: int | None = None,
        error: str | None = None,
    ) -> list[Event]:
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            usage = Usage(len(waiting.request.prompt), 0)
            return [Finished(request_id, reason, usage, Timing(waiting.submitted, None, None, now), error)]
        if (lane := self._lanes.pop(request_id, None)) is None:
            return []
        self._pace.forget(request_id)
        if self._reuse is not None:
            if reason is not FinishReason.ERROR:
                self._stores += self._reuse.stores(lane, leaving=True)
            self._reuse.leave(request_id)
        self._free_slots.append(lane.slot)
        self._departures.append(Departure(lane.slot, request_id))
        return [Finished(request_id, reason, lane.usage(completed), lane.timing(now), error)]

    # ---- a round is planned ---------------------------------------------------------------------------------------

    def plan(self, now: float) -> Round | None:
        """Admit who can be admitted and lay out the next round; None if there is nothing to do."""
        self._admit(now)
        restores = self._restores(now)
        feeds = [feed for lane in self._lanes.values() if (feed := self._feed(lane)) is not None]
        decoding = [feed for feed in feeds if feed.decoding]
        prefilling = [feed for feed in feeds if not feed.decoding]
        windows = [feed.window(self._draft_limit(feed.lane)) for feed in decoding]
        left = self._prefill_rows(windows) if prefilling else 0
        for feed in prefilling:
            if left <= 0:
                break
            windows.append(chunk := feed.chunk(left))
            left -= chunk.rows
        return Round(tuple(windows), restores) if windows or restores else None

    def _restores(self, now: float) -> tuple[Restore, ...]:
        if self._reuse is None:
            return ()
        decoding = any(lane.decoding for lane in self._lanes.values())
        return tuple(self._reuse.restores(self._lanes.values(), decoding=decoding, now=now))

    def restored(self, size: int, seconds: float) -> None:
        """Copying what a round restores, so many bytes in all, took so long."""
        if self._reuse is not None:
            self._reuse.restored(size, seconds)

    def _prefill_rows(self, decoding: Sequence[Window]) -> int:
        """How many rows prefill may have beside these windows: what drafts could use is shared with them by halves."""
        left = self._limits.round_rows - len(decoding)
        left -= min(sum(window.budget for window in decoding), left // 2)
        if not decoding or not self._limits.inter_token_seconds:
            return left
        return min(left, max(_LEAST_CHUNK, self._pace.rows_within(self._limits.inter_token_seconds) - len(decoding)))

    def _feed(self, lane: Lane) -> Feed | None:
        """What a lane is fed next; None while it waits for its beginning, from another lane or the prefix cache."""
        while (shared := lane.donor) is not None:
            donor = self._lanes.get(shared.request_id)
            if donor is not None and donor.cached < shared.length:
                return None
            if donor is not None and (self._limits.cuttable or donor.cached == shared.length):
                return Feed(lane, shared.length, donor.slot)
            self._arrange(lane)
        if self._reuse is not None and self._reuse.waits(lane):
            return None
        return Feed(lane, lane.cached)

    def _arrange(self, lane: Lane) -> None:
        """Where a lane's beginning comes from: a lane before it that has more of it than the prefix cache, or that."""
        found = self._reuse.match(lane.request) if self._reuse is not None else Match()
        lane.donor = self._donor(lane, found.length)
        if lane.donor is not None:
            if not self._limits.cuttable:
                self._lanes[lane.donor.request_id].stops.add(lane.donor.length)
            found = Match(branch=found.branch)
        if self._reuse is not None:
            self._reuse.admit(lane, found)

    def _donor(self, lane: Lane, least: int) -> Donor | None:
        """The lane admitted before with the longest beginning in common, if that is worth it. One that has gone on, and
        whose caches cannot be cut, is of no use.
        """
        whole = len(lane.request.prompt) - 1
        best: Donor | None = None
        for other in self._lanes.values():
            if other is lane:
                break
            if (other.request.owner, other.request.cache_salt) != (lane.request.owner, lane.request.cache_salt):
                continue
            length = _common(lane.tokens, other.tokens, whole)
            worth = length - least >= _WORTH_SHARING or length == whole > least
            if worth and (self._limits.cuttable or other.cached <= length) and (not best or length > best.length):
                best = Donor(other.request.request_id, length)
        return best

    def _draft_limit(self, lane: Lane) -> int:
        own = lane.request.draft_tokens
        return self._limits.draft_tokens if own is None else min(own, self._limits.draft_tokens)

    # ---- what it drafts -------------------------------------------------------------------------------------------

    def asks(self, planned: Round) -> list[DraftAsk]:
        """Of the lanes that draw in a round, those that may be drafted for."""
        return [
            self._ask(window, budget)
            for window in planned.windows
            if window.samples and self.serves(window) and (budget := self._budget(window)) > 0
        ]

    def _ask(self, window: Window, budget: int) -> DraftAsk:
        lane = self._lanes[window.request_id]
        request = lane.request
        return DraftAsk(
            request_id=request.request_id,
            tokens=lane.tokens,
            prompt=len(request.prompt),
            budget=budget,
            owner=request.owner,
            cache_salt=request.cache_salt,
            expected=request.expected,
            sources=request.draft_sources,
            sampling=request.sampling,
        )

    def _budget(self, window: Window) -> int:
        """How many tokens may be drafted for a lane that draws, also where its window was planned ahead without any."""
        lane = self._lanes[window.request_id]
        return min(self._draft_limit(lane), lane.remaining - 1)

    def offer(self, coming: Round, offers: Mapping[str, tuple[Offer, ...]]) -> None:
        """Note what could be drafted in a round: `draft` chooses from it, and what comes is held against all of it."""
        self._offered = [
            LaneOffers(window.request_id, window.start, offers.get(window.request_id, ()), self._budget(window))
            for window in coming.windows
            if window.samples and self.serves(window)
        ]

    def depth(self, source: str, request_ids: Sequence[str]) -> int:
        """How deep to ask a source whose asking costs time, for these lanes among those that were offered something."""
        return self._pace.depth(source, self._offered, frozenset(request_ids))

    def asked(self, source: str, lanes: int, depth: int, seconds: float) -> None:
        """Asking it took so long."""
        self._pace.asked(source, lanes, depth, seconds)

    def draft(self, planned: Round) -> Round:
        """Give each window the draft that pays, of those that its lane was offered."""
        chunks = [window for window in planned.windows if not window.samples]
        room = self._limits.round_rows - sum(window.rows for window in planned.windows)
        chosen = self._pace.choose(self._offered, shape_of(chunks), room)
        if not chosen:
            return planned
        return Round(tuple(_drafting(window, chosen.get(window.request_id)) for window in planned.windows))

    def plan_ahead(self, flying: Round) -> Round | None:
        """The round after `flying`, on draws that have not been read; None unless it can all be plain decode windows.

        Every lane must be in `flying` and decode there without a draft, and none look as if a draft would pay after it;
        none may need the host, and nobody may wait for a free slot. Lanes that will have used up their `max_tokens` are
        left out; one that ends otherwise is discarded a round late.
        """
        if not self._limits.pipelines or (self._waiting and self._free_slots):
            return None
        aboard = {window.request_id: window.end for window in flying.windows if window.samples and not window.draft}
        if len(aboard) != len(flying.windows) or any(request_id not in aboard for request_id in self._lanes):
            return None
        if any(lane.needs_host for lane in self._lanes.values()) or self._pace.would_draft(self._offered):
            return None
        going_on = [lane for lane in self._lanes.values() if lane.remaining > 1]
        windows = tuple(lane.window_ahead(aboard[lane.request.request_id]) for lane in going_on)
        return Round(windows, ahead=True) if windows else None

    def _admit(self, now: float) -> None:
        while self._waiting and self._free_slots:
            waiting = self._waiting.pop(next(iter(self._waiting)))
            request = waiting.request
            self._free_slots.sort(reverse=True)
            slot = self._free_slots.pop()
            lane = Lane(request, slot, submitted=waiting.submitted, admitted=now)
            self._lanes[request.request_id] = lane
            self._arrange(lane)

    # ---- and committed --------------------------------------------------------------------------------------------

    def tokens(self, request_id: str) -> Sequence[int]:
        """A lane's tokens so far, prompt and generated; to be read only, and only until the next commit."""
        return self._lanes[request_id].tokens

    def serves(self, window: Window) -> bool:
        """Whether the window's lane is still there."""
        return window.request_id in self._lanes

    def accept(self, window: Window, drawn: Drawn) -> Acceptance:
        """Walk a window's draft against the target's draws, by its request's stop tokens and limits.

        A grammar ends its text with a stop token, so for a constrained request `ignore_eos` means nothing.
        """
        lane = self._lanes[window.request_id]
        request = lane.request
        ignores = request.ignore_eos and request.constraint is None
        stop_tokens = frozenset[int]() if ignores else request.stop_tokens
        walk = accept(window.draft, drawn.tokens, stop_tokens=stop_tokens, remaining=lane.remaining)
        if not drawn.logprobs:
            return walk
        return msgspec.structs.replace(walk, logprobs=drawn.logprobs[: len(walk.emitted)])

    def timed(self, done: Round, seconds: float) -> None:
        """A round took so long."""
        self._pace.timed(shape_of(done.windows), seconds)

    def commit(self, results: Sequence[LaneResult], now: float) -> list[Event]:
        """Take over what a round did, for the lanes that are still there, and tell what to deliver."""
        self._observe_round(results)
        offered = {lane.request_id: lane for lane in self._offered}
        self._offered = []
        events: list[Event] = []
        for result in results:
            lane = self._lanes.get(result.window.request_id)
            if lane is None:
                continue
            lane.cached = result.cached
            if result.window.copies is not None:
                lane.donor, lane.reused = None, result.window.start
            if result.error is not None:
                events += self._end(lane.request.request_id, FinishReason.ERROR, now, error=result.error)
            elif result.acceptance is not None:
                if (offers := offered.get(lane.request.request_id)) is not None:
                    self._pace.observe(offers, result.acceptance.emitted)
                events += self._commit_walk(lane, result.window, result.acceptance, now)
            if self._reuse is not None and lane.request.request_id in self._lanes:
                self._stores += self._reuse.stores(lane)
        return events

    def _commit_walk(self, lane: Lane, window: Window, walk: Acceptance, now: float) -> list[Event]:
        request_id = window.request_id
        if window.draft:
            lane.observe_draft(window.source, len(window.draft), walk.accepted)
            counter = self._drafts.setdefault(window.source, DraftCounter())
            counter.observe(len(window.draft), walk.accepted)
        lane.extend(walk, now)
        events: list[Event] = [Tokens(request_id, walk.emitted, walk.logprobs)] if walk.emitted else []
        return events + self._end(request_id, walk.end, now) if walk.end is not None else events

    # ---- and counted ----------------------------------------------------------------------------------------------

    def _observe_round(self, results: Sequence[LaneResult]) -> None:
        windows = tuple(result.window for result in results)
        if windows:
            self._rounds[Round(windows).kind] += 1
            self._lane_counts.observe(len(windows))
            self._row_counts.observe(sum(window.rows for window in windows))
            self._draft_counts.observe(sum(len(window.draft) for window in windows))

    def stats(self) -> Stats:
        """A snapshot of all counters."""
        drafts = tuple(
            DraftStats(source, counter.drafts, tuple(counter.drafted), tuple(counter.accepted))
            for source, counter in self._drafts.items()
        )
        return Stats(
            len(self._lanes),
            len(self._waiting),
            dict(self._rounds),
            self._lane_counts.snapshot(),
            self._row_counts.snapshot(),
            self._draft_counts.snapshot(),
            drafts,
        )


def _common(left: Sequence[int], right: Sequence[int], most: int) -> int:
    """How many tokens two lists begin with in common, `most` at most."""
    most = min(most, len(left), len(right))
    common = 0
    while common < most and left[common : common + _COMPARED] == right[common : common + _COMPARED]:
        common += _COMPARED
    while common < most and left[common] == right[common]:
        common += 1
    return min(common, most)


def _drafting(window: Window, choice: Choice | None) -> Window:
    if choice is None:
        return window
    return msgspec.structs.replace(window, draft=choice.draft.tokens, source=choice.source)
