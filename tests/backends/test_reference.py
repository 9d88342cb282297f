"""The definition of a draw (contract rules 6 and 7), against loops over plain numbers and against known answers."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import reference
from backends.noise import gumbel, row_key, token_hash
from scheduler.request import Sampling
from tests.backends.draws import chi_square, samplings

VOCABULARY = 12
ROWS = st.lists(
    st.floats(-8, 8, width=32) | st.sampled_from([-1.0, 0.0, 1.0, 2.0]), min_size=VOCABULARY, max_size=VOCABULARY
)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=15)
INF = math.inf


# ---- against loops ---------------------------------------------------------------------------------------------------


def adjusted_by_hand(logits: Sequence[float], sampling: Sampling, history: Sequence[int], prompt: int) -> list[float]:
    adjusted = []
    for token, logit in enumerate(logits):
        value = logit
        if token in history:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        times = history[prompt:].count(token)
        value -= sampling.presence_penalty * (times > 0) + sampling.frequency_penalty * times
        adjusted.append(value + dict(sampling.logit_bias).get(token, 0.0))
    return adjusted


def stays_by_hand(logits: Sequence[float], sampling: Sampling) -> list[bool]:
    """Every token asks each of the three questions about all others."""
    top = max(logits)
    weights = [math.exp((logit - top) / sampling.temperature) for logit in logits]
    above = [[each > logit for each in logits] for logit in logits]
    stays = [not sampling.top_k or sum(greater) < sampling.top_k for greater in above]
    total = sum(weight for weight, stay in zip(weights, stays, strict=True) if stay)
    masses = [sum(weight for weight, more in zip(weights, greater, strict=True) if more) for greater in above]
    return [
        (stay and (sampling.top_p >= 1 or mass < sampling.top_p * total) and weight >= sampling.min_p) or logit == top
        for stay, mass, weight, logit in zip(stays, masses, weights, logits, strict=True)
    ]


@given(row=ROWS, sampling=samplings(VOCABULARY), history=TOKENS, data=st.data())
def test_penalties_and_bias_are_those_of_a_loop(
    row: list[float], sampling: Sampling, history: list[int], data: st.DataObject
) -> None:
    prompt = data.draw(st.integers(0, len(history)))
    logits = np.array(row, dtype=np.float32)
    adjusted = reference.adjust(logits, sampling, history, prompt)
    assert adjusted.dtype == np.float32
    np.testing.assert_allclose(adjusted, adjusted_by_hand(row, sampling, history, prompt), rtol=1e-5, atol=1e-5)
    assert logits.tolist() == np.array(row, dtype=np.float32).tolist(), "the raw logits are left alone"


@given(row=ROWS, sampling=samplings(VOCABULARY, (0.5, 1.0, 2.0)), masked=st.sets(st.integers(0, 11), max_size=11))
def test_what_stays_is_what_stays_by_a_loop(row: list[float], sampling: Sampling, masked: set[int]) -> None:
    logits = np.array(row, dtype=np.float32)
    logits[list(masked)] = -INF
    kept = reference.kept(logits, sampling)
    expected = stays_by_hand(logits.tolist(), sampling)
    top = float(logits.max())
    weights = np.exp((logits.astype(np.float64) - top) / sampling.temperature)
    for token in np.flatnonzero(kept != np.array(expected)):
        mass = weights[logits > logits[token]].sum() / weights.sum()
        near_p, near_min = abs(mass - sampling.top_p) < 1e-6, abs(weights[token] - sampling.min_p) < 1e-6
        assert near_p or near_min or sampling.top_k, "only a cut that rounding decides may come out otherwise"
        if sampling.top_k:
            whole = msgspec.structs.replace(sampling, top_p=1.0)
            assert reference.kept(logits, whole)[token] == stays_by_hand(logits.tolist(), whole)[token]


@given(row=ROWS, sampling=samplings(VOCABULARY), position=st.integers(0, 9999), history=TOKENS, mask=st.data())
def test_the_draw_is_the_best_of_what_stays(
    row: list[float], sampling: Sampling, position: int, history: list[int], mask: st.DataObject
) -> None:
    allowed = np.array(mask.draw(st.lists(st.booleans(), min_size=VOCABULARY, max_size=VOCABULARY).filter(any)))
    logits = np.array(row, dtype=np.float32)
    token, reported = reference.draw(logits, sampling, position, history=history, prompt=3, allowed=allowed)
    assert allowed[token]
    adjusted = np.where(allowed, reference.adjust(logits, sampling, history, 3), np.float32(-INF))
    if sampling.temperature == 0:
        assert token == adjusted.tolist().index(adjusted.max())
    else:
        noise = gumbel(token_hash(row_key(sampling.seed, sampling.choice, position), np.arange(12, dtype=np.uint32)))
        scores = adjusted / np.float32(sampling.temperature) + noise
        kept = reference.kept(adjusted, sampling)
        assert kept[token]
        assert scores[token] == scores[kept].max()
    assert (reported is None) == (sampling.logprobs is None)


@given(row=ROWS, seed=st.integers(0, 2**64 - 1), temperature=st.sampled_from([0.1, 0.7, 1.0, 5.0]))
def test_settings_that_do_nothing_change_nothing(row: list[float], seed: int, temperature: float) -> None:
    logits = np.array(row, dtype=np.float32)
    plain = reference.draw(logits, Sampling(temperature, seed), 7)
    everything = np.ones(VOCABULARY, dtype=np.bool_)
    idle = Sampling(temperature, seed, top_k=VOCABULARY, min_p=1e-30, top_p=1.0, logit_bias=((3, 0.0),))
    assert reference.draw(logits, idle, 7, history=[1, 2, 3], prompt=1, allowed=everything) == plain


# ---- known answers ---------------------------------------------------------------------------------------------------

LADDER = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), [True, True, False, False]),
        (Sampling(top_p=0.0), [True, False, False, False]),
        (Sampling(top_p=0.35), [True, False, False, False]),
        (Sampling(top_p=0.45), [True, True, False, False]),
        (Sampling(top_p=0.75), [True, True, True, False]),
        (Sampling(top_p=0.95), [True, True, True, True]),
        (Sampling(top_k=2, top_p=0.6), [True, True, False, False]),
        (Sampling(top_k=2, top_p=0.55), [True, False, False, False]),
        (Sampling(min_p=0.6), [True, True, False, False]),
        (Sampling(min_p=1.0), [True, False, False, False]),
        (Sampling(0.5, top_p=0.5), [True, False, False, False]),
        (Sampling(top_k=3, min_p=0.7), [True, True, False, False]),
    ],
)
def test_known_truncations(sampling: Sampling, kept: list[bool]) -> None:
    """Probabilities 0.4, 0.3, 0.2, 0.1; squared at temperature 0.5. What top-k left is renormalised for top-p."""
    assert reference.kept(LADDER, sampling).tolist() == kept


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_k=2), Sampling(top_p=0.1), Sampling(min_p=1.0)])
def test_equal_tokens_stay_together(sampling: Sampling) -> None:
    logits = np.array([1.0, 3.0, 0.0, 3.0, 3.0], dtype=np.float32)
    assert reference.kept(logits, sampling).tolist() == [False, True, False, True, True]


def test_penalties_count_what_rule_6_says() -> None:
    """Repetition counts prompt and generated tokens, presence and frequency the generated ones; then the bias."""
    logits = np.array([4.0, -4.0, 4.0, 4.0, 4.0], dtype=np.float32)
    sampling = Sampling(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((3, 1.0), (4, -2.0))
    )
    adjusted = reference.adjust(logits, sampling, [0, 1, 2, 2, 3], prompt=2)
    assert adjusted.tolist() == [2.0, -8.0, 1.0, 2.25, 2.0]


def test_the_mask_comes_after_the_bias_and_before_the_truncation() -> None:
    logits = np.array([9.0, 1.0, 0.0], dtype=np.float32)
    allowed = np.array([False, True, True])
    biased = Sampling(0.0, logit_bias=((0, 100.0),))
    assert reference.draw(logits, biased, 1, allowed=allowed)[0] == 1
    drawn = {reference.draw(logits, Sampling(5.0, seed, top_k=2), 1, allowed=allowed)[0] for seed in range(50)}
    assert drawn == {1, 2}, "the top 2 are those of what is allowed"


def test_tokens_that_the_vocabulary_lacks_are_passed_over() -> None:
    sampling = Sampling(0.0, repetition_penalty=2.0, presence_penalty=1.0, logit_bias=((99, 5.0),))
    assert reference.draw(LADDER, sampling, 1, history=[77, -1, 50], prompt=1)[0] == 0


def test_logprobs_are_those_of_the_raw_logits() -> None:
    sampling = Sampling(0.0, logit_bias=((3, 50.0),), logprobs=3)
    token, reported = reference.draw(LADDER, sampling, 1, allowed=np.array([False, True, True, True]))
    assert token == 3
    assert reported is not None
    assert reported.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [each for each, _ in reported.top] == [0, 1, 2]
    assert [logprob for _, logprob in reported.top] == pytest.approx([math.log(p) for p in (0.4, 0.3, 0.2)], abs=1e-6)


@given(row=ROWS, top=st.integers(0, 15), token=st.integers(0, 11))
def test_the_likeliest_are_reported_in_order_and_the_lowest_first(row: list[float], top: int, token: int) -> None:
    logits = np.array(row, dtype=np.float32)
    reported = reference.token_logprob(logits, token, top)
    expected = sorted(range(VOCABULARY), key=lambda each: (-logits[each], each))[:top]
    assert [each for each, _ in reported.top] == expected
    every = reference.token_logprob(logits, token, VOCABULARY)
    assert math.fsum(math.exp(logprob) for _, logprob in every.top) == pytest.approx(1)
    assert reported.logprob == dict(every.top)[token]


def test_a_row_of_which_nothing_is_left_still_draws() -> None:
    nothing = np.full(4, -INF, dtype=np.float32)
    assert reference.draw(nothing, Sampling(1.0, top_p=0.5), 1)[0] == 0


# ---- distribution ----------------------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(
    sampling=st.sampled_from(
        [Sampling(1.0, top_k=5), Sampling(0.7, top_p=0.8), Sampling(2.0, min_p=0.4), Sampling(1.5, top_k=6, top_p=0.9)]
    ),
    choice=st.integers(0, 2**32 - 1),
)
def test_draws_follow_the_truncated_softmax(sampling: Sampling, choice: int) -> None:
    """Pearson's chi-square over 4,000 positions: beyond 42 less than once in 100,000 runs (at most 11 degrees)."""
    logits = np.linspace(-1.0, 1.0, VOCABULARY, dtype=np.float32)
    varied = msgspec.structs.replace(sampling, choice=choice)
    drawn = [reference.draw(logits, varied, position)[0] for position in range(4000)]
    weights = np.exp(logits.astype(np.float64) / sampling.temperature) * stays_by_hand(logits.tolist(), sampling)
    assert chi_square(np.bincount(drawn, minlength=VOCABULARY), 4000 * weights / weights.sum()) < 42
