"""What a round costs: its time over its rows and its attention work, learned from the rounds that were run.

Pure: times come in as arguments, in seconds. Rounds in which every lane has one row (plain) and rounds with wider
windows are kept apart, as backends may take another way for them. Nothing is interpolated: of a cell that was never
seen the best is thought, it is tried if that would pay, and then known.
"""

from bisect import bisect_left
from itertools import pairwise

import msgspec

ROWS: tuple[int, ...] = (
    *range(1, 9),
    *range(10, 34, 2),
    *(36, 40, 44, 48, 52, 56, 60, 64, 72, 80, 88, 96, 112, 128, 160, 192, 224, 256, 384, 512, 1024),
)
"""Upper bounds of the cells, in rows of a round; what is larger belongs to the last one."""
_NEWEST = 0.05
"""The least weight of a new observation in its cell."""
_OUTLIER = 3.0
"""An observation so many times what was expected, or less than one so many-th of it, is a hiccup and counts as that."""
_TRUSTED = 3
"""So many observations make a cell's mean believable against its neighbours."""
_ATTENTION_STEP = 0.2
"""How far the price of attention follows one round whose attention is twice its cell's mean, or more."""
_ATTENTION_MOST = 0.8
"""Attention is never thought to be more than this share of a round."""
_DRIFT_STEP = 0.1
"""How fast all prices follow a machine that has become slower or faster as a whole."""
_LEAST = 1e-6
"""No round is free, whatever is thought of its attention; in seconds."""


class RoundShape(msgspec.Struct, frozen=True):
    """What a round computes."""

    rows: int
    wide: bool
    """Whether some window has more than one row."""
    attention: int
    """Keys that are attended: for each row, its position."""


class _Cell:
    """Rounds of like rows: their mean time and attention, and how many were seen."""

    __slots__ = ("attention", "seconds", "seen")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.attention = 0.0
        self.seen = 0

    def observe(self, seconds: float, attention: float) -> None:
        self.seen += 1
        if 1 < self.seen <= _TRUSTED:
            seconds = min(seconds, self.seconds)  # of the first few the shortest is believed: a hiccup only adds
        weight = 1.0 if self.seen <= _TRUSTED else _NEWEST
        self.seconds += (seconds - self.seconds) * weight
        self.attention += (attention - self.attention) * weight


