"""How many tokens each lane may draft: those whose rows pay, by what rounds cost and how often guesses come true.

Every (lane, position) slot of the drafts at hand has a chance of being emitted. The slots are ranked by it, and so
many are taken as make the most tokens a second over all lanes. None taken is "parked": the round is a plain one. Parked
lanes need no probes: what they would have drafted is held against what came, which costs no row. Pure, and
deterministic given the same observations.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

import msgspec

from scheduler.cost import ROWS, CostTable, RoundShape
from scheduler.costly import PROBE, CostlySource
from scheduler.draft import Draft
from scheduler.survival import Survival


class Offer(msgspec.Struct, frozen=True):
    """A draft that a source makes for a lane."""

    source: str
    draft: Draft


class LaneOffers(msgspec.Struct, frozen=True):
    """A decoding lane, how long its cache is, and what it could draft."""

    request_id: str
    cached: int
    offers: tuple[Offer, ...]
    budget: int


class Choice(msgspec.Struct, frozen=True):
    """What a lane drafts in the coming round."""

    source: str
    draft: Draft
    chances: tuple[float, ...]


_MARGIN = 1.02
"""A draft must promise so much more than a plain round: estimates err, and plain rounds pipeline."""


class Planner(Protocol):
    """Decides what is drafted. Implemented by `Pace`."""

    def choose(self, lanes: Sequence[LaneOffers], prefill: RoundShape, rows: int) -> dict[str, Choice]:
        """Per lane the source to draft from and what of its draft to verify; lanes that draft nothing are left out.

        `lanes` are all that decode in the round, `prefill` is what it computes besides, and `rows` how many draft rows
        there is room for.
        """
        ...

    def would_draft(self, lanes: Sequence[LaneOffers]) -> bool:
        """Whether it looks now as if drafts would pay in the round after the one that these offers are for."""
        ...

    def depth(self, source: str, lanes: Sequence[LaneOffers], asking: Set[str]) -> int:
        """How many tokens to ask of a source whose asking costs time, for the lanes named in `asking`; 0 not to ask it.
        Its marks are positions.
        """
        ...

    def asked(self, source: str, lanes: int, depth: int, seconds: float) -> None:
        """Asking it took so long."""
        ...

    def rows_within(self, seconds: float, beside: RoundShape, start: int) -> int:
        """The most rows of a chunk, whose lane's caches hold `start` tokens, that can be added to a round of the shape
        `beside` for it to take no longer than this; 0 if there is no room for one.
        """
        ...

    def seconds(self, shape: RoundShape) -> float:
        """What a round would take; 0 before anything is known of any."""
        ...

    def observe(self, lane: LaneOffers, came: Sequence[int]) -> None:
        """What came where a lane had these offers, whether they were verified or not."""
        ...

    def timed(self, shape: RoundShape, seconds: float) -> None:
        """A round took so long."""
        ...

    def forget(self, request_id: str) -> None:
        """The lane left."""
        ...


class Pace:
    """Chooses drafts. Written by the scheduler: `choose` before a round, `observe` and `timed` behind it."""

    def __init__(self, *, rectangle: bool = False) -> None:
        """`rectangle`: every lane is padded to the widest window, so that a column costs a row in every lane."""
        self.costs = CostTable()
        self.survival = Survival()
        self._rectangle = rectangle
        self._costly: dict[str, CostlySource] = {}

    def choose(self, lanes: Sequence[LaneOffers], prefill: RoundShape, rows: int) -> dict[str, Choice]:
        """The likeliest slots, as many as make the most tokens a second."""
        best = {lane.request_id: choice for lane in lanes if (choice := self._best(lane)) is not None}
        if not best:
            return {}
        steps = self._steps(lanes, best)
        attention = prefill.attention + sum(lane.cached for lane in lanes)
        plain = RoundShape(len(lanes) + prefill.rows, prefill.rows > 0, attention)
        taken = self._most_per_second(steps, plain, len(lanes), rows)
        return self._cut(best, steps[:taken])

    def would_draft(self, lanes: Sequence[LaneOffers]) -> bool:
        """The offers without their first token, which the round before draws: it must be right too. Or a source that
        could be asked.
        """
        if any(self._would_ask(source, costly, lanes) for source, costly in self._costly.items()):
            return True
        later = {
            lane.request_id: Choice(choice.source, choice.draft, choice.chances[1:])
            for lane in lanes
            if (choice := self._best(lane)) is not None and len(choice.chances) > 1
        }
        if not later:
            return False
        plain = RoundShape(len(lanes), False, sum(lane.cached for lane in lanes))
        return self._most_per_second(self._steps(lanes, later), plain, len(lanes), len(lanes) * len(ROWS)) > 0

    def depth(self, source: str, lanes: Sequence[LaneOffers], asking: Set[str]) -> int:
        """The depth that makes the most tokens a second, its own time included; now and then one more, or a probe."""
        costly = self._costly.setdefault(source, CostlySource())
        deepest = max((lane.budget for lane in lanes if lane.request_id in asking), default=0)
        pays = self._paying_depth(source, costly, lanes, asking, deepest)
        if pays:
            return min(pays + costly.paid(), deepest)
        if not deepest or not costly.due:
            costly.passed()
            return 0
        costly.tried()
        return min(PROBE, deepest)

    def asked(self, source: str, lanes: int, depth: int, seconds: float) -> None:
        """Learns its price."""
        self._costly.setdefault(source, CostlySource()).observe(lanes, depth, seconds)

    def _would_ask(self, source: str, costly: CostlySource, lanes: Sequence[LaneOffers]) -> bool:
        everybody = {lane.request_id for lane in lanes}
        deepest = max((lane.budget for lane in lanes), default=0)
        if deepest and (costly.due or self._paying_depth(source, costly, lanes, everybody, deepest)):
            return True
        costly.passed()
        return False

    def _paying_depth(
        self, source: str, costly: CostlySource, lanes: Sequence[LaneOffers], asking: Set[str], deepest: int
    ) -> int:
        """Against a plain round; what the others are offered is left out on both sides."""
        plain = RoundShape(len(lanes), False, sum(lane.cached for lane in lanes))
        seconds = self.costs.seconds(plain)
        if not seconds:
            return 0
        marks = tuple(range(deepest))
        asked = [lane for lane in lanes if lane.request_id in asking]
        chances = [self.survival.chances(lane.request_id, source, Draft(marks, marks))[: lane.budget] for lane in asked]
        attention = sum(lane.cached for lane in asked)
        most, best = _MARGIN * len(lanes) / seconds, 0
        for depth in range(1, deepest + 1):
            tokens = len(lanes) + sum(sum(each[:depth]) for each in chances)
            rows = plain.rows * (1 + depth) if self._rectangle else plain.rows + len(asked) * depth
            shape = RoundShape(rows, True, plain.attention + attention * depth)
            speed = tokens / (self.costs.seconds(shape) + costly.seconds(len(asked), depth))
            if speed > most:
                most, best = speed, depth
        return best

    def rows_within(self, seconds: float, beside: RoundShape, start: int) -> int:
        """By what rounds cost; as many as there may be before any was timed."""
        return self.costs.rows_within(seconds, beside, start)

    def seconds(self, shape: RoundShape) -> float:
        """By what rounds cost."""
        return self.costs.seconds(shape)

    def _steps(self, lanes: Sequence[LaneOffers], best: Mapping[str, Choice]) -> list["_Step"]:
        """What can be added to a plain round, in the order in which to add it."""
        return self._columns(lanes, best) if self._rectangle else self._slots(lanes, best)

    def _best(self, lane: LaneOffers) -> Choice | None:
        """The offer that promises most tokens; of equals the first, for sources come in the order of a ladder."""
        choices = []
        for offer in lane.offers:
            draft = offer.draft.cut(lane.budget)
            chances = self.survival.chances(lane.request_id, offer.source, draft)
            choices.append(Choice(offer.source, draft, tuple(chances)))
        return max(
            (choice for choice in choices if choice.chances), key=lambda choice: sum(choice.chances), default=None
        )

    def _slots(self, lanes: Sequence[LaneOffers], best: Mapping[str, Choice]) -> list["_Step"]:
        """Every slot a step of its own, likeliest first; a lane's slots stay in order, as chances only fall."""
        steps = [
            _Step(chance, 1, lane.cached, ((lane.request_id, position + 1),))
            for lane in lanes
            if (choice := best.get(lane.request_id)) is not None
            for position, chance in enumerate(choice.chances)
        ]
        return sorted(steps, key=lambda step: -step.gain)

    def _columns(self, lanes: Sequence[LaneOffers], best: Mapping[str, Choice]) -> list["_Step"]:
        """In a rectangle a step is a whole column: whoever has a draft that long takes part."""
        widest = max(len(choice.chances) for choice in best.values())
        attention = sum(lane.cached for lane in lanes)
        steps = []
        for position in range(widest):
            part = [(name, choice) for name, choice in best.items() if len(choice.chances) > position]
            gain = sum(choice.chances[position] for _, choice in part)
            steps.append(_Step(gain, len(lanes), attention, tuple((name, position + 1) for name, _ in part)))
        return steps

    def _most_per_second(self, steps: Sequence["_Step"], plain: RoundShape, lanes: int, rows: int) -> int:
        """How many of the steps to take, in order: all numbers of them are tried, as a cliff may lie in between."""
        tokens, shape = float(lanes), plain
        seconds = self.costs.seconds(plain)
        if not seconds:
            return 0
        most, taken = _MARGIN * tokens / seconds, 0
        for count, step in enumerate(steps, start=1):
            tokens += step.gain
            shape = RoundShape(shape.rows + step.rows, True, shape.attention + step.attention)
            if shape.rows - plain.rows > rows:
                break
            seconds = self.costs.seconds(shape)
            if tokens / seconds > most:
                most, taken = tokens / seconds, count
        return taken

    def _cut(self, best: Mapping[str, Choice], steps: Sequence["_Step"]) -> dict[str, Choice]:
        lengths: dict[str, int] = {}
        for step in steps:
            lengths.update(step.reaches)
        return {
            name: Choice(best[name].source, best[name].draft.cut(length), best[name].chances[:length])
            for name, length in lengths.items()
        }

    def observe(self, lane: LaneOffers, came: Sequence[int]) -> None:
        """What came where a lane had these offers, whether they were verified or not."""
        for offer in lane.offers:
            self.survival.observe(lane.request_id, offer.source, offer.draft, came)

    def timed(self, shape: RoundShape, seconds: float) -> None:
        """A round took so long."""
        self.costs.observe(shape, seconds)

    def forget(self, request_id: str) -> None:
        """The lane left."""
        self.survival.forget(request_id)


