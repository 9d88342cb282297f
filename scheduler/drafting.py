"""What the lanes of a round draft: who may be drafted for, what was offered, and what of that is chosen. Pure.

The cycle of a round is `asks -> offer -> draft`, then `observe` for each lane that drew, and `settle`.
"""

from collections.abc import Mapping, Sequence

import msgspec

from scheduler.draft import DraftAsk
from scheduler.lane import Lane
from scheduler.pace import Choice, LaneOffers, Offer, Planner
from scheduler.round import Round, Window, shape_of


class Drafting:
    """Stands between the sources and the planner. Written by `Scheduler`, and by `Executor` for what sources say."""

    def __init__(
        self, lanes: Mapping[str, Lane], pace: Planner, *, most: int, round_rows: int, itl_target: float = 0.0
    ) -> None:
        """`lanes` are the scheduler's own, to be read only; `most` tokens are drafted for one of them at once. Rounds
        with chunks do not become longer by drafts than `itl_target`, in seconds; 0 for no such limit.
        """
        self._lanes = lanes
        self._pace = pace
        self._most = most
        self._round_rows = round_rows
        self._itl_target = itl_target
        self._offered: dict[str, LaneOffers] = {}
        """What the lanes could draft whose draws come next, by request."""

    def limit(self, lane: Lane) -> int:
        """The most that may ever be drafted for a lane at once."""
        own = lane.request.draft_tokens
        return self._most if own is None else min(own, self._most)

    def asks(self, planned: Round) -> list[DraftAsk]:
        """Of the lanes that draw in a round, those that may be drafted for."""
        return [
            self._ask(self._lanes[window.request_id], budget)
            for window in self._drawing(planned)
            if (budget := self._budget(window)) > 0
        ]

    def offer(self, coming: Round, offers: Mapping[str, tuple[Offer, ...]]) -> None:
        """Note what could be drafted in a round: `draft` chooses from it, and what comes is held against all of it."""
        self._offered = {
            window.request_id: LaneOffers(
                window.request_id, window.start, offers.get(window.request_id, ()), self._budget(window)
            )
            for window in self._drawing(coming)
        }

    def depth(self, source: str, request_ids: Sequence[str]) -> int:
        """How deep to ask a source whose asking costs time, for these lanes among those that were offered something."""
        return self._pace.depth(source, self._lanes_offered(), frozenset(request_ids))

    def asked(self, source: str, lanes: int, depth: int, seconds: float) -> None:
        """Asking it took so long."""
        self._pace.asked(source, lanes, depth, seconds)

    def draft(self, planned: Round) -> Round:
        """Give each window the draft that pays, of those that its lane was offered."""
        chunks = [window for window in planned.windows if not window.samples]
        room = self._round_rows - sum(window.rows for window in planned.windows)
        if chunks and self._itl_target:
            furthest = max((lane.cached for lane in self._offered.values()), default=0)
            room = min(room, self._pace.rows_within(self._itl_target, shape_of(planned.windows), furthest))
        chosen = self._pace.choose(self._lanes_offered(), shape_of(chunks), room)
        if not chosen:
            return planned
        return Round(tuple(_drafting(window, chosen.get(window.request_id)) for window in planned.windows))

    def would_draft(self) -> bool:
        """Whether it looks as if drafts would pay in the round after the one that the offers are for."""
        return self._pace.would_draft(self._lanes_offered())

    def observe(self, request_id: str, came: Sequence[int]) -> None:
        """What came where a lane had its offers."""
        if (offers := self._offered.get(request_id)) is not None:
            self._pace.observe(offers, came)

    def settle(self) -> None:
        """The round is over; the offers were for it."""
        self._offered = {}

    def _lanes_offered(self) -> list[LaneOffers]:
        return list(self._offered.values())

    def _drawing(self, planned: Round) -> list[Window]:
        return [window for window in planned.windows if window.samples and window.request_id in self._lanes]

    def _ask(self, lane: Lane, budget: int) -> DraftAsk:
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
        return min(self.limit(lane), lane.remaining - 1)


def _drafting(window: Window, choice: Choice | None) -> Window:
    if choice is None:
        return window
    return msgspec.structs.replace(window, draft=choice.draft.tokens, source=choice.source)
