"""The spellings of numbers in a range, as JSON writes them.

Bounded numbers are written without an exponent, so that a finite automaton can compare their digits with a bound's, to
any number of digits; every number has such a spelling. Free numbers may have an exponent.
"""

from decimal import Decimal
from functools import cache
from itertools import count

from backends.grammar.automaton import NOTHING, Automaton, State, TooLargeError, minimal, preceded
from backends.grammar.pattern import matching

MAX_DIGITS = 400
"""Of a number in a schema, and of its exponent's value; the largest double has 309."""
_MAX_STEPS = 1000
"""Of the numerator of `multipleOf`."""
_MAX_FRACTION = 12
_TEN = 10


class Bound:
    """One end of a range: a value, and whether it is itself left out."""

    def __init__(self, value: Decimal, *, strict: bool) -> None:
        self.value = value
        self.strict = strict


@cache
def free() -> Automaton:
    """Every number, exponents included."""
    return matching(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


@cache
def integers() -> Automaton:
    """Integers without fraction or exponent; zero has no sign."""
    return matching(r"0|-?[1-9]\d*")


@cache
def fractions() -> Automaton:
    """Numbers that are no integers, without exponent."""
    return matching(r"-?(0|[1-9]\d*)\.\d*[1-9]\d*")


@cache
def _magnitudes() -> Automaton:
    return matching(r"(0|[1-9]\d*)(\.\d+)?")


def between(low: Bound | None, high: Bound | None) -> Automaton:
    """Numbers in a range, without exponent; `-0` is zero. Raises TooLargeError."""
    mirrored = _magnitudes_between(_mirrored(high), _mirrored(low))
    return _magnitudes_between(low, high) | preceded("-", mirrored)


def _mirrored(bound: Bound | None) -> Bound | None:
    return None if bound is None else Bound(-bound.value, strict=bound.strict)


def _magnitudes_between(low: Bound | None, high: Bound | None) -> Automaton:
    found = _magnitudes()
    if low is not None and (low.value > 0 or (low.value == 0 and low.strict)):
        found = found & _at_least(low)
    if high is None:
        return found
    if high.value < 0 or (high.value == 0 and high.strict):
        return NOTHING
    return found - _at_least(Bound(high.value, strict=not high.strict))


def _at_least(bound: Bound) -> Automaton:
    """Unsigned numbers not below a bound that is not negative."""
    if abs(bound.value.adjusted()) > MAX_DIGITS or len(bound.value.as_tuple().digits) > MAX_DIGITS:
        raise TooLargeError(f"a bound of more than {MAX_DIGITS} digits")
    whole, _, fraction = format(bound.value, "f").partition(".")
    fraction = fraction.rstrip("0")
    larger = [digits + rf"\d{{{len(whole) - len_digits}}}" for digits, len_digits in _larger_digits(whole)]
    larger.append(rf"[1-9]\d{{{max(len(whole), 1)}}}\d*")
    branches = [rf"({'|'.join(larger)})(\.\d+)?"]
    beyond = r"\d*[1-9]\d*" if bound.strict else r"\d*"
    fractions = [rf"{digits}\d*" for digits, _ in _larger_digits(fraction)]
    fractions.append(fraction + beyond if fraction or bound.strict else r"\d+")
    branches.append(rf"{whole}\.({'|'.join(fractions)})")
    if not fraction and not bound.strict:
        branches.append(whole)
    return matching("|".join(branches)) & _magnitudes()


def _larger_digits(digits: str) -> list[tuple[str, int]]:
    """Patterns of the shortest beginnings that make digits of the same length stand for more, and their lengths."""
    return [(f"{digits[:index]}[{int(digit) + 1}-9]", index + 1) for index, digit in enumerate(digits) if digit != "9"]


def multiples(step: Decimal) -> Automaton:
    """Multiples of a positive step, with no more fraction digits than it has. Raises TooLargeError."""
    _, digits, exponent = step.normalize().as_tuple()
    scale = max(0, -int(exponent))
    numerator = int(step.scaleb(scale))
    if numerator > _MAX_STEPS or scale > _MAX_FRACTION or len(digits) > _MAX_FRACTION:
        raise TooLargeError(f"multiples of {step}")
    return _unsigned_multiples(numerator, scale) | preceded("-", _unsigned_multiples(numerator, scale))


def _unsigned_multiples(numerator: int, scale: int) -> Automaton:
    """Reads the digits into a remainder: of the number itself before the point, of its fraction digits behind."""
    numbers = count()
    places = {(remainder, read): next(numbers) + 3 for read in range(-1, scale + 1) for remainder in range(numerator)}
    states: list[State] = [(), (), ()]
    accepting: set[int] = set()
    point = ord(".")
    for (remainder, read), number in places.items():
        arcs: list[tuple[int, int, int]] = []
        if read < 0 < scale:
            arcs.append((point, point, places[remainder, 0]))
        if read < scale or read < 0:
            following = read if read < 0 else read + 1
            arcs.extend(
                (ord(str(digit)), ord(str(digit)), places[(remainder * _TEN + digit) % numerator, following])
                for digit in range(_TEN)
            )
        states.append(tuple(arcs))
        padding = _TEN ** (scale - max(read, 0))
        if remainder * padding % numerator == 0 and read != 0:
            accepting.add(number)
    first = tuple((ord(str(digit)), ord(str(digit)), places[digit % numerator, -1]) for digit in range(1, _TEN))
    zero = ((point, point, places[0, 0]),) if scale else ()
    states[0] = ((ord("0"), ord("0"), 1), *first)
    states[1] = zero
    return minimal(states, {*accepting, 1})
