"""Penalty tables follow what is committed and nothing else (contract rules 5 and 6)."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import reference
from backends.mlx.adjust import Adjustments, LaneTables
from scheduler.request import Sampling
from scheduler.round import History, Window
from tests.backends.draws import samplings

VOCABULARY = 40
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)
PENALISED = samplings(VOCABULARY).filter(lambda sampling: sampling.counts)


def window_of(
    sampling: Sampling, tokens: Sequence[int], prompt: int, draft: Sequence[int] = (), slot: int = 0
) -> Window:
    history = History(tokens, prompt) if sampling.counts else None
    start = len(tokens) - 1
    return Window(slot, str(slot), start, (tokens[-1],), True, sampling, start + 9, draft=tuple(draft), history=history)


def logits_of(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).normal(0, 3, (rows, VOCABULARY)).astype(np.float32)


def applied(adjustments: Adjustments | None, logits: np.ndarray) -> np.ndarray:
    return logits if adjustments is None else np.array(adjustments.apply(mx.array(logits)))


def expected_of(window: Window, logits: np.ndarray) -> np.ndarray:
    """Row by row by the reference, each over the history and the draft before it."""
    tokens, prompt = (window.history.tokens, window.history.prompt) if window.history else ((), 0)
    rows = [
        reference.adjust(row, window.sampling, [*tokens, *window.draft[:place]] if window.history else [], prompt)
        for place, row in enumerate(logits)
    ]
    return np.stack(rows)


def agree(adjustments: Adjustments | None, windows: Sequence[Window]) -> None:
    logits = logits_of(sum(1 + len(window.draft) for window in windows))
    changed = applied(adjustments, logits)
    first = 0
    for window in windows:
        part = slice(first, first + 1 + len(window.draft))
        np.testing.assert_allclose(changed[part], expected_of(window, logits[part]), rtol=1e-5, atol=1e-4)
        first = part.stop


Turn = tuple[list[int], int, list[int]]
TURNS = st.lists(st.tuples(TOKENS, st.integers(0, 6), TOKENS), min_size=1, max_size=6)


@given(
    lanes=st.lists(
        st.tuples(samplings(VOCABULARY), st.lists(st.integers(0, 39), min_size=1, max_size=8), TURNS),
        min_size=1,
        max_size=4,
    )
)
def test_rule_5_every_position_is_the_references_and_rejected_drafts_leave_no_trace(
    lanes: list[tuple[Sampling, list[int], list[Turn]]],
) -> None:
    """Rounds of lanes of all kinds: each drafts, some of it is accepted, something else is drawn; the list is one and
    the same, appended to between rounds.
    """
    tables = LaneTables()
    texts = [list(prompt) for _, prompt, _ in lanes]
    for turn in range(max(len(turns) for _, _, turns in lanes)):
        aboard = [slot for slot, (_, _, turns) in enumerate(lanes) if turn < len(turns)]
        windows = [
            window_of(lanes[slot][0], texts[slot], len(lanes[slot][1]), lanes[slot][2][turn][0], slot)
            for slot in aboard
        ]
        agree(tables.adjustments(windows, VOCABULARY), windows)
        for slot in aboard:
            draft, accepted, drawn = lanes[slot][2][turn]
            texts[slot] += [*draft[:accepted], *drawn]


def test_rule_5_a_draft_that_was_rejected_is_not_counted() -> None:
    tables = LaneTables()
    sampling = Sampling(frequency_penalty=1.0, repetition_penalty=1.5)
    text = [1, 2]
    tables.adjustments([window_of(sampling, text, 1, draft=[30, 30, 31])], VOCABULARY)
    text.append(3)
    with_draft = tables.adjustments([window_of(sampling, text, 1)], VOCABULARY)
    without = LaneTables().adjustments([window_of(sampling, text, 1)], VOCABULARY)
    logits = logits_of(1)
    assert applied(with_draft, logits).tolist() == applied(without, logits).tolist()
    assert with_draft is not None
    assert not {30, 31} & set(with_draft.tokens[0].tolist())


def test_only_new_tokens_are_looked_at() -> None:
    class Watched(list[int]):
        looked: int = 0

        def __getitem__(self, key: slice) -> list[int]:  # type: ignore[override]
            found = super().__getitem__(key)
            self.looked += len(found)
            return found

    tables = LaneTables()
    text = Watched(range(30))
    last = window_of(Sampling(repetition_penalty=1.5), [29], 0)
    for length in range(30, 36):
        windows = [Window(0, "0", length - 1, last.tokens, True, last.sampling, 99, history=History(text, 10))]
        tables.adjustments(windows, VOCABULARY)
        text.append(length)
    assert text.looked == 35


def test_a_released_slot_and_a_reset_forget() -> None:
    sampling = Sampling(presence_penalty=1.0)
    fresh = [window_of(sampling, [5, 6], 1, slot=slot) for slot in (0, 1)]
    tables = LaneTables()
    for forget in (lambda: (tables.release(0), tables.release(0), tables.release(1)), tables.reset):
        tables.adjustments([window_of(sampling, [9, 8, 7, 7], 1, slot=slot) for slot in (0, 1)], VOCABULARY)
        forget()
        agree(tables.adjustments(fresh, VOCABULARY), fresh)
        tables.reset()


def test_a_release_leaves_the_others() -> None:
    sampling = Sampling(presence_penalty=1.0)
    tables = LaneTables()
    text = [9, 8, 7, 7]
    tables.adjustments([window_of(sampling, text, 1, slot=slot) for slot in (0, 1)], VOCABULARY)
    tables.release(0)
    going_on = [window_of(sampling, text, 1, slot=1)]
    agree(tables.adjustments(going_on, VOCABULARY), going_on)


def test_plain_windows_change_nothing() -> None:
    assert LaneTables().adjustments([window_of(Sampling(0.7), [1, 2], 1)], VOCABULARY) is None
    first = [window_of(Sampling(presence_penalty=1.0), [1], 1)]
    assert LaneTables().adjustments(first, VOCABULARY) is None, "nothing was generated yet"


@pytest.mark.parametrize("sampling", [Sampling(logit_bias=((39, 1.0), (40, 9.0), (10**6, 9.0))), Sampling(0.5)])
def test_plain_rows_beside_changed_ones_stay_as_they_are(sampling: Sampling) -> None:
    """A bias or penalty on tokens that the vocabulary lacks is passed over."""
    changed = Sampling(repetition_penalty=2.0, frequency_penalty=0.5, logit_bias=((10**6, 9.0),))
    windows = [
        window_of(sampling, [1, 2], 1, draft=[4], slot=0),
        window_of(changed, [1, 2, 2, 50, -1], 1, draft=[3, 99], slot=1),
    ]
    agree(LaneTables().adjustments(windows, VOCABULARY), windows)


def test_a_masked_logit_stays_masked() -> None:
    logits = np.full((1, VOCABULARY), -np.inf, dtype=np.float32)
    window = window_of(Sampling(repetition_penalty=2.0, frequency_penalty=1.0), [1, 2, 2], 1)
    assert np.isneginf(applied(LaneTables().adjustments([window], VOCABULARY), logits)).all()
