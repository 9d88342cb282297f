"""Converts a GGUF file of the "llama" architecture into a folder that mlx-lm and transformers load as it is.

Owns the mapping from GGUF metadata and tensor names to config.json, generation_config.json, model.safetensors,
tokenizer.json and tokenizer_config.json. Everything in them comes from the file; nothing is looked up elsewhere.
Must not know where a file came from, nor where the folder will finally stand.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GROUP_SIZE = 32
"""Weights per scale in every quantized GGUF type that MLX keeps quantized (Q4_0, Q4_1, Q8_0)."""

_TOP_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PARTS = ("weight", "scales", "biases")

# `tokenizer.ggml.token_type`
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


class GGUFError(ValueError):
    """A GGUF file that is damaged, or that this converter does not know how to turn into an equal model."""


Kind = TypeVar("Kind")


class Metadata:
    """Typed access to a GGUF file's key-value pairs; a missing or mistyped key is a GGUFError that names it."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def text(self, key: str) -> str:
        """The string at `key`."""
        return self._of(key, str)

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer (or bool) at `key`."""
        if default is not None and key not in self._values:
            return default
        return int(self._scalar(key))

    def number(self, key: str, default: float | None = None) -> float:
        """The float32 at `key`, as the shortest decimal that is that float32 (1e-05, not 9.99999974e-06)."""
        if default is not None and key not in self._values:
            return default
        return float(str(np.float32(self._scalar(key))))

    def texts(self, key: str) -> list[str]:
        """The array of strings at `key`."""
        return [str(text) for text in self._of(key, list)]

    def integers(self, key: str) -> list[int]:
        """The array of integers at `key`."""
        return [int(value) for value in np.array(self._of(key, mx.array)).ravel()]

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def _scalar(self, key: str) -> int | float:
        values = np.array(self._of(key, mx.array)).ravel().tolist()
        if len(values) != 1:
            raise GGUFError(f"the GGUF file's {key!r} is not one number but {len(values)}")
        return cast(int | float, values[0])

    def _of(self, key: str, kind: type[Kind]) -> Kind:
        if key not in self._values:
            raise GGUFError(f"the GGUF file has no {key!r}")
        value = self._values[key]
        if not isinstance(value, kind):
            raise GGUFError(f"the GGUF file's {key!r} is of another type than it should be: {value!r}")
        return value


def convert(source: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Write the model in the GGUF file `source` into `folder`, which is made if need be.

    Quantized tensors stay in MLX's quantized form with their float16 scales, so that dequantizing in float32 gives
    the file's own values to the bit. `progress` is told (modules done, modules in all). Raises GGUFError for a
    damaged file and for whatever would change the model's answers if it were ignored: another architecture, RoPE
    scaling, tensors or a tokenizer without a known equivalent.
    """
    arrays, metadata = _read(source)
    _refuse_unsupported(metadata)
    tokenizer = build_tokenizer(metadata)
    weights = _convert_weights(arrays, metadata, progress)
    settings = {
        "config.json": _config(metadata, weights),
        "generation_config.json": _token_ids(metadata),
        "tokenizer_config.json": _tokenizer_config(metadata),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in settings.items():
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _read(source: Path) -> tuple[dict[str, mx.array], Metadata]:
    try:
        loaded = mx.load(str(source), format="gguf", return_metadata=True)
    except (ValueError, RuntimeError) as error:
        raise GGUFError(f"{source.name} cannot be read as GGUF: {error}") from error
    arrays, values = cast(tuple[dict[str, mx.array], dict[str, object]], loaded)
    return arrays, Metadata(values)


def _refuse_unsupported(metadata: Metadata) -> None:
    architecture = metadata.text("general.architecture")
    if architecture != "llama":
        raise GGUFError(f"GGUF architecture {architecture!r} is not supported, only 'llama'")
    if "llama.rope.scaling.type" in metadata and metadata.text("llama.rope.scaling.type") != "none":
        raise GGUFError(f"RoPE scaling {metadata.text('llama.rope.scaling.type')!r} is not supported")
    rotated = metadata.integer("llama.rope.dimension_count", _head_dim(metadata))
    if rotated != _head_dim(metadata):
        raise GGUFError(f"RoPE over {rotated} of {_head_dim(metadata)} dimensions is not supported")


def _head_dim(metadata: Metadata) -> int:
    heads = metadata.integer("llama.attention.head_count")
    return metadata.integer("llama.attention.key_length", metadata.integer("llama.embedding_length") // heads)


def _kv_heads(metadata: Metadata) -> int:
    return metadata.integer("llama.attention.head_count_kv", metadata.integer("llama.attention.head_count"))


# Weights


def _convert_weights(
    arrays: dict[str, mx.array], metadata: Metadata, progress: Callable[[int, int], None]
) -> dict[str, mx.array]:
    """Rename every tensor and put q and k rows back in order; every tensor is used, or it is an error."""
    modules = _modules(metadata.integer("llama.block_count"), untied="output.weight" in arrays)
    heads = {"attn_q": metadata.integer("llama.attention.head_count"), "attn_k": _kv_heads(metadata)}
    left = dict(arrays)
    weights: dict[str, mx.array] = {}
    for done, (source, target) in enumerate(modules.items(), start=1):
        if f"{source}.weight" not in left:
            raise GGUFError(f"the GGUF file has no tensor {source}.weight")
        for part in _PARTS:
            tensor = left.pop(f"{source}.{part}", None)
            if tensor is not None:
                rotated_heads = heads.get(source.rpartition(".")[2])
                ordered = tensor if rotated_heads is None else _unpermute(tensor, rotated_heads)
                weights[f"{target}.{part}"] = _narrow(ordered)
        progress(done, len(modules))
    if left:
        raise GGUFError(f"the GGUF file has tensors without a known meaning: {', '.join(sorted(left)[:4])}")
    return weights


def _modules(layers: int, untied: bool) -> dict[str, str]:
    """GGUF module name -> mlx-lm module name."""
    modules = dict(_TOP_MODULES)
    if untied:
        modules["output"] = "lm_head"
    for layer in range(layers):
        for source, target in _LAYER_MODULES.items():
            modules[f"blk.{layer}.{source}"] = f"model.layers.{layer}.{target}"
    return modules


def _unpermute(tensor: mx.array, heads: int) -> mx.array:
    """Undo the row order of llama.cpp's converter: pairs (2i, 2i+1) of a head become (i, i + head_dim / 2).

    GGUF rotates neighbouring rows, mlx-lm and transformers rotate the two halves of a head. `tensor` is
    [heads * head_dim, anything]: rows are only moved, so packed words, scales and biases move alike.
    """
    rows, *rest = tensor.shape
    pairs = tensor.reshape(heads, rows // heads // 2, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _narrow(tensor: mx.array) -> mx.array:
    """Float32 tensors as float16 where that loses nothing, so that a GPU need not compute in float32 for the norms."""
    if tensor.dtype != mx.float32:
        return tensor
    narrowed = tensor.astype(mx.float16)
    return narrowed if mx.array_equal(narrowed.astype(mx.float32), tensor).item() else tensor


# Configuration


def _config(metadata: Metadata, weights: Mapping[str, mx.array]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": metadata.integer("llama.embedding_length"),
        "intermediate_size": metadata.integer("llama.feed_forward_length"),
        "num_hidden_layers": metadata.integer("llama.block_count"),
        "num_attention_heads": metadata.integer("llama.attention.head_count"),
        "num_key_value_heads": _kv_heads(metadata),
        "head_dim": _head_dim(metadata),
        "max_position_embeddings": metadata.integer("llama.context_length"),
        "rms_norm_eps": metadata.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "torch_dtype": "float16",
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
    }
    quantization = _quantization(weights)
    return config | _token_ids(metadata) | ({"quantization": quantization} if quantization else {})


def _quantization(weights: Mapping[str, mx.array]) -> dict[str, Any]:
    """mlx-lm's "quantization": the commonest bit width, and by path the modules that differ from it."""
    bits = {
        name.removesuffix(".scales"): _bits(weights[name.removesuffix("scales") + "weight"], scales)
        for name, scales in weights.items()
        if name.endswith(".scales")
    }
    if not bits:
        return {}
    common = Counter(bits.values()).most_common(1)[0][0]
    exceptions = {path: {"group_size": GROUP_SIZE, "bits": own} for path, own in bits.items() if own != common}
    return {"group_size": GROUP_SIZE, "bits": common, **exceptions}


def _bits(packed: mx.array, scales: mx.array) -> int:
    return packed.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)


def _token_ids(metadata: Metadata) -> dict[str, int]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id`, those that the file names."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    sources = {name: f"tokenizer.ggml.{source}_token_id" for name, source in keys.items()}
    return {name: metadata.integer(key) for name, key in sources.items() if key in metadata}


# Tokenizer


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The byte-level BPE tokenizer of the file: single digits are split off, then GPT-2's pattern.

    Raises GGUFError for another kind of tokenizer: a wrong pre-tokenizer would encode most texts well and some wrongly.
    """
    kind = (metadata.text("tokenizer.ggml.model"), metadata.text("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise GGUFError(f"GGUF tokenizer {kind[0]!r} with pre-tokenizer {kind[1]!r} is not supported")
    if metadata.integer("tokenizer.ggml.add_bos_token", 0) or metadata.integer("tokenizer.ggml.add_space_prefix", 0):
        raise GGUFError("a GGUF tokenizer that adds a BOS token or a leading space is not supported")
    tokens = metadata.texts("tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(metadata)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.integers("tokenizer.ggml.token_type")
    for token, kind_of_token in zip(tokens, types, strict=True):
        if kind_of_token in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind_of_token == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    merges = [tuple(merge.split(" ")) for merge in metadata.texts("tokenizer.ggml.merges")]
    pairs = [(merge[0], merge[1]) for merge in merges if len(merge) == 2]
    if len(pairs) != len(merges):
        raise GGUFError("the GGUF file has a merge that is not a pair of tokens")
    return pairs


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.integer("llama.context_length"),
    }
    tokens = metadata.texts("tokenizer.ggml.tokens")
    for name, source in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        key = f"tokenizer.ggml.{source}_token_id"
        if key in metadata:
            config[f"{name}_token"] = tokens[metadata.integer(key)]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata.text("tokenizer.chat_template")
    return config
