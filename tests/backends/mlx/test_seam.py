"""The seams: heads compute the chosen rows only, and callers that have nothing to do with lanes notice nothing."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import base, gemma2, llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from backends.mlx.caches.buffers import LayerBuffers, LayerShape
from backends.mlx.caches.packed import PackedCache
from backends.mlx.seam import HeadRows, install_attention, install_head
from tests.backends.mlx.random_models import VOCABULARY, random_model
from tests.backends.mlx.serving import Paths, both_paths, prompt_of
from tests.backends.mlx.windows import chunk, decode

PROMPTS = [prompt_of(90 + lane, length, VOCABULARY) for lane, length in enumerate((12, 30, 5, 41))]
each_path = pytest.mark.parametrize("path", ["packed", "padded"])


# ---- the head --------------------------------------------------------------------------------------------------------


class CountingHead(nn.Module):
    """An own head that notes how many rows it computes."""

    def __init__(self, compute: Callable[[mx.array], mx.array], rows: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._compute = compute
        self._note = rows.append

    def __call__(self, hidden: mx.array) -> mx.array:
        self._note(hidden.size // hidden.shape[-1])
        return self._compute(hidden)


def counting(head: str) -> tuple[Paths, list[int]]:
    """A llama with a head that counts, and the counts."""
    model, rows = headed(head), list[int]()
    if head == "own":
        model.lm_head = CountingHead(model.lm_head, rows)
    else:
        embedding = model.model.embed_tokens
        embedding.as_linear = CountingHead(embedding.as_linear, rows).__call__
    return both_paths(model), rows


@each_path
@pytest.mark.parametrize("head", ["own", "tied", "quantized"])
def test_only_sampled_rows_reach_the_head(path: str, head: str) -> None:
    paths, rows = counting(head)
    forward = paths[path]
    forward.run([chunk(lane, prompt[:-1]) for lane, prompt in enumerate(PROMPTS[:3])], None)
    rows.clear()
    ragged = [decode(lane, prompt, (3,) * lane) for lane, prompt in enumerate(PROMPTS[:3])]
    verified = forward.run([*ragged, chunk(3, PROMPTS[3])], None)
    assert verified.logits is not None
    assert verified.logits.shape == (1 + 2 + 3, VOCABULARY)
    assert rows[-1] == 1 + 2 + 3
    assert sum(rows[:-1]) <= 1, "a chunk computes one row at most, and that is never evaluated"


@each_path
@pytest.mark.parametrize("head", ["own", "tied", "quantized", "elsewhere"])
def test_the_rows_logits_are_those_of_the_whole_head(path: str, head: str) -> None:
    """Whatever the head: also where it hangs under another name and computes all rows."""
    paths = both_paths(headed(head))
    forward = paths[path]
    forward.run([chunk(lane, prompt[:-1]) for lane, prompt in enumerate(PROMPTS)], None)
    windows = [decode(lane, prompt, PROMPTS[0][:lane]) for lane, prompt in enumerate(PROMPTS)]
    verified = forward.run(windows, None)
    assert verified.logits is not None
    assert sorted(each.index for each in verified.sampled) == [0, 1, 2, 3]
    for each in verified.sampled:
        whole = (*PROMPTS[each.index], *PROMPTS[0][: each.index])
        expected = paths.model(mx.array([whole]))[0, len(PROMPTS[each.index]) - 1 :]
        assert np.allclose(verified.logits[each.first : each.last], expected, atol=1e-4)


def headed(head: str) -> nn.Module:
    model = random_model("llama", tie_word_embeddings=head in ("tied", "quantized"))
    if head == "quantized":
        nn.quantize(model, group_size=32, bits=8)
    return HeadElsewhere(model) if head == "elsewhere" else model


class HeadElsewhere(nn.Module):
    """A model whose head hangs under a name of its own, as some of mlx-lm's do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model.model
        self.out = model.lm_head

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.model.layers
        return layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.out(self.model(tokens, cache))
        return logits


def test_rows_are_picked_from_the_flattened_hidden_states() -> None:
    hidden = mx.arange(24).reshape(2, 3, 4)
    chosen = HeadRows()
    assert mx.array_equal(chosen.pick(hidden), hidden)
    chosen.rows = mx.array([4, 0])
    assert chosen.pick(hidden).tolist() == [[[16, 17, 18, 19], [0, 1, 2, 3]]]


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_with_the_seam_gives_others_all_rows(tied: bool) -> None:
    model = random_model("llama", tie_word_embeddings=tied)
    tokens = mx.array([PROMPTS[1]])
    before = model(tokens)
    install_head(model)
    assert mx.array_equal(model(tokens), before)


