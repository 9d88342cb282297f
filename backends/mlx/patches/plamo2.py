"""plamo2: its layers call MLX's attention themselves instead of mlx-lm's function, which has the seam."""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import plamo2

from backends.mlx.caches.packed import handed_by


class _Fast:
    """`mx.fast`, with a look at whose keys its attention gets."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mx.fast, name)

    @staticmethod
    def scaled_dot_product_attention(
        queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Any = None, **others: Any
    ) -> mx.array:
        packed = handed_by(keys)
        if packed is None:
            return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, **others)
        return packed.attend(queries, scale=scale, **others)


class _Core:
    """`mlx.core`, with that."""

    fast = _Fast()

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


def patch(_: Module) -> None:
    """Let the module see the attention above."""
    if not isinstance(plamo2.mx, _Core):
        plamo2.mx = _Core()
