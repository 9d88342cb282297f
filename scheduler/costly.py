"""What it costs to ask a source that has a model of its own, and when to try one again that did not pay. Pure."""

_NEWEST = 0.1
"""The weight of a new observation."""
_TRUSTED = 3
"""Of the first so many the shortest is believed: one that was not asked for long has a text to read first."""
_FURTHER = 0.5
"""What a further step is thought to cost beside the first one, until one was timed: else none would ever be."""
_OUTLIER = 3.0
"""An asking so many times as long as expected counts as that: it had a newcomer's prompt to read."""
_SOONEST, _LATEST = 16, 256
"""Rounds until a source that did not pay is tried again; twice as many each time, up to the latest."""
_CURIOUS = 8
"""Of so many askings that pay one goes a step deeper: what lies behind the first few guesses at some depth, were they
wrong, would else never be known.
"""
PROBE = 1
"""How deep it is asked to see whether it would pay."""


class _Price:
    """Of asking for so many lanes: the first step, which reads what came since and starts all up, and each further one.
    Written by `CostlySource`.
    """

    def __init__(self) -> None:
        self._first = 0.0
        self._further: float | None = None
        self._seen = [0, 0]
        """Askings of one step, and of more."""

    def seconds(self, depth: int) -> float:
        """Of so many steps, one or more."""
        further = _FURTHER * self._first if self._further is None else self._further
        return self._first + further * (depth - 1)

    def observe(self, depth: int, seconds: float) -> None:
        """So many steps took so long. Of what was not expected each of them has its share."""
        deeper = depth > 1
        known = any(self._seen)
        self._seen[deeper] += 1
        if not known:
            self._first = seconds / depth
            self._further = self._first if deeper else None
        elif self._seen[deeper] <= _TRUSTED:
            self._believe(depth, seconds)
        else:
            expected = self.seconds(depth)
            share = (min(seconds, _OUTLIER * expected) - expected) * _NEWEST / depth
            self._first = max(self._first + share, 0.0)
            if self._further is not None and deeper:
                self._further = max(self._further + share, 0.0)

    def _believe(self, depth: int, seconds: float) -> None:
        """One of the first askings, if it is the shortest."""
        if depth == 1:
            self._first = min(self._first, seconds)
        elif self._seen[0]:
            each = max(seconds - self._first, 0.0) / (depth - 1)
            self._further = each if self._further is None else min(self._further, each)
        elif seconds < (expected := self.seconds(depth)):
            self._first *= seconds / expected
            self._further = self._first


class CostlySource:
    """One source's price, and its patience. Written by `Pace` alone."""

    def __init__(self) -> None:
        self._prices: dict[int, _Price] = {}
        """By lanes."""
        self._rounds = _SOONEST
        """Since it was last asked."""
        self._patience = _SOONEST
        self._paying = 0
        """Askings that paid."""

    def seconds(self, lanes: int, depth: int) -> float:
        """The time that asking it so deep would take; 0 if it was never asked. As with the nearest number of lanes."""
        if not self._prices:
            return 0.0
        nearest = min(self._prices, key=lambda known: (abs(known - lanes), known))
        return self._prices[nearest].seconds(depth)

    def observe(self, lanes: int, depth: int, seconds: float) -> None:
        """Asking it took so long."""
        self._prices.setdefault(lanes, _Price()).observe(depth, seconds)

    def paid(self) -> int:
        """It is asked because that pays: should it cease to, it is tried again soon. How many steps to go deeper."""
        self._rounds = 0
        self._patience = _SOONEST
        self._paying += 1
        return int(self._paying % _CURIOUS == 0)

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
