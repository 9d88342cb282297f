"""Exponentials from vectorised operations: the same numbers as MLX's own, to float32's rounding."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.mlx import exponential


def test_exp2_is_right_to_three_units_over_its_whole_range() -> None:
    powers = np.concatenate([np.linspace(-126, 127, 200_001), np.arange(-126, 128), np.arange(-126, 127) + 0.5])
    ours = np.array(exponential.exp2(mx.array(powers.astype(np.float32))), dtype=np.float64)
    exact = np.exp2(powers.astype(np.float32).astype(np.float64))
    assert np.max(np.abs(ours / exact - 1)) < 3 * 2**-23


@given(
    st.lists(st.floats(-(2.0**100), 0.0, width=32, allow_subnormal=False) | st.just(-np.inf), min_size=1, max_size=50)
)
def test_exp_equals_mlx_at_and_below_zero(powers: list[float]) -> None:
    """Minus infinity, a masked logit's distance from the best, counts as nothing beside the best."""
    ours, theirs = (np.array(exp(mx.array(powers, dtype=mx.float32))) for exp in (exponential.exp, mx.exp))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-37)


def test_the_best_exp_is_one_of_the_two() -> None:
    assert exponential.best_exp() in (exponential.exp, mx.exp)


@given(st.lists(st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False), min_size=1, max_size=50))
def test_swiglu_equals_silu_times_up_however_large_the_gate(gates: list[float]) -> None:
    gate = mx.array(gates, dtype=mx.float32)
    up = mx.full(gate.shape, 0.5)
    ours, theirs = np.array(exponential.swiglu(gate, up)), np.array(nn.silu(gate) * up)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-30)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0, 30.0, 1e4]))
def test_softmax_equals_mlx(seed: int, spread: float) -> None:
    scores = mx.array(np.random.default_rng(seed).normal(size=(3, 40)).astype(np.float32) * spread)
    ours, theirs = np.array(exponential.softmax(scores)), np.array(mx.softmax(scores, axis=-1))
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-30)
    np.testing.assert_allclose(ours.sum(axis=-1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("width", [1, 7, 40])
@pytest.mark.parametrize("kind", ["none", "causal", "array"])
def test_attention_equals_mlx(kv_heads: int, width: int, kind: str) -> None:
    lanes, heads, length, dim = 4, 6, 900, 16
    draws = np.random.default_rng(width * kv_heads)
    queries, keys, values = (
        mx.array(draws.normal(size=(lanes, count, rows, dim)).astype(np.float32))
        for count, rows in ((heads, width), (kv_heads, length), (kv_heads, length))
    )
    ends = mx.array(draws.integers(width, length, size=(lanes, 1, 1, 1))) - width + mx.arange(width)[:, None]
    mask = {"none": None, "causal": "causal", "array": mx.arange(length) <= ends}[kind]
    ours = exponential.attention(queries, keys, values, scale=0.25, mask=mask, sinks=None)
    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=mask)
    assert lanes * heads * width * length >= exponential.SMALLEST_SCORES
    np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=1e-4, atol=1e-6)
