"""Draws: the noise is that of `backends.noise` (contract rule 7), finite everywhere, and rows follow their softmax."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.mlx.sampler import SampledRow, draw, noise
from backends.noise import MIX_A, MIX_B, gumbel, row_key, token_hash
from scheduler.request import Sampling

WORD = 1 << 32
GREEDY = Sampling(temperature=0.0)
WORDS = st.integers(0, WORD - 1)


def noise_of(key: tuple[int, int], vocabulary: int) -> np.ndarray:
    drawn: np.ndarray = np.array(noise(mx.array([key], mx.uint32), vocabulary))[0]
    return drawn


@settings(max_examples=30)
@given(key=st.tuples(WORDS, WORDS), vocabulary=st.sampled_from([1, 2, 100, 49152]))
def test_the_noise_is_that_of_the_definition(key: tuple[int, int], vocabulary: int) -> None:
    expected = gumbel(token_hash(key, np.arange(vocabulary, dtype=np.uint32)))
    drawn = noise_of(key, vocabulary)
    assert drawn.dtype == np.float32
    assert np.allclose(drawn, expected, rtol=2e-6, atol=2e-6)


def test_the_hash_agrees_to_the_last_bit() -> None:
    """Where the hash is small, float32 noise tells all of its bits: x = 2**32 * (1 - exp(-exp(-g))) - 0.5."""
    tokens = np.arange(1 << 20, dtype=np.uint32)
    keys = [row_key(7, choice, 123) for choice in range(4)]
    drawn = np.array(noise(mx.array(keys, mx.uint32), len(tokens)))
    hashed = np.stack([token_hash(key, tokens) for key in keys])
    small = hashed < 1 << 16
    assert small.sum() > 40
    told = -np.expm1(-np.exp(-drawn[small].astype(np.float64))) * WORD - 0.5
    assert np.array_equal(np.round(told).astype(np.uint32), hashed[small])


def unmixed(value: int) -> int:
    """The number that the 32-bit mixer of `backends.noise` takes to `value`: every step of it can be undone."""
    value ^= value >> 16
    value = value * pow(MIX_B, -1, WORD) % WORD
    value ^= value >> 15 ^ value >> 30
    value = value * pow(MIX_A, -1, WORD) % WORD
    return value ^ value >> 16


def mixed(value: int) -> int:
    """The mixer itself, out of `token_hash`: its second round alone, undone by `unmixed`."""
    (hashed,) = token_hash((0, 0), np.array([unmixed(value)], dtype=np.uint32)).tolist()
    return int(hashed)


@pytest.mark.parametrize("target", [0, 1, 127, 128, WORD // 2, WORD - 129, WORD - 128, WORD - 2, WORD - 1])
def test_noise_is_finite_for_every_hash(target: int) -> None:
    """Keys are made for which token 5 hashes to `target`: the whole float32 range, both ends included."""
    token, first = 5, 0x1234567
    second = mixed(token ^ first) ^ unmixed(target)
    key = (first, second)
    assert token_hash(key, np.array([token], dtype=np.uint32)).tolist() == [target]
    drawn = noise_of(key, 16)
    assert np.isfinite(drawn).all()
    assert drawn[token] == pytest.approx(gumbel(np.array([target], dtype=np.uint32))[0], rel=2e-6)


# ---- draws -----------------------------------------------------------------------------------------------------------

SAMPLINGS = st.builds(
    Sampling, st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0]), st.integers(0, 2**64 - 1), st.integers(0, 3)
)
ROWS = st.builds(SampledRow, SAMPLINGS, st.integers(0, 10_000))


def logits_of(seed: int, rows: int, vocabulary: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, vocabulary)).astype(np.float32)


def scores_alone(logits: np.ndarray, row: SampledRow) -> np.ndarray:
    """What one row's draw is the largest of, by numpy: logits, or logits over temperature plus keyed noise."""
    sampling = row.sampling
    if sampling.temperature == 0:
        return logits
    key = row_key(sampling.seed, sampling.choice, row.position)
    noise_row = gumbel(token_hash(key, np.arange(len(logits), dtype=np.uint32)))
    return logits / np.float32(sampling.temperature) + noise_row


