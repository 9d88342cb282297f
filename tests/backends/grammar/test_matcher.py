"""The promises of a matcher: masks and accepted tokens agree, rolling back leaves no trace, the end is known."""

import json
import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.fake import EOS
from backends.grammar.spec import SpecKind
from tests.backends.grammar.grammars import allowed, grammar_of, matcher_of

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["first", "second", "é"]},
            "size": {"type": "number", "minimum": 0.5, "maximum": 12},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "maxItems": 3},
        },
        "required": ["kind"],
    }
)
SPECS = [
    (SpecKind.JSON_SCHEMA, SCHEMA),
    (SpecKind.JSON_OBJECT, ""),
    (SpecKind.REGEX, "(ab|a)*c?"),
    (SpecKind.CHOICE, '["yes", "yesterday", "no", "é", "è"]'),
    (SpecKind.EBNF, 'root ::= item ("," item)*\nitem ::= [a-z]{1,3} | "[" root "]"\n'),
]
KINDS = pytest.mark.parametrize(("kind", "text"), SPECS, ids=[kind.value for kind, _ in SPECS])


@KINDS
@given(moves=st.lists(st.integers(-4, 300), max_size=40))
def test_rolling_back_leaves_no_trace(kind: SpecKind, text: str, moves: list[int]) -> None:
    """Positive moves pick a token of the mask, others roll back; the masks are those of a fresh matcher."""
    grammar = grammar_of(kind, text)
    matcher = matcher_of(grammar)
    tokens: list[int] = []
    for move in moves:
        if move < 0:
            count = min(-move, len(tokens))
            matcher.rollback(count)
            del tokens[len(tokens) - count :]
            continue
        choices = allowed(matcher)
        token = choices[move % len(choices)]
        if not tokens or tokens[-1] != EOS:
            assert matcher.accept(token)
            tokens.append(token)
    fresh = matcher_of(grammar)
    assert all(fresh.accept(token) for token in tokens)
    assert allowed(matcher) == allowed(fresh)
    assert matcher.finished == fresh.finished
    assert matcher.forced(8) == fresh.forced(8)


@KINDS
@given(choices=st.lists(st.integers(0, 300), max_size=25), other=st.integers(-3, 400))
def test_just_the_tokens_of_the_mask_are_accepted(kind: SpecKind, text: str, choices: list[int], other: int) -> None:
    matcher = matcher_of(grammar_of(kind, text))
    for choice in choices:
        tokens = allowed(matcher)
        assert tokens, "a text that cannot go on"
        for token in {other, tokens[choice % len(tokens)], 0, 255, EOS}:
            before = allowed(matcher)
            accepted = matcher.accept(token)
            assert accepted == (token in tokens)
            if accepted:
                matcher.rollback(1)
            assert allowed(matcher) == before
        token = tokens[choice % len(tokens)]
        assert matcher.finished == (tokens == [EOS])
        assert matcher.accept(token)
        if token == EOS:
            break


@given(
    st.recursive(
        st.sampled_from(["a", "b", "[ab]", "."]),
        lambda inner: (
            st.builds("({}|{})".format, inner, inner)
            | st.builds("{}{}".format, inner, inner)
            | st.builds("({})*".format, inner)
            | st.builds("({}){{1,2}}".format, inner)
        ),
        max_leaves=5,
    )
)
def test_a_regular_expression_is_pythons(pattern: str) -> None:
    """At every prefix, a letter is allowed if some text of the language goes on with it."""
    texts = {
        text
        for size in range(7)
        for letters in product("ab", repeat=size)
        if re.fullmatch(pattern, text := "".join(letters))
    }
    grammar = grammar_of(SpecKind.REGEX, pattern)
    for prefix in {text[:size] for text in texts for size in range(min(len(text), 3) + 1)}:
        matcher = matcher_of(grammar)
        assert all(matcher.accept(byte) for byte in prefix.encode())
        mask = allowed(matcher)
        for letter in "ab":
            if any(text.startswith(prefix + letter) for text in texts):
                assert ord(letter) in mask
        assert (EOS in mask) == (prefix in texts)


@given(st.lists(st.text('ab"\\é😀\n', min_size=1, max_size=5), min_size=1, max_size=6, unique=True), st.data())
def test_a_choice_is_exactly_its_texts(texts: list[str], data: st.DataObject) -> None:
    encoded = [text.encode() for text in texts]
    matcher = matcher_of(grammar_of(SpecKind.CHOICE, json.dumps(texts)))
    prefix = b""
    while True:
        left = [text for text in encoded if text.startswith(prefix)]
        following = {text[len(prefix)] for text in left if text != prefix} | ({EOS} if prefix in encoded else set())
        assert set(allowed(matcher)) == following
        assert matcher.finished == (following == {EOS})
        forced = bytes(matcher.forced(50))
        assert all(text.startswith(prefix + forced) for text in left)
        token = data.draw(st.sampled_from(sorted(following)))
        assert matcher.accept(token)
        if token == EOS:
            return
        prefix += bytes([token])


@KINDS
@given(choices=st.lists(st.integers(0, 300), max_size=20), limit=st.integers(0, 12))
def test_forced_text_is_accepted_and_moves_nothing(kind: SpecKind, text: str, choices: list[int], limit: int) -> None:
    matcher = matcher_of(grammar_of(kind, text))
    for choice in choices:
        tokens = allowed(matcher)
        forced = matcher.forced(limit)
        assert len(forced) <= limit
        assert allowed(matcher) == tokens
        for token in forced:
            assert allowed(matcher) == [token]
            assert matcher.accept(token)
        matcher.rollback(len(forced))
        token = tokens[choice % len(tokens)]
        assert matcher.accept(token)
        if token == EOS:
            assert matcher.forced(limit) == ()
            return


def test_behind_the_end_there_are_only_stop_tokens(capfd: pytest.CaptureFixture[str]) -> None:
    matcher = matcher_of(grammar_of(SpecKind.REGEX, "ab?"))
    assert matcher.accept(ord("a"))
    assert not matcher.finished
    assert matcher.accept(EOS)
    assert matcher.finished
    assert allowed(matcher) == [EOS]
    assert [matcher.accept(token) for token in (EOS, ord("b"), -1, 257, 100_000)] == [False] * 5
    matcher.rollback(1)
    assert not matcher.finished
    assert allowed(matcher) == [ord("b"), EOS]
    assert capfd.readouterr().err == ""


def test_finished_is_forgotten_when_the_text_goes_another_way() -> None:
    matcher = matcher_of(grammar_of(SpecKind.CHOICE, '["a", "bc"]'))
    assert matcher.accept(ord("a"))
    assert matcher.finished
    matcher.rollback(1)
    assert matcher.accept(ord("b"))
    assert not matcher.finished


def test_structural_tags_hold_schemas_of_ours() -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f"],
            "tags": [
                {
                    "type": "tag",
                    "begin": "<f>",
                    "content": {"type": "json_schema", "json_schema": {"type": "integer", "multipleOf": 7}},
                    "end": "</f>",
                }
            ],
        },
    }
    grammar = grammar_of(SpecKind.STRUCTURAL_TAG, json.dumps(tag))
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": {"type": "integer", "multipleOf": 7}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    for known in (grammar, grammar_of(SpecKind.STRUCTURAL_TAG, json.dumps(older))):
        for text, right in (("see <f>14</f> ok", True), ("see <f>15</f>", False), ("no tag", True), ("<f>7", False)):
            matcher = matcher_of(known)
            assert (all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(EOS)) == right
