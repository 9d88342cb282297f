"""Ranges and multiples against exact decimal arithmetic."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.grammar.automaton import TooLargeError
from backends.grammar.decimals import Bound, between, fractions, free, integers, multiples

VALUES = st.decimals(-2000, 2000, places=2) | st.sampled_from(
    [Decimal(number) for number in ("0", "-0.01", "99", "100")]
)
BOUNDS = st.none() | st.builds(Bound, VALUES, strict=st.booleans())


@st.composite
def spellings(draw: st.DrawFn) -> str:
    """Numbers without an exponent."""
    whole = draw(st.integers(0, 2100) | st.sampled_from([9, 10, 99, 100, 999, 1000]))
    fraction = draw(
        st.sampled_from(["", ".0", ".00", ".5", ".50", ".01", ".009", ".99"]) | st.from_regex(r"\A\.[0-9]{1,4}\Z")
    )
    return draw(st.sampled_from(["", "-"])) + str(whole) + fraction


def fits(value: Decimal, low: Bound | None, high: Bound | None) -> bool:
    above = low is None or (value > low.value if low.strict else value >= low.value)
    return above and (high is None or (value < high.value if high.strict else value <= high.value))


@given(BOUNDS, BOUNDS, st.lists(spellings(), min_size=4, max_size=12))
def test_a_range(low: Bound | None, high: Bound | None, texts: list[str]) -> None:
    language = between(low, high)
    near = [
        bound.value + step
        for bound in (low, high)
        if bound
        for step in (Decimal(0), Decimal("0.001"), Decimal("-0.001"))
    ]
    for text in [*texts, *(format(value, "f") for value in near)]:
        if text.strip("0123456789-.") == "" and text[-1].isdigit():
            assert language.accepts(text) == fits(Decimal(text), low, high), text


@pytest.mark.parametrize("step", ["1", "3", "7", "12", "1000", "0.01", "0.25", "2.5", "0.5"])
@given(texts=st.lists(spellings(), min_size=4, max_size=12))
def test_multiples(step: str, texts: list[str]) -> None:
    language = multiples(Decimal(step))
    digits = max(0, -int(Decimal(step).normalize().as_tuple().exponent))
    for text in [*texts, str(Decimal(step) * 123)]:
        if len(text.partition(".")[2]) <= digits:
            assert language.accepts(text) == (Decimal(text) % Decimal(step) == 0), text


@pytest.mark.parametrize("text", ["01", "-01", ".5", "5.", "+1", "1e", "", "-", "--1", "1.2.3"])
def test_what_is_no_number(text: str) -> None:
    for language in (free(), integers(), fractions(), between(None, None), multiples(Decimal("0.5"))):
        assert not language.accepts(text)


def test_kinds() -> None:
    assert free().accepts("-1.5e+30")
    assert [integers().accepts(text) for text in ("0", "-7", "-0", "7.0")] == [True, True, False, False]
    assert [fractions().accepts(text) for text in ("0.5", "-7.10", "7", "7.0")] == [True, True, False, False]


def test_what_is_too_large() -> None:
    with pytest.raises(TooLargeError):
        between(Bound(Decimal("1e999"), strict=False), None)
    with pytest.raises(TooLargeError):
        multiples(Decimal(100_003))
