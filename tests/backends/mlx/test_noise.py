"""The noise with MLX is that of `backends.noise` (contract rule 7): the same bits, finite everywhere."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.mlx.noise import noise
from backends.noise import MIX_A, MIX_B, gumbel, row_key, token_hash

WORD = 1 << 32
WORDS = st.integers(0, WORD - 1)


def noise_of(key: tuple[int, int], vocabulary: int) -> np.ndarray:
    drawn: np.ndarray = np.array(noise(mx.array([key], mx.uint32), mx.arange(vocabulary, dtype=mx.uint32)))[0]
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
    drawn = np.array(noise(mx.array(keys, mx.uint32), mx.array(tokens)))
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


@given(
    keys=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=5),
    tokens=st.lists(st.integers(0, 300_000), min_size=1, max_size=20),
)
def test_a_tokens_noise_is_its_own_wherever_it_stands(keys: list[tuple[int, int]], tokens: list[int]) -> None:
    rows = np.stack([np.roll(tokens, shift) for shift in range(len(keys))]).astype(np.uint32)
    drawn = np.array(noise(mx.array(keys, mx.uint32), mx.array(rows)))
    expected = np.stack([gumbel(token_hash(key, row)) for key, row in zip(keys, rows, strict=True)])
    assert np.allclose(drawn, expected, rtol=2e-6, atol=2e-6)


def test_the_noise_never_changes_between_versions() -> None:
    """Recorded values: a change here changes the answer to every seeded request."""
    assert row_key(0, 0, 0) == (595752380, 956087953)
    assert row_key(42, 1, 1000) == (1172670709, 581300873)
    assert row_key(2**64 - 1, 2**32 - 1, 2**32 - 1) == (1764337064, 397034585)
    hashed = token_hash(row_key(42, 1, 1000), np.array([0, 1, 49151], dtype=np.uint32))
    assert hashed.tolist() == [289855518, 4126824546, 931756843]
    first_tokens = [2.6610837, -1.1756922, -0.1619607, -0.9031826]
    assert noise_of(row_key(42, 1, 1000), 4).tolist() == pytest.approx(first_tokens, rel=1e-5)
