"""The key and value buffers of one attention layer: one pair per capacity class, `[rows, kv_heads, capacity, dim]`.

Owns the arrays and applies the changes that `LaneGroups` decides. Writes replace the only reference to a buffer, so MLX
updates it in place; a view is made per use and never kept across a write (it would make the write copy the buffer).
"""

import mlx.core as mx
import msgspec

from backends.mlx.caches.groups import Change, Resize


class LayerShape(msgspec.Struct, frozen=True):
    """What one layer caches per position; key and value widths may differ."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype


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
    """Keys and values of every lane in one layer. Written by the caches that stand before it, on the engine thread."""

    def __init__(self, shape: LayerShape) -> None:
        self._shape = shape
        self._heads = mx.arange(shape.kv_heads)[None]
        self.keys: dict[int, mx.array] = {}
        self.values: dict[int, mx.array] = {}

    def apply(self, change: Change) -> None:
        """Resize a group or copy one lane to another seat."""
        if isinstance(change, Resize):
            self._resize(self.keys, change, self._shape.key_dim)
            self._resize(self.values, change, self._shape.value_dim)
            return
        source, target, length = change.source, change.target, change.length
        for buffers in (self.keys, self.values):
            held = mx.contiguous(buffers[source.capacity][source.row, :, :length])
            mx.eval(
                held
            )  # until it is made, it holds the buffer that it reads, and a write to that would copy all of it
            buffer = buffers.pop(target.capacity)
            buffer[target.row, :, :length] = held
            buffers[target.capacity] = buffer

    def write(self, write: Write, keys: mx.array, values: mx.array) -> None:
        """Store packed keys and values, `[rows, kv_heads, 1, dim]` each, where `write` says."""
        for buffers, packed in ((self.keys, keys), (self.values, values)):
            part = packed[write.first : write.last] if write.last - write.first < packed.shape[0] else packed
            buffer = buffers.pop(write.capacity)
            if isinstance(write, SliceWrite):
                lanes = (write.last - write.first) // write.width
                block = part if write.width == 1 else _to_lanes(part, lanes)
                buffer[write.row : write.row + lanes, :, write.start : write.start + write.width] = block
            else:
                buffer[write.rows, self._heads, write.positions] = part[:, :, 0]
            buffers[write.capacity] = buffer

    def arrays(self) -> list[mx.array]:
        """All buffers, to be evaluated where nothing else depends on them."""
        return [*self.keys.values(), *self.values.values()]

    def _resize(self, buffers: dict[int, mx.array], change: Resize, dim: int) -> None:
        old = buffers.pop(change.capacity, None)
        if change.rows == 0:
            return
        buffer = mx.zeros((change.rows, self._shape.kv_heads, change.capacity, dim), self._shape.dtype)
        if old is not None:
            buffer[: old.shape[0]] = old
        buffers[change.capacity] = buffer


def _to_lanes(packed: mx.array, lanes: int) -> mx.array:
    """`[lanes * width, heads, 1, dim]` to `[lanes, heads, width, dim]`."""
    _, heads, _, dim = packed.shape
    return packed.reshape(lanes, -1, heads, dim).transpose(0, 2, 1, 3)
