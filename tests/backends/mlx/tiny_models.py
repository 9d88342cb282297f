"""Tiny random models for the tests: GGUF files written byte by byte, and mlx-lm folders of any architecture."""

import importlib
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from tokenizers import pre_tokenizers

Floats = npt.NDArray[np.float32]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, LAYERS = 64, 4, 2, 16, 96, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def vocabulary() -> list[str]:
    """Special tokens, the 256 bytes, one token for every merge."""
    return [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


@dataclass
class GGUF:
    """A GGUF file to be: metadata, tensors as bytes, and what the tensors mean in float32 (the oracle)."""

    values: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], int, bytes]] = field(default_factory=dict)
    meaning: dict[str, Floats] = field(default_factory=dict)

    def add_f32(self, name: str, values: Floats) -> None:
        self.tensors[name] = (values.shape, 0, values.astype("<f4").tobytes())
        self.meaning[name] = values

    def add_q4_1(self, name: str, shape: tuple[int, int], rng: np.random.Generator) -> None:
        """Blocks of 32 weights: float16 scale, float16 minimum, 16 bytes (low nibbles first, then high ones)."""
        blocks = shape[0] * shape[1] // 32
        scale = rng.uniform(0.001, 0.02, (blocks, 1)).astype("<f2")
        minimum = rng.uniform(-0.2, 0.0, (blocks, 1)).astype("<f2")
        codes = rng.integers(0, 16, (blocks, 32), dtype=np.uint8)
        packed = codes[:, :16] | (codes[:, 16:] << 4)
        self.tensors[name] = (shape, 3, np.hstack([scale.view("u1"), minimum.view("u1"), packed]).tobytes())
        weights = scale.astype(np.float32) * codes + minimum.astype(np.float32)
        self.meaning[name] = weights.astype(np.float32).reshape(shape)

    def add_q8_0(self, name: str, shape: tuple[int, int], rng: np.random.Generator) -> None:
        """Blocks of 32 weights: float16 scale, 32 signed bytes."""
        blocks = shape[0] * shape[1] // 32
        scale = rng.uniform(0.0005, 0.002, (blocks, 1)).astype("<f2")
        codes = rng.integers(-127, 128, (blocks, 32), dtype=np.int8)
        self.tensors[name] = (shape, 8, np.hstack([scale.view("u1"), codes.view("u1")]).tobytes())
        self.meaning[name] = (scale.astype(np.float32) * codes).astype(np.float32).reshape(shape)

    def write(self, path: Path) -> Path:
        header = struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self.values))
        for key, value in self.values.items():
            header += _text(key) + _value(value)
        data = b""
        for name, (shape, kind, content) in self.tensors.items():
            dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
            header += _text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, len(data))
            data += content + bytes(-len(content) % 32)
        path.write_bytes(header + bytes(-len(header) % 32) + data)
        return path


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    """A value with its GGUF type: bool 7, uint32 4, float32 6, string 8, array 9 (of strings, or of int32 5)."""
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        case _:
            return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def tiny_gguf(seed: int = 0, untied: bool = False) -> GGUF:
    """A whole model of architecture "llama": Q4_1 layers, Q8_0 embeddings, float32 norms."""
    rng = np.random.default_rng(seed)
    tokens = vocabulary()
    file = GGUF(_tiny_values(tokens))
    file.add_q8_0("token_embd.weight", (len(tokens), HIDDEN), rng)
    file.add_f32("output_norm.weight", _norm(rng))
    if untied:
        file.add_q8_0("output.weight", (len(tokens), HIDDEN), rng)
    for layer in range(LAYERS):
        for module, shape in {
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate": (FEED_FORWARD, HIDDEN),
            "ffn_up": (FEED_FORWARD, HIDDEN),
            "ffn_down": (HIDDEN, FEED_FORWARD),
        }.items():
            file.add_q4_1(f"blk.{layer}.{module}.weight", shape, rng)
        file.add_f32(f"blk.{layer}.attn_norm.weight", _norm(rng))
        file.add_f32(f"blk.{layer}.ffn_norm.weight", _norm(rng))
    return file


def _norm(rng: np.random.Generator) -> Floats:
    """Norm weights that float16 holds exactly, like those of a bfloat16 checkpoint."""
    return rng.uniform(0.5, 1.5, HIDDEN).astype(np.float16).astype(np.float32)


def _tiny_values(tokens: list[str]) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.block_count": LAYERS,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-05,
        "llama.rope.freq_base": 5000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


TINY_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": FEED_FORWARD,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
}


def write_folder(
    folder: Path,
    config: dict[str, Any] | None = None,
    dtype: mx.Dtype = mx.float16,
    quantization: dict[str, Any] | None = None,
) -> nn.Module:
    """Write a random model as config.json and model.safetensors; returns the model that was written."""
    config = TINY_CONFIG | (config or {})
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(11)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    if quantization is not None:
        nn.quantize(model, **quantization)
        config = config | {"quantization": quantization}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), parameters(model))
    write_json(folder / "config.json", config)
    model.eval()
    return model


def parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))


def stored_weights(folder: Path) -> dict[str, mx.array]:
    return cast(dict[str, mx.array], mx.load(str(folder / "model.safetensors")))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
