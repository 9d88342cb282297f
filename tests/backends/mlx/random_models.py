"""Tiny random models of mlx-lm's own architectures, in memory; their output is varied enough to prove something."""

import importlib
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

VOCABULARY = 128

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"tie_word_embeddings": False},
    "qwen3": _COMMON
    | {"head_dim": 16, "max_position_embeddings": 2048, "rope_theta": 10000.0, "tie_word_embeddings": True},
    "mixtral": _COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": _COMMON | {"tie_word_embeddings": False},
    "gemma2": _COMMON | {"head_dim": 16},
    "gemma3_text": _COMMON | {"head_dim": 16},
    "mamba": {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "gpt_bigcode": {
        "n_embd": 64,
        "n_layer": 2,
        "n_inner": 96,
        "n_head": 4,
        "n_positions": 2048,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": VOCABULARY,
    },
}
ATTENTION_GAIN, FEED_FORWARD_GAIN, HEAD_GAIN = 4.0, 2.0, 4.0
"""How much larger than mlx's initial values the weights are: embeddings are left small beside what the layers add, else
a model repeats the token that it just read.
"""
QUERY_KEY_NORM = 2.0
"""Where queries and keys are normalised, their norms' weights make attention look at anything in particular."""


def random_model(kind: str, seed: int = 0, **config: Any) -> nn.Module:
    """An evaluated float32 model; the same one for the same arguments."""
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(seed)
    model: nn.Module = module.Model(module.ModelArgs.from_dict({"model_type": kind} | CONFIGS[kind] | config))
    model.update(cast(dict[str, Any], tree_map_with_path(_louder, model.parameters())))
    model.eval()
    mx.eval(model.parameters())
    return model


def _louder(path: str, weight: mx.array) -> mx.array:
    if "q_norm" in path or "k_norm" in path:
        return weight * QUERY_KEY_NORM
    if weight.ndim < 2 or "embed" in path:
        return weight
    if "head" in path:
        return weight * HEAD_GAIN
    return weight * (ATTENTION_GAIN if "attn" in path else FEED_FORWARD_GAIN)
