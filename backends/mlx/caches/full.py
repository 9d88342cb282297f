"""Full-attention caches as mlx-lm's model code meets them: one object per layer, in two forms over the same buffers.

`PackedCache` stands behind the attention seam: every row is its own batch entry, keys go to the lanes' buffers, and
attention runs per rectangle. `PaddedCache` serves models without the seam, whose own attention code sees one
right-padded rectangle of all lanes: mlx-lm's code as it is, which makes it the reference of the packed path too.
"""

from typing import Any

import mlx.core as mx

from backends.mlx.caches.buffers import LayerBuffers
from backends.mlx.exponential import Attention
from backends.mlx.layout import PackedLayout, Rectangle
from backends.mlx.rectangle import PaddedLayout


class PackedCache:
    """What a layer sees of a packed round. `layout` is set for all layers before each forward.

    `attention` is called as `mx.fast.scaled_dot_product_attention` is.
    """

    def __init__(self, buffers: LayerBuffers, attention: Attention) -> None:
        self._buffers = buffers
        self._attention = attention
        self.layout: PackedLayout | None = None

    @property
    def offset(self) -> mx.array:
        """Each packed row's position, int32 `[rows]`: RoPE rotates every row by its own."""
        return self._current().positions

    def make_mask(self, *_: Any, **__: Any) -> None:
        """Rows of length 1 need no mask; the rectangles bring their own."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store the round's keys and values (`[rows, kv_heads, 1, dim]`); `attend` finds them in the buffers."""
        for write in self._current().writes:
            self._buffers.write(write, keys, values)
        return keys, values

    def attend(self, queries: mx.array, *, scale: float, sinks: mx.array | None) -> mx.array:
        """Attention of packed queries `[rows, heads, 1, dim]` over the lanes' keys; the same shape out."""
        layout = self._current()
        parts = [self._attend(queries, rectangle, scale, sinks) for rectangle in layout.rectangles]
        joined = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return joined if layout.outputs is None else mx.take(joined, layout.outputs, axis=0)

    def _attend(self, packed: mx.array, rectangle: Rectangle, scale: float, sinks: mx.array | None) -> mx.array:
        last_row = rectangle.row + rectangle.lanes
        keys = self._buffers.keys[rectangle.capacity][rectangle.row : last_row, :, : rectangle.length]
        values = self._buffers.values[rectangle.capacity][rectangle.row : last_row, :, : rectangle.length]
        queries = _gather(packed, rectangle)
        output = self._attention(queries, keys, values, scale=scale, mask=rectangle.mask, sinks=sinks)
        if rectangle.width == 1:
            return output
        _, heads, _, dim = output.shape
        return output.transpose(0, 2, 1, 3).reshape(-1, heads, 1, dim)

    def _current(self) -> PackedLayout:
        assert self.layout is not None, "a forward without a layout"
        return self.layout


def _gather(packed: mx.array, rectangle: Rectangle) -> mx.array:
    """Packed queries `[rows, heads, 1, dim]` to a rectangle's `[lanes, heads, width, dim]`."""
    if rectangle.queries is not None:
        packed = mx.take(packed, rectangle.queries, axis=0)
    elif rectangle.last - rectangle.first < packed.shape[0]:
        packed = packed[rectangle.first : rectangle.last]
    if rectangle.width == 1:
        return packed
    _, heads, _, dim = packed.shape
    return packed.reshape(rectangle.lanes, rectangle.width, heads, dim).transpose(0, 2, 1, 3)


class PaddedCache:
    """What a layer sees of a padded round: keys `[lanes, kv_heads, width, dim]` in, all of its lanes' keys out."""

    def __init__(self, buffers: LayerBuffers) -> None:
        self._buffers = buffers
        self.layout: PaddedLayout | None = None

    @property
    def offset(self) -> mx.array:
        """Where each lane's window starts, int32 `[lanes]`."""
        return self._current().starts

    def make_mask(self, length: int, *, return_array: bool = False, window_size: int | None = None) -> mx.array:  # noqa: ARG002 (mlx-lm's signature)
        """Boolean `[lanes, 1, width, length]`: a query at position p sees the keys of positions up to p."""
        assert window_size is None, "a sliding window needs a cache of its own"
        return self._current().mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store the windows, padding included (it lies behind each lane's end), and return the lanes' buffers."""
        self._buffers.write(self._current().write, _to_rows(keys), _to_rows(values))
        return self._fetch(self._buffers.keys), self._fetch(self._buffers.values)

    def _fetch(self, buffers: dict[int, mx.array]) -> mx.array:
        layout = self._current()
        buffer = buffers[layout.capacity]
        if layout.rows is not None:
            return mx.take(buffer, layout.rows, axis=0)[:, :, : layout.length]
        return buffer[layout.row : layout.row + layout.lanes, :, : layout.length]

    def _current(self) -> PaddedLayout:
        assert self.layout is not None, "a forward without a layout"
        return self.layout


def _to_rows(lanes: mx.array) -> mx.array:
    """`[lanes, heads, width, dim]` to `[lanes * width, heads, 1, dim]`."""
    _, heads, _, dim = lanes.shape
    return lanes.transpose(0, 2, 1, 3).reshape(-1, heads, 1, dim)
