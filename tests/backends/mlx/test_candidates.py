"""The largest logits of a row, without a look at most of them, are the largest."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.mlx.candidates import BLOCK, largest


def check(logits: np.ndarray, count: int) -> None:
    values, tokens = (np.array(each) for each in largest(mx.array(logits), count))
    assert values.shape == tokens.shape == (len(logits), count)
    assert tokens.dtype == np.uint32
    expected = -np.sort(-logits, axis=1)[:, :count]
    assert values.tolist() == expected.tolist()
    assert np.take_along_axis(logits, tokens.astype(np.int64), axis=1).tolist() == values.tolist()
    assert all(len(set(row)) == count for row in tokens.tolist()), "no token twice"


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 5),
    vocabulary=st.integers(1, 6000),
    count=st.sampled_from([1, 3, 64, 128, 256]),
    kind=st.sampled_from(["plain", "whole", "masked", "equal"]),
)
def test_they_are_those_of_a_sort(seed: int, rows: int, vocabulary: int, count: int, kind: str) -> None:
    draws = np.random.default_rng(seed)
    logits = draws.normal(size=(rows, vocabulary)).astype(np.float32)
    if kind == "whole":
        logits = np.round(logits)
    if kind == "masked":
        logits[draws.random(logits.shape) < 0.99] = -np.inf
    if kind == "equal":
        logits[:] = 1.0
    check(logits, min(count, vocabulary))


@pytest.mark.parametrize("vocabulary", [64 * BLOCK, 64 * BLOCK + 1, 65 * BLOCK - 1, 65 * BLOCK, 65 * BLOCK + 1])
def test_the_largest_may_stand_together_or_apart_or_at_the_end(vocabulary: int) -> None:
    logits = np.zeros((3, vocabulary), dtype=np.float32)
    logits[0, :64] = np.arange(64) + 1
    logits[1, :: vocabulary // 64][:64] = 5
    logits[2, -64:] = np.arange(64) + 1
    check(logits, 64)
