"""Draws of a whole round at once are those of the reference, row by row (contract rules 6 and 7)."""

from collections.abc import Iterator, Sequence

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import reference
from backends.masks import Allowed
from backends.mlx import exponential
from backends.mlx.adjust import LaneTables
from backends.mlx.rows import Exp, SampledRow
from backends.mlx.sampler import ReadRows, draw
from backends.noise import gumbel, row_key, token_hash
from scheduler.request import Sampling
from scheduler.round import History, Window
from tests.backends.draws import chi_square, masked, near_tie, samplings

GREEDY = Sampling(temperature=0.0)
WIDE = 700
"""A vocabulary that has more tokens than there are candidates, and is not a multiple of a block."""


def drawn_rows(
    logits: np.ndarray, rows: Sequence[SampledRow], *, allowed: Allowed | None = None, exp: Exp = mx.exp
) -> ReadRows:
    return draw(mx.array(logits), rows, allowed=allowed, exp=exp).read()


def random_logits(seed: int, rows: int, vocabulary: int, spread: float) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocabulary)) * spread).astype(np.float32)


# ---- a round against the reference -----------------------------------------------------------------------------------


class NearTies:
    """Counts rows, and those that rounding may have decided. Written by `check`."""

    def __init__(self) -> None:
        self.rows = 0
        self.ties = 0

    def check(self, token: int, expected: int, adjusted: reference.Logits, row: SampledRow) -> None:
        """Fail unless a token is the reference's, or might be by rounding."""
        self.rows += 1
        if token != expected:
            self.ties += 1
            told = f"{token} instead of {expected} for {row}"
            assert near_tie(token, adjusted, row.sampling, row.position), told


@pytest.fixture(scope="module")
def ties() -> Iterator[NearTies]:
    counted = NearTies()
    yield counted
    print(f"{counted.rows} rows, {counted.ties} near-ties")  # noqa: T201
    assert 100 * counted.ties <= counted.rows


class Lane(msgspec.Struct, frozen=True):
    """One lane of a random round."""

    sampling: Sampling
    history: list[int]
    prompt: int
    draft: list[int]
    mask: int | None
    """A seed."""

    def window(self, slot: int) -> Window:
        length = len(self.history)
        history = History(self.history, self.prompt) if self.sampling.counts else None
        last = (self.history[-1],)
        return Window(
            slot,
            str(slot),
            length - 1,
            last,
            True,
            self.sampling,
            length + 9,
            draft=tuple(self.draft),
            history=history,
        )

    def rows(self) -> list[SampledRow]:
        return [SampledRow(self.sampling, len(self.history) + place) for place in range(len(self.draft) + 1)]

    def allowed(self, vocabulary: int) -> Allowed | None:
        """A row per draw: a few tokens, or many."""
        if self.mask is None:
            return None
        draws = np.random.default_rng(self.mask)
        allowed = draws.random((len(self.draft) + 1, vocabulary)) < draws.choice([0.003, 0.3, 0.9])
        allowed[:, draws.integers(vocabulary)] = True
        return np.asarray(allowed)


@st.composite
def lanes(draw: st.DrawFn, vocabulary: int) -> Lane:
    tokens = st.integers(0, vocabulary - 1)
    history = draw(st.lists(tokens, min_size=1, max_size=30))
    return Lane(
        draw(samplings(vocabulary)),
        history,
        draw(st.integers(1, len(history))),
        draw(st.lists(tokens, max_size=4)),
        draw(st.none() | st.integers(0, 10**6)),
    )


