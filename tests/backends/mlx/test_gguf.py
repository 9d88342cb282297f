import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load, load_model
from transformers import AutoTokenizer

from backends.mlx.gguf import GGUFError, Metadata, build_tokenizer, convert
from tests.backends.mlx.tiny_models import (
    CHAT_TEMPLATE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    SPECIALS,
    Floats,
    stored_weights,
    tiny_gguf,
    vocabulary,
)

MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def ignore(done: int, total: int) -> None:
    """A progress callback that nobody looks at."""


def converted(tmp_path: Path, values: dict[str, Any] | None = None, untied: bool = False) -> Path:
    file = tiny_gguf(untied=untied)
    file.values |= values or {}
    convert(file.write(tmp_path / "tiny.gguf"), tmp_path / "model", ignore)
    return tmp_path / "model"


def float32(weights: dict[str, mx.array], path: str, bits: int) -> Floats:
    scales, biases = (weights[f"{path}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    return np.array(mx.dequantize(weights[f"{path}.weight"], scales, biases, group_size=32, bits=bits))


def halves(rows: Floats, heads: int) -> Floats:
    """Row j of a head is GGUF row 2j, row j + head_dim / 2 is GGUF row 2j + 1, spelled out row by row."""
    half = HEAD_DIM // 2
    source = [2 * j if j < half else 2 * (j - half) + 1 for j in range(HEAD_DIM)]
    return np.stack([rows[head * HEAD_DIM + row] for head in range(heads) for row in source])


def test_weights_keep_the_values_of_the_file_to_the_bit(tmp_path: Path) -> None:
    weights, meaning = stored_weights(converted(tmp_path)), tiny_gguf().meaning
    np.testing.assert_array_equal(float32(weights, "model.embed_tokens", 8), meaning["token_embd.weight"])
    for layer in range(2):
        for source, target in MODULES.items():
            expected = meaning[f"blk.{layer}.{source}.weight"]
            if source in ("attn_q", "attn_k"):
                expected = halves(expected, HEADS if source == "attn_q" else KV_HEADS)
            np.testing.assert_array_equal(float32(weights, f"model.layers.{layer}.{target}", 4), expected)
        norm = np.array(weights[f"model.layers.{layer}.post_attention_layernorm.weight"].astype(mx.float32))
        np.testing.assert_array_equal(norm, meaning[f"blk.{layer}.ffn_norm.weight"])


def test_rotating_halves_of_ordered_rows_equals_rotating_neighbours_of_the_files_rows(tmp_path: Path) -> None:
    folder, meaning = converted(tmp_path), tiny_gguf().meaning
    model, _ = load_model(folder)
    neighbours, _ = load_model(folder, model_config={"rope_traditional": True})
    model.set_dtype(mx.float32)
    neighbours.set_dtype(mx.float32)
    tokens = mx.array([[5, 80, 33, 7, 100, 41]])
    expected = model(tokens)
    assert not mx.allclose(expected, neighbours(tokens), atol=1e-2).item()
    for layer, block in enumerate(neighbours.model.layers):
        for name in ("q", "k"):
            projection = nn.Linear(64, 64, bias=False)
            projection.weight = mx.array(meaning[f"blk.{layer}.attn_{name}.weight"])
            setattr(block.self_attn, f"{name}_proj", projection)
    assert mx.allclose(expected, neighbours(tokens), atol=1e-4).item()


def test_norms_are_float16_only_where_that_is_exact(tmp_path: Path) -> None:
    file = tiny_gguf()
    file.add_f32("output_norm.weight", np.full(64, 1.0001, np.float32))
    convert(file.write(tmp_path / "tiny.gguf"), tmp_path / "model", ignore)
    weights = stored_weights(tmp_path / "model")
    assert weights["model.norm.weight"].dtype == mx.float32
    assert weights["model.norm.weight"][0].item() == np.float32(1.0001)
    assert weights["model.layers.0.input_layernorm.weight"].dtype == mx.float16


def test_configuration_comes_from_the_metadata(tmp_path: Path) -> None:
    folder = converted(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-05,
        "rope_theta": 5000.0,
        "tie_word_embeddings": True,
        "vocab_size": len(vocabulary()),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "quantization": {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}},
    }
    assert {key: config.get(key) for key in expected} == expected
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    assert json.loads((folder / "generation_config.json").read_text()) == ids


def test_optional_metadata_has_the_formats_defaults(tmp_path: Path) -> None:
    file = tiny_gguf()
    for key in ("llama.attention.head_count_kv", "llama.rope.freq_base", "llama.rope.dimension_count"):
        del file.values[key]
    for layer in range(2):
        for name in ("attn_k", "attn_v"):
            file.add_q4_1(f"blk.{layer}.{name}.weight", (64, 64), np.random.default_rng(layer))
    convert(file.write(tmp_path / "tiny.gguf"), tmp_path / "model", ignore)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["num_key_value_heads"], config["rope_theta"]) == (HEADS, 10000.0)
    load_model(tmp_path / "model")


