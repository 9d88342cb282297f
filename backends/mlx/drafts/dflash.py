"""A drafter of a few layers that guesses a block of tokens at once: DFlash ("Block Diffusion for Flash Speculative
Decoding", arXiv 2602.06036).

The target's hidden states behind several layers are joined by one projection and a norm; each layer of the drafter
makes keys and values of them, at the positions where they came to be. Over those, and over one another both ways,
attend the embeddings of the newest token and of a mask for each token to come; behind the last norm, the target's head
says what stands at each mask. Embeddings and head are the target's own.

Names, measures and order are read from the code of its authors (z-lab) and from transformers. The second generation
(with convolutions and a selector of candidates) is another network, and refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.rope_utils import initialize_rope

from backends.mlx.caches.buffers import LayerShape
from backends.mlx.caches.kinds import AttentionKind
from backends.mlx.caches.packed import PackedCache
from backends.mlx.caches.sight import Sight
from backends.mlx.drafts.files import DrafterError
from backends.mlx.drafts.target import Borrowed
from backends.mlx.taps import Tap


class DFlashShape(msgspec.Struct, frozen=True):
    """The measures of the network."""

    dims: int
    """Of the target's hidden states, and its own."""
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: tuple[Sight, ...]
    """How far each one sees."""
    eps: float
    rope_base: float
    rope_scaling: dict[str, Any] | None
    longest: int
    """Positions that the rotary embedding is made for."""
    bias: bool
    """Whether the projections of attention have one."""
    taps: tuple[int, ...]
    """Behind which of the target's layers it reads."""
    block: int
    """The newest token and as many masks as it guesses at most."""
    mask: int
    target_layers: int | None
    """How many the target must have, if that is told."""


class _Told(msgspec.Struct):
    """The configuration as it is published."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    architectures: list[str] = []
    head_dim: int | None = None
    hidden_act: str = "silu"
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    num_target_layers: int | None = None
    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    dflash_config: dict[str, Any] = {}


def dflash_shape(config: Mapping[str, Any]) -> DFlashShape:
    """From the configuration beside published weights. Raises DrafterError for one that lacks something, or that asks
    for what is not known here.
    """
    try:
        told = msgspec.convert(config, _Told)
        own = msgspec.convert({**told.dflash_config, **_stated(told)}, _Own)
    except msgspec.ValidationError as error:
        raise DrafterError(f"its configuration is not that of a DFlash drafter: {error}") from None
    if "DFlash2DraftModel" in told.architectures or own.conv_kernel_size or own.selector_rank:
        raise DrafterError("it is a DFlash drafter of the second generation, which is not known yet")
    if told.hidden_act != "silu":
        raise DrafterError(f"its activation {told.hidden_act!r} is not known")
    rope = told.rope_parameters or {}
    scaling = told.rope_scaling or ({**rope} if rope.get("rope_type", "default") != "default" else None)
    shape = DFlashShape(
        dims=told.hidden_size,
        heads=told.num_attention_heads,
        kv_heads=told.num_key_value_heads,
        head_dim=told.head_dim or told.hidden_size // told.num_attention_heads,
        intermediate=told.intermediate_size,
        layers=_sights(told),
        eps=told.rms_norm_eps,
        rope_base=told.rope_theta or rope.get("rope_theta", 10000.0),
        rope_scaling=scaling,
        longest=told.max_position_embeddings,
        bias=told.attention_bias,
        taps=tuple(own.target_layer_ids),
        block=own.block_size,
        mask=own.mask_token_id,
        target_layers=told.num_target_layers,
    )
    sizes = (shape.dims, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, len(shape.layers))
    if min(*sizes, len(shape.taps), shape.block - 1) < 1 or shape.heads % shape.kv_heads or shape.head_dim % 2:
        raise DrafterError("its measures do not fit together")
    return shape


class _Own(msgspec.Struct):
    """What only such a drafter has, beside the rest or in a part of its own."""

    block_size: int
    mask_token_id: int
    target_layer_ids: list[int]
    conv_kernel_size: int = 0
    selector_rank: int = 0


def _stated(told: _Told) -> dict[str, Any]:
    stated = {
        "block_size": told.block_size,
        "mask_token_id": told.mask_token_id,
        "target_layer_ids": told.target_layer_ids,
    }
    return {name: value for name, value in stated.items() if value is not None}


def _sights(told: _Told) -> tuple[Sight, ...]:
    """A layer that sees everything sees the whole block, too, and one with a window does not; unless the configuration
    says otherwise.
    """
    kinds = told.layer_types or ["full_attention"] * told.num_hidden_layers
    if len(kinds) != told.num_hidden_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise DrafterError(f"its layers are of kinds that are not known: {sorted(set(kinds))}")
    if "sliding_attention" in kinds and not told.sliding_window:
        raise DrafterError("its layers have windows of no size")
    sights = []
    for kind in kinds:
        sliding = kind == "sliding_attention"
        causal = sliding if told.is_causal is None else told.is_causal
        sights.append(Sight(window=(told.sliding_window or 0) if sliding else 0, both_ways=not causal))
    return tuple(sights)


class DFlashAttention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._heads, self._kv_heads = shape.heads, shape.kv_heads
        self._scale = shape.head_dim**-0.5
        self.q_proj = nn.Linear(shape.dims, shape.heads * shape.head_dim, bias=shape.bias)
        self.k_proj = nn.Linear(shape.dims, shape.kv_heads * shape.head_dim, bias=shape.bias)
        self.v_proj = nn.Linear(shape.dims, shape.kv_heads * shape.head_dim, bias=shape.bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.dims, bias=shape.bias)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.eps)
        self._rope: Callable[..., mx.array] = initialize_rope(
            shape.head_dim,
            base=shape.rope_base,
            traditional=False,
            scaling_config=shape.rope_scaling,
            max_position_embeddings=shape.longest,
        )

    def keys_and_values(self, x: mx.array, offset: mx.array) -> tuple[mx.array, mx.array]:
        """Of packed rows `[rows, 1, dims]` at their positions: `[rows, kv_heads, 1, head_dim]` each."""
        keys = self.k_norm(_heads(self.k_proj(x), self._kv_heads))
        return self._rope(keys, offset=offset), _heads(self.v_proj(x), self._kv_heads)

    def __call__(self, x: mx.array, cache: PackedCache) -> mx.array:
        """Packed rows `[rows, 1, dims]`; the same shape out."""
        queries = self._rope(self.q_norm(_heads(self.q_proj(x), self._heads)), offset=cache.offset)
        keys, values = cache.update_and_fetch(*self.keys_and_values(x, cache.offset))
        attended = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self._scale, mask=None)
        output: mx.array = self.o_proj(attended.swapaxes(1, 2).reshape(x.shape[0], 1, -1))
        return output


def _heads(x: mx.array, heads: int) -> mx.array:
    """`[rows, 1, heads * dim]` to `[rows, heads, 1, dim]`."""
    return x.reshape(x.shape[0], 1, heads, -1).swapaxes(1, 2)


class DFlashMLP(nn.Module):
    """A gated one."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate_proj = nn.Linear(shape.dims, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.dims, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.dims, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """`[..., dims]` to `[..., dims]`."""
        output: mx.array = self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class DFlashLayer(nn.Module):
    """Attention and a gated network, each behind a norm and beside what comes in."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.self_attn = DFlashAttention(shape)
        self.mlp = DFlashMLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.dims, eps=shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.dims, eps=shape.eps)

    def __call__(self, x: mx.array, cache: PackedCache) -> mx.array:
        """Packed rows `[rows, 1, dims]`; the same shape out."""
        x = x + self.self_attn(self.input_layernorm(x), cache)
        output: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return output


