"""gpt_bigcode: positions are embedded, and made by numpy from one offset for all lanes, which raises for several."""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import gpt_bigcode

from backends.mlx.patches.packed_calls import take_over


def patch(_: Module) -> None:
    """Embed each row's own position."""
    take_over(gpt_bigcode.GPTBigCodeModel, _model)


def _model(self: Any, inputs: mx.array, cache: Any) -> mx.array:
    hidden = self.wte(inputs) + self.wpe(cache[0].offset[:, None])
    for layer, layer_cache in zip(self.h, cache, strict=True):
        hidden = layer(hidden, None, cache=layer_cache)
    normed: mx.array = self.ln_f(hidden)
    return normed