class CostTable:
    """Predicts a round's time. Written by `Pace` alone, with the rounds that were run."""

    def __init__(self) -> None:
        self._cells: dict[bool, dict[int, _Cell]] = {False: {}, True: {}}
        self._attention = 0.0
        """Seconds per attended key, without drift."""
        self._drift = 1.0
        """How much slower the machine is now than when the cells were filled."""
        self._prices: dict[bool, list[float]] = {}
        """By kind, per cell, without drift; made when asked for, and no longer true after an observation."""

    def observe(self, shape: RoundShape, seconds: float) -> None:
        """A round of this shape took so long."""
        expected = self.seconds(shape)
        cell = self._cells[shape.wide].setdefault(_index(shape.rows), _Cell())
        if cell.seen >= _TRUSTED:
            seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER)
            self._learn_attention(cell, shape.attention, (seconds - expected) / self._drift)
            self._drift *= (seconds / expected) ** _DRIFT_STEP
        cell.observe(seconds / self._drift, shape.attention)
        self._prices.clear()

    def _learn_attention(self, cell: _Cell, attention: int, error: float) -> None:
        """By the error of what was expected (normalised least mean squares). Rounds much like their cell's mean say
        next to nothing: what they have too much or too little is the machine's.
        """
        more = attention - cell.attention
        weight = more * more + cell.attention * cell.attention
        if weight:
            most = _ATTENTION_MOST * cell.seconds / max(cell.attention, 1.0)
            learned = self._attention + _ATTENTION_STEP * error * more / weight
            self._attention = min(max(0.0, learned), most)

    def seconds(self, shape: RoundShape) -> float:
        """The time that a round of this shape would take; 0 if nothing was ever observed."""
        price = self.prices(wide=shape.wide)[_index(shape.rows)]
        return (price + self._attention * shape.attention) * self._drift if price else 0.0

    def rows_within(self, seconds: float, beside: RoundShape, start: int) -> int:
        """How many rows can be added to a round, in a window that begins at `start`, for it to take no longer: as many
        as make it a full cell. 0 where even one makes it too long, and no end to them if no round was ever timed.

        Nothing is tried here, for others would have to wait: an unseen cell is thought to cost what lies between its
        seen neighbours.
        """
        for total, price in zip(reversed(ROWS), reversed(self._careful_prices()), strict=True):
            rows = total - beside.rows
            attention = beside.attention + rows * (start + rows)
            if rows > 0 and (price + self._attention * attention) * self._drift <= seconds:
                return rows
        return 0

    def _careful_prices(self) -> list[float]:
        """Per cell of `ROWS`, seconds without attention: of unseen ones by the line between their neighbours, and from
        the last one on by the rows' own price.
        """
        cells = self._cells[True] or self._cells[False]
        best = self.prices(wide=True)
        seen = sorted(cells)
        if not seen:
            return best
        careful = list(best)
        for left, right in pairwise(seen):
            for index in range(left + 1, right):
                share = (ROWS[index] - ROWS[left]) / (ROWS[right] - ROWS[left])
                careful[index] = best[left] + (best[right] - best[left]) * share
        first, last = seen[0], seen[-1]
        slope = (best[last] - best[first]) / (ROWS[last] - ROWS[first]) if last > first else best[last] / ROWS[last]
        for index in range(last + 1, len(ROWS)):
            careful[index] = best[last] + slope * (ROWS[index] - ROWS[last])
        careful[:first] = [best[first]] * first
        return careful

    def prices(self, *, wide: bool) -> list[float]:
        """Per cell of `ROWS`, seconds without attention; more rows never cost less. Where no wide round was ever seen,
        plain ones stand for them.
        """
        if wide not in self._prices:
            cells = self._cells[wide] or self._cells[not wide]
            attention = self._attention
            means = {index: max(_LEAST, cell.seconds - attention * cell.attention) for index, cell in cells.items()}
            trusted = {index for index, cell in cells.items() if cell.seen >= _TRUSTED}
            self._prices[wide] = _prices(means, trusted)
        return self._prices[wide]


def _index(rows: int) -> int:
    return min(bisect_left(ROWS, rows), len(ROWS) - 1)


def _prices(means: dict[int, float], trusted: set[int]) -> list[float]:
    """Seen cells have their mean. Of unseen ones the best is thought that may be true, so that they are tried if it
    pays: that of the next smaller cell, or, before the first one, its share by rows. Further behind the last one than
    its neighbour, rows go on to cost what they did.
    """
    if not means:
        return [0.0] * len(ROWS)
    seen = sorted(means)
    for left, index, right in zip(seen, seen[1:], seen[2:], strict=False):
        if index not in trusted:
            share = (ROWS[index] - ROWS[left]) / (ROWS[right] - ROWS[left])
            means[index] = min(means[index], means[left] + (means[right] - means[left]) * share)
    first, last = seen[0], seen[-1]
    prices: list[float] = []
    for index, rows in enumerate(ROWS):
        if index in means:
            price = means[index]
        elif index < first:
            price = means[first] * rows / ROWS[first]
        elif index <= last + 1:
            price = prices[-1]
        else:
            price = means[last] + _slope(means, seen) * (rows - ROWS[last])
        prices.append(max(price, prices[-1] if prices else 0.0))
    return prices


def _slope(means: dict[int, float], seen: list[int]) -> float:
    """Seconds per further row, from the smallest cell to the largest; of a single one, its time shared by its rows."""
    first, last = seen[0], seen[-1]
    if first == last:
        return means[last] / ROWS[last]
    return max(0.0, (means[last] - means[first]) / (ROWS[last] - ROWS[first]))
