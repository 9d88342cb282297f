"""The cache of a layer on the padded path, where a model's own attention code sees a right-padded rectangle of lanes.

mlx-lm's code as it is, which makes it the reference of the packed path too.
"""

import mlx.core as mx

from backends.mlx.caches.buffers import LayerBuffers
from backends.mlx.rectangle import PaddedLayout


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
