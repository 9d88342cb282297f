"""What a multi-token-prediction layer drafts, from the definition: one lane, one row after the other with mlx-lm's own
cache, everything anew for every draft. And such layers: random ones, under the names by which they are published.
"""

import re
from collections.abc import Mapping
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from backends import reference
from scheduler.draft import Draft, DraftAsk
from tests.backends.draws import near_tie

Floats = npt.NDArray[np.float64]
Weights = dict[str, mx.array]

EPS = 1e-5
TIE = 1e-4
"""Scores this close may come out either way."""
ZERO_CENTRED = re.compile(
    r".*(input_layernorm|post_attention_layernorm|q_norm|k_norm|model\.norm|mtp\.norm|pre_fc_norm_\w+)\.weight"
)
"""Norms of Qwen's that are published as their distance from one."""


class PlainMTP(msgspec.Struct, frozen=True):
    """A layer of mlx-lm's, what is before and behind it, and what it has of its model."""

    embedding_norm: Floats
    hidden_norm: Floats
    projection: Floats
    layer: nn.Module
    norm: Floats
    embeddings: Floats
    head: Floats

    def check(self, draft: Draft, ask: DraftAsk, hidden: Floats) -> None:
        """Fail unless every token of a draft is what comes behind those before it, near-ties apart.

        `hidden` are the model's hidden states at the newest positions but one, as many as the drafter has seen.
        """
        assert len(draft.tokens) == ask.budget
        assert draft.marks == tuple(range(len(draft.tokens)))
        cache = KVCache()
        output = hidden[0]
        for token, state in zip(ask.tokens[-len(hidden) :], hidden, strict=True):
            output = self._row(token, state, cache)
        text = list(ask.tokens)
        for token in draft.tokens:
            logits = (self.head @ output).astype(np.float32)
            adjusted = reference.adjust(logits, ask.sampling, text, ask.prompt)
            scores = reference.scores(adjusted, ask.sampling, len(text))
            near = scores[token] >= scores.max() - TIE or near_tie(token, adjusted, ask.sampling, len(text))
            assert near, f"{token} instead of {scores.argmax()}, behind {len(text) - len(ask.tokens)} drafted tokens"
            text.append(token)
            output = self._row(token, output, cache)

    def _row(self, token: int, state: Floats, cache: KVCache) -> Floats:
        joined = np.concatenate(
            [_normed(self.embeddings[token], self.embedding_norm), _normed(state, self.hidden_norm)]
        )
        row = mx.array((self.projection @ joined).astype(np.float32))
        output = self.layer(row[None, None], mask=None, cache=cache)
        return _normed(np.array(output[0, 0]).astype(np.float64), self.norm)


def _normed(x: Floats, weight: Floats) -> Floats:
    normed: Floats = x / np.sqrt(np.square(x).mean() + EPS) * weight
    return normed


def random_mtp(layer: nn.Module, embeddings: mx.array, head: mx.array, seed: int = 0) -> PlainMTP:
    """Around a layer, with norms that are no ones; that of embeddings is small, as Qwen's are."""
    rng = np.random.default_rng(seed)
    dims = embeddings.shape[1]
    norms = [rng.uniform(low, 3 * low, dims).astype(np.float32).astype(np.float64) for low in (0.2, 0.5, 0.5)]
    projection = rng.normal(0, 1 / np.sqrt(dims), (dims, 2 * dims)).astype(np.float32).astype(np.float64)
    tables = [np.array(table).astype(np.float64) for table in (embeddings, head)]
    return PlainMTP(norms[0], norms[1], projection, layer, norms[2], *tables)


# ---- names -----------------------------------------------------------------------------------------------------------


def parameters(model: nn.Module) -> Weights:
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))


def qwen_names(mtp: PlainMTP) -> Weights:
    """What mlx-lm has of it, by Qwen's names."""
    return {
        "mtp.fc.weight": _floats(mtp.projection),
        "mtp.pre_fc_norm_embedding.weight": _floats(mtp.embedding_norm),
        "mtp.pre_fc_norm_hidden.weight": _floats(mtp.hidden_norm),
        "mtp.norm.weight": _floats(mtp.norm),
        **{f"mtp.layers.0.{name}": weight for name, weight in parameters(mtp.layer).items()},
    }


def glm_names(mtp: PlainMTP, layers: int) -> Weights:
    """By GLM's, with what it has of the model once more, which nobody is to look at."""
    prefix = f"model.layers.{layers}."
    return {
        f"{prefix}eh_proj.weight": _floats(mtp.projection),
        f"{prefix}enorm.weight": _floats(mtp.embedding_norm),
        f"{prefix}hnorm.weight": _floats(mtp.hidden_norm),
        f"{prefix}shared_head.norm.weight": _floats(mtp.norm),
        f"{prefix}shared_head.head.weight": mx.zeros(mtp.head.shape),
        f"{prefix}embed_tokens.weight": mx.zeros(mtp.embeddings.shape),
        **{f"{prefix}{name}": weight for name, weight in parameters(mtp.layer).items()},
    }


def _floats(array: Floats) -> mx.array:
    return mx.array(array.astype(np.float32))


def centred(weights: Mapping[str, mx.array]) -> Weights:
    """Norms as Qwen publishes them, and convolutions as torch has them."""
    published: Weights = {}
    for name, weight in weights.items():
        if name.endswith("conv1d.weight"):
            published[name] = weight.swapaxes(1, 2)
        elif ZERO_CENTRED.fullmatch(name):
            published[name] = weight - 1
        else:
            published[name] = weight
    return published


def apart(weights: Mapping[str, mx.array]) -> Weights:
    """Each expert by itself."""
    published: Weights = {}
    for name, weight in weights.items():
        if "switch_mlp" in name:
            for expert, part in enumerate(weight):
                published[name.replace("switch_mlp", f"experts.{expert}")] = part
        else:
            published[name] = weight
    return published


def narrowed(weights: Mapping[str, mx.array]) -> tuple[Weights, Weights]:
    """Matrices in 8 bits, with a scale for each block of 128 by 128; and what they stand for."""
    published, meant = dict(weights), dict(weights)
    for name, weight in weights.items():
        if weight.ndim == 2:
            rows, columns = weight.shape
            scales = mx.random.uniform(0.5, 2, (-(-rows // 128), -(-columns // 128)), key=mx.random.key(rows))
            published[name] = mx.to_fp8(weight)
            published[f"{name}_scale_inv"] = scales
            wide = np.array(scales).repeat(128, axis=0)[:rows].repeat(128, axis=1)[:, :columns]
            meant[name] = mx.from_fp8(published[name], dtype=mx.float32) * mx.array(wide)
    return published, meant


def joined_latent(weights: Mapping[str, mx.array]) -> Weights:
    """The two projections from the latent vector as the one that is published."""
    published = dict(weights)
    for name in weights:
        if name.endswith(".embed_q.weight"):
            base = name.removesuffix("embed_q.weight")
            keys = published.pop(name).swapaxes(-1, -2)
            values = published.pop(f"{base}unembed_out.weight")
            both = mx.concatenate([keys, values], axis=1)
            published[f"{base}kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    return published


def fused(weights: Mapping[str, mx.array]) -> Weights:
    """All experts in one array, and gate and up projection too."""
    published = dict(weights)
    for name in weights:
        if name.endswith("switch_mlp.gate_proj.weight"):
            base = name.removesuffix("switch_mlp.gate_proj.weight")
            gate, up, down = (published.pop(f"{base}switch_mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
            published[f"{base}experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
            published[f"{base}experts.down_proj"] = down
    return published
