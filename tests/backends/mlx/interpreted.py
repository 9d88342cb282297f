"""Layouts read naively, number by number: who is written where, and who sees what.

A key is known by its lane's slot and its position, a row by its place in the packed order. Tests compare what comes out
of here with what lanes that are left to themselves would see.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from backends.groups import LaneGroups
from backends.mlx.caches.buffers import ScatterWrite, SliceWrite, Write
from backends.mlx.caches.sight import EVERYTHING, Sight
from backends.mlx.layout import PackedLayout, Rectangle
from backends.mlx.rectangle import PaddedLayout
from scheduler.round import Window

Key = tuple[int, int]
"""(slot, position)"""


class Seen(msgspec.Struct, frozen=True):
    """What one row of attention's output is made of: the query's packed row, and the keys it sees, in order."""

    query: int
    keys: tuple[Key | None, ...]


class Placed(msgspec.Struct, frozen=True):
    """Windows of a round, and the seats of all lanes: theirs and those of lanes that sit the round out."""

    windows: tuple[Window, ...]
    groups: LaneGroups
    lengths: Mapping[int, int]
    """How many positions each lane holds before the round, by slot."""


class KeyMemory:
    """A layer's buffers as dictionaries, full of other lanes' keys and stale ones. Written by the layout's writes."""

    def __init__(self, placed: Placed, sight: Sight = EVERYTHING) -> None:
        self.keys: dict[tuple[int, int, int], Key] = {}
        """(capacity, row, place) -> what stands there."""
        self._sight = sight
        for slot, length in placed.lengths.items():
            seat = placed.groups.seat(slot)
            places = sight.places(seat.capacity)
            for position in range(length):
                self.keys[seat.capacity, seat.row, position % places] = (slot, position)

    def write(self, write: Write, rows: Sequence[Key]) -> None:
        """Store the keys of all packed rows where `write` says."""
        part = rows[write.first : write.last]
        for key, row, position in zip(part, *_targets(write), strict=True):
            assert 0 <= position < self._sight.places(write.capacity)
            self.keys[write.capacity, row, position] = key

    def look(self, capacity: int, row: int, positions: Iterable[int]) -> tuple[Key | None, ...]:
        return tuple(self.keys.get((capacity, row, position)) for position in positions)


def _targets(write: Write) -> tuple[list[int], list[int]]:
    """The buffer row and the position that each packed row of a write goes to."""
    count = write.last - write.first
    if isinstance(write, ScatterWrite):
        return np.array(write.rows).reshape(count).tolist(), np.array(write.positions).reshape(count).tolist()
    assert isinstance(write, SliceWrite)
    lanes, remainder = divmod(count, write.width)
    assert remainder == 0
    rows = np.repeat(np.arange(write.row, write.row + lanes), write.width)
    positions = np.tile(np.arange(write.start, write.start + write.width), lanes)
    return rows.tolist(), positions.tolist()


def packed_rows(layout: PackedLayout) -> list[Key]:
    """The (slot, position) of every packed row."""
    return [
        (entry.window.slot, position)
        for entry in layout.seated
        for position in range(entry.window.start, entry.window.end)
    ]


def packed_memory(layout: PackedLayout, placed: Placed, sight: Sight = EVERYTHING) -> KeyMemory:
    """What stands in the buffers after the layout's writes."""
    memory = KeyMemory(placed, sight)
    for write in layout.writes:
        memory.write(write, packed_rows(layout))
    return memory


def see_packed(layout: PackedLayout, placed: Placed, sight: Sight = EVERYTHING) -> list[Seen]:
    """What each packed row's attention output is made of, in packed order."""
    before, after = KeyMemory(placed, sight), packed_memory(layout, placed, sight)
    rows = packed_rows(layout)
    outputs = []
    for rectangle in layout.rectangles:
        if rectangle.wide:
            ring = before.look(rectangle.capacity, rectangle.row, range(sight.places(rectangle.capacity)))
            keys = [(*ring, *rows[rectangle.first : rectangle.last])]
        else:
            lanes = range(rectangle.row, rectangle.row + rectangle.lanes)
            keys = [after.look(rectangle.capacity, row, range(rectangle.length)) for row in lanes]
        outputs += _see_rectangle(rectangle, keys)
    order = range(layout.rows) if layout.outputs is None else np.array(layout.outputs).tolist()
    return [outputs[place] for place in order]


def _see_rectangle(rectangle: Rectangle, keys: Sequence[Sequence[Key | None]]) -> list[Seen]:
    """`keys` are what stands before each of its lanes."""
    lanes, width = rectangle.lanes, rectangle.width
    queries = (
        range(rectangle.first, rectangle.last) if rectangle.queries is None else np.array(rectangle.queries).tolist()
    )
    assert len(queries) == lanes * width
    visible = _visible(rectangle)
    return [
        Seen(
            queries[lane * width + column],
            tuple(keys[lane][place] for place in np.flatnonzero(visible[lane, column]).tolist()),
        )
        for lane in range(lanes)
        for column in range(width)
    ]


def _visible(rectangle: Rectangle) -> np.ndarray:
    """Boolean `[lanes, width, length]`."""
    shape = (rectangle.lanes, rectangle.width, rectangle.length)
    if rectangle.mask is None:
        return np.ones(shape, dtype=bool)
    if isinstance(rectangle.mask, str):
        assert rectangle.mask == "causal"
        offset = rectangle.length - rectangle.width
        triangle = np.arange(rectangle.length) <= offset + np.arange(rectangle.width)[:, None]
        return np.broadcast_to(triangle, shape)
    mask = np.array(rectangle.mask)
    assert mask.shape == (rectangle.lanes, 1, rectangle.width, rectangle.length)
    return mask[:, 0]


def see_padded(layout: PaddedLayout, placed: Placed) -> tuple[KeyMemory, list[list[tuple[Key | None, ...]]]]:
    """The memory after the writes, and the keys that each lane and column of the rectangle sees."""
    memory = KeyMemory(placed)
    windows = [placed.windows[index] for index in layout.order]
    rows = [(window.slot, window.start + column) for window in windows for column in range(layout.width)]
    memory.write(layout.write, rows)
    buffer_rows = range(layout.row, layout.row + layout.lanes) if layout.rows is None else np.array(layout.rows)
    mask = np.array(layout.mask)
    assert mask.shape == (layout.lanes, 1, layout.width, layout.length)
    return memory, [
        [
            memory.look(layout.capacity, int(row), np.flatnonzero(mask[lane, 0, column]).tolist())
            for column in range(layout.width)
        ]
        for lane, row in enumerate(buffer_rows)
    ]
