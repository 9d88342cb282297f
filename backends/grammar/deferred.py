"""A constraint that begins behind a mark: free text first (a chain of thought), the grammar behind its end.

Owns the search for the mark among the generated tokens. Knows grammars by their interface only.
"""

from collections.abc import Sequence

from backends.base import MaskWords
from backends.grammar.base import Grammar, Matcher


class DeferredGrammar:
    """A grammar that begins behind the first occurrence of some tokens. Implements `Grammar`."""

    def __init__(self, grammar: Grammar, mark: Sequence[int]) -> None:
        """`mark` holds at least one token."""
        self._grammar = grammar
        self._mark = tuple(mark)
        self._failures = _failures(self._mark)

    @property
    def summary(self) -> str:
        """The grammar's own, and that it waits."""
        return f"{self._grammar.summary} behind {len(self._mark)} tokens"

    def matcher(self) -> Matcher:
        """A matcher that has seen nothing of the mark."""
        return DeferredMatcher(self._grammar, self._mark, self._failures)


class DeferredMatcher:
    """Free until the mark is complete, then the grammar's matcher. Implements `Matcher`."""

    def __init__(self, grammar: Grammar, mark: tuple[int, ...], failures: tuple[int, ...]) -> None:
        self._grammar = grammar
        self._mark = mark
        self._failures = failures
        self._matched = [0]
        """After each free token, how many tokens of the mark the text ends with; rolls back with it."""
        self._behind: Matcher | None = None
        self._accepted_behind = 0

    def accept(self, token: int) -> bool:
        """Anything before the mark is complete."""
        if self._behind is not None:
            accepted = self._behind.accept(token)
            self._accepted_behind += accepted
            return accepted
        matched = self._matched[-1]
        while matched and self._mark[matched] != token:
            matched = self._failures[matched - 1]
        matched += self._mark[matched] == token
        self._matched.append(matched)
        if matched == len(self._mark):
            self._behind = self._grammar.matcher()
            self._accepted_behind = 0
        return True

    def rollback(self, count: int) -> None:
        """Also back over the mark."""
        behind = min(count, self._accepted_behind)
        if self._behind is not None and behind:
            self._behind.rollback(behind)
            self._accepted_behind -= behind
        free = count - behind
        if free:
            self._behind = None
            del self._matched[-free:]

    def fill(self, words: MaskWords) -> None:
        """Every token before the mark is complete."""
        if self._behind is None:
            words[:] = -1
        else:
            self._behind.fill(words)

    @property
    def finished(self) -> bool:
        """Never before the mark is complete."""
        return self._behind is not None and self._behind.finished

    def forced(self, limit: int) -> tuple[int, ...]:
        """Nothing before the mark is complete."""
        return () if self._behind is None else self._behind.forced(limit)


def _failures(mark: tuple[int, ...]) -> tuple[int, ...]:
    """For each prefix of the mark, the longest shorter prefix that it ends with (Knuth, Morris and Pratt)."""
    failures = [0]
    for token in mark[1:]:
        length = failures[-1]
        while length and mark[length] != token:
            length = failures[length - 1]
        failures.append(length + (mark[length] == token))
    return tuple(failures)