def test_mlx_lm_loads_an_untied_model_as_it_is(tmp_path: Path) -> None:
    model, tokenizer = load(str(converted(tmp_path, untied=True)))
    assert not model.args.tie_word_embeddings
    meaning = tiny_gguf(untied=True).meaning["output.weight"]
    np.testing.assert_array_equal(float32(stored_weights(tmp_path / "model"), "lm_head", 8), meaning)
    assert tokenizer.eos_token_ids == {2}
    assert model(mx.array([tokenizer.encode("hello w12")])).shape[-1] == len(vocabulary())


def test_progress_counts_modules(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    source = tiny_gguf().write(tmp_path / "tiny.gguf")
    convert(source, tmp_path / "model", lambda done, total: told.append((done, total)))
    assert told == [(done, 20) for done in range(1, 21)]


def test_tokenizer_applies_merges_and_splits_digits(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path))
    assert tokenizer.tokenize("hello w12") == ["hello", "Ġw", "1", "2"]
    assert tokenizer.tokenize("a<|im_end|>b<file_sep>c") == ["a", "<|im_end|>", "b", "<file_sep>", "c"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (SPECIALS[1], SPECIALS[2], SPECIALS[0])
    assert tokenizer.decode([2, 1, 3], skip_special_tokens=True) == ""
    assert tokenizer.model_max_length == 512
    assert tokenizer.chat_template == CHAT_TEMPLATE
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], return_dict=False)
    assert tokenizer.convert_ids_to_tokens(chat) == ["<|im_start|>", "hello", "<|im_end|>"]


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_tokenizer_round_trips_every_text(text: str) -> None:
    values = {key: mx.array(value) if isinstance(value, int) else value for key, value in tiny_gguf().values.items()}
    types = mx.array(values["tokenizer.ggml.token_type"])
    tokenizer = build_tokenizer(Metadata(values | {"tokenizer.ggml.token_type": types}))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_user_defined_tokens_stay_whole_and_are_text(tmp_path: Path) -> None:
    file = tiny_gguf()
    file.values["tokenizer.ggml.token_type"][file.values["tokenizer.ggml.tokens"].index("hell")] = 4
    convert(file.write(tmp_path / "tiny.gguf"), tmp_path / "model", ignore)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer.encode("hello")
    assert tokenizer.convert_ids_to_tokens(ids) == ["hell", "o"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling 'yarn'"),
        ({"llama.rope.dimension_count": 8}, "RoPE over 8 of 16 dimensions"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama'"),
        ({"tokenizer.ggml.add_bos_token": True}, "adds a BOS token"),
        ({"tokenizer.ggml.merges": ["h e", "hello"]}, "not a pair"),
        ({"llama.context_length": "long"}, "'llama.context_length' is of another type than it should be: 'long'"),
        ({"llama.context_length": [1, 2]}, "'llama.context_length' is not one number but 2"),
        ({"llama.block_count": 3}, "no tensor blk.2.attn_norm.weight"),
        ({"llama.block_count": 1}, "without a known meaning: blk.1.attn_k.biases"),
    ],
)
def test_what_would_change_the_answers_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(GGUFError, match=message.replace(".", r"\.")):
        converted(tmp_path, values)
    assert not (tmp_path / "model").exists()


def test_a_missing_key_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    file = tiny_gguf()
    del file.values["llama.context_length"]
    with pytest.raises(GGUFError, match=r"has no 'llama\.context_length'"):
        convert(file.write(tmp_path / "tiny.gguf"), tmp_path / "model", ignore)
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(GGUFError, match=r"damaged\.gguf cannot be read as GGUF"):
        convert(tmp_path / "damaged.gguf", tmp_path / "model", ignore)
