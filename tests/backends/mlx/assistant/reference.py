"""What a Gemma 4 assistant drafts, from its description: one lane, one row after the other in numpy, over the keys and
values that mlx-lm's own caches hold of the kept text. And such assistants: random ones, as they are published.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from backends import reference
from scheduler.draft import Draft, DraftAsk
from tests.backends.draws import near_tie
from tests.backends.mlx.architectures import SLIDING_WINDOW, VOCABULARY

Floats = npt.NDArray[np.float64]
Config = dict[str, Any]

SLIDING, FULL = "sliding_attention", "full_attention"
BACKBONE = 64
TIE = 1e-4
"""Scores this close may come out either way."""
LOUD = 3.0
"""How far logits of random assistants spread."""

TEXT: Config = {
    "model_type": "gemma4_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
    "sliding_window": SLIDING_WINDOW,
    "rms_norm_eps": 1e-5,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    },
}
DENSE: Config = {"model_type": "gemma4_assistant", "backbone_hidden_size": BACKBONE, "text_config": TEXT}
GROUPED: Config = DENSE | {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 5}
HEAD_DIMS = {SLIDING: 16, FULL: 32}


class Cached(msgspec.Struct, frozen=True):
    """What a target made of the first tokens of a text: by type its shared keys and values `[heads, tokens, dim]`, and
    what its head reads at the last of them.
    """

    keys: dict[str, Floats]
    values: dict[str, Floats]
    hidden: Floats


class PlainTarget:
    """A Gemma 4 of mlx-lm's, into which nothing of ours was installed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.text: Any = getattr(model, "language_model", model)
        self._known: dict[tuple[int, ...], Cached] = {}

    def cached(self, tokens: Sequence[int]) -> Cached:
        """All in one forward, behind which also its rotating caches hold all of them in order."""
        key = tuple(tokens)
        if key not in self._known:
            caches = make_prompt_cache(self.model)
            states = self.text.model(mx.array([key]), cache=caches)
            last = dict(zip(self.text.args.layer_types, caches, strict=False))
            keys = {kind: _floats(cache.keys[0, :, : len(key)]) for kind, cache in last.items()}
            values = {kind: _floats(cache.values[0, :, : len(key)]) for kind, cache in last.items()}
            self._known[key] = Cached(keys, values, _floats(states[0, -1]))
        return self._known[key]

    def embedding(self, token: int) -> Floats:
        """Scaled, as its first layer reads it."""
        return _floats(self.text.model.embed_tokens.weight[token]) * math.sqrt(BACKBONE)


