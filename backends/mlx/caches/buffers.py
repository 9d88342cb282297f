"""The buffers of one attention layer: for each of its planes one per capacity class, `[rows, heads, places, dim]`.

A layer that keeps keys and values has two planes; a quantized one has words, scales and biases of each. A layer that
sees only so far back has fewer places than the class has positions (see `Sight`). Owns the arrays and applies the
changes that `LaneGroups` decides. Writes replace the only reference to a buffer, so MLX updates it in place; a view is
made per use and never kept across a write (it would make the write copy the buffer).
"""

from typing import Protocol

import mlx.core as mx
import msgspec

from backends.groups import Change, Move, Resize
from backends.mlx.caches.sight import EVERYTHING, Sight


class Plane(msgspec.Struct, frozen=True):
    """One kind of number that a layer caches per position."""

    heads: int
    dim: int
    dtype: mx.Dtype


class Planes(Protocol):
    """What a layer caches per position."""

    @property
    def planes(self) -> tuple[Plane, ...]:
        """In the order in which they are written."""
        ...


class LayerShape(msgspec.Struct, frozen=True):
    """Keys and values, of widths that may differ; no values if theirs is 0."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Keys, values."""
        dims = (self.key_dim, self.value_dim) if self.value_dim else (self.key_dim,)
        return tuple(Plane(self.kv_heads, dim, self.dtype) for dim in dims)


class SliceWrite(msgspec.Struct, frozen=True):
    """The packed rows `[first, last)` are whole windows of one width that go to neighbouring rows of a group, all at
    the same position: buffer rows `[row, row + lanes)`, positions `[start, start + width)`.
    """

    capacity: int
    first: int
    last: int
    row: int
    start: int
    width: int


class ScatterWrite(msgspec.Struct, frozen=True):
    """The packed rows `[first, last)` go each to its own row and position of a group: `rows` and `positions` are int32
    `[last - first, 1]`.
    """

    capacity: int
    first: int
    last: int
    rows: mx.array
    positions: mx.array


Write = SliceWrite | ScatterWrite


class LayerBuffers:
    """What every lane caches in one layer. Written by the caches that stand before it, on the engine thread."""

    def __init__(self, shape: Planes, sight: Sight = EVERYTHING) -> None:
        self.sight = sight
        self.shapes = shape.planes
        self._heads = mx.arange(self.shapes[0].heads)[None]
        self.planes: tuple[dict[int, mx.array], ...] = tuple({} for _ in self.shapes)
        """By capacity."""

    @property
    def keys(self) -> dict[int, mx.array]:
        """The first plane."""
        return self.planes[0]

    @property
    def values(self) -> dict[int, mx.array]:
        """The last plane, which may be the first."""
        return self.planes[-1]

    def row_bytes(self, capacity: int) -> int:
        """What one row of a class takes over all planes."""
        return self.sight.places(capacity) * sum(plane.heads * plane.dim * plane.dtype.size for plane in self.shapes)

    def largest_plane(self, capacity: int) -> int:
        """What the largest plane has of that."""
        return self.sight.places(capacity) * max(plane.heads * plane.dim * plane.dtype.size for plane in self.shapes)

    def apply(self, *changes: Change) -> None:
        """Resize groups and copy lanes to other seats, in order.

        Where anything is copied, it is evaluated plane by plane: at no time is more than one plane held twice.
        """
        for plane, buffers in zip(self.shapes, self.planes, strict=True):
            copies = False
            for change in changes:
                if isinstance(change, Resize):
                    copies = self._resize(buffers, change, plane) or copies
                else:
                    copies = True
                    _copy(buffers, change)
            if copies:
                mx.eval(list(buffers.values()))

    def write(self, write: Write, *packed: mx.array) -> None:
        """Store what is packed for each plane, `[rows, heads, 1, dim]`, where `write` says."""
        for buffers, rows in zip(self.planes, packed, strict=True):
            part = rows[write.first : write.last] if write.last - write.first < rows.shape[0] else rows
            buffer = buffers.pop(write.capacity)
            if isinstance(write, SliceWrite):
                lanes = (write.last - write.first) // write.width
                block = part if write.width == 1 else _to_lanes(part, lanes)
                buffer[write.row : write.row + lanes, :, write.start : write.start + write.width] = block
            else:
                buffer[write.rows, self._heads, write.positions] = part[:, :, 0]
            buffers[write.capacity] = buffer

    def held(self, capacity: int, row: int, lanes: int, length: int) -> tuple[mx.array, ...]:
        """Of each plane the first `length` places of neighbouring rows, `[lanes, heads, length, dim]`."""
        return tuple(buffers[capacity][row : row + lanes, :, :length] for buffers in self.planes)

    def arrays(self) -> list[mx.array]:
        """All buffers, to be evaluated where nothing else depends on them."""
        return [buffer for buffers in self.planes for buffer in buffers.values()]

    def _resize(self, buffers: dict[int, mx.array], change: Resize, plane: Plane) -> bool:
        """Whether rows were copied."""
        old = buffers.pop(change.capacity, None)
        if change.rows == 0:
            return False
        if old is not None and change.rows < old.shape[0]:
            buffers[change.capacity] = mx.contiguous(old[: change.rows])
            return True
        places = self.sight.places(change.capacity)
        buffer = mx.zeros((change.rows, plane.heads, places, plane.dim), plane.dtype)
        if old is not None:
            buffer[: old.shape[0]] = old
        buffers[change.capacity] = buffer
        return old is not None


def _copy(buffers: dict[int, mx.array], move: Move) -> None:
    source, target = buffers[move.source.capacity], move.target
    length = min(move.length, source.shape[2])
    held = mx.contiguous(source[move.source.row, :, :length])
    mx.eval(held)  # until it is made, it holds the buffer that it reads, and a write to that would copy all of it
    del source
    buffer = buffers.pop(target.capacity)
    buffer[target.row, :, :length] = held
    buffers[target.capacity] = buffer


def _to_lanes(packed: mx.array, lanes: int) -> mx.array:
    """`[lanes * width, heads, 1, dim]` to `[lanes, heads, width, dim]`."""
    _, heads, _, dim = packed.shape
    return packed.reshape(lanes, -1, heads, dim).transpose(0, 2, 1, 3)
