"""gemma2, gear: attention scores are capped by a tanh, which neither MLX's attention nor the seam can say.

gemma2 writes its attention out, over masks of a rank too few for several lanes: it raises at 3 lanes, and at as many
lanes as it has KV heads it diverges silently. gear has a function of its own for it.
"""

from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import gear, gemma2

from backends.mlx.caches.packed import PackedCache, handed_by
from backends.mlx.exponential import Attention
from backends.mlx.patches.packed_calls import take_over

_GEAR = "_softcap_attention"
"""gear's function."""


@cache
def softcapped(cap: float) -> Attention:
    """Attention as `mx.fast.scaled_dot_product_attention`, whose scores s become `cap * tanh(s / cap)`."""

    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
    ) -> mx.array:
        assert sinks is None, "no model has both"
        lanes, heads, width, dim = queries.shape
        kv_heads, length = keys.shape[1:3]
        grouped = (queries * scale).reshape(lanes, kv_heads, -1, width, dim)
        scores = mx.tanh(grouped @ keys[:, :, None].swapaxes(-1, -2) / cap) * cap
        if isinstance(mask, str):
            mask = (mx.arange(length) <= mx.arange(length - width, length)[:, None])[None, None]
        if mask is not None:
            scores = mx.where(mask[:, :, None], scores, mx.finfo(scores.dtype).min)
        weights = mx.softmax(scores, axis=-1, precise=True)
        return (weights @ values[:, :, None]).reshape(lanes, heads, width, -1)

    return attention


def patch_gemma2(_: Module) -> None:
    """Attend through the cache."""
    take_over(gemma2.Attention, _gemma2_attention)


def _gemma2_attention(self: Any, x: mx.array, mask: None = None, cache: PackedCache | None = None) -> mx.array:  # noqa: ARG001
    assert cache is not None
    rows = x.shape[0]
    queries = self.rope(self.q_proj(x).reshape(rows, self.n_heads, 1, -1), offset=cache.offset)
    keys = self.rope(self.k_proj(x).reshape(rows, self.n_kv_heads, 1, -1), offset=cache.offset)
    cache.update_and_fetch(keys, self.v_proj(x).reshape(rows, self.n_kv_heads, 1, -1))
    out = cache.attend(queries, scale=self.scale, attention=softcapped(self.attn_logit_softcapping))
    projected: mx.array = self.o_proj(out.reshape(rows, 1, -1))
    return projected


def patch_gear(_: Module) -> None:
    """Its function, with a look at whose keys it got."""
    original = getattr(gear, _GEAR)
    if hasattr(original, "taken_over"):
        return

    def attention(
        queries: mx.array, keys: mx.array, values: mx.array, scale: float, softcap: float, mask: Any
    ) -> mx.array:
        packed = handed_by(keys)
        if packed is None:
            own: mx.array = original(queries, keys, values, scale=scale, softcap=softcap, mask=mask)
            return own
        return packed.attend(queries, scale=scale, attention=softcapped(softcap))

    attention.taken_over = original  # type: ignore[attr-defined]
    setattr(gear, _GEAR, attention)