class PlainAssistant:
    """The published weights by their names, and what they mean."""

    def __init__(self, config: Config, weights: Mapping[str, mx.array], target: PlainTarget) -> None:
        self._config = config
        self._text: Config = config["text_config"]
        self._weights = {name: _floats(array) for name, array in weights.items()}
        self.target = target

    def check(self, draft: Draft, ask: DraftAsk) -> None:
        """Fail unless every token of a draft is what comes behind those before it, near-ties apart."""
        assert len(draft.tokens) == ask.budget
        assert draft.marks == tuple(range(len(draft.tokens)))
        position = len(ask.tokens) - 1
        cached = self.target.cached(ask.tokens[:-1])
        text, hidden = list(ask.tokens), cached.hidden
        for token in draft.tokens:
            output = self.output(text[-1], hidden, cached, position)
            adjusted = reference.adjust(self.logits(output), ask.sampling, text, ask.prompt)
            scores = reference.scores(adjusted, ask.sampling, len(text))
            near = scores[token] >= scores.max() - TIE or near_tie(token, adjusted, ask.sampling, len(text))
            assert near, f"{token} instead of {scores.argmax()}, behind {len(text) - len(ask.tokens)} drafted tokens"
            text.append(token)
            hidden = self._weights["post_projection.weight"] @ output

    def logits(self, output: Floats) -> npt.NDArray[np.float32]:
        """Of an output; very low ones for tokens that are not scored."""
        table = self._weights.get("lm_head.weight", self._weights.get("model.embed_tokens.weight"))
        assert table is not None
        logits = (table @ output).astype(np.float32)
        if self._config.get("use_ordered_embeddings"):
            scores = self._weights["masked_embedding.centroids.weight"] @ output
            best = np.argsort(-scores)[: self._config["centroid_intermediate_top_k"]]
            order = self._weights["masked_embedding.token_ordering"].astype(int)
            groups = order.reshape(self._config["num_centroids"], -1)
            logits[np.setdiff1d(order, groups[best])] = -1e30
        return logits

    def output(self, token: int, hidden: Floats, cached: Cached, position: int) -> Floats:
        """What its head reads behind a token and a hidden state."""
        x = self._weights["pre_projection.weight"] @ np.concatenate([self.target.embedding(token), hidden])
        for place, kind in enumerate(self._text["layer_types"]):
            attended = self._attended(self._normed(x, place, "input_layernorm"), place, kind, cached, position)
            x = x + self._normed(attended, place, "post_attention_layernorm")
            inner = self._normed(x, place, "pre_feedforward_layernorm")
            gate, up = (self._linear(inner, place, f"mlp.{name}_proj") for name in ("gate", "up"))
            gelu = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
            fed = self._linear(gelu * up, place, "mlp.down_proj")
            x = x + self._normed(fed, place, "post_feedforward_layernorm")
            x = x * self._weights[f"model.layers.{place}.layer_scalar"]
        return self._root_normed(x) * self._weights["model.norm.weight"]

    def _attended(self, x: Floats, place: int, kind: str, cached: Cached, position: int) -> Floats:
        keys, values = cached.keys[kind], cached.values[kind]
        if kind == SLIDING:
            keys, values = keys[:, -SLIDING_WINDOW:], values[:, -SLIDING_WINDOW:]
        queries = self._linear(x, place, "self_attn.q_proj").reshape(self._text["num_attention_heads"], -1)
        queries = self._root_normed(queries) * self._weights[f"model.layers.{place}.self_attn.q_norm.weight"]
        queries = self._rotated(queries, kind, position)
        heads = []
        for head, query in enumerate(queries):
            shared = head // (len(queries) // len(keys))
            scores = keys[shared] @ query
            weights = np.exp(scores - scores.max())
            heads.append(weights / weights.sum() @ values[shared])
        return self._linear(np.concatenate(heads), place, "self_attn.o_proj")

    def _rotated(self, x: Floats, kind: str, position: int) -> Floats:
        """Pairs are half a head apart; of full attention only the fastest are turned at all."""
        told, half = self._text["rope_parameters"][kind], x.shape[-1] // 2
        turned = np.arange(half) < int(half * told.get("partial_rotary_factor", 1.0))
        angles = position * np.where(turned, told["rope_theta"] ** (-np.arange(half) / half), 0.0)
        first, second = x[:, :half], x[:, half:]
        cosines, sines = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cosines - second * sines, first * sines + second * cosines], axis=-1)

    def _root_normed(self, x: Floats) -> Floats:
        normed: Floats = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + self._text["rms_norm_eps"])
        return normed

    def _normed(self, x: Floats, place: int, name: str) -> Floats:
        return self._root_normed(x) * self._weights[f"model.layers.{place}.{name}.weight"]

    def _linear(self, x: Floats, place: int, name: str) -> Floats:
        product: Floats = self._weights[f"model.layers.{place}.{name}.weight"] @ x
        return product


def random_assistant(config: Config, seed: int = 0) -> dict[str, mx.array]:
    """Loud enough to say something, by the published names; norms and scalars are no ones."""
    rng = np.random.default_rng(seed)
    text = config["text_config"]
    dims, inner, heads = text["hidden_size"], text["intermediate_size"], text["num_attention_heads"]
    backbone, vocabulary = config["backbone_hidden_size"], text["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (dims, 2 * backbone),
        "post_projection.weight": (backbone, dims),
        "model.embed_tokens.weight": (vocabulary, dims),
        "model.norm.weight": (dims,),
    }
    for place, kind in enumerate(text["layer_types"]):
        width = heads * HEAD_DIMS[kind]
        layer = {
            "self_attn.q_proj.weight": (width, dims),
            "self_attn.o_proj.weight": (dims, width),
            "self_attn.q_norm.weight": (HEAD_DIMS[kind],),
            "mlp.gate_proj.weight": (inner, dims),
            "mlp.up_proj.weight": (inner, dims),
            "mlp.down_proj.weight": (dims, inner),
            "layer_scalar": (1,),
        }
        norms = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        layer |= {f"{norm}.weight": (dims,) for norm in norms}
        shapes |= {f"model.layers.{place}.{name}": shape for name, shape in layer.items()}
    if config.get("use_ordered_embeddings"):
        shapes["masked_embedding.centroids.weight"] = (config["num_centroids"], dims)
    weights = {name: mx.array(_random(rng, shape)) for name, shape in shapes.items()}
    if config.get("use_ordered_embeddings"):
        weights["masked_embedding.token_ordering"] = mx.array(rng.permutation(vocabulary), dtype=mx.int64)
    return weights


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if len(shape) == 1:
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return (rng.normal(0, LOUD, shape) / math.sqrt(shape[1])).astype(np.float32)


def _floats(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32)).astype(np.float64)
