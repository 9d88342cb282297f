"""The network of a Gemma 4 assistant: a drafter that keeps no keys of its own and attends what its target has cached.

A row takes the target's embedding of a token and a hidden state, joined by one projection; a few decoder layers of
Gemma 4's follow, which have queries only; one more norm, behind which a head of its own guesses the next token, and
from which another projection makes the hidden state of the next row.

What is known of it was read in transformers (`gemma4_assistant`, `gemma4`, and `SinglePositionMultiTokenCandidate-
Generator` in its `generation/candidate_generator.py`), which serves Google's published ones:

- The embedding comes first, and is scaled by the root of the target's width, as the target's own module does it.
- The hidden state is behind the target's last norm, as its head reads it, at the position before the newest token. In
  the rows after the first the network's own output stands for it.
- Layers of each type attend what the last layer of that type caches, of those of the target that cache anything
  (`kv_sharing_modes`). Queries are normalised and rotated; scores are not scaled (Gemma 4 never does).
- All rows of a draft have one position, that of the newest token, which the target has not been fed yet: they see what
  is before it. (Transformers does not cut the key of a rejected token that was there; that is not followed.) vLLM has
  the position before it (`spec_decode/gemma4.py`); OpenVINO and mlx-swift have that of the newest token, too.
- Logits are not capped, unlike the target's.
- With `use_ordered_embeddings`, tokens are grouped, and only those of the groups whose centroids score best can be
  drafted. Transformers gives all others one low logit, which depends on who is in the batch; here, as in vLLM, they
  have none.

How far back sliding layers see is told in three ways: one position more than the window (transformers), one less
(mlx-vlm), or just the window (vLLM), counted back from the newest cached one. Here it is the latter, with the target's
window. `gemma4_unified_assistant` is the same network.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models import gemma4_text

LayerType = Literal["sliding_attention", "full_attention"]


class TextShape(msgspec.Struct, frozen=True, kw_only=True):
    """The measures of the decoder layers, as `config.json` has them under `text_config`; defaults are transformers'."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_types: tuple[LayerType, ...]
    vocab_size: int = 262144
    sliding_window: int = 512
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, dict[str, Any]] | None = None
    max_position_embeddings: int = 131072
    num_kv_shared_layers: int = 0
    hidden_activation: str = "gelu_pytorch_tanh"
    hidden_size_per_layer_input: int = 0
    enable_moe_block: bool = False
    use_double_wide_mlp: bool = False

    def __post_init__(self) -> None:
        sizes = (self.hidden_size, self.intermediate_size, self.num_hidden_layers, self.num_attention_heads)
        if min(*sizes, self.vocab_size) < 1 or len(self.layer_types) != self.num_hidden_layers:
            raise ValueError("its measures do not fit together")
        if self.num_kv_shared_layers not in (0, self.num_hidden_layers):
            raise ValueError("some of its layers would cache keys of their own")
        if self.hidden_size_per_layer_input or self.enable_moe_block or self.use_double_wide_mlp:
            raise ValueError("its layers have experts, inputs of their own or wide feed-forward parts")
        if self.hidden_activation != "gelu_pytorch_tanh":
            raise ValueError(f"its activation is {self.hidden_activation!r}")


class AssistantShape(msgspec.Struct, frozen=True, kw_only=True):
    """An assistant's `config.json`."""

    text_config: TextShape
    backbone_hidden_size: int = 1536
    """Of the target's hidden states."""
    use_ordered_embeddings: bool = False
    num_centroids: int = 2048
    centroid_intermediate_top_k: int = 32

    def __post_init__(self) -> None:
        groups, vocabulary = self.num_centroids, self.text_config.vocab_size
        if self.use_ordered_embeddings and not 1 <= self.centroid_intermediate_top_k <= groups <= vocabulary:
            raise ValueError("its groups of tokens are more than there are")
        if self.use_ordered_embeddings and vocabulary % groups:
            raise ValueError(f"{vocabulary} tokens are not {groups} groups of one size")


