"""llama4: masks of chunks, and temperatures of its layers without RoPE, come from one integer offset for all lanes.

The chunks are the caches' `Sight` here.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import llama4

from backends.mlx.caches.packed import PackedCache
from backends.mlx.patches.packed_calls import take_over


def patch(_: Module) -> None:
    """Leave masks to the caches, and give each row the temperature of its position."""
    take_over(llama4.LlamaModel, _model)
    take_over(llama4.Attention, _attention)


def _model(self: Any, inputs: mx.array, cache: Any) -> mx.array:
    hidden = self.embed_tokens(inputs)
    for layer, layer_cache in zip(self.layers, cache, strict=True):
        hidden = layer(hidden, None, cache=layer_cache)
    normed: mx.array = self.norm(hidden)
    return normed


def _attention(self: Any, x: mx.array, mask: None = None, cache: PackedCache | None = None) -> mx.array:  # noqa: ARG001
    assert cache is not None
    rows = x.shape[0]
    queries = self.q_proj(x).reshape(rows, self.n_heads, 1, -1)
    keys = self.k_proj(x).reshape(rows, self.n_kv_heads, 1, -1)
    values = self.v_proj(x).reshape(rows, self.n_kv_heads, 1, -1)
    if self.use_rope:
        queries, keys = (self.rope(each, offset=cache.offset) for each in (queries, keys))
    if self.use_qk_norm:
        queries, keys = (mx.fast.rms_norm(each, weight=None, eps=1e-6) for each in (queries, keys))
    if self.attn_temperature_tuning and not self.use_rope:
        steps = mx.floor((cache.offset + 1) / self.floor_scale)
        temperatures = mx.log(steps + 1.0) * self.attn_scale + 1.0
        queries = (queries * temperatures[:, None, None, None]).astype(queries.dtype)
    cache.update_and_fetch(keys, values)
    out: mx.array = self.o_proj(cache.attend(queries, scale=self.scale).reshape(rows, 1, -1))
    return out
