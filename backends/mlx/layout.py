"""How the windows of a round lie in one packed forward: row order, where keys go, and the rectangles attention sees.

A packed row is one token of one window, a batch entry of length 1 with a position of its own. Rows are ordered by
(capacity class, width class, buffer row), so that the rows of one attention rectangle lie together. Made once per
round on the host and shared by all layers; knows seats and windows, no model.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import mlx.core as mx
import msgspec
import numpy as np

from backends.mlx.caches.buffers import ScatterWrite, SliceWrite, Write
from backends.mlx.caches.groups import LaneGroups, Seat
from scheduler.round import Window

WIDEST_SHARED = 32
"""Windows wider than this attend alone: padding them to one another costs more than a call of their own."""
WIDEST_SCATTERED = 8
"""Windows wider than this are stored by a slice of their own, narrower ones together by one scatter."""


class Seated(msgspec.Struct, frozen=True):
    """A window, its place in the round as planned, its lane's seat, and its first row in packed order."""

    window: Window
    index: int
    seat: Seat
    first: int

    @property
    def last(self) -> int:
        """The row behind its last."""
        return self.first + self.window.rows


class Rectangle(msgspec.Struct, frozen=True):
    """One attention call: `lanes` buffer rows from `row` of a group on, `width` queries each, keys `[0, length)`.

    `queries` (int32 `[lanes * width]`) picks packed rows, None where they are just `[first, last)` in order; padding
    repeats some row and is thrown away. `mask` is boolean `[lanes, 1, width, length]`, "causal" (queries end where the
    keys end), or None where every query may see every key.
    """

    capacity: int
    row: int
    lanes: int
    width: int
    length: int
    first: int
    last: int
    queries: mx.array | None
    mask: mx.array | str | None


class PackedLayout(msgspec.Struct, frozen=True):
    """Everything a layer needs to know of a round of `rows` packed rows.

    `positions` is int32 `[rows]`. `outputs` (int32 `[rows]`) finds each packed row in the concatenated outputs of the
    rectangles, None where they are in order already.
    """

    seated: tuple[Seated, ...]
    rows: int
    positions: mx.array
    writes: tuple[Write, ...]
    rectangles: tuple[Rectangle, ...]
    outputs: mx.array | None


def packed_layout(windows: Sequence[Window], groups: LaneGroups) -> PackedLayout:
    """Lay out a round; every window's lane must have a seat that holds it."""
    seated = _in_order(windows, groups)
    positions = np.concatenate([np.arange(entry.window.start, entry.window.end) for entry in seated])
    shared = [tuple(entries) for _, entries in groupby(seated, _rectangle_key)]
    cuts = [_Cut.of(entries) for run in shared for entries in _dense_runs(run)]
    return PackedLayout(
        seated=seated,
        rows=len(positions),
        positions=mx.array(positions.astype(np.int32)),
        writes=tuple(_writes(seated)),
        rectangles=tuple(cut.rectangle() for cut in cuts),
        outputs=_outputs(cuts, len(positions)),
    )


def width_class(rows: int) -> int:
    """Windows of one class may share a rectangle: powers of two up to `WIDEST_SHARED`."""
    return 1 << (rows - 1).bit_length()


def _in_order(windows: Sequence[Window], groups: LaneGroups) -> tuple[Seated, ...]:
    placed = [(window, index, groups.seat(window.slot)) for index, window in enumerate(windows)]
    placed.sort(key=lambda entry: (entry[2].capacity, width_class(entry[0].rows), entry[2].row))
    seated = []
    first = 0
    for window, index, seat in placed:
        seated.append(Seated(window, index, seat, first))
        first += window.rows
    return tuple(seated)


def _rectangle_key(entry: Seated) -> tuple[int, int, int]:
    rows = entry.window.rows
    alone = entry.seat.row if rows > WIDEST_SHARED else -1
    return entry.seat.capacity, width_class(rows), alone


def _dense_runs(entries: tuple[Seated, ...]) -> Iterator[tuple[Seated, ...]]:
    """Split at gaps in the buffer rows that would make more padding lanes than lanes."""
    run = [entries[0]]
    for entry in entries[1:]:
        if entry.seat.row - run[0].seat.row + 1 > 2 * (len(run) + 1):
            yield tuple(run)
            run = []
        run.append(entry)
    yield tuple(run)