class DFlash(nn.Module):
    """The network; its parameters have the published names."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fc = nn.Linear(len(shape.taps) * shape.dims, shape.dims, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.dims, eps=shape.eps)
        self.layers = [DFlashLayer(shape) for _ in shape.layers]
        self.norm = nn.RMSNorm(shape.dims, eps=shape.eps)


class DFlashNetwork:
    """A `DFlash` between the target's embeddings and its head: see `block.BlockNetwork`."""

    def __init__(self, network: DFlash, shape: DFlashShape, target: Borrowed) -> None:
        self.module: nn.Module = network
        self.taps: tuple[Tap, ...] = shape.taps
        self.most = shape.block - 1
        self.mask = shape.mask
        self._network = network
        self._target = target
        self._dtype = network.norm.weight.dtype
        layer = LayerShape(shape.kv_heads, shape.head_dim, shape.head_dim, self._dtype)
        self.cached: Sequence[AttentionKind] = [AttentionKind(layer, sight) for sight in shape.layers]

    def store(self, features: mx.array, caches: Sequence[PackedCache]) -> None:
        """Each layer's keys and values of the joined features."""
        joined = self._network.hidden_norm(self._network.fc(features.astype(self._dtype)))[:, None]
        for layer, cache in zip(self._network.layers, caches, strict=True):
            cache.store(*layer.self_attn.keys_and_values(joined, cache.offset))

    def outputs(self, tokens: mx.array, caches: Sequence[PackedCache]) -> mx.array:
        """Behind the last norm."""
        x = self._target.embedding(tokens).astype(self._dtype)
        for layer, cache in zip(self._network.layers, caches, strict=True):
            x = layer(x, cache)
        output: mx.array = self._network.norm(x)
        return output

    def logits(self, outputs: mx.array) -> mx.array:
        """By the target's head."""
        return self._target.logits(outputs)
