"""Ways of drafting that `replay` holds against `scheduler.pace.Pace`: always so many tokens, and knowing what comes."""

from collections.abc import Callable, Mapping, Sequence, Set

from deploy.bench.recording import RecordedCosts
from scheduler.cost import CostTable, RoundShape
from scheduler.pace import Choice, LaneOffers, Offer


class _Costs:
    """What every planner must tell besides its choices: how much prefill fits beside decoding."""

    def __init__(self) -> None:
        self._costs = CostTable()

    def rows_within(self, seconds: float, beside: RoundShape, start: int) -> int:
        """As `Pace` says it, so that prefill is the same under all policies."""
        return self._costs.rows_within(seconds, beside, start)

    def seconds(self, shape: RoundShape) -> float:
        """As `Pace` says it."""
        return self._costs.seconds(shape)

    def timed(self, shape: RoundShape, seconds: float) -> None:
        """A round took so long."""
        self._costs.observe(shape, seconds)

    def depth(self, source: str, lanes: Sequence[LaneOffers], asking: Set[str]) -> int:  # noqa: ARG002
        """Sources whose asking costs time are not asked."""
        return 0

    def asked(self, source: str, lanes: int, depth: int, seconds: float) -> None:
        """Nobody is."""

    def observe(self, lane: LaneOffers, came: Sequence[int]) -> None:
        """Learns nothing from it."""

    def forget(self, request_id: str) -> None:
        """Knows nothing of it."""


class FixedDepth(_Costs):
    """A `Planner`: the first `depth` tokens of each lane's first offer, whatever they cost."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._depth = depth

    def choose(self, lanes: Sequence[LaneOffers], prefill: RoundShape, rows: int) -> dict[str, Choice]:  # noqa: ARG002
        """In order of the lanes, while there is room."""
        chosen: dict[str, Choice] = {}
        for lane in lanes:
            depth = min(self._depth, lane.budget, rows)
            if lane.offers and depth > 0:
                choice = _cut(lane.offers[0], depth)
                rows -= len(choice.draft.tokens)
                chosen[lane.request_id] = choice
        return chosen

    def would_draft(self, lanes: Sequence[LaneOffers]) -> bool:
        """Whoever has an offer now is taken to have one next time."""
        return self._depth > 0 and any(lane.offers for lane in lanes)


class Oracle(_Costs):
    """A `Planner` that knows which of the offered tokens will come and what rounds cost: no planner on the same sources
    makes more tokens a second of a single round.
    """

    def __init__(self, comes: Callable[[str, int], Sequence[int]], costs: RecordedCosts) -> None:
        """`comes(request_id, cached)`: the tokens that will come behind the lane's window, all of them."""
        super().__init__()
        self._comes = comes
        self._recorded = costs

    def choose(self, lanes: Sequence[LaneOffers], prefill: RoundShape, rows: int) -> dict[str, Choice]:
        """Right tokens only, as many as pay; lanes with short caches first, as their rows are the cheapest."""
        best = {lane.request_id: choice for lane in lanes if (choice := self._best(lane)) is not None}
        return self._most_per_second(lanes, best, prefill, rows)

    def would_draft(self, lanes: Sequence[LaneOffers]) -> bool:  # noqa: ARG002
        """Always looks first: a round that is planned ahead would have no drafts, and in a replay it is no faster."""
        return True

    def _best(self, lane: LaneOffers) -> Choice | None:
        """The offer that is right for longest, cut where it is wrong."""
        comes = self._comes(lane.request_id, lane.cached)
        choices = [_cut(offer, min(lane.budget, _right(offer.draft.tokens, comes))) for offer in lane.offers]
        best = max(choices, key=lambda choice: len(choice.draft.tokens), default=None)
        return best if best is not None and best.draft.tokens else None

    def _most_per_second(
        self, lanes: Sequence[LaneOffers], best: Mapping[str, Choice], prefill: RoundShape, rows: int
    ) -> dict[str, Choice]:
        plain = prefill.attention + sum(lane.cached + 1 for lane in lanes)
        shape = RoundShape(len(lanes) + prefill.rows, prefill.rows > 0, plain)
        most, taken = len(lanes) / self._recorded.seconds(shape), 0
        slots = [
            (lane.request_id, place + 1, lane.cached + 2 + place)
            for lane in sorted(lanes, key=lambda lane: lane.cached)
            if lane.request_id in best
            for place in range(len(best[lane.request_id].draft.tokens))
        ][:rows]
        for count, (_, _, keys) in enumerate(slots, start=1):
            shape = RoundShape(shape.rows + 1, True, shape.attention + keys)
            rate = (len(lanes) + count) / self._recorded.seconds(shape)
            if rate > most:
                most, taken = rate, count
        lengths = {request_id: length for request_id, length, _ in slots[:taken]}
        return {name: Choice(best[name].source, best[name].draft.cut(length), ()) for name, length in lengths.items()}


def _cut(offer: Offer, length: int) -> Choice:
    return Choice(offer.source, offer.draft.cut(length), ())


def _right(draft: Sequence[int], comes: Sequence[int]) -> int:
    """How many tokens of a draft will come."""
    for place, (token, right) in enumerate(zip(draft, comes, strict=False)):
        if token != right:
            return place
    return min(len(draft), len(comes))
