"""A model's own multi-token-prediction layer as a drafter that reads the model.

A row takes the embedding of a token and the model's hidden state at the position before it, and guesses the token
behind (DeepSeek-V3, 2024, section 2.2; published with Qwen3-Next, Qwen3.5 and GLM-4.5 and what came after them). Each
has a norm of its own; both, embedding first, are joined by one projection; a decoder layer of the model's own kind and
one more norm follow, and the model's language-model head reads the result.

What that leaves open is taken from those who serve such layers:

- The hidden state is behind the model's last norm, as its head reads it. So vLLM serves Qwen, says Rapid-MLX, which
  measured that fewer drafts are accepted with what stands before that norm; and so does the code that was published
  with DeepSeek-R1, says ROCm's ATOM. For GLM the same is taken to hold.
- The embedding comes first: vLLM (`qwen3_next_mtp.py`, `qwen3_5_mtp.py`, `deepseek_mtp.py`, `glm4_moe_mtp.py`) and
  SGLang (`deepseek_nextn.py`, `glm4_moe_nextn.py`).
- Where the model has not been yet, the layer's own output stands for its hidden state, behind the layer's last norm.
  So the same files, but for vLLM's of GLM and DeepSeek, which carried on what stands before `shared_head.norm`: for
  DeepSeek and GLM-5 that was given up later, and ATOM measured with DeepSeek-R1 that it costs acceptance.
- vLLM also zeroes the embedding of a text's first row for GLM and DeepSeek. SGLang does not, nor is it done here, where
  a lane's first row need not be the text's.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models import deepseek_v3, glm4_moe, glm4_moe_lite, qwen3_5, qwen3_next
from mlx_lm.models.cache import KVCache

from backends.mlx.caches.kinds import AttentionKind, attention_kind
from backends.mlx.drafts.files import DrafterError
from backends.mlx.drafts.mtp_weights import Naming, holds_weights, read_weights, split_latent
from backends.mlx.drafts.target import Borrowed
from backends.mlx.drafts.weights import fill
from backends.mlx.load import Loaded
from backends.mlx.seam import install_attention
from backends.mlx.taps import Tap


class MTP(nn.Module):
    """The network: two norms, a projection, a layer of the model's own kind, and a norm."""

    def __init__(self, layer: nn.Module, dims: int, eps: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embedding_norm = nn.RMSNorm(dims, eps=eps)
        self.hidden_norm = nn.RMSNorm(dims, eps=eps)
        self.projection = nn.Linear(2 * dims, dims, bias=False)
        self.layer = layer
        self.norm = nn.RMSNorm(dims, eps=eps)

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """Embeddings and hidden states `[batch, length, dims]` to what the head reads, `[batch, length, dims]`."""
        joined = mx.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        output: mx.array = self.norm(self.layer(self.projection(joined), mask=None, cache=cache))
        return output


class MTPNetwork:
    """An `MTP` between the target's embeddings and its head: see `reading.ReadingNetwork`."""

    def __init__(self, network: MTP, target: Borrowed) -> None:
        self.module: nn.Module = network
        self.taps: tuple[Tap, ...] = ("head",)
        self.vocabulary = target.vocabulary
        self.ids = mx.arange(target.vocabulary, dtype=mx.uint32)
        self._network = network
        self._target = target
        self._dtype = _dtype(target)
        self.cached = _cached(network, target.dims, self._dtype)

    def read(self, features: mx.array) -> mx.array:
        """Themselves."""
        return features.astype(self._dtype)

    def output(self, tokens: mx.array, features: mx.array, cache: Any) -> mx.array:
        """One row a token."""
        return self._network(self._target.embedding(tokens), features[:, None], cache)

    def logits(self, outputs: mx.array) -> mx.array:
        """By the target's head."""
        return self._target.logits(outputs)


def _dtype(target: Borrowed) -> mx.Dtype:
    """What the target computes in."""
    embedded: mx.array = target.embedding(mx.array([0]))
    return embedded.dtype


def _cached(network: MTP, dims: int, dtype: mx.Dtype) -> AttentionKind:
    """What its layer caches, as mlx-lm's own cache sees it."""
    install_attention(network)  # which notes whether it is latent vectors
    cache = KVCache()
    row = mx.zeros((1, 1, dims), dtype)
    return attention_kind(cache, lambda: network(row, row, cache))


# Whose weights are known


class _Family(msgspec.Struct, frozen=True):
    """Models whose multi-token-prediction weights are published alike."""

    arguments: Callable[[Any], Any]
    """A model's arguments in mlx-lm."""
    layer: Callable[[Any], nn.Module]
    """From them to a decoder layer that attends everything, and has experts if the model has any."""
    naming: Callable[[Any], Naming]
    latent: bool = False
    """Whether its layers cache latent vectors (see `split_latent`)."""


def _qwen_naming(_: Any) -> Naming:
    """As in vLLM's `qwen3_next_mtp.py` and `qwen3_5_mtp.py`, whose norms add one to all these weights."""
    parts = {
        "fc.": "projection.",
        "pre_fc_norm_embedding.": "embedding_norm.",
        "pre_fc_norm_hidden.": "hidden_norm.",
        "norm.": "norm.",
        "layers.0.": "layer.",
    }
    return Naming("mtp.", tuple(parts.items()), zero_centred=True)


def _numbered_naming(arguments: Any) -> Naming:
    """As in vLLM's `glm4_moe_mtp.py` and `deepseek_mtp.py`: the layer behind the last, which has copies of the model's
    head and embeddings.
    """
    parts = {
        "enorm.": "embedding_norm.",
        "hnorm.": "hidden_norm.",
        "eh_proj.": "projection.",
        "shared_head.norm.": "norm.",
        "shared_head.head.": None,
        "embed_tokens.": None,
        "": "layer.",
    }
    return Naming(f"model.layers.{arguments.num_hidden_layers}.", tuple(parts.items()))


def _qwen3_next_layer(arguments: Any) -> nn.Module:
    attending = dataclasses.replace(arguments, full_attention_interval=1, mlp_only_layers=[], decoder_sparse_step=1)
    layer: nn.Module = qwen3_next.Qwen3NextDecoderLayer(attending, 0)
    return layer


def _qwen3_5_layer(arguments: Any) -> nn.Module:
    layer: nn.Module = qwen3_5.DecoderLayer(dataclasses.replace(arguments, full_attention_interval=1), 0)
    return layer


def _glm4_moe_layer(arguments: Any) -> nn.Module:
    layer: nn.Module = glm4_moe.DecoderLayer(arguments, arguments.num_hidden_layers)
    return layer


def _deepseek_layer(arguments: Any) -> nn.Module:
    layer: nn.Module = deepseek_v3.DeepseekV3DecoderLayer(arguments, arguments.num_hidden_layers)
    return layer


def _glm4_moe_lite_layer(arguments: Any) -> nn.Module:
    layer: nn.Module = glm4_moe_lite.Glm4MoeLiteDecoderLayer(arguments, arguments.num_hidden_layers)
    return layer


_QWEN3_NEXT = _Family(lambda model: model.args, _qwen3_next_layer, _qwen_naming)
_QWEN3_5 = _Family(lambda model: model.language_model.args, _qwen3_5_layer, _qwen_naming)
_GLM4_MOE = _Family(lambda model: model.args, _glm4_moe_layer, _numbered_naming)
_FAMILIES: Mapping[str, _Family] = {
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "glm4_moe": _GLM4_MOE,
    "deepseek_v3": _Family(lambda model: model.args, _deepseek_layer, _numbered_naming, latent=True),
    "glm4_moe_lite": _Family(lambda model: model.args, _glm4_moe_lite_layer, _numbered_naming, latent=True),
}
"""By the module of mlx-lm's that defines the model."""


# Building one


def find_mtp(loaded: Loaded) -> bool:
    """Whether a model's folder holds multi-token-prediction weights of a kind that is known. They may be damaged."""
    family = _FAMILIES.get(_kind(loaded))
    return family is not None and holds_weights(loaded.folder, family.naming(family.arguments(loaded.model)))


def mtp_network(loaded: Loaded, target: Borrowed) -> MTPNetwork:
    """From the weights in a model's folder, evaluated: in the target's type, quantized if both are.

    Raises DrafterError if there are none, or of a kind that is not known, and for weights that are not whole or do not
    fit the model.
    """
    family = _family(loaded)
    arguments = family.arguments(loaded.model)
    naming = family.naming(arguments)
    try:
        weights = read_weights(loaded.folder, naming)
        if not weights:
            raise DrafterError("its folder holds none")
        if family.latent:
            weights = split_latent(weights, arguments.num_attention_heads, arguments.qk_nope_head_dim)
        network = MTP(family.layer(arguments), target.dims, arguments.rms_norm_eps)
        fill(network, weights, naming.stored, loaded.model, _dtype(target))
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        # Fault boundary: the weights are the user's, and MLX raises whatever it trips over.
        raise DrafterError(f"{loaded.name} has no multi-token-prediction weights that could draft: {error}") from None
    return MTPNetwork(network, target)


def _kind(loaded: Loaded) -> str:
    return type(loaded.model).__module__.removeprefix("mlx_lm.models.")


def _family(loaded: Loaded) -> _Family:
    kind = _kind(loaded)
    if kind not in _FAMILIES:
        raise DrafterError(f"{loaded.name}: no multi-token-prediction weights are known for {kind}")
    return _FAMILIES[kind]
