"""A drafter of one layer that reads what the target made of the text, and goes on from its own output.

After EAGLE (Li et al. 2024) and EAGLE-3 (Li et al. 2025): a row takes the embedding of a token and the target's
features at the position before it, and guesses the token behind. Where the target has not been yet, the network's own
output stands for its features. The features are of several layers, joined by one projection; embeddings and rows of
the language-model head are the target's own and are not trained.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from mlx_lm.models.base import scaled_dot_product_attention

from backends.mlx.caches.buffers import LayerShape
from backends.mlx.caches.kinds import AttentionKind
from backends.mlx.caches.packed import PackedCache
from backends.mlx.caches.sight import Sight
from backends.mlx.drafts.target import Borrowed
from backends.mlx.features import normalised
from backends.mlx.taps import Tap


class EagleShape(msgspec.Struct, frozen=True):
    """The measures of the network, as a drafter's file has them."""

    dims: int
    """Of the target's hidden states."""
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    taps: tuple[Tap, ...]
    """Whose features it reads."""
    window: int
    """How many positions back its attention sees."""
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        sizes = (self.dims, self.heads, self.kv_heads, self.head_dim, self.intermediate, self.window, len(self.taps))
        if min(sizes) < 1 or self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError("the measures of the drafter do not fit together")


class EagleAttention(nn.Module):
    """Grouped-query attention over embedding and features side by side."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.scale = shape.head_dim**-0.5
        width = 2 * shape.dims
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.dims, bias=False)
        self.rope = nn.RoPE(shape.head_dim, base=shape.rope_base)

    def project(self, x: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys and values of `x` `[batch, length, 2 * dims]`, rotated; each `[batch, heads, length, dim]`."""
        batch, length, _ = x.shape
        queries = self.q_proj(x).reshape(batch, length, self.heads, -1).swapaxes(1, 2)
        keys = self.k_proj(x).reshape(batch, length, self.kv_heads, -1).swapaxes(1, 2)
        values = self.v_proj(x).reshape(batch, length, self.kv_heads, -1).swapaxes(1, 2)
        rope: Callable[..., mx.array] = self.rope  # MLX takes an offset for each batch entry too
        return rope(queries, offset=offset), rope(keys, offset=offset), values

    def __call__(self, x: mx.array, cache: PackedCache) -> mx.array:
        """Packed rows `[rows, 1, 2 * dims]` to `[rows, 1, dims]`."""
        queries, keys, values = self.project(x, cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
        attended = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=None)
        return self.join(attended)

    def join(self, attended: mx.array) -> mx.array:
        """`[batch, heads, length, dim]` to `[batch, length, dims]`."""
        batch, _, length, _ = attended.shape
        joined: mx.array = self.o_proj(attended.swapaxes(1, 2).reshape(batch, length, -1))
        return joined


class Eagle(nn.Module):
    """The network itself. Its parameters are what a drafter's file holds."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        dims = shape.dims
        self.fuse = nn.Linear(len(shape.taps) * dims, dims, bias=False)
        self.embedding_norm = nn.RMSNorm(dims)
        self.feature_norm = nn.RMSNorm(dims)
        self.attention = EagleAttention(shape)
        self.inner_norm = nn.RMSNorm(dims)
        self.gate_proj = nn.Linear(dims, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(dims, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, dims, bias=False)
        self.norm = nn.RMSNorm(dims)

    def before(self, embedded: mx.array, features: mx.array) -> mx.array:
        """What attention reads: `[..., dims]` twice to `[..., 2 * dims]`."""
        return mx.concatenate([self.embedding_norm(embedded), self.feature_norm(features)], axis=-1)

    def behind(self, features: mx.array, attended: mx.array) -> mx.array:
        """The output `[..., dims]`, which is the features of the next row where the target has none."""
        hidden = features + attended
        inner = self.inner_norm(hidden)
        output: mx.array = hidden + self.down_proj(nn.silu(self.gate_proj(inner)) * self.up_proj(inner))
        return output

    def __call__(self, embedded: mx.array, features: mx.array, cache: PackedCache) -> mx.array:
        """Packed rows: embeddings and features `[rows, 1, dims]` to outputs `[rows, 1, dims]`."""
        return self.behind(features, self.attention(self.before(embedded, features), cache))


def parameters_of(network: nn.Module) -> dict[str, mx.array]:
    """By name."""
    return dict(tree_flatten(network.parameters()))


class EagleNetwork:
    """An `Eagle` between the target's embeddings and its head: see `reading.ReadingNetwork`."""

    def __init__(self, network: Eagle, shape: EagleShape, target: Borrowed, ids: npt.NDArray[np.uint32]) -> None:
        """`ids` are the tokens that it drafts, ascending."""
        self.module: nn.Module = network
        self.taps = shape.taps
        self.vocabulary = target.vocabulary
        self.ids = mx.array(ids)
        self._network = network
        self._embedding = target.embedding
        self._head = target.head_rows(ids).T
        dtype = network.fuse.weight.dtype
        layer = LayerShape(shape.kv_heads, shape.head_dim, shape.head_dim, dtype)
        self.cached = AttentionKind(layer, Sight(window=shape.window))

    def read(self, features: mx.array) -> mx.array:
        """Each tap's by its root mean square, joined."""
        fused: mx.array = self._network.fuse(normalised(features, len(self.taps)).astype(self.cached.shape.dtype))
        return fused

    def output(self, tokens: mx.array, features: mx.array, cache: PackedCache) -> mx.array:
        """One row a token."""
        embedded = self._embedding(tokens).astype(features.dtype)
        return self._network(embedded, features[:, None], cache)

    def logits(self, outputs: mx.array) -> mx.array:
        """By the target's head."""
        found: mx.array = self._network.norm(outputs) @ self._head
        return found
