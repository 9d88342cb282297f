"""How the windows of a round lie in one packed forward: row order, where keys go, and the rectangles attention sees.

A packed row is one token of one window, a batch entry of length 1 with a position of its own. Rows are ordered by
(capacity class, width class, buffer row), so that the rows of one attention rectangle lie together. Made once per
round on the host, with one layout for each `Sight` that layers have; knows seats and windows, no model.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import mlx.core as mx
import msgspec
import numpy as np

from backends.groups import LaneGroups, Seat
from backends.mlx.caches.buffers import ScatterWrite, SliceWrite, Write
from backends.mlx.caches.sight import EVERYTHING, HEADROOM, Positions, Sight, held
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
    keys end), or None where every query may see every key. If `wide`, a lane's window is too wide for its ring: its
    keys are what the ring held before the round, and behind that the window's own rows `[first, last)`.
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
    wide: bool = False


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


class PackedRound:
    """The rows of one round, and what layers of each sight need to know of them."""

    def __init__(self, windows: Sequence[Window], groups: LaneGroups) -> None:
        """Every window's lane must have a seat that holds it."""
        self.seated = _in_order(windows, groups)
        positions = np.concatenate([np.arange(entry.window.start, entry.window.end) for entry in self.seated])
        self.rows = len(positions)
        self.positions = mx.array(positions.astype(np.int32))
        self._layouts: dict[Sight, PackedLayout] = {}
        self._writes: dict[Sight, tuple[Write, ...]] = {}

    def writes(self, sight: Sight = EVERYTHING) -> tuple[Write, ...]:
        """Where layers of one sight store the rows."""
        if sight not in self._writes:
            self._writes[sight] = tuple(_writes(self.seated, sight))
        return self._writes[sight]

    def layout(self, sight: Sight = EVERYTHING) -> PackedLayout:
        """For layers of one sight."""
        if sight not in self._layouts:
            self._layouts[sight] = self._lay_out(sight)
        return self._layouts[sight]

    def _lay_out(self, sight: Sight) -> PackedLayout:
        shared = [tuple(entries) for _, entries in groupby(self.seated, _rectangle_key)]
        cuts = [_Cut.of(entries, sight) for run in shared for entries in _dense_runs(run)]
        return PackedLayout(
            seated=self.seated,
            rows=self.rows,
            positions=self.positions,
            writes=self.writes(sight),
            rectangles=tuple(cut.rectangle() for cut in cuts),
            outputs=_outputs(cuts, self.rows),
        )


def packed_layout(windows: Sequence[Window], groups: LaneGroups, sight: Sight = EVERYTHING) -> PackedLayout:
    """Lay out a round for layers of one sight; every window's lane must have a seat that holds it."""
    return PackedRound(windows, groups).layout(sight)


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
    sight: Sight
    row: int
    lanes: int
    width: int
    length: int
    wide: bool

    @classmethod
    def of(cls, entries: tuple[Seated, ...], sight: Sight) -> "_Cut":
        row = entries[0].seat.row
        width = max(entry.window.rows for entry in entries)
        end = max(entry.window.end for entry in entries)
        places = sight.places(entries[0].seat.capacity)
        wide = width > HEADROOM and end > places
        if wide and any(entry.window.draft for entry in entries):
            raise ValueError(f"a window of {width} rows with a draft is wider than the head-room of its ring")
        length = places + width if wide else min(end, places)
        return cls(entries, sight, row, entries[-1].seat.row - row + 1, width, length, wide)

    @property
    def full(self) -> bool:
        """No padding: every buffer row has a window, every window is as wide as the rectangle."""
        return len(self.entries) == self.lanes and all(entry.window.rows == self.width for entry in self.entries)

    def rectangle(self) -> Rectangle:
        first, last = self.entries[0].first, self.entries[-1].last
        queries = None if self.full else mx.array(self._queries())
        capacity = self.entries[0].seat.capacity
        return Rectangle(
            capacity, self.row, self.lanes, self.width, self.length, first, last, queries, self._mask(), self.wide
        )

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
        if self._limited:
            queries, newest = self._positions()[..., None], self._newest()[..., None]
            return mx.array(self.sight.sees(queries, newest, self._keys()[:, None])[:, None])
        if self.full and all(entry.window.end == self.length for entry in self.entries):
            return None if self.width == 1 or self.sight.both_ways else "causal"
        return mx.arange(self.length) <= mx.array(self._newest()[:, None, :, None])

    @property
    def _limited(self) -> bool:
        """Whether some query does not see all of its lane's past, or keys do not stand at their positions."""
        reach = self.sight.reach
        return bool(reach) and any(entry.window.end > reach for entry in self.entries)

    def _positions(self) -> Positions:
        """Of all queries, int32 `[lanes, width]`; padding has one that sees something."""
        positions = np.zeros((self.lanes, self.width), dtype=np.int32)
        for entry in self.entries:
            window = entry.window
            lane = entry.seat.row - self.row
            positions[lane, : window.rows] = np.arange(window.start, window.end)
            positions[lane, window.rows :] = window.end - 1
        return positions

    def _newest(self) -> Positions:
        """The newest position that each query may see, int32 `[lanes, width]`."""
        positions = self._positions()
        return np.broadcast_to(positions[:, -1:], positions.shape) if self.sight.both_ways else positions

    def _keys(self) -> Positions:
        """The positions of all keys, int32 `[lanes, length]`."""
        places = self.sight.places(self.entries[0].seat.capacity)
        if self.wide:
            window = self.entries[0].window
            before = held(places, places, np.array([window.start], dtype=np.int32))
            return np.concatenate([before, np.arange(window.start, window.end, dtype=np.int32)[None]], axis=1)
        ends = np.ones(self.lanes, dtype=np.int32)
        for entry in self.entries:
            ends[entry.seat.row - self.row] = entry.window.end
        return held(places, self.length, ends)


