"""Rotary positions of packed rows from one table a round, shared by all layers.

`mx.fast.rope` on the CPU computes frequencies, sines and cosines anew in every call, twice a layer, though all layers
of a round rotate by the same positions. Only plain, half-split RoPE in float32 is taken over; every other call goes to
mlx-lm's own module. (RoFormer, Su et al. 2021.)
"""

import math

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE


class Rotations:
    """Cosines and sines of the newest positions asked for. Written by the `TableRoPE`s of one model.

    The table is kept as long as the very same positions array is asked for, which is one round.
    """

    def __init__(self) -> None:
        self._positions: mx.array | None = None
        self._tables: dict[tuple[int, float, float], tuple[mx.array, mx.array]] = {}

    def table(self, positions: mx.array, dims: int, base: float, scale: float) -> tuple[mx.array, mx.array]:
        """Cosines, and sines with the sign of their half, float32 `[rows, 1, 1, dims]` for int32 `[rows]`."""
        if positions is not self._positions:
            self._positions = positions
            self._tables.clear()
        key = (dims, base, scale)
        if key not in self._tables:
            self._tables[key] = _table(positions, dims, base, scale)
        return self._tables[key]


def _table(positions: mx.array, dims: int, base: float, scale: float) -> tuple[mx.array, mx.array]:
    half = dims // 2
    frequencies = mx.exp(mx.arange(half, dtype=mx.float32) * (-math.log(base) / half))
    angles = (positions.astype(mx.float32) * scale)[:, None, None, None] * frequencies
    cosines, sines = mx.cos(angles), mx.sin(angles)
    return mx.concatenate([cosines, cosines], axis=-1), mx.concatenate([-sines, sines], axis=-1)


class TableRoPE(Module):
    """Stands in for a `nn.RoPE` of the model."""

    def __init__(self, original: RoPE, rotations: Rotations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._original = original
        self._rotations = rotations

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate `[rows, heads, length, dims]`, each row by its own position if `offset` is int32 `[rows]`."""
        original = self._original
        if isinstance(offset, mx.array) and self._takes(x, offset):
            cosines, sines = self._rotations.table(offset, original.dims, original.base, original.scale)
            half = original.dims // 2
            swapped = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
            return x * cosines + swapped * sines
        rotated: mx.array = original(x, offset=offset)  # type: ignore[arg-type]  # MLX takes arrays too
        return rotated

    def _takes(self, x: mx.array, offset: mx.array) -> bool:
        one_position_a_row = offset.ndim == 1 and x.shape[-2] == 1
        return one_position_a_row and x.dtype == mx.float32 and x.shape[-1] == self._original.dims


def install_rope(model: Module) -> None:
    """Put tables in place of the plain RoPEs of `model`, once."""
    rotations = Rotations()
    for part in model.modules():
        rope = part.get("rope")
        if type(rope) is RoPE and not rope.traditional:
            part.rope = TableRoPE(rope, rotations)
