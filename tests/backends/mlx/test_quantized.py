"""Keys and values of few bits: lanes get what one lane of numbers rounded so gets, whatever the chunks."""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from backends.base import KVQuantization
from backends.mlx.build import build_forward
from backends.mlx.load import LoadError
from backends.mlx.verify import Forward
from engine.config import EngineConfig
from scheduler.request import Request
from tests.backends.mlx.random_models import VOCABULARY, random_model
from tests.backends.mlx.serving import (
    NEAR_TIE,
    Agreement,
    OracleDrafts,
    Solo,
    greedy,
    prompt_of,
    serve,
    submissions,
)
from tests.backends.mlx.windows import chunk, decode

pytestmark = pytest.mark.usefixtures("calm")

WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads of 32, which is a group."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "gemma3_text": WIDE | {"head_dim": 32, "sliding_window": 16, "sliding_window_pattern": 2},
}
HOWS = [KVQuantization(4, 32), KVQuantization(8, 32), KVQuantization(4, 32, start=50), KVQuantization(8, 32, 300)]


class RoundedCache(KVCache):  # type: ignore[misc]  # mlx-lm's is untyped
    """mlx-lm's own cache, of keys and values that went through MLX's quantization from a position on."""

    def __init__(self, how: KVQuantization) -> None:
        super().__init__()
        self._how = how

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        exact = max(0, self._how.start - self.offset)
        fetched: tuple[mx.array, mx.array] = super().update_and_fetch(
            *(
                mx.concatenate([each[:, :, :exact], self._rounded(each[:, :, exact:])], axis=2)
                for each in (keys, values)
            )
        )
        return fetched

    def _rounded(self, rows: mx.array) -> mx.array:
        if not rows.shape[2]:
            return rows
        parts = mx.quantize(rows, group_size=self._how.group_size, bits=self._how.bits)
        return mx.dequantize(*parts, group_size=self._how.group_size, bits=self._how.bits)


def rounded_caches(model: nn.Module, how: KVQuantization) -> list[Any]:
    return [RoundedCache(how) if type(each) is KVCache else each for each in make_prompt_cache(model)]


def solo_with(caches: list[Any], model: nn.Module, request: Request) -> Solo:
    leads: list[float] = []

    def sample(logprobs: mx.array) -> mx.array:
        second, best = np.sort(np.array(logprobs[0]))[-2:]
        leads.append(float(best - second))
        return mx.argmax(logprobs, axis=-1)

    prompt = mx.array(request.prompt)
    steps = generate_step(prompt, model, max_tokens=request.max_tokens, sampler=sample, prompt_cache=caches)
    tokens = tuple(int(token) for token, _ in steps)
    return Solo(tokens, tuple(leads[: len(tokens)]))


@cache
def reference(kind: str) -> nn.Module:
    return random_model(kind, seed=1, **MODELS[kind])


@cache
def forward_of(kind: str, how: KVQuantization) -> Forward:
    return build_forward(random_model(kind, seed=1, **MODELS[kind]), VOCABULARY, kind, quantization=how)


def requests_of(kind: str) -> list[Request]:
    lengths = [(12, 50), (45, 40), (240, 36), (290, 20)]
    return [
        greedy(f"{kind}-{place}", prompt_of(place, length, VOCABULARY), tokens)
        for place, (length, tokens) in enumerate(lengths)
    ]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("rows", [9, 256])
def test_lanes_get_what_one_lane_of_such_numbers_gets(
    kind: str, how: KVQuantization, rows: int, agreement: Agreement
) -> None:
    requests = requests_of(kind)
    model = reference(kind)
    alone = {each.request_id: solo_with(rounded_caches(model, how), model, each) for each in requests}
    answers = {each.request_id: (*each.prompt, *alone[each.request_id].tokens) for each in requests}
    source = OracleDrafts(answers, VOCABULARY, lambda lane, turn: (1 + (lane + turn) % 4, (lane * turn) % 4))
    config = EngineConfig(max_lanes=3, round_rows=rows, draft_tokens=4)
    served = serve(forward_of(kind, how), submissions(requests, every=2), config, [source])
    for request in requests:
        agreement.check(request, served.tokens[request.request_id], alone[request.request_id])


@pytest.mark.parametrize("bits", [4, 8])
def test_it_is_the_quantization_that_mlx_lm_has(bits: int) -> None:
    """Its own cache of few bits, and its own attention over it."""
    model, request = reference("llama"), requests_of("llama")[1]
    caches = [QuantizedKVCache(group_size=32, bits=bits) for _ in model.layers]
    theirs = solo_with(caches, model, request)
    served = serve(forward_of("llama", KVQuantization(bits, 32)), submissions([request]), EngineConfig(draft_tokens=0))
    tokens = served.tokens[request.request_id]
    differing = [place for place, pair in enumerate(zip(tokens, theirs.tokens, strict=True)) if pair[0] != pair[1]]
    assert not differing or theirs.leads[differing[0]] <= NEAR_TIE


def test_few_bits_matter_and_the_first_positions_stay_exact() -> None:
    """Else the tests above would compare nothing: logits differ from exact ones behind `start`, and not before it."""
    prompt = prompt_of(3, 80, VOCABULARY)
    exact = reference("llama")(mx.array([prompt]), cache=make_prompt_cache(reference("llama")))[0]
    for how, same in ((KVQuantization(4, 32), 1), (KVQuantization(4, 32, start=50), 50)):
        forward = forward_of("llama", how)
        forward.run([chunk(0, prompt[:1])], None)
        draft = prompt[2:]
        logits = forward.run([decode(0, prompt[:2], draft)], None).logits
        assert logits is not None
        worst = np.abs(np.array(logits) - np.array(exact[1:])).max(axis=-1)
        assert worst[: same - 1].max(initial=0) < 1e-3
        assert worst[same:].max() > 0.01
        forward.reset()


@pytest.mark.parametrize(("bits", "share"), [(4, 0.1875), (8, 0.3125)])
def test_what_it_saves(bits: int, share: float) -> None:
    """Of float32 and groups of 32: the bits, and a scale and a bias for each group."""

    def held(forward: Forward) -> int:
        forward.run([chunk(0, prompt_of(0, 100, VOCABULARY))], None)
        total = sum(array.nbytes for array in forward.buffers())
        forward.reset()
        return total

    plain = build_forward(random_model("llama", seed=1, **WIDE), VOCABULARY, "llama")
    assert held(forward_of("llama", KVQuantization(bits, 32))) == share * held(plain)


@pytest.mark.parametrize(
    ("kind", "config", "how", "reason"),
    [
        ("llama", {}, KVQuantization(4, 32), "heads of 16 and 16 cannot be quantized in groups of 32"),
        ("llama", WIDE, KVQuantization(4, 64), "heads of 32 and 32 cannot be quantized in groups of 64"),
    ],
)
def test_what_cannot_be_quantized_is_refused(
    kind: str, config: dict[str, Any], how: KVQuantization, reason: str
) -> None:
    with pytest.raises(LoadError, match=f"tiny: {reason}"):
        build_forward(random_model(kind, **config), VOCABULARY, "tiny", quantization=how)


@pytest.mark.parametrize("wrong", [{"bits": 3}, {"bits": 4, "group_size": 48}, {"bits": 8, "start": -1}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must be|cannot start"):
        KVQuantization(**wrong)
