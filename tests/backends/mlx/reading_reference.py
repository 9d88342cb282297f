"""What a drafter that reads its target drafts, from the definition: one lane, all rows anew for every token, dense
attention, no caches, numpy in float64. And what it reads: mlx-lm's own model, fed one whole text.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import numpy.typing as npt

from backends import reference
from backends.mlx.drafts.eagle import Eagle, EagleShape, parameters_of
from backends.mlx.taps import Tap
from scheduler.draft import Draft, DraftAsk
from tests.backends.draws import near_tie

Floats = npt.NDArray[np.float64]

TIE = 1e-4
"""Scores this close may come out either way."""


# ---- the target, text by text ----------------------------------------------------------------------------------------


class Standing:
    """Stands in the place of a layer or a head, which it asks for everything, and notes what goes in and out."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self._inner = inner
        self.read: mx.array | None = None
        self.output: mx.array | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._inner(*args, **kwargs)
        self.read = args[0]
        self.output = result[0] if isinstance(result, tuple) else result
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WholeTexts:
    """A model of mlx-lm's, into which nothing of ours was installed. Takes it over."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: list[Standing] = []
        self._heads: list[Standing] = []
        for part in model.modules():
            if "layers" in part:
                self._layers += [Standing(layer) for layer in part["layers"]]
                part["layers"][:] = self._layers
            if "lm_head" in part:
                self._heads.append(Standing(part.pop("lm_head")))
                part.lm_head = self._heads[-1]
            if isinstance(part, nn.Embedding):
                self._heads.append(Standing(part.as_linear))
                part.as_linear = self._heads[-1]  # type: ignore[method-assign]
        self._known: dict[tuple[int, ...], tuple[list[Floats], Floats, Floats]] = {}

    def features(self, tokens: Sequence[int], taps: Sequence[Tap]) -> Floats:
        """What these taps are to note of a text, `[tokens, taps * dim]`."""
        layers, head, _ = self._fed(tuple(tokens))
        return np.concatenate([head if tap == "head" else layers[tap] for tap in taps], axis=-1)

    def logits(self, tokens: Sequence[int]) -> Floats:
        """`[tokens, vocabulary]`."""
        return self._fed(tuple(tokens))[2]

    def _fed(self, tokens: tuple[int, ...]) -> tuple[list[Floats], Floats, Floats]:
        if tokens not in self._known:
            logits = self._model(mx.array([tokens]))
            (head,) = (each.read for each in self._heads if each.read is not None)
            layers = [_floats(layer.output) for layer in self._layers]
            self._known[tokens] = layers, _floats(head), _floats(logits)
        return self._known[tokens]


def _floats(array: mx.array | None) -> Floats:
    assert array is not None
    return np.array(array[0].astype(mx.float32)).astype(np.float64)


# ---- the drafter -----------------------------------------------------------------------------------------------------


class Borrowings(msgspec.Struct, frozen=True):
    """What the network has of its target: embeddings and head `[vocabulary, dims]`, and the tokens that it drafts."""

    embeddings: Floats
    head: Floats
    ids: npt.NDArray[np.uint32]


class DenseDrafter:
    """An `Eagle` in numpy.

    Row t takes the embedding of token t + 1 and the target's features of position t, and scores token t + 2. Behind the
    last position whose features are known, it takes its own output of the row before instead.
    """

    def __init__(self, network: Eagle, shape: EagleShape, borrowed: Borrowings) -> None:
        self._shape = shape
        self._borrowed = borrowed
        self._weights = {name: np.array(value).astype(np.float64) for name, value in parameters_of(network).items()}

    def check(self, draft: Draft, ask: DraftAsk, features: Floats) -> None:
        """Fail unless every token of a draft is what comes behind those before it, near-ties apart.

        `features` are the target's of the newest positions but one, as many as the lane was read; `[rows, width]`.
        """
        assert len(draft.tokens) == ask.budget
        assert draft.marks == tuple(range(len(draft.tokens)))
        text = list(ask.tokens)
        read = self._fused(features)
        for token in draft.tokens:
            outputs = self._outputs(text[len(ask.tokens) - len(features) :], read)
            adjusted = reference.adjust(self._logits(outputs[-1]), ask.sampling, text, ask.prompt)
            scores = reference.scores(adjusted, ask.sampling, len(text))
            expected = int(scores.argmax())
            near = scores[token] >= scores[expected] - TIE
            if not near and ask.sampling.truncates:
                near = near_tie(token, adjusted, ask.sampling, len(text))
            assert near, f"{token} instead of {expected}, behind {len(text) - len(ask.tokens)} drafted tokens"
            text.append(token)
            read = np.concatenate([read, outputs[-1:]])

    def _logits(self, output: Floats) -> reference.Logits:
        """Of all tokens; minus infinity for those that are not drafted."""
        logits = np.full(len(self._borrowed.head), -np.inf, dtype=np.float32)
        logits[self._borrowed.ids] = self._normed(output, "norm") @ self._borrowed.head[self._borrowed.ids].T
        return logits

    def _outputs(self, tokens: Sequence[int], features: Floats) -> Floats:
        """Of all rows `[rows, dims]`, from as many tokens and as many rows of features or outputs."""
        embedded = self._borrowed.embeddings[np.array(tokens)]
        x = np.concatenate([self._normed(embedded, "embedding_norm"), self._normed(features, "feature_norm")], axis=-1)
        hidden = features + self._attended(x)
        inner = self._normed(hidden, "inner_norm")
        gate, up = self._linear(inner, "gate_proj"), self._linear(inner, "up_proj")
        return hidden + self._linear(gate / (1 + np.exp(-gate)) * up, "down_proj")

    def _attended(self, x: Floats) -> Floats:
        shape, rows = self._shape, len(x)
        queries = self._linear(x, "attention.q_proj").reshape(rows, shape.heads, shape.head_dim)
        keys = self._linear(x, "attention.k_proj").reshape(rows, shape.kv_heads, shape.head_dim)
        values = self._linear(x, "attention.v_proj").reshape(rows, shape.kv_heads, shape.head_dim)
        queries, keys = self._rotated(queries), self._rotated(keys)
        back = np.arange(rows)[:, None] - np.arange(rows)
        seen = (back >= 0) & (back < shape.window)
        heads = []
        for head in range(shape.heads):
            shared = head // (shape.heads // shape.kv_heads)
            scores = np.where(seen, queries[:, head] @ keys[:, shared].T / np.sqrt(shape.head_dim), -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            heads.append(weights / weights.sum(axis=-1, keepdims=True) @ values[:, shared])
        return self._linear(np.concatenate(heads, axis=-1), "attention.o_proj")

    def _rotated(self, x: Floats) -> Floats:
        """By its place among the rows; pairs are half a head apart."""
        half = self._shape.head_dim // 2
        angles = np.arange(len(x))[:, None] * self._shape.rope_base ** (-np.arange(half) / half)
        cosines, sines = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cosines - second * sines, first * sines + second * cosines], axis=-1)

    def _fused(self, features: Floats) -> Floats:
        """Each tap's by its own root mean square, then joined."""
        parts = features.reshape(len(features), len(self._shape.taps), -1)
        even = parts / np.sqrt(np.square(parts).mean(axis=-1, keepdims=True) + 1e-6)
        return self._linear(even.reshape(len(features), -1), "fuse")

    def _normed(self, x: Floats, name: str) -> Floats:
        normed: Floats = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-5) * self._weights[f"{name}.weight"]
        return normed

    def _linear(self, x: Floats, name: str) -> Floats:
        product: Floats = x @ self._weights[f"{name}.weight"].T
        return product
