"""The embedded model itself: what was converted tokenizes, templates, computes and answers as it should."""

import hashlib
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from backends.mlx.load import Loaded, load
from tests.backends.mlx.tiny_models import parameters, stored_weights

pytestmark = pytest.mark.real_model

FLOAT32_SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
"""Of all float32 weights, by name, as decoded block by block from the GGUF file by a program of its own."""

TEXTS = [
    "Hello, world!",
    "  two leading spaces,\ttabs\r\nand\n\n\nlines  ",
    "def f(x):\n    return x ** 2  # don't, we'll, I'm\n",
    "café naïve Ångström — “quotes” … ½ ²",
    "日本語のテキスト、中文和한국어",
    "مرحبا بالعالم שלום עולם",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 e\u0301 \u200b\ufeff\u0000",
    "3.14159, 1,000,000 and ٣٤٥",
    "<|im_start|>user\nnot a turn<|im_end|>",
]


def ignore(stage: str, done: int, total: int | None) -> None:
    """A progress callback that nobody looks at."""


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Loaded:
    return load(str(smollm2), smollm2.parents[1], "float32", ignore)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


LOST_CONTROLS = "\x04\x06\x13\x14\x16\x1d"
"""The vocabulary of SmolLM2 has no token for these bytes, nor for 0xf1 and 0xf2, which begin U+40000 to U+BFFFF."""


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=LOST_CONTROLS, max_codepoint=0x3FFFF)))
def test_every_text_of_known_bytes_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_known_encodings(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("The year 2024's end") == ["The", "Ġyear", "Ġ", "2", "0", "2", "4", "'s", "Ġend"]
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2], skip_special_tokens=True) == "hi"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (2, 2, 49152)


def test_the_chat_template_is_chatml_with_the_models_own_system_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    user = {"role": "user", "content": "Hi!"}
    rendered = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )
    system = {"role": "system", "content": "Be brief."}
    rendered = tokenizer.apply_chat_template([system, user], tokenize=False)
    assert rendered == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"


def test_facts_of_the_model(model: Loaded) -> None:
    assert (model.name, model.dtype, model.parameter_bytes) == ("smollm2-135m", "float32", 4 * 134_515_008)
    assert (model.vocab_size, model.context_length, model.eos_token_ids) == (49152, 8192, (2,))
    assert model.generation_defaults == {}


def test_float32_weights_are_the_dequantized_ones(model: Loaded, smollm2: Path) -> None:
    stored, held = stored_weights(smollm2), parameters(model.model)
    for name, weight in held.items():
        path = name.removesuffix(".weight")
        if f"{path}.scales" not in stored:
            expected = stored[name].astype(mx.float32)
        else:
            scales, biases = (stored[f"{path}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            bits = 8 if path == "model.embed_tokens" else 4
            expected = mx.dequantize(stored[name], scales, biases, group_size=32, bits=bits)
        assert mx.array_equal(weight, expected).item(), name


def test_float32_weights_are_those_of_the_gguf_file(model: Loaded) -> None:
    digest = hashlib.sha256()
    for name, weight in sorted(parameters(model.model).items()):
        digest.update(name.encode())
        digest.update(np.array(weight).tobytes())
    assert digest.hexdigest() == FLOAT32_SHA256


def test_greedy_completions_are_sensible(model: Loaded, smollm2: Path) -> None:
    tokenizer = mlx_lm.utils.load_tokenizer(smollm2)
    completion = mlx_lm.generate(model.model, tokenizer, "The capital of France is", max_tokens=4)
    assert "Paris" in completion
    question = [{"role": "user", "content": "What is the capital of Italy? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    answer = mlx_lm.generate(model.model, tokenizer, prompt, max_tokens=24)
    assert "Rome" in answer
