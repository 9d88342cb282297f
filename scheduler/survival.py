"""How often guesses come true: the chance that a drafted token is right, given that those before it in its draft were.

Learned per source and mark over all lanes, and per lane, which starts from what all lanes together say. A guess need
not have been verified to be counted: it is held against the token that came. Pure.
"""

from collections.abc import Sequence

from scheduler.draft import Draft

_FORGET = 0.99
"""How much an older guess counts beside the next newer one, over all lanes: the last 100 make the picture."""
_LANE_FORGET = 0.98
_PRIOR = (1.0, 2.0)
"""Guesses that came true, and guesses, before any was seen."""
_LANE_PRIOR = 3.0
"""So many guesses of all lanes stand for a lane's own while it has none."""


class _Record:
    """Guesses, and those of them that came true; older ones count less."""

    __slots__ = ("made", "true")

    def __init__(self, true: float, made: float) -> None:
        self.true = true
        self.made = made

    def observe(self, came_true: bool, forget: float) -> None:
        self.true = self.true * forget + came_true
        self.made = self.made * forget + 1.0


class Survival:
    """Written by `Pace` alone."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, int], _Record] = {}
        self._lanes: dict[str, dict[tuple[str, int], _Record]] = {}

    def observe(self, request_id: str, source: str, draft: Draft, came: Sequence[int]) -> None:
        """A lane's draft, and the tokens that came in its place; what lies behind its first wrong token, or behind
        what came, tells nothing.
        """
        lane = self._lanes.setdefault(request_id, {})
        for token, mark, right in zip(draft.tokens, draft.marks, came, strict=False):
            key = (source, mark)
            self._all.setdefault(key, _Record(*_PRIOR)).observe(token == right, _FORGET)
            lane.setdefault(key, _Record(0.0, 0.0)).observe(token == right, _LANE_FORGET)
            if token != right:
                break

    def chances(self, request_id: str, source: str, draft: Draft) -> list[float]:
        """For each token of a draft, the chance that it and all before it are right."""
        lane = self._lanes.get(request_id, {})
        chances: list[float] = []
        reached = 1.0
        for mark in draft.marks:
            reached *= self._one(lane.get((source, mark)), (source, mark))
            chances.append(reached)
        return chances

    def _one(self, own: _Record | None, key: tuple[str, int]) -> float:
        everybody = self._all.get(key)
        share = _PRIOR[0] / _PRIOR[1] if everybody is None else everybody.true / everybody.made
        return share if own is None else (own.true + _LANE_PRIOR * share) / (own.made + _LANE_PRIOR)

    def forget(self, request_id: str) -> None:
        """The lane left."""
        self._lanes.pop(request_id, None)

    def table(self) -> dict[tuple[str, int], float]:
        """The chance by source and mark, over all lanes."""
        return {key: record.true / record.made for key, record in self._all.items()}
