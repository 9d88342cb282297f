"""What plain decoding would have made of a round, token by token: the oracle of the acceptance walk. And a planner that
holds nothing back.
"""

from collections.abc import Sequence, Set

from scheduler.cost import RoundShape
from scheduler.pace import Choice, LaneOffers
from scheduler.request import FinishReason
from scheduler.round import Acceptance


def replay(draft: Sequence[int], drawn: Sequence[int], stop_tokens: Set[int], remaining: int) -> Acceptance:
    """Decode one token after the other for as long as the draws of this round are known to be the target's own.

    `drawn[i]` is the target's token only in a context that continues with `draft[:i]`.
    """
    emitted: list[int] = []
    accepted = 0
    while True:
        position = len(emitted)
        token = drawn[position]
        foreseen = position < len(draft) and draft[position] == token
        accepted += foreseen
        if token in stop_tokens:
            return Acceptance(tuple(emitted), accepted, FinishReason.STOP, ended_by_token=True)
        emitted.append(token)
        if len(emitted) == remaining:
            return Acceptance(tuple(emitted), accepted, FinishReason.LENGTH)
        if not foreseen:
            return Acceptance(tuple(emitted), accepted)


class Eager:
    """A `Planner` that drafts whatever there is, the first offer of each lane."""

    def choose(self, lanes: Sequence[LaneOffers], prefill: RoundShape, rows: int) -> dict[str, Choice]:
        chosen: dict[str, Choice] = {}
        for lane in lanes:
            if lane.offers:
                draft = lane.offers[0].draft.cut(min(lane.budget, rows))
                rows -= len(draft.tokens)
                if draft.tokens:
                    chosen[lane.request_id] = Choice(lane.offers[0].source, draft, (1.0,) * len(draft.tokens))
        return chosen

    def would_draft(self, lanes: Sequence[LaneOffers]) -> bool:
        return any(lane.offers for lane in lanes)

    def depth(self, source: str, lanes: Sequence[LaneOffers], asking: Set[str]) -> int:
        return max((lane.budget for lane in lanes if lane.request_id in asking), default=0)

    def asked(self, source: str, lanes: int, depth: int, seconds: float) -> None:
        """Learns nothing."""

    def rows_within(self, seconds: float) -> int:
        return 1024

    def observe(self, lane: LaneOffers, came: Sequence[int]) -> None:
        """Learns nothing."""

    def timed(self, shape: RoundShape, seconds: float) -> None:
        """Learns nothing."""

    def forget(self, request_id: str) -> None:
        """Knows nothing."""
