"""Decides: who is served, what each round feeds and drafts, what its draws mean, who leaves.

Owns the queue and every `Lane`. Knows no tensors, threads, clocks (`now` comes in, in seconds) or I/O. The cycle is
`plan -> draft -> accept (per window) -> commit`; `submit`, `cancel` and `finish` may come between any two of them.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import msgspec

from scheduler.accept import accept
from scheduler.admission import Boundless, Room
from scheduler.drafting import Drafting
from scheduler.events import Event, Finished, Tokens
from scheduler.lane import Donor, Feed, Lane
from scheduler.pace import Planner
from scheduler.prefix import Match
from scheduler.queue import FairQueue
from scheduler.request import FinishReason, Request
from scheduler.reuse import Reuse
from scheduler.round import Acceptance, Drawn, LaneResult, Restore, Round, Store, Window, shape_of
from scheduler.share import shares
from scheduler.stats import DRAFT_BUCKETS, LANE_BUCKETS, ROW_BUCKETS, DraftCounter, DraftStats, Histogram, Stats
from scheduler.suspects import Suspects


class Limits(msgspec.Struct, frozen=True):
    """How wide a round may be."""

    max_lanes: int
    """Lanes served at once."""
    round_rows: int
    """Rows of one forward; more than lanes."""
    draft_tokens: int
    """Drafted tokens a lane, at most; 0 turns drafting off."""
    itl_target: float = 0.0
    """Prefill takes no more of a round than leaves it this short, in seconds, while others decode; 0 for any length."""
    cuttable: bool = True
    """Whether caches hold a lane at every length up to its own, so that another can have any of it."""
    pipelines: bool = True
    """Whether rounds can be planned ahead."""


_LEAST_CHUNK = 8
"""Rows that a prefill gets in any case: it must come to an end."""
_STRETCH = 1.5
"""How much longer a chunk may make a round that takes too long by itself."""
_WORTH_SHARING = 16
"""Tokens in common for which a lane waits for another one's prefill; fewer only if they are all there is."""
_COMPARED = 256
"""Tokens compared at once."""


class Departure(msgspec.Struct, frozen=True):
    """A lane that left: its slot is to be released and, unless it returns, whatever was kept under its id forgotten."""

    slot: int | None
    """None if it had left it before."""
    request_id: str
    returns: bool = False