@each_path
def test_after_a_round_others_get_all_rows_again(path: str) -> None:
    paths, _ = counting("own")
    before = paths.model(mx.array([PROMPTS[1]]))
    paths[path].run([chunk(0, PROMPTS[0])], None)
    paths[path].run([decode(0, PROMPTS[0], (1, 2)), chunk(1, PROMPTS[1])], None)
    assert mx.array_equal(paths.model(mx.array([PROMPTS[1]])), before)


# ---- attention -------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare_llama(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A llama whose module has its attention function as mlx-lm wrote it; mlx quantizes groups of 32 at least."""
    monkeypatch.setattr(llama, "scaled_dot_product_attention", base.scaled_dot_product_attention)
    return random_model("llama", head_dim=32)


def logits_in_three_steps(model: nn.Module, caches: list[Any]) -> list[np.ndarray]:
    return [
        np.array(model(mx.array([PROMPTS[3][start:end]]), cache=caches)) for start, end in ((0, 30), (30, 31), (31, 41))
    ]


@pytest.mark.parametrize(
    "cache", [KVCache, lambda: QuantizedKVCache(group_size=32, bits=8), lambda: RotatingKVCache(max_size=16)]
)
def test_other_caches_give_the_same_to_the_bit(bare_llama: nn.Module, cache: Callable[[], Any]) -> None:
    before = logits_in_three_steps(bare_llama, [cache() for _ in bare_llama.layers])
    assert install_attention(bare_llama)
    assert llama.scaled_dot_product_attention is not base.scaled_dot_product_attention
    after = logits_in_three_steps(bare_llama, [cache() for _ in bare_llama.layers])
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))


def test_mlx_lm_generates_the_same_with_the_seams_in_and_a_round_between(bare_llama: nn.Module) -> None:
    def generated() -> list[int]:
        return [int(token) for token, _ in generate_step(mx.array(PROMPTS[1]), bare_llama, max_tokens=30)]

    before = generated()
    paths = both_paths(bare_llama)
    paths.packed.run([chunk(0, PROMPTS[0])], None)
    assert generated() == before
    mx.eval(paths.packed.run([decode(0, (*PROMPTS[0], 3))], None).logits)
    assert generated() == before


def test_the_seam_is_installed_once(bare_llama: nn.Module) -> None:
    assert install_attention(bare_llama)
    once = llama.scaled_dot_product_attention
    assert install_attention(bare_llama)
    assert llama.scaled_dot_product_attention is once


def test_a_model_that_does_not_import_the_function_has_no_seam() -> None:
    assert not install_attention(random_model("gemma2"))
    assert not hasattr(gemma2, "scaled_dot_product_attention")


def test_what_the_original_does_not_know_is_not_handed_on(
    bare_llama: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some modules' functions take no sinks, others take arguments of their own."""
    called: list[dict[str, Any]] = []

    def original(queries: mx.array, keys: mx.array, values: mx.array, **named: Any) -> mx.array:
        called.append(named)
        return queries

    monkeypatch.setattr(llama, "scaled_dot_product_attention", original)
    install_attention(bare_llama)
    ones = mx.ones((1, 4, 1, 16))
    llama.scaled_dot_product_attention(ones, ones, ones, cache=None, scale=1.0, mask="causal")
    llama.scaled_dot_product_attention(ones, ones, ones, None, 2.0, None, sinks=ones, softcap=3.0)
    assert called == [
        {"cache": None, "scale": 1.0, "mask": "causal"},
        {"cache": None, "scale": 2.0, "mask": None, "sinks": ones, "softcap": 3.0},
    ]


@pytest.mark.parametrize("asked", [{"mask": "causal"}, {"mask": None, "softcap": 3.0}])
def test_packed_rows_refuse_what_they_cannot_follow(bare_llama: nn.Module, asked: dict[str, Any]) -> None:
    install_attention(bare_llama)
    cache = PackedCache(LayerBuffers(LayerShape(2, 32, 32, mx.float32)), mx.fast.scaled_dot_product_attention)
    ones = mx.ones((1, 4, 1, 16))
    with pytest.raises(ValueError, match=r"mlx_lm\.models\.llama masks attention in a way of its own"):
        llama.scaled_dot_product_attention(ones, ones, ones, cache=cache, scale=1.0, **asked)


def test_a_fresh_cache_is_still_mlx_lms_own(bare_llama: nn.Module) -> None:
    install_head(bare_llama)
    install_attention(bare_llama)
    assert {type(cache) for cache in make_prompt_cache(bare_llama)} == {KVCache}
