"""The numbers and strings of a case, as automata."""

from collections.abc import Iterable, Sequence
from decimal import Decimal

from backends.grammar.automaton import EVERYTHING, NOTHING, Automaton, lengths, literals
from backends.grammar.cases import Case, Cases, Conjunction, Size
from backends.grammar.decimals import Bound, between, fractions, free, integers, multiples


def number_language(case: Case, kinds: Iterable[str], excluded: Sequence[Decimal]) -> Automaton:
    """The numbers of a case; `kinds` are `integer`, `fraction` or both. Raises TooLargeError."""
    low = max(case.low, key=lambda bound: (bound.value, bound.strict), default=None)
    high = min(case.high, key=lambda bound: (bound.value, not bound.strict), default=None)
    bounded = low is not None or high is not None or case.multiples or excluded
    allowed = set(kinds)
    if allowed == {"integer"}:
        language = integers()
    elif allowed == {"fraction"}:
        language = fractions()
    else:
        language = between(None, None) if bounded else free()
    if low is not None or high is not None:
        language = language & between(low, high)
    for step in case.multiples:
        language = language & multiples(step)
    for value in excluded:
        language = language - between(Bound(value, strict=False), Bound(value, strict=False))
    return language


def string_language(case: Case, excluded: Sequence[str]) -> Automaton:
    """The strings of a case. Raises TooLargeError."""
    language = EVERYTHING
    for other, inside in case.languages:
        language = language & other if inside else language - other
    if excluded:
        language = language - literals(excluded)
    return _of_length(language, case.length)


def _of_length(language: Automaton, length: Size) -> Automaton:
    if not length.possible:
        return NOTHING
    shortest, longest = language.lengths()
    longest_fits = length.most is None or (longest is not None and longest <= length.most)
    if language.empty or (shortest >= length.least and longest_fits):
        return language
    return language & lengths(length.least, None if longest_fits else length.most)


def names_language(cases: Cases, conjunction: Conjunction) -> Automaton:
    """The strings that satisfy some subschemas. Raises SchemaError, TooLargeError."""
    language = NOTHING
    for case in cases.of(conjunction):
        if case.values is not None:
            language = language | literals(value for value in case.values if isinstance(value, str))
        elif "string" in case.types:
            excluded = [value for value in case.excluded if isinstance(value, str)]
            language = language | string_language(case, excluded)
    return language