@settings(max_examples=150)
@given(
    company=st.sampled_from([9, 40, WIDE, WIDE, 2048]).flatmap(
        lambda vocabulary: st.tuples(st.just(vocabulary), st.lists(lanes(vocabulary), min_size=1, max_size=5))
    ),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.05, 1.0, 4.0, 30.0]),
    whole=st.booleans(),
    exp=st.sampled_from([mx.exp, exponential.exp]),
)
def test_every_row_is_the_references(
    ties: NearTies, company: tuple[int, list[Lane]], seed: int, spread: float, whole: bool, exp: Exp
) -> None:
    """Rows of every need beside each other; whole logits have many equal ones."""
    vocabulary, crowd = company
    rows = [row for lane in crowd for row in lane.rows()]
    logits = random_logits(seed, len(rows), vocabulary, spread)
    logits = np.round(logits) if whole else logits
    masks = [lane.allowed(vocabulary) for lane in crowd]
    adjustments = LaneTables().adjustments([lane.window(slot) for slot, lane in enumerate(crowd)], vocabulary)
    everything = [
        np.ones((len(lane.draft) + 1, vocabulary), np.bool_) if mask is None else mask
        for lane, mask in zip(crowd, masks, strict=True)
    ]
    allowed = None if all(mask is None for mask in masks) else np.concatenate(everything)
    read = draw(mx.array(logits), rows, adjustments=adjustments, allowed=allowed, exp=exp).read()

    row = 0
    for lane, mask in zip(crowd, everything, strict=True):
        for place in range(len(lane.draft) + 1):
            history = [*lane.history, *lane.draft[:place]] if lane.sampling.counts else []
            adjusted = masked(reference.adjust(logits[row], lane.sampling, history, lane.prompt), mask[place])
            token, reported = reference.draw(
                logits[row],
                lane.sampling,
                rows[row].position,
                history=history,
                prompt=lane.prompt,
                allowed=mask[place],
            )
            ties.check(read.tokens[row], token, adjusted, rows[row])
            if reported is not None:
                reported = reference.token_logprob(logits[row], read.tokens[row], lane.sampling.logprobs or 0)
                got = read.logprobs[row]
                assert got.logprob == pytest.approx(reported.logprob, abs=1e-4)
                assert [each for each, _ in got.top] == [each for each, _ in reported.top]
                assert [each for _, each in got.top] == pytest.approx([each for _, each in reported.top], abs=1e-4)
            assert (row in read.logprobs) == (reported is not None)
            row += 1


@settings(max_examples=40)
@given(
    crowd=st.lists(st.tuples(samplings(WIDE), st.integers(0, 9999)), min_size=2, max_size=10),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.05, 2.0]),
)
def test_a_row_alone_draws_what_it_draws_in_a_crowd(
    crowd: list[tuple[Sampling, int]], seed: int, spread: float
) -> None:
    rows = [SampledRow(sampling, position) for sampling, position in crowd]
    logits = random_logits(seed, len(rows), WIDE, spread)
    together = drawn_rows(logits, rows)
    for index, row in enumerate(rows):
        alone = drawn_rows(logits[index : index + 1], [row])
        assert alone.tokens == [together.tokens[index]]
        if row.sampling.logprobs is not None:
            one, other = alone.logprobs[0], together.logprobs[index]
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


# ---- rows that are no numbers ----------------------------------------------------------------------------------------

SPOILS = {
    "NaN": lambda row, place: row.__setitem__(place, np.nan),
    "negative NaN": lambda row, place: row.__setitem__(place, -np.float32(np.nan)),
    "all NaN": lambda row, _place: row.fill(np.nan),
    "plus infinity": lambda row, place: row.__setitem__(place, np.inf),
    "both infinities": lambda row, place: row.__setitem__([place, place - 1], [np.inf, -np.inf]),
    "all minus infinity": lambda row, _place: row.fill(-np.inf),
}