class Scheduler:
    """By turns, `max_lanes` at once, as many as there is room for; all decoding lanes in each round, prefill in what is
    left.
    """

    def __init__(self, limits: Limits, pace: Planner, reuse: Reuse | None = None, room: Room | None = None) -> None:
        """`pace` decides how much of what could be drafted is, `reuse` what is taken from a prefix cache, `room` for
        how many lanes there is memory.
        """
        self._limits = limits
        self._pace = pace
        self._reuse = reuse
        self._room = room or Boundless()
        self._suspects = Suspects(limits.max_lanes)
        self._stores: list[Store] = []
        self._waiting = FairQueue()
        self._lanes: dict[str, Lane] = {}
        """In order of admission."""
        self.drafting = Drafting(
            self._lanes, pace, most=limits.draft_tokens, round_rows=limits.round_rows, itl_target=limits.itl_target
        )
        self._free_slots = list(range(limits.max_lanes))
        """A heap."""
        self._timed: dict[str, Lane] = {}
        """Those that have a deadline, wherever they are."""
        self._turns = 0
        """How many were ever admitted."""
        self._preemptions = 0
        self._failed_forwards = 0
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
        """Put a request into the queue."""
        lane = Lane(request, submitted=now)
        self._waiting.push(lane)
        if request.deadline is not None:
            self._timed[request.request_id] = lane
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

    def expire(self, now: float) -> list[Event]:
        """End whatever has had its time."""
        late = [name for name, lane in self._timed.items() if lane.expired(now)]
        return [event for name in late for event in self._end(name, FinishReason.DEADLINE, now)]

    def fail(self, lost: Sequence[Round], error: str, now: float) -> list[Event]:
        """A forward failed, and with it all caches are lost, and these rounds, one behind the other: any of them may be
        the one. Lanes are rebuilt from their tokens. Those that were aboard are tried again in halves, until it is
        known who is guilty; that one ends.
        """
        self._failed_forwards += 1
        aboard: dict[str, int] = {}
        for each in lost:
            aboard |= {restore.request_id: restore.pieces[-1].end for restore in each.restores}
            aboard |= {window.request_id: window.start + window.real for window in each.windows}
        there = {name: end for name, end in aboard.items() if name in self._lanes}
        guilty = self._suspects.failed(there, alone=len(aboard) == 1)
        for lane in self._lanes.values():
            lane.begin_again()
        events = self._end(guilty, FinishReason.ERROR, now, error=error) if guilty is not None else []
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
        lane = self._lanes.get(request_id)
        if lane is not None:
            self._take_out(lane, keep=reason is not FinishReason.ERROR)
        elif (lane := self._waiting.remove(request_id)) is None:
            return []
        elif lane.served:
            self._departures.append(Departure(None, request_id))
        self._timed.pop(request_id, None)
        self._pace.forget(request_id)
        self._waiting.close(lane.request.owner)
        return [Finished(request_id, reason, lane.usage(completed), lane.timing(now), error)]

    def _take_out(self, lane: Lane, *, keep: bool, returns: bool = False) -> None:
        """A lane leaves its slot; what it has cached goes to the prefix cache, if it is to be kept."""
        request_id = lane.request.request_id
        del self._lanes[request_id]
        self._suspects.forget(request_id)
        if self._reuse is not None:
            if keep:
                self._stores += self._reuse.stores(lane, leaving=True)
            self._reuse.leave(request_id)
        heappush(self._free_slots, lane.slot)
        self._departures.append(Departure(lane.slot, request_id, returns))

    # ---- and find room --------------------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """Whose turn it is comes in, or nobody: no one is passed over for being large."""
        while (lane := self._waiting.next()) is not None and self._may_come(lane):
            self._waiting.remove(lane.request.request_id)
            lane.seat(heappop(self._free_slots), self._turns, now)
            self._turns += 1
            self._lanes[lane.request.request_id] = lane
            self._arrange(lane)

    def _may_come(self, newcomer: Lane) -> bool:
        """Where others are, a newcomer needs room to grow by one class of capacity, each of which is twice the last."""
        if not self._free_slots or len(self._lanes) >= self._suspects.most:
            return False
        length = len(newcomer.tokens)
        grown = length + min(max(length, 1 + self.drafting.limit(newcomer)), newcomer.remaining)
        return not self._lanes or self._room.admits({**self._lengths(), self._free_slots[0]: grown})

    def _make_room(self) -> bool:
        """For all lanes as they are behind the coming round: if it takes that, the youngest gives way to the others.
        False while there is not even room for one.
        """
        while len(self._lanes) > self._suspects.most:
            self._preempt()
        while not self._room.secure(self._lengths()):
            if len(self._lanes) == 1:
                return self._reuse is not None and self._alone_without(self._reuse)
            self._preempt()
        return True

    def _alone_without(self, reuse: Reuse) -> bool:
        """Whether there is room for the only lane if it waits for nothing from the prefix cache."""
        reuse.renounce()
        return self._room.secure(self._lengths())

    def _preempt(self) -> None:
        """The youngest goes back to the queue, and later on with the same tokens."""
        lane = max(self._lanes.values(), key=lambda lane: lane.turn)
        self._preemptions += 1
        self._take_out(lane, keep=True, returns=True)
        lane.begin_again()
        self._waiting.put_back(lane)

    def _lengths(self, ahead: int = 1) -> dict[int, int]:
        """By slot, how many positions each lane may have when it has gone on by so many tokens and a draft."""
        return {
            lane.slot: len(lane.tokens) + min(ahead + self.drafting.limit(lane), lane.remaining)
            for lane in self._lanes.values()
        }

    # ---- a round is planned ---------------------------------------------------------------------------------------

    def plan(self, now: float) -> Round | None:
        """Admit who can be admitted and lay out the next round; None if there is nothing to do. Lanes may have left
        then, to make room.
        """
        self._admit(now)
        if not self._make_room():
            return None
        lanes = [lane for lane in self._lanes.values() if not self._suspects.pauses(lane.request.request_id)]
        for lane in lanes:
            self._rearrange(lane)  # what it then has from the prefix cache is restored in this round
        restores = self._restores(lanes, now)
        feeds = [feed for lane in lanes if (feed := self._feed(lane)) is not None]
        decoding = [feed.window(self.drafting.limit(feed.lane)) for feed in feeds if feed.decoding]
        prefilling = [feed for feed in feeds if not feed.decoding]
        chunks = [feed.chunk(rows) for feed, rows in shares(prefilling, self._prefill_rows(decoding, prefilling))]
        return Round((*decoding, *chunks), restores) if feeds or restores else None

    def _restores(self, lanes: Sequence[Lane], now: float) -> tuple[Restore, ...]:
        if self._reuse is None:
            return ()
        decoding = any(lane.decoding for lane in lanes)
        return tuple(self._reuse.restores(lanes, decoding=decoding, now=now))

    def restored(self, size: int, seconds: float) -> None:
        """Copying what a round restores, so many bytes in all, took so long."""
        if self._reuse is not None:
            self._reuse.restored(size, seconds)

    def _prefill_rows(self, decoding: Sequence[Window], prefilling: Sequence[Feed]) -> int:
        """How many rows prefill may have beside these windows: what drafts could use is shared with them by halves."""
        left = self._limits.round_rows - len(decoding)
        left -= min(sum(window.budget for window in decoding), left // 2)
        if not decoding or not prefilling or not self._limits.itl_target:
            return left
        beside, furthest = shape_of(decoding), max(feed.start for feed in prefilling)
        seconds = max(self._limits.itl_target, _STRETCH * self._pace.seconds(beside))
        return min(left, max(_LEAST_CHUNK, self._pace.rows_within(seconds, beside, furthest)))

    def _feed(self, lane: Lane) -> Feed | None:
        """What a lane is fed next; None while it waits for its beginning, from another lane or the prefix cache."""
        self._rearrange(lane)  # what was restored may have brought a donor too far
        if (shared := lane.donor) is not None:
            donor = self._lanes[shared.request_id]
            return Feed(lane, shared.length, donor.slot) if donor.cached >= shared.length else None
        if self._reuse is not None and self._reuse.waits(lane):
            return None
        return Feed(lane, lane.cached)

    def _rearrange(self, lane: Lane) -> None:
        """Its donor may have left, or gone on with caches that cannot be cut."""
        while (shared := lane.donor) is not None:
            donor = self._lanes.get(shared.request_id)
            if donor is not None and (self._limits.cuttable or donor.cached <= shared.length):
                return
            self._arrange(lane)

    def _arrange(self, lane: Lane) -> None:
        """Where a lane's beginning comes from: a lane before it that has more of it than the prefix cache, or that."""
        found = self._reuse.match(lane) if self._reuse is not None else Match()
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
        whole = len(lane.tokens) - 1
        best: Donor | None = None
        if self._suspects.trying:
            return None  # those that are tried must not wait for those that pause
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

    def plan_ahead(self, flying: Round) -> Round | None:
        """The round after `flying`, on draws that have not been read; None unless it can all be plain decode windows.

        Every lane must be in `flying` and decode there without a draft, and none look as if a draft would pay after it;
        none may need the host, and nobody may wait for a free slot. Lanes that will have used up their `max_tokens` are
        left out; one that ends otherwise is discarded a round late.
        """
        if (
            not self._limits.pipelines
            or (self._waiting and self._free_slots)
            or not self._room.covers(self._lengths(2))
        ):
            return None
        aboard = {window.request_id: window.end for window in flying.windows if window.samples and not window.draft}
        if len(aboard) != len(flying.windows) or any(request_id not in aboard for request_id in self._lanes):
            return None
        if any(lane.needs_host for lane in self._lanes.values()) or self.drafting.would_draft():
            return None
        going_on = [lane for lane in self._lanes.values() if lane.remaining > 1]
        windows = tuple(lane.window_ahead(aboard[lane.request.request_id]) for lane in going_on)
        return Round(windows, ahead=True) if windows else None

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
        self._suspects.survived()
        events: list[Event] = []
        for result in results:
            lane = self._lanes.get(result.window.request_id)
            if lane is None:
                continue
            if result.window.copies is not None:
                lane.donor = None
                lane.reuse(result.window.start)
            lane.cached = result.cached
            self._suspects.passed(result.window.request_id, result.cached)
            self._charge(lane, result)
            if result.error is not None:
                if result.spoiled and self._reuse is not None:
                    self._reuse.spoil(lane)
                events += self._end(lane.request.request_id, FinishReason.ERROR, now, error=result.error)
            elif result.acceptance is not None:
                self.drafting.observe(lane.request.request_id, result.acceptance.emitted)
                events += self._commit_walk(lane, result.window, result.acceptance, now)
            if self._reuse is not None and lane.request.request_id in self._lanes:
                self._stores += self._reuse.stores(lane)
        self.drafting.settle()
        return events

    def _commit_walk(self, lane: Lane, window: Window, walk: Acceptance, now: float) -> list[Event]:
        request_id = window.request_id
        if window.draft:
            lane.observe_draft(window.source, len(window.draft), walk.accepted)
            counter = self._drafts.setdefault(window.source, DraftCounter())
            counter.observe(len(window.draft), walk.accepted)
        lane.extend(walk, now)
        lane.cached = min(lane.cached, len(lane.tokens))  # a drafted stop token is cached, and no part of the text
        end = FinishReason.DEADLINE if lane.expired(now) else walk.end
        events: list[Event] = [Tokens(request_id, walk.emitted, walk.logprobs)] if walk.emitted else []
        return events + self._end(request_id, end, now) if end is not None else events

    def _charge(self, lane: Lane, result: LaneResult) -> None:
        """What of a round was for whom: a chunk's rows, or the tokens that came."""
        emitted = len(result.acceptance.emitted) if result.acceptance is not None else 0
        self._waiting.charge(lane.request.owner, 0 if result.window.samples else result.window.real, emitted)

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
            self._preemptions,
            self._failed_forwards,
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
