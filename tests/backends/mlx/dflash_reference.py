"""What a DFlash drafter guesses, from the definition, in numpy: one lane, everything anew for every block. And such
drafters: random ones, under the names by which they are published.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from backends import reference
from scheduler.draft import Draft, DraftAsk
from tests.backends.draws import near_tie

Floats = npt.NDArray[np.float64]
TIE = 1e-4
"""Scores this close may come out either way."""
EPS = 1e-6


class PlainDFlash(msgspec.Struct, frozen=True):
    """Its configuration and weights, and what it has of its target."""

    config: Mapping[str, Any]
    weights: Mapping[str, Floats]
    embeddings: Floats
    head: Floats

    @property
    def most(self) -> int:
        return int(self.config["block_size"]) - 1

    def check(self, draft: Draft, ask: DraftAsk, hidden: Floats) -> None:
        """Fail unless every token of a draft is what is guessed at its place, near-ties apart.

        `hidden` are the target's states at the newest positions but one, as many as the drafter has seen.
        """
        count = min(ask.budget, self.most)
        assert draft.marks == tuple(range(count))
        logits = self.guesses(hidden, ask.tokens[-1], count).astype(np.float32)
        for ahead, (token, row) in enumerate(zip(draft.tokens, logits, strict=True)):
            adjusted = reference.adjust(row, ask.sampling, list(ask.tokens), ask.prompt)
            position = len(ask.tokens) + ahead
            scores = reference.scores(adjusted, ask.sampling, position)
            near = scores[token] >= scores.max() - TIE or near_tie(token, adjusted, ask.sampling, position)
            assert near, f"{token} instead of {scores.argmax()}, {ahead} places ahead"

    def guesses(self, hidden: Floats, newest: int, count: int) -> Floats:
        """Logits `[count, vocabulary]`."""
        known = len(hidden)
        context = self._normed(hidden @ self.weights["fc.weight"].T, "hidden_norm")
        x = self.embeddings[[newest] + [self.config["mask_token_id"]] * count]
        for layer in range(self.config["num_hidden_layers"]):
            inner = self._normed(x, f"layers.{layer}.input_layernorm")
            x = x + self._attention(layer, inner, context, known)
            inner = self._normed(x, f"layers.{layer}.post_attention_layernorm")
            gate, up = (inner @ self.weights[f"layers.{layer}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.weights[f"layers.{layer}.mlp.down_proj.weight"].T
        logits: Floats = self._normed(x[1:], "norm") @ self.head.T
        return logits

    def _attention(self, layer: int, inner: Floats, context: Floats, known: int) -> Floats:
        dim, heads = self.config["head_dim"], self.config["num_attention_heads"]
        places = np.arange(known + len(inner))
        both = np.concatenate([context, inner])
        queries = self._rotated(self._heads(layer, "q", inner, normed=True), places[known:])
        keys = self._rotated(self._heads(layer, "k", both, normed=True), places)
        values = self._heads(layer, "v", both, normed=False)
        seen = self._seen(layer, places[known:, None], places, known)
        outputs = []
        for head in range(heads):
            shared = head * self.config["num_key_value_heads"] // heads
            scores = np.where(seen, queries[head] @ keys[shared].T / np.sqrt(dim), -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            outputs.append(weights / weights.sum(axis=1, keepdims=True) @ values[shared])
        joined: Floats = np.concatenate(outputs, axis=1) @ self.weights[f"layers.{layer}.self_attn.o_proj.weight"].T
        return joined

    def _seen(self, layer: int, queries: npt.NDArray[np.int_], keys: npt.NDArray[np.int_], known: int) -> Any:
        sliding = self.config.get("layer_types", {layer: ""})[layer] == "sliding_attention"
        causal = self.config.get("is_causal", sliding)
        seen = (keys <= queries) | (not causal)
        return seen & (queries - keys < self.config["sliding_window"]) if sliding else seen

    def _heads(self, layer: int, part: str, x: Floats, *, normed: bool) -> Floats:
        """`[heads, rows, dim]`."""
        name = f"layers.{layer}.self_attn.{part}"
        rows = (x @ self.weights[f"{name}_proj.weight"].T).reshape(len(x), -1, self.config["head_dim"])
        return (self._normed(rows, f"{name}_norm") if normed else rows).swapaxes(0, 1)

    def _normed(self, x: Floats, name: str) -> Floats:
        normed: Floats = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + EPS) * self.weights[f"{name}.weight"]
        return normed

    def _rotated(self, x: Floats, places: npt.NDArray[np.int_]) -> Floats:
        half = self.config["head_dim"] // 2
        angles = places[:, None] * self.config["rope_theta"] ** (-np.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        cosine, sine = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1)


def random_dflash(config: Mapping[str, Any], embeddings: mx.array, head: mx.array, seed: int = 0) -> PlainDFlash:
    """With norms that are no ones."""
    rng = np.random.default_rng(seed)
    dims, dim, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (dims, dims * len(config["dflash_config"]["target_layer_ids"])),
        "hidden_norm.weight": (dims,),
        "norm.weight": (dims,),
    }
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "input_layernorm": (dims,),
            "post_attention_layernorm": (dims,),
            "self_attn.q_proj": (heads, dims),
            "self_attn.k_proj": (kv_heads, dims),
            "self_attn.v_proj": (kv_heads, dims),
            "self_attn.o_proj": (dims, heads),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inner, dims),
            "mlp.up_proj": (inner, dims),
            "mlp.down_proj": (dims, inner),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    weights = {
        name: rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else rng.normal(0, 2 / np.sqrt(shape[1]), shape)
        for name, shape in shapes.items()
    }
    narrow = {name: weight.astype(np.float32).astype(np.float64) for name, weight in weights.items()}
    own = config["dflash_config"]
    flat = {**config, "mask_token_id": own["mask_token_id"], "block_size": own["block_size"]}
    return PlainDFlash(flat, narrow, *(np.array(table).astype(np.float64) for table in (embeddings, head)))


def published(plain: PlainDFlash) -> dict[str, mx.array]:
    """Its weights."""
    return {name: mx.array(weight.astype(np.float32)) for name, weight in plain.weights.items()}
