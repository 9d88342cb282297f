"""Every patch is needed: without it the model's lanes are refused. With it they are served, on the packed path.

That what they are served is right is `test_architectures`' to show.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import afm7, gear, gemma2, gpt_bigcode, llama4, plamo2, rope_utils

from backends.mlx import build
from backends.mlx.build import build_forward
from backends.mlx.load import LoadError
from backends.mlx.patches import PATCHES, apply_patches
from backends.mlx.patches.rope_utils import _rotated
from backends.mlx.patches.softcap import softcapped
from backends.mlx.verify import PackedForward
from tests.backends.mlx.architectures import VOCABULARY, tiny_model
from tests.backends.mlx.random_models import random_model

PLACES: dict[str, list[tuple[Any, str]]] = {
    "afm7": [(afm7.KVReuseAttention, "__call__")],
    "gear": [(gear, "_softcap_attention")],
    "gemma2": [(gemma2.Attention, "__call__")],
    "gpt_bigcode": [(gpt_bigcode.GPTBigCodeModel, "__call__")],
    "llama4": [(llama4.LlamaModel, "__call__"), (llama4.Attention, "__call__")],
    "rope_utils": [(rope_utils.DynamicNTKScalingRoPE, "__call__")],
}
"""What each patch puts its own in place of."""


def model_of(name: str) -> Any:
    if name == "rope_utils":
        return random_model("llama", rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=64)
    return tiny_model(name)


def test_every_patch_is_listed_here() -> None:
    assert {*PLACES, "plamo2"} == set(PATCHES)


@pytest.mark.parametrize("name", sorted(PATCHES))
def test_without_its_patch_a_model_is_refused_and_with_it_served(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    apply_patches(model)
    with monkeypatch.context() as bare:
        bare.setattr(build, "apply_patches", lambda _: None)
        for owner, attribute in PLACES.get(name, ()):
            bare.setattr(owner, attribute, getattr(owner, attribute).taken_over)
        if name == "plamo2":
            bare.setattr(plamo2, "mx", mx)
        with pytest.raises(LoadError, match="several lanes at once do not give what one lane gives"):
            build_forward(model, VOCABULARY, name)
    assert isinstance(build_forward(model_of(name), VOCABULARY, name), PackedForward)


@pytest.mark.parametrize("mask", [None, "causal", "some"])
def test_capped_scores_are_what_the_formula_says(mask: str | None) -> None:
    rng = np.random.default_rng(3)
    queries, keys, values = (rng.normal(size=(2, heads, rows, 8)) for heads, rows in ((4, 3), (2, 7), (2, 7)))
    visible = np.ones((2, 1, 3, 7), bool)
    if mask == "causal":
        visible = np.broadcast_to(np.arange(7) <= np.arange(4, 7)[:, None], visible.shape)
    if mask == "some":
        visible = rng.random((2, 1, 3, 7)) < 0.7
        visible[..., 0] = True
    scores = np.tanh(queries @ np.repeat(keys, 2, axis=1).swapaxes(-1, -2) * 0.3 / 5.0) * 5.0
    weights = np.where(visible, np.exp(scores), 0.0)
    expected = weights / weights.sum(-1, keepdims=True) @ np.repeat(values, 2, axis=1)
    arrays = [mx.array(each.astype(np.float32)) for each in (queries, keys, values)]
    said = mx.array(visible) if mask == "some" else mask
    out = softcapped(5.0)(*arrays, scale=0.3, mask=said, sinks=None)
    assert np.abs(np.array(out) - expected).max() < 1e-5


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [8, 16])
def test_rows_are_rotated_as_mlx_rotates_them(traditional: bool, dims: int) -> None:
    x = mx.random.normal((3, 2, 1, 16), key=mx.random.key(1))
    positions, bases = (5, 0, 310), (10000.0, 500.0, 777.0)
    ours = _rotated(x, dims, mx.array(positions), mx.array(bases), traditional)
    for row, (position, base) in enumerate(zip(positions, bases, strict=True)):
        theirs = mx.fast.rope(x[row : row + 1], dims, traditional=traditional, base=base, scale=1.0, offset=position)
        assert np.abs(np.array(ours[row] - theirs[0])).max() < 1e-4
