"""Automata against Python's `re` and against Python's own set algebra, over small alphabets."""

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.grammar.automaton import EVERYTHING, NOTHING, Automaton, TooLargeError, lengths, literals
from backends.grammar.pattern import PatternError, containing, matching

ALPHABET = "ab1-"
TEXTS = ["".join(letters) for size in range(5) for letters in product(ALPHABET, repeat=size)]


def patterns() -> st.SearchStrategy[str]:
    atoms = st.sampled_from(
        ["a", "b", "1", ".", r"\d", r"\w", r"\W", "[ab]", "[^a]", "[a-b1]", "[-a]", r"\-", r"[^\d]"]
    )
    quantifiers = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?"])
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.builds("({}){}".format, inner, quantifiers),
            st.builds("(?:{}|{})".format, inner, inner),
            st.builds("{}{}".format, inner, inner),
            st.builds("(|{})".format, inner),
        ),
        max_leaves=6,
    )


def language(automaton: Automaton) -> set[str]:
    return {text for text in TEXTS if automaton.accepts(text)}


@given(patterns())
def test_a_whole_match_is_pythons(pattern: str) -> None:
    assert language(matching(pattern)) == {text for text in TEXTS if re.fullmatch(pattern, text)}


@given(patterns(), st.sampled_from(["{}", "^{}", "{}$", "^{}$", "^(?:{})|b$", "(?:^a|{})1"]))
def test_a_search_is_pythons(pattern: str, anchored: str) -> None:
    pattern = anchored.format(f"(?:{pattern})")
    assert language(containing(pattern)) == {text for text in TEXTS if re.search(pattern, text)}


@given(patterns(), patterns())
def test_set_algebra(first: str, second: str) -> None:
    left, right = matching(first), matching(second)
    ours, theirs = language(left), language(right)
    assert language(left & right) == ours & theirs
    assert language(left | right) == ours | theirs
    assert language(left - right) == ours - theirs
    assert language(~left) == set(TEXTS) - ours
    assert (left - left).empty
    assert (left & ~left).empty


@given(patterns(), st.integers(0, 3), st.none() | st.integers(0, 5))
def test_lengths(pattern: str, least: int, most: int | None) -> None:
    automaton = matching(pattern)
    wanted = {text for text in language(automaton) if least <= len(text) <= (len(text) if most is None else most)}
    found = automaton & lengths(least, most) if most is None or least <= most else NOTHING
    assert language(found) == wanted
    shortest, longest = automaton.lengths()
    known = {len(text) for text in language(automaton)}
    if known:
        assert shortest == min(known)
        assert longest is None or longest >= max(known)


@given(st.sets(st.text(max_size=4)), st.text(max_size=4))
def test_literals(texts: set[str], other: str) -> None:
    automaton = literals(texts)
    assert all(automaton.accepts(text) for text in texts)
    assert automaton.accepts(other) == (other in texts)
    assert EVERYTHING.accepts(other)


@given(patterns())
def test_minimal_automata_of_one_language_are_equal(pattern: str) -> None:
    first, second = matching(pattern), matching(f"(?:{pattern}|{pattern})")
    assert (first.states, first.accepting) == (second.states, second.accepting)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a(?=b)", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "back-references"),
        (r"(?P<x>a)\k<x>", "back-references"),
        (r"\bword", "word boundaries"),
        (r"\p{L}", "Unicode properties"),
        ("(?i)a", "flags"),
        ("a++", "possessive"),
        ("a**", "nothing to repeat"),
        ("*a", "nothing to repeat"),
        ("(a", "without its"),
        ("a)", "without its"),
        ("[a", "ends early"),
        ("a{3,1}", "wrong order"),
        ("[z-a]", "not in order"),
        ("a{x}", "begins no repetition"),
        ("a^b", "middle of the pattern"),
        ("(a$)+", "inside of a repetition"),
        (r"\q", "unknown escape"),
        ("\\", "ends early"),
    ],
)
def test_what_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(PatternError, match=reason):
        containing(pattern)


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}", "(a|b)*a(a|b){20}", "a{2000000}", "(((a{99}){99}){99}){99}"])
def test_what_is_too_large(pattern: str) -> None:
    with pytest.raises(TooLargeError):
        matching(pattern)


def test_escapes() -> None:
    assert matching(r"\x41\u0042\u{43}\cA\t\/").accepts("ABC\x01\t/")
    assert matching(r"\ud83d\ude00").accepts("😀")
    assert matching(r"[\b]").accepts("\b")
    assert not matching(".").accepts("\n")
    assert matching("[^]").accepts("\n")
