"""The acceptance walk against plain decoding (contract rules 1 to 3)."""

import zlib
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler.accept import accept
from scheduler.request import FinishReason
from scheduler.round import Acceptance
from tests.scheduler.plain import replay

EOS = 9
NONE: frozenset[int] = frozenset()
TOKEN = st.sampled_from([1, 2, 3, EOS, 10])


@st.composite
def walks(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A draft that is right for some way, and one draw more than it is long."""
    drawn = draw(st.lists(TOKEN, min_size=1, max_size=9))
    right = draw(st.integers(0, len(drawn) - 1))
    guessed = draw(st.lists(TOKEN, min_size=len(drawn) - 1 - right, max_size=len(drawn) - 1 - right))
    return (*drawn[:right], *guessed), tuple(drawn)


@given(walk=walks(), stop_tokens=st.frozensets(st.sampled_from([2, EOS, 10])), remaining=st.integers(1, 12))
@example(walk=((), (EOS,)), stop_tokens=frozenset({EOS}), remaining=1)
@example(walk=((1, EOS, 2), (1, EOS, 2, 3)), stop_tokens=frozenset({EOS}), remaining=2)
def test_the_walk_is_a_replay_of_plain_decoding(
    walk: tuple[tuple[int, ...], tuple[int, ...]], stop_tokens: frozenset[int], remaining: int
) -> None:
    draft, drawn = walk
    expected = replay(draft, drawn, stop_tokens, remaining)
    assert accept(draft, drawn, stop_tokens=stop_tokens, remaining=remaining) == expected


@given(salt=st.integers(0, 2**32), max_tokens=st.integers(1, 30), data=st.data())
def test_rule_1_whoever_drafts_the_whole_answer_is_the_same(salt: int, max_tokens: int, data: st.DataObject) -> None:
    def target(context: Sequence[int]) -> int:
        return zlib.crc32(bytes(context), salt) % 11

    plain = decode(target, max_tokens, lambda _context: ())

    def guess(context: Sequence[int]) -> tuple[int, ...]:
        """Right for a while, then perhaps wrong."""
        draft: list[int] = []
        for _ in range(data.draw(st.integers(0, 5))):
            draft.append(target([*context, *draft]) if data.draw(st.booleans()) else data.draw(TOKEN))
        return tuple(draft)

    assert decode(target, max_tokens, guess) == plain


def decode(
    target: Callable[[Sequence[int]], int], max_tokens: int, guess: Callable[[Sequence[int]], tuple[int, ...]]
) -> tuple[list[int], FinishReason]:
    """A whole request, round by round, with drafts cut as the scheduler cuts them."""
    context = [5]
    while True:
        remaining = max_tokens - len(context) + 1
        draft = guess(context)[: remaining - 1]
        drawn = [target([*context, *draft[:position]]) for position in range(len(draft) + 1)]
        walk = accept(draft, drawn, stop_tokens={EOS}, remaining=remaining)
        context += walk.emitted
        if walk.end is not None:
            return context, walk.end


def test_rule_1_the_first_mismatch_emits_the_correction() -> None:
    assert accept((1, 2, 3), (1, 7, 3, 4), stop_tokens=NONE, remaining=9) == Acceptance((1, 7), 1)


def test_rule_1_a_wrong_first_token_still_emits_one() -> None:
    assert accept((1, 2), (7, 2, 3), stop_tokens=NONE, remaining=9) == Acceptance((7,), 0)


def test_rule_1_nothing_behind_a_mismatch_counts_even_if_it_agrees() -> None:
    assert accept((1, 2, 3), (7, 2, 3, 4), stop_tokens=NONE, remaining=9) == Acceptance((7,), 0)


def test_rule_1_all_accepted_emits_the_bonus() -> None:
    assert accept((1, 2, 3), (1, 2, 3, 4), stop_tokens=NONE, remaining=9) == Acceptance((1, 2, 3, 4), 3)


def test_rule_8_an_empty_draft_emits_the_one_draw() -> None:
    assert accept((), (4,), stop_tokens={EOS}, remaining=9) == Acceptance((4,), 0)


STOPPED = FinishReason.STOP


@pytest.mark.parametrize(
    ("draft", "drawn", "expected"),
    [
        pytest.param((1, EOS, 2), (1, EOS, 2, 3), Acceptance((1,), 2, STOPPED, True), id="as an accepted draft"),
        pytest.param((1, 2, 3), (1, EOS, 3, 4), Acceptance((1,), 1, STOPPED, True), id="as the correction"),
        pytest.param((1, 2), (1, 2, EOS), Acceptance((1, 2), 2, STOPPED, True), id="as the bonus"),
        pytest.param((), (EOS,), Acceptance((), 0, STOPPED, True), id="alone"),
        pytest.param((EOS,), (EOS, 1), Acceptance((), 1, STOPPED, True), id="as the first draft"),
        pytest.param((EOS, 1), (2, 1, 1), Acceptance((2,), 0), id="drafted but not drawn"),
        pytest.param((1, 2), (3, EOS, EOS), Acceptance((3,), 0), id="drawn behind a mismatch"),
        pytest.param((EOS, EOS), (EOS, EOS, EOS), Acceptance((), 1, STOPPED, True), id="twice: the first one ends"),
    ],
)
def test_rule_2_an_eos_ends_the_walk_undelivered(
    draft: tuple[int, ...], drawn: tuple[int, ...], expected: Acceptance
) -> None:
    assert accept(draft, drawn, stop_tokens={EOS}, remaining=9) == expected


def test_rule_2_an_ignored_eos_is_ordinary_content() -> None:
    assert accept((1, EOS, 2), (1, EOS, 2, EOS), stop_tokens=NONE, remaining=9) == Acceptance((1, EOS, 2, EOS), 3)


@pytest.mark.parametrize("remaining", range(1, 7))
def test_rule_3_never_more_than_remains(remaining: int) -> None:
    walk = accept((1, 2, 3), (1, 2, 3, 4), stop_tokens={EOS}, remaining=remaining)
    assert walk.emitted == (1, 2, 3, 4)[:remaining]
    assert walk.accepted == min(3, remaining)
    assert walk.end is (FinishReason.LENGTH if remaining <= 4 else None)
    assert not walk.ended_by_token


def test_rule_3_an_eos_behind_the_budget_was_never_drawn() -> None:
    assert accept((1, 2), (1, 2, EOS), stop_tokens={EOS}, remaining=2) == Acceptance((1, 2), 2, FinishReason.LENGTH)


def test_rule_12_an_eos_as_the_last_allowed_token_is_a_stop() -> None:
    assert accept((1,), (1, EOS), stop_tokens={EOS}, remaining=2) == Acceptance((1,), 1, FinishReason.STOP, True)