class Headlong:
    """A `Planner` that drafts whatever there is, the first offer of each lane: for measurements, and for tests that
    want drafts whatever they cost.
    """

    def choose(self, lanes: Sequence[LaneOffers], prefill: RoundShape, rows: int) -> dict[str, Choice]:  # noqa: ARG002
        """As much as there is room for, lane by lane."""
        chosen: dict[str, Choice] = {}
        for lane in lanes:
            draft = lane.offers[0].draft.cut(min(lane.budget, rows)) if lane.offers else Draft()
            rows -= len(draft.tokens)
            if draft.tokens:
                chosen[lane.request_id] = Choice(lane.offers[0].source, draft, (1.0,) * len(draft.tokens))
        return chosen

    def would_draft(self, lanes: Sequence[LaneOffers]) -> bool:
        """Wherever somebody has a guess."""
        return any(lane.offers for lane in lanes)

    def depth(self, source: str, lanes: Sequence[LaneOffers], asking: Set[str]) -> int:  # noqa: ARG002
        """As deep as anybody may."""
        return max((lane.budget for lane in lanes if lane.request_id in asking), default=0)

    def asked(self, source: str, lanes: int, depth: int, seconds: float) -> None:
        """Learns nothing."""

    def rows_within(self, seconds: float, beside: RoundShape, start: int) -> int:  # noqa: ARG002
        """Any number."""
        return ROWS[-1]

    def seconds(self, shape: RoundShape) -> float:  # noqa: ARG002
        """Knows nothing."""
        return 0.0

    def observe(self, lane: LaneOffers, came: Sequence[int]) -> None:
        """Learns nothing."""

    def timed(self, shape: RoundShape, seconds: float) -> None:
        """Learns nothing."""

    def forget(self, request_id: str) -> None:
        """Knows nothing."""


class _Step(msgspec.Struct, frozen=True):
    """What could be added to a round next: tokens it may gain, rows and keys it costs, how long drafts are with it."""

    gain: float
    rows: int
    attention: int
    reaches: tuple[tuple[str, int], ...]
