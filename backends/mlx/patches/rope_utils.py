"""RoPE whose base grows with the length (dynamic NTK), which mlx-lm takes from one offset for all lanes.

Here each row's base comes from its own position, as it does in mlx-lm when tokens are fed one at a time.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import rope_utils


def patch(_: Module) -> None:
    """Let the class rotate rows whose positions differ."""
    owner = rope_utils.DynamicNTKScalingRoPE
    original = owner.__call__
    if hasattr(original, "taken_over"):
        return

    def rotate(self: Any, x: mx.array, offset: mx.array | int = 0) -> mx.array:
        if isinstance(offset, int) or offset.ndim == 0:
            own: mx.array = original(self, x, offset)
            return own
        length = mx.maximum(x.shape[-2] + offset, self.max_position_embeddings)
        return _rotated(x, self.dims, offset, _grown(self, length), self.traditional)

    rotate.taken_over = original  # type: ignore[attr-defined]
    owner.__call__ = rotate


def _grown(rope: Any, length: mx.array) -> mx.array:
    """The base for a text of this length."""
    stretch = rope.factor * length / rope.max_position_embeddings - (rope.factor - 1)
    base: mx.array = rope.base * stretch ** (rope.dims / (rope.dims - 2))
    return base


def _rotated(x: mx.array, dims: int, positions: mx.array, bases: mx.array, traditional: bool) -> mx.array:
    """Rows `[rows, heads, 1, dim]`, the first `dims` rotated by each row's position and base, `[rows]` both."""
    half = dims // 2
    powers = mx.arange(half, dtype=mx.float32) / half
    frequencies = mx.exp(-powers * mx.log(bases.astype(mx.float32))[:, None])
    angles = positions.astype(mx.float32)[:, None] * frequencies
    cosines, sines = (wave(angles)[:, None, None].astype(x.dtype) for wave in (mx.cos, mx.sin))
    turned, rest = x[..., :dims], x[..., dims:]
    if traditional:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = [first * cosines - second * sines, first * sines + second * cosines]
    joined = mx.stack(pair, axis=-1).reshape(turned.shape) if traditional else mx.concatenate(pair, axis=-1)
    return mx.concatenate([joined, rest], axis=-1)
