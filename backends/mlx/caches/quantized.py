"""Keys and values of 4 or 8 bits (affine, in groups along the dimension, as MLX quantizes), on the packed path.

A row is quantized by itself when it is stored, so that it does not matter in what chunks a prompt came. The first
`start` positions of a lane stay as they are for good: they are kept twice, and read from where they are exact.
"""

import mlx.core as mx
import msgspec

from backends.base import KVQuantization
from backends.mlx.caches.buffers import LayerBuffers, LayerShape, Plane
from backends.mlx.caches.packed import PackedCache
from backends.mlx.exponential import Attention
from backends.mlx.layout import PackedRound, Rectangle


class QuantizedShape(msgspec.Struct, frozen=True):
    """The planes of quantized keys and values."""

    shape: LayerShape
    how: KVQuantization

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Words, scales and biases of the keys, then of the values."""
        heads, dtype = self.shape.kv_heads, self.shape.dtype
        return tuple(
            plane
            for dim in (self.shape.key_dim, self.shape.value_dim)
            for plane in (
                Plane(heads, dim * self.how.bits // 32, mx.uint32),
                Plane(heads, dim // self.how.group_size, dtype),
                Plane(heads, dim // self.how.group_size, dtype),
            )
        )


class QuantizedCache(PackedCache):
    """What a layer sees of a packed round; `exact` are the buffers of the first positions, None if there are none.

    Attention runs over keys and values that are made exact for one rectangle of one layer at a time: any kind of
    attention can be had over them, and no more than that is ever held.
    """

    def __init__(
        self, buffers: LayerBuffers, exact: LayerBuffers | None, how: KVQuantization, attention: Attention
    ) -> None:
        super().__init__(buffers, attention)
        self._exact = exact
        self._how = how

    def _store(self, packed: PackedRound, keys: mx.array, values: mx.array) -> None:
        super()._store(packed, keys, values)
        if self._exact is not None:
            for write in packed.writes(self._exact.sight):
                self._exact.write(write, keys, values)

    def _planes(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        return tuple(
            part
            for rows in (keys, values)
            for part in mx.quantize(rows, group_size=self._how.group_size, bits=self._how.bits)
        )

    def _keys_and_values(self, rectangle: Rectangle) -> tuple[mx.array, mx.array]:
        place = (rectangle.capacity, rectangle.row, rectangle.lanes)
        held = self._buffers.held(*place, rectangle.length)
        keys, values = self._exactly(*held[:3]), self._exactly(*held[3:])
        if self._exact is None:
            return keys, values
        first = self._exact.held(*place, min(self._how.start, rectangle.length))
        exact, later = first[0].shape[2], (keys, values)
        joined = [mx.concatenate([a, b[:, :, exact:]], axis=2) for a, b in zip(first, later, strict=True)]
        return joined[0], joined[1]

    def _exactly(self, words: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.dequantize(words, scales, biases, group_size=self._how.group_size, bits=self._how.bits)