@settings(max_examples=150)
@given(
    company=st.sampled_from([9, 40, WIDE, 2048]).flatmap(
        lambda vocabulary: st.tuples(st.just(vocabulary), st.lists(lanes(vocabulary), min_size=1, max_size=5))
    ),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.05, 4.0]),
    dtype=st.sampled_from([mx.float32, mx.float32, mx.float16, mx.bfloat16]),
    data=st.data(),
)
def test_rows_that_are_no_numbers_are_told_and_no_other_row_is_drawn_otherwise(
    company: tuple[int, list[Lane]], seed: int, spread: float, dtype: mx.Dtype, data: st.DataObject
) -> None:
    """With masks, penalties, truncation and log-probabilities; to the bit."""
    vocabulary, crowd = company
    rows = [row for lane in crowd for row in lane.rows()]
    spoiled = data.draw(st.sets(st.integers(0, len(rows) - 1)))
    clean = random_logits(seed, len(rows), vocabulary, spread)
    clean[:, list(data.draw(st.sets(st.integers(0, vocabulary - 1), max_size=3)))] = -np.inf
    bad = clean.copy()
    for row in spoiled:
        data.draw(st.sampled_from(list(SPOILS.values())))(bad[row], data.draw(st.integers(0, vocabulary - 1)))
    masks = [lane.allowed(vocabulary) for lane in crowd]
    everything = [
        np.ones((len(lane.draft) + 1, vocabulary), np.bool_) if mask is None else mask
        for lane, mask in zip(crowd, masks, strict=True)
    ]
    allowed = None if all(mask is None for mask in masks) else np.concatenate(everything)
    windows = [lane.window(slot) for slot, lane in enumerate(crowd)]

    def read(logits: np.ndarray) -> ReadRows:
        adjustments = LaneTables().adjustments(windows, vocabulary)
        return draw(mx.array(logits).astype(dtype), rows, adjustments=adjustments, allowed=allowed).read()

    told, plain = read(bad), read(clean)
    assert plain.broken == frozenset()
    assert told.broken == spoiled
    first = 0
    for lane in crowd:
        last = first + len(lane.draft) + 1
        window = told.window(first, last)
        assert len(window.tokens) == last - first
        assert all(0 <= token < vocabulary for token in window.tokens)
        if spoiled.isdisjoint(range(first, last)):
            assert window == plain.window(first, last)
        else:
            assert window.error is not None
            assert window.logprobs == ()
        first = last


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 3), Sampling(1.0, 3, top_p=0.9), Sampling(1.0, 3, top_k=5)])
def test_tokens_that_a_model_forbids_are_no_fault(sampling: Sampling) -> None:
    """Nor are logits whose sum is past float32."""
    logits = random_logits(4, 3, WIDE, 2.0)
    logits[0, 3:] = -np.inf
    logits[1] *= np.float32(1e37)
    read = drawn_rows(logits, [SampledRow(sampling, place) for place in range(3)])
    assert read.broken == frozenset()
    assert read.tokens[0] < 3
    assert read.window(0, 3).error is None


# ---- greedy and warm rows --------------------------------------------------------------------------------------------

PLAIN = st.builds(Sampling, st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0]), st.integers(0, 2**64 - 1), st.integers(0, 3))


def scores_alone(logits: np.ndarray, row: SampledRow) -> np.ndarray:
    """What one plain row's draw is the largest of, by numpy: logits, or logits over temperature plus keyed noise."""
    sampling = row.sampling
    if sampling.temperature == 0:
        return logits
    key = row_key(sampling.seed, sampling.choice, row.position)
    return logits / np.float32(sampling.temperature) + gumbel(token_hash(key, np.arange(len(logits), dtype=np.uint32)))


@given(
    rows=st.lists(st.builds(SampledRow, PLAIN, st.integers(0, 10_000)), min_size=1, max_size=12), seed=st.integers(0)
)
def test_greedy_and_warm_rows_are_drawn_together_as_each_alone(rows: list[SampledRow], seed: int) -> None:
    logits = random_logits(seed, len(rows), 50, 2.0)
    drawn = draw(mx.array(logits), rows)
    assert drawn.tokens.dtype == mx.uint32
    assert drawn.read().tokens == drawn.tokens.tolist(), "what a round ahead feeds on is final"
    for token, row, each in zip(drawn.read().tokens, rows, logits, strict=True):
        scores = scores_alone(each, row)
        rounding = 1e-5 if row.sampling.temperature > 0 else 0.0
        assert scores[token] >= scores.max() - rounding


def test_plain_rows_beside_truncated_ones_are_final_at_once() -> None:
    """A lane that truncates may leave while its round flies; the others' next round feeds on theirs."""
    kinds = [Sampling(1.0, top_p=0.9), Sampling(1.0), GREEDY, Sampling(1.0, top_p=0.5)]
    rows = [SampledRow(kinds[index % 4], index) for index in range(40)]
    drawn = draw(mx.array(random_logits(3, 40, WIDE, 0.1)), rows)
    early = drawn.tokens.tolist()
    late = drawn.read().tokens
    assert [early[index] for index in range(40) if index % 4 in (1, 2)] == [
        late[index] for index in range(40) if index % 4 in (1, 2)
    ]
    assert early != late, "the wide rows were drawn when read"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_greedy_rows_are_the_argmax_and_ties_go_to_the_first(dtype: mx.Dtype) -> None:
    logits = mx.array(random_logits(1, 5, 50, 2.0)).astype(dtype)
    logits[3, 7] = logits[3, 41] = 100.0
    drawn = draw(logits, [SampledRow(GREEDY, position) for position in range(5)]).read()
    assert drawn.tokens == mx.argmax(logits, axis=-1).tolist()
    assert drawn.tokens[3] == 7


