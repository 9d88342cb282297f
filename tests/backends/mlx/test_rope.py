"""Rotary tables: the same rotation as mlx-lm's own module, and nobody else's business."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.mlx.rope import Rotations, TableRoPE, install_rope


def rows(count: int, dims: int, heads: int = 3) -> mx.array:
    draws = np.random.default_rng(count * dims).normal(size=(count, heads, 1, dims))
    return mx.array(draws.astype(np.float32))


@given(
    st.lists(st.integers(0, 9000), min_size=1, max_size=9),
    st.sampled_from([2, 16, 64]),
    st.sampled_from([1e4, 5e5]),
    st.sampled_from([1.0, 0.25]),
)
def test_every_row_is_rotated_by_its_own_position(at: list[int], dims: int, base: float, scale: float) -> None:
    own = nn.RoPE(dims, base=base, scale=scale)
    x = rows(len(at), dims)
    tabled = TableRoPE(own, Rotations())(x, offset=mx.array(at))
    alone = [own(x[row : row + 1], offset=position) for row, position in enumerate(at)]
    np.testing.assert_allclose(np.array(tabled), np.array(mx.concatenate(alone)), atol=2e-3 if max(at) > 500 else 2e-4)


def test_new_positions_get_a_new_table() -> None:
    rope = TableRoPE(nn.RoPE(16), Rotations())
    x = rows(2, 16)
    first, second = rope(x, offset=mx.array([1, 2])), rope(x, offset=mx.array([2, 1]))
    np.testing.assert_allclose(np.array(first[0]), np.array(nn.RoPE(16)(x[:1], offset=1))[0], atol=1e-5)
    np.testing.assert_allclose(np.array(second[0]), np.array(nn.RoPE(16)(x[:1], offset=2))[0], atol=1e-5)


@pytest.mark.parametrize("own", [nn.RoPE(8), nn.RoPE(16)], ids=["part of the head", "whole head"])
def test_other_calls_go_to_the_models_own_module(own: nn.RoPE) -> None:
    tabled = TableRoPE(own, Rotations())
    sequence = mx.random.normal((1, 2, 5, 16))
    assert mx.array_equal(tabled(sequence, offset=3), own(sequence, offset=3))
    half = rows(2, 16).astype(mx.float16)
    assert mx.array_equal(tabled(half, offset=mx.array([4, 5])), own(half, offset=mx.array([4, 5])))


def test_only_plain_half_split_ropes_are_replaced() -> None:
    class Part(nn.Module):
        def __init__(self, rope: nn.Module) -> None:
            super().__init__()
            self.rope = rope

    model = nn.Module()
    model.parts = [Part(nn.RoPE(16)), Part(nn.RoPE(16, traditional=True)), Part(nn.Identity())]
    install_rope(model)
    install_rope(model)
    assert [type(part.rope) for part in model.parts] == [TableRoPE, nn.RoPE, nn.Identity]
