"""Truncated rows: what candidates cover is drawn among them, and all else among all tokens, by the same rule."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import reference
from backends.mlx.rows import SampledRow
from backends.mlx.truncate import CANDIDATES, TruncatedDraws
from scheduler.request import Sampling
from tests.backends.draws import near_tie

VOCABULARY = 3000


def draws(logits: np.ndarray, sampling: Sampling, first: int = 0) -> TruncatedDraws:
    rows = [SampledRow(sampling, first + place) for place in range(len(logits))]
    return TruncatedDraws(mx.array(logits), rows, mx.exp)


def check(logits: np.ndarray, sampling: Sampling, *, covered: bool | None = None) -> None:
    """Every row is the reference's, up to rounding in one of twenty."""
    drawn = draws(logits, sampling)
    if covered is not None:
        assert np.array(drawn.covered).tolist() == [covered] * len(logits)
    differing = 0
    for place, (token, row) in enumerate(zip(drawn.read().tolist(), logits, strict=True)):
        expected, _ = reference.draw(row, sampling, place)
        if token != expected:
            differing += 1
            assert near_tie(token, row, sampling, place), f"{token} instead of {expected} at {place}"
    assert 20 * differing <= len(logits)


def bell(spread: float, rows: int = 40) -> np.ndarray:
    return (np.random.default_rng(5).normal(size=(rows, VOCABULARY)) * spread).astype(np.float32)


# ---- who is covered --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "spread", "covered"),
    [
        (Sampling(1.0, top_p=0.9), 8.0, True),
        (Sampling(1.0, top_p=0.9), 0.1, False),
        (Sampling(1.0, top_p=0.001), 0.1, True),
        (Sampling(1.0, top_p=0.0), 0.0, False),
        (Sampling(1.0, min_p=0.5), 3.0, True),
        (Sampling(1.0, min_p=0.5), 0.1, False),
        (Sampling(1.0, top_k=1), 1.0, True),
        (Sampling(1.0, top_k=63), 1.0, True),
        (Sampling(1.0, top_k=64), 1.0, True),
        (Sampling(1.0, top_k=255), 1.0, True),
        (Sampling(1.0, top_k=256), 1.0, False),
        (Sampling(1.0, top_k=1000), 1.0, False),
        (Sampling(1.0, top_k=2999), 1.0, False),
        (Sampling(1.0, top_k=VOCABULARY), 1.0, False),
        (Sampling(1.0, top_k=10**9), 1.0, False),
        (Sampling(1.0, top_k=1000, top_p=0.9), 0.1, False),
        (Sampling(1.0, top_k=1000, top_p=0.001), 8.0, False),
        (Sampling(1.0, top_k=1000, min_p=0.3, top_p=0.2), 8.0, False),
        (Sampling(1.0, top_k=200, top_p=0.5), 0.1, True),
        (Sampling(1.0, top_k=1000, top_p=0.5, min_p=0.9), 0.1, False),
        (Sampling(50.0, top_p=0.99, min_p=0.01), 0.1, False),
    ],
)
def test_covered_rows_and_wide_ones_are_the_references(sampling: Sampling, spread: float, covered: bool) -> None:
    check(bell(spread), sampling, covered=covered)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    top_k=st.sampled_from([0, 0, 3, 100, 256, 900]),
    top_p=st.floats(0, 1),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.7]),
    temperature=st.floats(0.2, 5),
    spread=st.sampled_from([0.0, 0.02, 0.5, 3.0]),
)
def test_any_truncation_is_the_references(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float, spread: float
) -> None:
    check(bell(spread, rows=20), Sampling(temperature, seed, 0, top_k or int(top_p == 1.0), top_p, min_p))


def test_rows_of_all_kinds_do_not_disturb_each_other() -> None:
    kinds = [
        Sampling(1.0, 1, top_p=0.8),
        Sampling(0.5, 2, top_k=5),
        Sampling(1.0, 3, min_p=0.2),
        Sampling(2.0, 4, top_k=500, top_p=0.5),
        Sampling(1.0, 5, top_k=250),
    ]
    rows = [SampledRow(kinds[place % 5], place) for place in range(40)]
    logits = np.concatenate([bell(0.1, rows=20), bell(4.0, rows=20)])
    drawn = TruncatedDraws(mx.array(logits), rows, mx.exp)
    assert 5 < np.array(drawn.covered).sum() < 35
    expected = [reference.draw(row, each.sampling, each.position)[0] for row, each in zip(logits, rows, strict=True)]
    assert drawn.read().tolist() == expected


