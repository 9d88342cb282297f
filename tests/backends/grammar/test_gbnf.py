"""A client's GBNF: classes against sets of code points, and what xgrammar would take but not enforce."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.grammar.base import GrammarError
from backends.grammar.gbnf import enforced
from backends.grammar.spec import SpecKind
from tests.backends.grammar.grammars import accepts, grammar_of

SURROGATES = range(0xD800, 0xE000)
ODD = [0x00, 0x0A, 0x22, 0x2D, 0x5B, 0x5D, 0x5E, 0x61, 0x7A, 0xE9, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x1F600, 0x10FFFF]
NAMED = {0x0A: "\\n", 0x09: "\\t", 0x2D: "\\-", 0x5D: "\\]", 0x5C: "\\\\", 0x5E: "\\^"}


def spellings(code: int) -> list[str]:
    found = [f"\\U{code:08x}"]
    if code <= 0xFFFF:
        found.append(f"\\u{code:04X}")
    if code in NAMED:
        found.append(NAMED[code])
    elif code not in {0x00, 0x22, 0x5B}:
        found.append(chr(code))
    return found


def scalars() -> st.SearchStrategy[int]:
    anywhere = st.integers(0, 0xD7FF) | st.integers(0xE000, 0x10FFFF)
    return (st.sampled_from(ODD) | anywhere).filter(lambda code: code not in {0x0D, 0x5C})


@st.composite
def classes(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]], bool]:
    """A class as it is written, its ranges, and whether it is negated."""
    ranges = draw(
        st.lists(st.tuples(scalars(), scalars()).map(lambda ends: (min(ends), max(ends))), min_size=1, max_size=4)
    )
    written = []
    for low, high in ranges:
        first = draw(st.sampled_from(spellings(low)))
        written.append(first if low == high else first + "-" + draw(st.sampled_from(spellings(high))))
    negated = draw(st.booleans())
    return f"[{'^' if negated else ''}{''.join(written)}]", ranges, negated


def encoded(code: int) -> bytes:
    return chr(code).encode("utf-8", "surrogatepass")


@settings(max_examples=40)
@given(classes(), st.lists(scalars(), max_size=5), st.sampled_from([0xD800, 0xDABC, 0xDFFF]))
def test_a_class_is_a_set_of_code_points_without_surrogates(
    written: tuple[str, list[tuple[int, int]], bool], others: list[int], surrogate: int
) -> None:
    text, ranges, negated = written
    grammar = grammar_of(SpecKind.EBNF, f"root ::= {text} ")
    near = [code + step for ends in ranges for code in ends for step in (-1, 0, 1)]
    for code in {*near, *others, *ODD} & set(range(0x110000)) - set(SURROGATES):
        inside = any(low <= code <= high for low, high in ranges)
        assert accepts(grammar, encoded(code)) == (inside != negated), hex(code)
    assert not accepts(grammar, encoded(surrogate))


REFUSED = [
    ('root ::= x "c"\nx ::= "a" (= "b")', "look-ahead"),
    ('root ::= "a" (="b")', "look-ahead"),
    ('root ::= "\\"" (="b") "\\""', "look-ahead"),
    ('root ::= ["] (="b") ["]', "look-ahead"),
    ('root ::= "a" # "\n (="b") # "', "look-ahead"),
    ('root ::= "a" # "\r (="b") # "', "look-ahead"),
    ("root ::= x\nx[max_chars=2] ::= [a-z]*", "max_chars"),
    ("root ::= x\nx[ max_chars = 2 ]\n::= [a-z]*", "max_chars"),
    ('root ::= Regex("a(?=b)")', "Regex"),
    ('root ::= Regex # (\n ("a")', "Regex"),
    ('root ::= Substring("a b")', "Substring"),
    ("root ::= Token(3)", "not of tokens"),
    ('root ::= "a"{4294967297}', "repeated more than"),
    ('root ::= "a"{0, 18446744073709551617}', "repeated more than"),
    ('root ::= "\\uD800"', "surrogate"),
    ('root ::= "\\uD83D\\uDE00"', "surrogate"),
    ("root ::= [\\uD800-\\uE000]", "surrogate"),
    ("root ::= [a\\xdabc]", "surrogate"),
    ('root ::= "\\U00110000"', "no character"),
    ("root ::= [^\\U00110000]", "no character"),
]


@pytest.mark.parametrize(("grammar", "reason"), REFUSED, ids=[grammar for grammar, _ in REFUSED])
def test_what_would_not_be_enforced_is_refused(grammar: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        enforced(grammar)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= "(=" "Regex(" "[max_chars=2] ::= {99999999999}"', "(=Regex([max_chars=2] ::= {99999999999}"),
        ("root ::= [(] [=] [a]{2}", "(=aa"),
        ('root ::= "a" # (= "b") Regex("x") \\uD800', "a"),
        ('root ::= "a" [b]\nx ::= "c"', "ab"),
        ('root ::= myRegex ("a" | "b")\nmyRegex ::= "x"', "xb"),
        ('root ::= "\\\\uD800"', "\\uD800"),
        ('root ::= "\\U0001F600" "é"', "😀é"),
    ],
)
def test_what_only_looks_like_it_is_not(grammar: str, text: str) -> None:
    assert enforced(grammar) == grammar
    assert accepts(grammar_of(SpecKind.EBNF, grammar), text)


def test_a_grammar_inside_of_a_structural_tag_is_looked_at_as_well() -> None:
    tag = '{"type": "structural_tag", "format": {"type": "grammar", "grammar": "root ::= \\"a\\" (= \\"b\\")"}}'
    with pytest.raises(GrammarError, match="#/format/grammar: look-ahead"):
        grammar_of(SpecKind.STRUCTURAL_TAG, tag)