KINDS = [
    Sampling(0.7),
    Sampling(0.7, top_p=0.8),
    Sampling(0.7, top_k=20, logprobs=3),
    Sampling(0.0, repetition_penalty=1.3, logprobs=2),
]


@pytest.mark.parametrize("sampling", KINDS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_drawn_in_float32(sampling: Sampling, dtype: mx.Dtype) -> None:
    logits = mx.array(random_logits(2, 100, WIDE, 2.0)).astype(dtype)
    rows = [SampledRow(msgspec.structs.replace(sampling, seed=place), 9) for place in range(100)]
    window = Lane(sampling, list(range(50)), 10, [1] * 99, None).window(0)
    adjustments = LaneTables().adjustments([window], WIDE)
    half = draw(logits, rows, adjustments=adjustments).read()
    assert half == draw(logits.astype(mx.float32), rows, adjustments=adjustments).read()


# ---- distribution ----------------------------------------------------------------------------------------------------

LADDER = np.linspace(-1.0, 1.0, 12, dtype=np.float32)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("varied", ["position", "seed", "choice"])
def test_draws_follow_the_softmax(temperature: float, varied: str) -> None:
    """Pearson's chi-square over 6,000 draws of 12 tokens: above 31.3 once in a thousand (11 degrees of freedom)."""
    count = 6000
    rows = [varied_row(temperature, varied, place) for place in range(count)]
    drawn = drawn_rows(np.tile(LADDER, (count, 1)), rows)
    weights = np.exp(LADDER.astype(np.float64) / temperature)
    assert chi_square(np.bincount(drawn.tokens, minlength=12), count * weights / weights.sum()) < 31.3


def varied_row(temperature: float, varied: str, place: int) -> SampledRow:
    seed, choice, position = (place if varied == each else 5 for each in ("seed", "choice", "position"))
    return SampledRow(Sampling(temperature, seed=seed, choice=choice), position)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, 3, top_k=7),
        Sampling(0.8, 3, top_p=0.7),
        Sampling(2.0, 3, min_p=0.4),
        Sampling(1.5, 3, top_k=9, top_p=0.8, min_p=0.2),
        Sampling(1.0, 3, top_p=0.9, logit_bias=((0, 2.0), (11, -2.0))),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_draws_follow_the_truncated_softmax(sampling: Sampling, flat: bool) -> None:
    """Exact probabilities; beyond 33 once in 2,000 runs at 11 degrees of freedom. Flat: groups of 40 equal tokens, so
    that the rows are drawn among all tokens.
    """
    count = 6000
    repeat = 40 if flat else 1
    logits = np.tile(np.repeat(LADDER, repeat), (count, 1))
    sampling = msgspec.structs.replace(sampling, top_k=sampling.top_k * repeat)
    window = Lane(sampling, [1], 1, [0] * (count - 1), None).window(0)
    adjustments = LaneTables().adjustments([window], 12 * repeat)
    rows = [SampledRow(sampling, position) for position in range(count)]
    drawn = draw(mx.array(logits), rows, adjustments=adjustments).read().tokens
    adjusted = reference.adjust(logits[0], sampling, [], 0)
    weights = np.exp(adjusted.astype(np.float64) / sampling.temperature) * reference.kept(adjusted, sampling)
    expected = (count * weights / weights.sum()).reshape(12, repeat).sum(axis=1)
    assert chi_square(np.bincount(np.array(drawn) // repeat, minlength=12), expected) < 33


@pytest.mark.parametrize("sampling", [Sampling(2.0, 1), Sampling(2.0, 1, top_p=0.95), Sampling(2.0, 1, top_k=30)])
def test_a_row_draws_by_its_seed_choice_and_position(sampling: Sampling) -> None:
    """The same again, it is the same; one of them differing, the draws of 64 rows differ in most places."""
    logits = random_logits(3, 64, WIDE, 2.0)
    base = drawn_rows(logits, [SampledRow(sampling, place) for place in range(64)])
    assert drawn_rows(logits, [SampledRow(sampling, place) for place in range(64)]) == base
    others = [
        [SampledRow(msgspec.structs.replace(sampling, seed=2), place) for place in range(64)],
        [SampledRow(msgspec.structs.replace(sampling, choice=1), place) for place in range(64)],
        [SampledRow(sampling, place + 64) for place in range(64)],
    ]
    for rows in others:
        assert np.sum(np.array(drawn_rows(logits, rows).tokens) != np.array(base.tokens)) > 32