@given(rows=st.lists(ROWS, min_size=1, max_size=12), seed=st.integers(0, 1000))
def test_greedy_and_warm_rows_are_drawn_together_as_each_alone(rows: list[SampledRow], seed: int) -> None:
    logits = logits_of(seed, len(rows))
    drawn = draw(mx.array(logits), rows)
    assert drawn.dtype == mx.uint32
    for token, row, each in zip(np.array(drawn), rows, logits, strict=True):
        scores = scores_alone(each, row)
        rounding = 1e-5 if row.sampling.temperature > 0 else 0.0
        assert scores[token] >= scores.max() - rounding


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_greedy_rows_are_the_argmax_and_ties_go_to_the_first(dtype: mx.Dtype) -> None:
    logits = mx.array(logits_of(1, 5)).astype(dtype)
    logits[3, 7] = logits[3, 41] = 100.0
    greedy = [SampledRow(GREEDY, position) for position in range(5)]
    drawn = draw(logits, greedy)
    assert drawn.tolist() == mx.argmax(logits, axis=-1).tolist()
    assert drawn[3].item() == 7


def test_warm_rows_of_half_precision_are_drawn_in_float32() -> None:
    logits = mx.array(logits_of(2, 400)).astype(mx.bfloat16)
    rows = [SampledRow(Sampling(0.7, seed=place), 9) for place in range(400)]
    assert draw(logits, rows).tolist() == draw(logits.astype(mx.float32), rows).tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("varied", ["position", "seed", "choice"])
def test_draws_follow_the_softmax(temperature: float, varied: str) -> None:
    """Pearson's chi-square over 6,000 draws of 12 tokens: above 31.3 once in a thousand (11 degrees of freedom)."""
    logits = np.linspace(-1.0, 1.0, 12, dtype=np.float32)
    count = 6000
    rows = [varied_row(temperature, varied, place) for place in range(count)]
    drawn = draw(mx.array(np.tile(logits, (count, 1))), rows)
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = count * weights / weights.sum()
    observed = np.bincount(np.array(drawn), minlength=12)
    assert ((observed - expected) ** 2 / expected).sum() < 31.3


def varied_row(temperature: float, varied: str, place: int) -> SampledRow:
    seed, choice, position = (place if varied == each else 5 for each in ("seed", "choice", "position"))
    return SampledRow(Sampling(temperature, seed=seed, choice=choice), position)


def test_a_row_draws_by_its_seed_choice_and_position() -> None:
    """One of them differing, the draws of 64 rows differ in most places."""
    logits = mx.array(logits_of(3, 64))
    base = draw(logits, [SampledRow(Sampling(2.0, seed=1), place) for place in range(64)])
    others = [
        [SampledRow(Sampling(2.0, seed=2), place) for place in range(64)],
        [SampledRow(Sampling(2.0, seed=1, choice=1), place) for place in range(64)],
        [SampledRow(Sampling(2.0, seed=1), place + 64) for place in range(64)],
    ]
    for rows in others:
        assert np.sum(np.array(draw(logits, rows)) != np.array(base)) > 32


def test_the_noise_never_changes_between_versions() -> None:
    """Recorded values: a change here changes the answer to every seeded request."""
    assert row_key(0, 0, 0) == (595752380, 956087953)
    assert row_key(42, 1, 1000) == (1172670709, 581300873)
    assert row_key(2**64 - 1, 2**32 - 1, 2**32 - 1) == (1764337064, 397034585)
    hashed = token_hash(row_key(42, 1, 1000), np.array([0, 1, 49151], dtype=np.uint32))
    assert hashed.tolist() == [289855518, 4126824546, 931756843]
    first_tokens = [2.6610837, -1.1756922, -0.1619607, -0.9031826]
    assert noise_of(row_key(42, 1, 1000), 4).tolist() == pytest.approx(first_tokens, rel=1e-5)
