"""A deferred grammar against a search for its mark in the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from backends.fake import EOS
from backends.grammar.deferred import DeferredGrammar
from backends.grammar.matcher import XGrammarMatcher
from backends.grammar.spec import SpecKind
from tests.backends.grammar.grammars import allowed, grammar_of, matcher_of

EVERYTHING = list(range(257))


class Regex:
    """Implements `Grammar` without a compiler."""

    summary = "regex"

    def __init__(self) -> None:
        self._grammar = grammar_of(SpecKind.REGEX, "[ab]{3}")

    def matcher(self) -> XGrammarMatcher:
        return matcher_of(self._grammar)


def first_end(tokens: list[int], mark: list[int]) -> int | None:
    """Where the first occurrence of the mark ends."""
    starts = (start for start in range(len(tokens)) if tokens[start : start + len(mark)] == mark)
    start = next(starts, None)
    return None if start is None else start + len(mark)


@given(
    st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4),
    st.lists(st.sampled_from([1, 1, 1, 2, 2, 2, ord("a"), ord("b"), EOS, -1, -2]), max_size=40),
)
def test_it_is_free_and_then_the_grammar(mark: list[int], moves: list[int]) -> None:
    """Negative moves roll back."""
    matcher = DeferredGrammar(Regex(), mark).matcher()
    tokens: list[int] = []
    for move in moves:
        if move < 0:
            count = min(-move, len(tokens))
            matcher.rollback(count)
            del tokens[len(tokens) - count :]
        elif matcher.accept(move):
            tokens.append(move)
        end = first_end(tokens, mark)
        if end is None:
            assert allowed(matcher) == EVERYTHING
            assert not matcher.finished
            assert matcher.forced(3) == ()
            continue
        plain = Regex().matcher()
        assert all(plain.accept(token) for token in tokens[end:])
        assert allowed(matcher) == allowed(plain)
        assert matcher.finished == plain.finished


def test_a_mark_that_begins_again_inside_of_itself() -> None:
    matcher = DeferredGrammar(Regex(), [1, 1, 2, 1, 1, 3]).matcher()
    for token in (1, 1, 1, 2, 1, 1):
        assert matcher.accept(token)
    assert allowed(matcher) == EVERYTHING
    assert matcher.accept(3)
    assert allowed(matcher) == [ord("a"), ord("b")]


def test_the_boundary_inside_of_a_draft() -> None:
    matcher = DeferredGrammar(Regex(), [7, 8]).matcher()
    draft = [7, 7, 8, ord("a"), ord("c")]
    assert [matcher.accept(token) for token in draft] == [True, True, True, True, False]
    matcher.rollback(2)
    assert allowed(matcher) == EVERYTHING
    assert matcher.accept(8)
    assert allowed(matcher) == [ord("a"), ord("b")]
