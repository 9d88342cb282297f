"""Drafts from an expected text: right as far as the answer is that text, found again behind what is not."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.draft import Draft, DraftAsk
from scheduler.prediction import PredictionDrafts

PROMPT = (900, 901)
TEXT = tuple(range(100, 180))


def followed(expected: Sequence[int], answer: Sequence[int], budget: int = 5) -> list[tuple[int, ...]]:
    """The draft before each token of an answer."""
    source = PredictionDrafts()
    drafts = []
    for length in range(len(answer)):
        tokens = (*PROMPT, *answer[:length])
        (draft,) = source.propose([DraftAsk("a", tokens, len(PROMPT), budget, expected=expected)])
        assert len(draft.tokens) == len(draft.marks) <= budget
        drafts.append(draft.tokens)
    return drafts


def right(expected: Sequence[int], answer: Sequence[int]) -> int:
    """How many tokens were the first of the draft before them."""
    return sum(draft[:1] == (token,) for draft, token in zip(followed(expected, answer), answer, strict=True))


def test_an_answer_that_is_the_expected_text_is_drafted_from_its_first_token() -> None:
    for place, draft in enumerate(followed(TEXT, TEXT)):
        assert draft == TEXT[place : place + 5]


@pytest.mark.parametrize(
    ("answer", "lost"),
    [
        ((*TEXT[:30], 7, *TEXT[31:]), 1),
        ((*TEXT[:30], 7, 8, 9, *TEXT[33:]), 3),
        ((*TEXT[:30], 7, 8, 9, *TEXT[30:]), 4),
        ((*TEXT[:30], *TEXT[40:]), 2),
        ((*TEXT[:60], *TEXT[10:60]), 4),
    ],
    ids=["one replaced", "three replaced", "three put in", "ten left out", "begun again"],
)
def test_after_an_edit_the_text_is_found_again(answer: tuple[int, ...], lost: int) -> None:
    assert right(TEXT, answer) == len(answer) - lost


def test_pairs_of_common_words_in_what_was_put_in_do_not_lead_astray() -> None:
    expected = (*TEXT[:40], 3, 4, *TEXT[40:60], 1, 2, *TEXT[60:])
    put_in = (7, 8, 9, 10, 3, 4, 11, 12, 13, 1, 2, 14, 15)
    drafts = followed(expected, (*expected[:12], *put_in, *expected[12:]))
    guesses = [draft[0] for draft in drafts[12 + 1 : 12 + len(put_in)] if draft]
    assert guesses == list(expected[13:17]), "only each token in the place of another, for a while"
    assert drafts[12 + len(put_in) + 1 :] == followed(expected, expected)[13:]


def test_confidence_grows_with_what_was_right() -> None:
    source = PredictionDrafts()

    def marks(length: int) -> tuple[int, ...]:
        (draft,) = source.propose([DraftAsk("a", TEXT[:length], 0, 4, expected=TEXT)])
        return draft.marks

    fresh, proven = marks(0), marks(40)
    assert max(fresh) < min(proven)
    assert list(fresh) == sorted(fresh)


def test_a_guess_after_two_other_tokens_is_marked_below_one_after_the_first() -> None:
    marks = [
        PredictionDrafts().propose([DraftAsk("a", (*TEXT[:30], *(7, 8)[:others]), 0, 4, expected=TEXT)])[0].marks[0]
        for others in (2, 1, 0)
    ]
    assert marks == sorted(set(marks))


def test_of_several_places_the_next_behind_the_cursor_is_taken() -> None:
    expected = (1, 2, 10, 1, 2, 20, 1, 2, 30)
    drafts = followed(expected, (1, 2, 10, 9, 1, 2, 20))
    assert drafts[-1][:1] == (20,)


def test_without_an_expected_text_and_behind_its_end_there_is_no_guess() -> None:
    source = PredictionDrafts()
    assert source.propose([DraftAsk("a", (1, 2, 3), 2, 5)]) == [Draft()]
    assert followed((5, 6), (5, 6, 7, 8, 9))[-1] == ()


@given(
    expected=st.lists(st.integers(0, 4), max_size=30),
    answer=st.lists(st.integers(0, 4), max_size=40),
    step=st.integers(1, 7),
)
def test_any_answer_to_any_text_in_any_pieces(expected: list[int], answer: list[int], step: int) -> None:
    whole, pieces = PredictionDrafts(), PredictionDrafts()
    for length in range(0, len(answer), step):
        ask = DraftAsk("a", answer[:length], 0, 6, expected=expected)
        (draft,) = pieces.propose([ask])
        assert draft.tokens == () or any(
            tuple(expected[at : at + len(draft.tokens)]) == draft.tokens for at in range(len(expected))
        )
    for length in range(len(answer)):
        ask = DraftAsk("a", answer[:length], 0, 6, expected=expected)
        by_one = whole.propose([ask])
        assert len(by_one[0].tokens) <= 6
    last = DraftAsk("a", answer, 0, 6, expected=expected)
    assert whole.propose([last]) == pieces.propose([last])