# ---- equal tokens, masked tokens, broken tokens ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_p=0.0),
        Sampling(1.0, top_p=0.5),
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_k=70),
        Sampling(1.0, min_p=1.0),
    ],
)
@pytest.mark.parametrize("equal", [2, CANDIDATES[0] - 1, CANDIDATES[0], CANDIDATES[0] + 1, 1000])
def test_equal_tokens_stay_together_however_many(sampling: Sampling, equal: int) -> None:
    logits = np.full((60, VOCABULARY), -30.0, dtype=np.float32)
    places = np.random.default_rng(1).choice(VOCABULARY, equal, replace=False)
    logits[:, places] = 4.0
    check(logits, sampling)
    if sampling.top_k != 70:
        assert set(draws(logits, sampling).read().tolist()) <= set(places.tolist())


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9])
@pytest.mark.parametrize("top_k", [2, 30, 64, 255])
def test_top_p_takes_its_share_of_all_that_is_equal_to_the_kth(top_k: int, top_p: float) -> None:
    """One token leads, thousands are equal behind it: all of them are what top-k leaves."""
    logits = np.zeros((40, VOCABULARY), dtype=np.float32)
    logits[:, 77] = 0.5
    check(logits, Sampling(0.3, 9, top_k=top_k, top_p=top_p), covered=False)


def test_of_equal_scores_the_lowest_token_is_drawn() -> None:
    """So cold that the noise is lost in rounding: 64 candidates or 128, the choice among equals is the same."""
    logits = np.zeros((4, VOCABULARY), dtype=np.float32)
    places = [2900, 40, 1700]
    logits[:, places] = 1.0
    for top_k in (3, 100):
        sampling = Sampling(1e-9, top_k=top_k)
        assert draws(logits, sampling).read().tolist() == [40] * 4
        assert reference.draw(logits[0], sampling, 0)[0] == 40


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_p=0.9), Sampling(1.0, top_k=40), Sampling(1.0, top_k=900)])
@pytest.mark.parametrize("allowed", [1, 2, 64, 65, 500])
def test_masked_rows_are_drawn_from_what_is_allowed(sampling: Sampling, allowed: int) -> None:
    logits = bell(0.3)
    for place, row in enumerate(logits):
        keep = np.random.default_rng(place).choice(VOCABULARY, allowed, replace=False)
        hidden = np.ones(VOCABULARY, dtype=np.bool_)
        hidden[keep] = False
        row[hidden] = -np.inf
    check(logits, sampling, covered=True if allowed < CANDIDATES[0] else None)


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_p=0.9), Sampling(1.0, top_k=900), Sampling(1.0, min_p=0.1)])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_broken_row_ends_in_some_token_and_leaves_its_neighbours(sampling: Sampling, broken: float) -> None:
    logits = bell(0.1, rows=6)
    logits[2] = broken
    logits[4, ::2] = broken
    drawn = draws(logits, sampling).read()
    assert (drawn < VOCABULARY).all()
    for place in (0, 1, 3, 5):
        assert drawn[place] == reference.draw(logits[place], sampling, place)[0]


def test_a_row_that_is_not_covered_is_final_only_when_read() -> None:
    sampling = Sampling(1.0, top_p=0.99)
    drawn = draws(bell(0.05), sampling)
    assert drawn.tokens.tolist() != drawn.read().tolist()
    check(bell(0.05), sampling, covered=False)


def test_many_wide_rows_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(1.0, top_p=0.5)
    whole = draws(bell(0.1), sampling).read().tolist()
    monkeypatch.setattr("backends.mlx.rows.CHUNK", 7 * VOCABULARY)
    assert draws(bell(0.1), sampling).read().tolist() == whole