def _outputs(cuts: Sequence[_Cut], rows: int) -> mx.array | None:
    offsets = np.cumsum([0, *(cut.lanes * cut.width for cut in cuts)])
    places = np.concatenate([cut.places() + offset for cut, offset in zip(cuts, offsets, strict=False)])
    if offsets[-1] == rows and np.array_equal(places, np.arange(rows)):
        return None
    return mx.array(places.astype(np.int32))


def _writes(seated: Sequence[Seated], sight: Sight) -> Iterator[Write]:
    for capacity, entries in groupby(seated, lambda entry: entry.seat.capacity):
        places = sight.places(capacity)
        narrow: list[Seated] = []
        for entry in entries:
            if sight.head:
                yield from _head_write(capacity, entry, sight.head)
            elif entry.window.rows > WIDEST_SCATTERED:
                yield from _wide_writes(capacity, entry, places)
            else:
                narrow.append(entry)
        if narrow and _aligned(narrow, places):
            yield _slice_write(capacity, narrow, places)
        elif narrow:
            yield _scatter_write(capacity, narrow, places)


def _head_write(capacity: int, entry: Seated, head: int) -> Iterator[Write]:
    """Those rows of a window that stand in the head of its lane."""
    width = min(entry.window.end, head) - entry.window.start
    if width > 0:
        yield SliceWrite(capacity, entry.first, entry.first + width, entry.seat.row, entry.window.start, width)


def _wide_writes(capacity: int, entry: Seated, places: int) -> Iterator[Write]:
    """The newest rows of a window, as many as there are places, in one slice or, around the ring's end, in two."""
    window = entry.window
    position = max(window.start, window.end - places)
    while position < window.end:
        place = position % places
        width = min(window.end - position, places - place)
        first = entry.first + position - window.start
        yield SliceWrite(capacity, first, first + width, entry.seat.row, place, width)
        position += width


def _aligned(entries: Sequence[Seated], places: int) -> bool:
    """Whether the windows are alike and neighbours, so that one slice takes them all."""
    head = entries[0]
    return head.window.start % places + head.window.rows <= places and all(
        entry.seat.row == head.seat.row + offset
        and entry.window.start == head.window.start
        and entry.window.rows == head.window.rows
        for offset, entry in enumerate(entries)
    )


def _slice_write(capacity: int, entries: Sequence[Seated], places: int) -> SliceWrite:
    head, window = entries[0], entries[0].window
    return SliceWrite(capacity, head.first, entries[-1].last, head.seat.row, window.start % places, window.rows)


def _scatter_write(capacity: int, entries: Sequence[Seated], places: int) -> ScatterWrite:
    rows = np.concatenate([np.full(entry.window.rows, entry.seat.row, dtype=np.int32) for entry in entries])
    positions = np.concatenate([np.arange(entry.window.start, entry.window.end, dtype=np.int32) for entry in entries])
    return ScatterWrite(
        capacity, entries[0].first, entries[-1].last, mx.array(rows[:, None]), mx.array(positions[:, None] % places)
    )
