"""Reported log-probabilities are the log-softmax of the raw logits, and the likeliest tokens are in order."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import reference
from backends.mlx import exponential
from backends.mlx.logprobs import RowLogprobs
from backends.mlx.rows import Exp


@pytest.mark.parametrize("top", [1, 5, 20])
def test_of_more_equal_tokens_than_are_looked_at_the_lowest_are_reported(top: int) -> None:
    logits = np.zeros((1, 5000), dtype=np.float32)
    equal = np.random.default_rng(3).choice(5000, 900, replace=False)
    logits[0, equal] = 2.0
    (reported,) = RowLogprobs(mx.array(logits), [top], mx.exp).read(np.array([7], dtype=np.uint32))
    assert [token for token, _ in reported.top] == sorted(equal.tolist())[:top]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([1, 5, 64, 700, 5000]),
    tops=st.lists(st.sampled_from([0, 1, 5, 20, 40]), min_size=1, max_size=4),
    spread=st.sampled_from([0.0, 0.3, 3.0, 60.0]),
    whole=st.booleans(),
    exp=st.sampled_from([mx.exp, exponential.exp]),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
)
def test_they_are_the_references(
    seed: int, vocabulary: int, tops: list[int], spread: float, whole: bool, exp: Exp, dtype: mx.Dtype
) -> None:
    """With many equal logits too, as half precision has them."""
    random = np.random.default_rng(seed)
    logits = mx.array((random.normal(size=(len(tops), vocabulary)) * spread).astype(np.float32)).astype(dtype)
    logits = mx.round(logits) if whole else logits
    drawn = random.integers(0, vocabulary, len(tops)).astype(np.uint32)
    reported = RowLogprobs(logits, tops, exp).read(drawn)
    for row, top in enumerate(tops):
        expected = reference.token_logprob(np.array(logits[row].astype(mx.float32)), int(drawn[row]), top)
        assert reported[row].logprob == pytest.approx(expected.logprob, rel=1e-5, abs=1e-4)
        assert [token for token, _ in reported[row].top] == [token for token, _ in expected.top]
        got, wanted = ([logprob for _, logprob in each.top] for each in (reported[row], expected))
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-4)