class GroupedHead(nn.Module):
    """Which tokens are scored at all: those of some groups, picked by their centroids."""

    def __init__(self, shape: AssistantShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.centroids = nn.Linear(shape.text_config.hidden_size, shape.num_centroids, bias=False)
        self.token_ordering = mx.arange(shape.text_config.vocab_size, dtype=mx.int32)
        self._picked = shape.centroid_intermediate_top_k

    def __call__(self, outputs: mx.array, head: mx.array) -> mx.array:
        """Float32 logits `[rows, vocabulary]` of outputs `[rows, dims]` by the head's rows `[vocabulary, dims]`; the
        lowest number for tokens that are not scored.
        """
        scores = self.centroids(outputs)
        best = mx.argpartition(-scores, kth=self._picked - 1, axis=-1)[:, : self._picked]
        tokens = self.token_ordering.reshape(scores.shape[-1], -1)[best].reshape(outputs.shape[0], -1)
        found = (head[tokens] @ outputs[..., None])[..., 0].astype(mx.float32)
        none = mx.full((outputs.shape[0], head.shape[0]), mx.finfo(mx.float32).min)
        return mx.put_along_axis(none, tokens, found, axis=-1)


class Assistant(nn.Module):
    """The network itself; its parameters are called as in a published folder, but for `head`, which there is the table
    of embeddings that nobody looks tokens up in.
    """

    def __init__(self, shape: AssistantShape, head_dims: Mapping[LayerType, int]) -> None:
        """`head_dims` are those of the keys that layers of each type attend. Raises ValueError for a rotation that is
        not known.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        text = shape.text_config
        self.pre_projection = nn.Linear(2 * shape.backbone_hidden_size, text.hidden_size, bias=False)
        self.model = Layers(text, head_dims)
        self.head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        if shape.use_ordered_embeddings:
            self.masked_embedding = GroupedHead(shape)
        self.post_projection = nn.Linear(text.hidden_size, shape.backbone_hidden_size, bias=False)

    def __call__(
        self, embedded: mx.array, hidden: mx.array, lent: Mapping[LayerType, mx.array], positions: mx.array
    ) -> mx.array:
        """Embeddings and hidden states `[rows, backbone dims]` to outputs `[rows, dims]`.

        `lent` stand for the target's keys and values by the layers' type (see `PackedCache.lend`); `positions` is int32
        `[rows]`.
        """
        joined = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1)[:, None])
        return self.model(joined, lent, positions)[:, 0]

    def logits(self, outputs: mx.array) -> mx.array:
        """`[rows, dims]` to `[rows, vocabulary]`."""
        if "masked_embedding" in self:
            return self.masked_embedding(outputs, self.head.weight)
        found: mx.array = self.head(outputs)
        return found

    def carried(self, outputs: mx.array) -> mx.array:
        """The hidden states of the next rows: `[rows, dims]` to `[rows, backbone dims]`."""
        found: mx.array = self.post_projection(outputs)
        return found


class Layers(nn.Module):
    """Decoder layers of mlx-lm's own, none of which stores keys, and a norm."""

    def __init__(self, text: TextShape, head_dims: Mapping[LayerType, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        arguments = gemma4_text.ModelArgs(
            hidden_size=text.hidden_size,
            num_hidden_layers=text.num_hidden_layers,
            intermediate_size=text.intermediate_size,
            num_attention_heads=text.num_attention_heads,
            head_dim=head_dims["sliding_attention"],
            global_head_dim=head_dims["full_attention"],
            rms_norm_eps=text.rms_norm_eps,
            num_kv_shared_layers=text.num_hidden_layers,
            hidden_size_per_layer_input=0,
            rope_parameters=text.rope_parameters,
            max_position_embeddings=text.max_position_embeddings,
            layer_types=list(text.layer_types),
        )
        self.layers = [gemma4_text.DecoderLayer(arguments, place) for place in range(text.num_hidden_layers)]
        self.norm = nn.RMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        self._types = text.layer_types

    def __call__(self, hidden: mx.array, lent: Mapping[LayerType, mx.array], positions: mx.array) -> mx.array:
        """`[rows, 1, dims]` to the same."""
        for kind, layer in zip(self._types, self.layers, strict=True):
            keys = lent[kind]
            hidden = layer(hidden, shared_kv=(keys, keys), offset=positions)[0]
        return cast("mx.array", self.norm(hidden))
