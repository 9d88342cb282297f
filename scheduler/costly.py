"""What it costs to ask a source that has a model of its own, and when to try one again that did not pay. Pure."""

import msgspec

_NEWEST = 0.1
"""The weight of a new observation."""
_TRUSTED = 3
"""Of the first so many the shortest is believed: one that was not asked for long has a text to read first."""
_OUTLIER = 3.0
"""An asking so many times as long as expected counts as that: it had a newcomer's prompt to read."""
_SOONEST, _LATEST = 16, 256
"""Rounds until a source that did not pay is tried again; twice as many each time, up to the latest."""
PROBE = 1
"""How deep it is asked to see whether it would pay."""


class _Step(msgspec.Struct):
    """One step of drafting for so many lanes."""

    seconds: float = 0.0
    seen: int = 0


class CostlySource:
    """One source's price, and its patience. Written by `Pace` alone."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        """By lanes."""
        self._rounds = _SOONEST
        """Since it was last asked."""
        self._patience = _SOONEST

    def seconds(self, lanes: int, depth: int) -> float:
        """The time that asking it so deep would take; 0 if it was never asked. As with the nearest number of lanes."""
        if not self._steps:
            return 0.0
        nearest = min(self._steps, key=lambda known: (abs(known - lanes), known))
        return self._steps[nearest].seconds * depth

    def observe(self, lanes: int, depth: int, seconds: float) -> None:
        """Asking it took so long."""
        step = self._steps.setdefault(lanes, _Step())
        each = seconds / depth
        step.seen += 1
        if step.seen <= _TRUSTED:
            step.seconds = each if step.seen == 1 else min(each, step.seconds)
        else:
            step.seconds += (min(each, _OUTLIER * step.seconds) - step.seconds) * _NEWEST

    def paid(self) -> None:
        """It is asked because that pays: should it cease to, it is tried again soon."""
        self._rounds = 0
        self._patience = _SOONEST

    def passed(self) -> None:
        """A round in which it was not asked."""
        self._rounds += 1

    @property
    def due(self) -> bool:
        """Whether to ask it although it does not seem to pay."""
        return self._rounds >= self._patience

    def tried(self) -> None:
        """It is asked because it was due."""
        self._rounds = 0
        self._patience = min(2 * self._patience, _LATEST)