class _Cut(msgspec.Struct, frozen=True):
    """The entries that make one rectangle, and its measures."""

    entries: tuple[Seated, ...]
    row: int
    lanes: int
    width: int
    length: int

    @classmethod
    def of(cls, entries: tuple[Seated, ...]) -> "_Cut":
        row = entries[0].seat.row
        width = max(entry.window.rows for entry in entries)
        length = max(entry.window.end for entry in entries)
        return cls(entries, row, entries[-1].seat.row - row + 1, width, length)

    @property
    def full(self) -> bool:
        """No padding: every buffer row has a window, every window is as wide as the rectangle."""
        return len(self.entries) == self.lanes and all(entry.window.rows == self.width for entry in self.entries)

    def rectangle(self) -> Rectangle:
        first, last = self.entries[0].first, self.entries[-1].last
        queries = None if self.full else mx.array(self._queries())
        capacity = self.entries[0].seat.capacity
        return Rectangle(capacity, self.row, self.lanes, self.width, self.length, first, last, queries, self._mask())

    def places(self) -> np.ndarray:
        """Where each packed row of the entries stands in the rectangle's output, int32."""
        return np.concatenate(
            [(entry.seat.row - self.row) * self.width + np.arange(entry.window.rows) for entry in self.entries]
        )

    def _queries(self) -> np.ndarray:
        queries = np.full((self.lanes, self.width), self.entries[0].first, dtype=np.int32)
        for entry in self.entries:
            queries[entry.seat.row - self.row, : entry.window.rows] = np.arange(entry.first, entry.last)
        return queries.reshape(-1)

    def _mask(self) -> mx.array | str | None:
        if self.full and all(entry.window.end == self.length for entry in self.entries):
            return None if self.width == 1 else "causal"
        positions = np.zeros((self.lanes, 1, self.width, 1), dtype=np.int32)
        for entry in self.entries:
            window = entry.window
            positions[entry.seat.row - self.row, 0, : window.rows, 0] = np.arange(window.start, window.end)
        return mx.arange(self.length) <= mx.array(positions)


def _outputs(cuts: Sequence[_Cut], rows: int) -> mx.array | None:
    offsets = np.cumsum([0, *(cut.lanes * cut.width for cut in cuts)])
    places = np.concatenate([cut.places() + offset for cut, offset in zip(cuts, offsets, strict=False)])
    if offsets[-1] == rows and np.array_equal(places, np.arange(rows)):
        return None
    return mx.array(places.astype(np.int32))


def _writes(seated: Sequence[Seated]) -> Iterator[Write]:
    for capacity, entries in groupby(seated, lambda entry: entry.seat.capacity):
        narrow: list[Seated] = []
        for entry in entries:
            if entry.window.rows > WIDEST_SCATTERED:
                yield _slice_write(capacity, [entry])
            else:
                narrow.append(entry)
        if narrow:
            yield _slice_write(capacity, narrow) if _aligned(narrow) else _scatter_write(capacity, narrow)


def _aligned(entries: Sequence[Seated]) -> bool:
    """Whether the windows are alike and neighbours, so that one slice takes them all."""
    head = entries[0]
    return all(
        entry.seat.row == head.seat.row + offset
        and entry.window.start == head.window.start
        and entry.window.rows == head.window.rows
        for offset, entry in enumerate(entries)
    )


def _slice_write(capacity: int, entries: Sequence[Seated]) -> SliceWrite:
    head, window = entries[0], entries[0].window
    return SliceWrite(capacity, head.first, entries[-1].last, head.seat.row, window.start, window.rows)


def _scatter_write(capacity: int, entries: Sequence[Seated]) -> ScatterWrite:
    rows = np.concatenate([np.full(entry.window.rows, entry.seat.row, dtype=np.int32) for entry in entries])
    positions = np.concatenate([np.arange(entry.window.start, entry.window.end, dtype=np.int32) for entry in entries])
    return ScatterWrite(
        capacity, entries[0].first, entries[-1].last, mx.array(rows[:, None]), mx.array(positions[:, None])
    )
