"""Regular expressions as automata: ECMAScript's dialect, as JSON schemas use it, without what no automaton can do.

Look-around, back-references, word boundaries, Unicode properties and flags are refused with their place.
"""

from collections.abc import Sequence

import msgspec

from backends.grammar.automaton import (
    Automaton,
    Edges,
    Ranges,
    TooLargeError,
    determinized,
    inverted,
    normalized,
    rebased,
)

_MAX_PARTS = 20_000
"""States of the nondeterministic automaton, counted repetitions written out."""
_MAX_NESTING = 100
_BEGIN, _END = 0x110000, 0x110001
"""Stand for the ends of a text, where a pattern is searched in it."""
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_BLANK: Ranges = normalized(
    (code, code)
    for code in (
        *range(0x09, 0x0E),
        0x20,
        0xA0,
        0x1680,
        *range(0x2000, 0x200B),
        0x2028,
        0x2029,
        0x202F,
        0x205F,
        0x3000,
        0xFEFF,
    )
)
_DOT: Ranges = inverted(((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)))
_CLASSES = {"d": _DIGITS, "D": inverted(_DIGITS), "w": _WORD, "W": inverted(_WORD), "s": _BLANK, "S": inverted(_BLANK)}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_SYNTAX = frozenset("^$\\.*+?()[]{}|/")


class PatternError(ValueError):
    """A regular expression that is not one, or asks for what no automaton can do; says why and where."""


class _Set(msgspec.Struct, frozen=True):
    ranges: Ranges


class _Sequence(msgspec.Struct, frozen=True):
    parts: "tuple[_Node, ...]"


class _Choice(msgspec.Struct, frozen=True):
    branches: "tuple[_Node, ...]"


class _Repeat(msgspec.Struct, frozen=True):
    part: "_Node"
    least: int
    most: int | None


class _Anchor(msgspec.Struct, frozen=True):
    mark: int


_Node = _Set | _Sequence | _Choice | _Repeat | _Anchor


def matching(pattern: str) -> Automaton:
    """The texts that match as a whole; anchors at the ends change nothing. Raises PatternError, TooLargeError."""
    node = _Parser(pattern).parse()
    return _built(node, anchors=False)


def containing(pattern: str) -> Automaton:
    """The texts in which the pattern is found, as JSON schemas mean it. Raises PatternError, TooLargeError."""
    node = _Parser(pattern).parse()
    anything = _Repeat(_Set(((0, _END),)), 0, None)
    return rebased(_built(_Sequence((anything, node, anything)), anchors=True), _BEGIN, _END)


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def parse(self) -> _Node:
        node = self._choice()
        if self._at < len(self._text):
            raise self._error("a ')' without its '('")
        _refuse_inner_anchors(node)
        return node

    def _error(self, reason: str) -> PatternError:
        return PatternError(f"{reason} at character {self._at + 1} of the pattern")

    def _peek(self, count: int = 1) -> str:
        return self._text[self._at : self._at + count]

    def _take(self) -> str:
        if self._at >= len(self._text):
            raise self._error("the pattern ends early")
        self._at += 1
        return self._text[self._at - 1]

    def _skip(self, text: str) -> bool:
        found = self._peek(len(text)) == text
        self._at += len(text) * found
        return found

    def _choice(self) -> _Node:
        branches = [self._sequence()]
        while self._skip("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else _Choice(tuple(branches))

    def _sequence(self) -> _Node:
        parts = []
        while self._peek() not in {"", "|", ")"}:
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _repeated(self, part: _Node) -> _Node:
        bounds = self._quantifier()
        if bounds is None:
            return part
        if isinstance(part, _Anchor):
            raise self._error("a repeated anchor")
        self._skip("?")  # lazy or greedy, the language is the same
        if self._peek() == "+":
            raise self._error("a possessive quantifier is not supported")
        if self._quantifier() is not None:
            raise self._error("nothing to repeat")
        return _Repeat(part, *bounds)

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._skip(sign):
                return bounds
        if self._peek() != "{":
            return None
        start = self._at
        self._at += 1
        least = self._number()
        most = self._number() if self._skip(",") else least
        if least is None or not self._skip("}"):
            self._at = start
            raise self._error("a '{' that begins no repetition (write it as '\\{')")
        if most is not None and most < least:
            raise self._error("a repetition whose bounds are in the wrong order")
        return least, most

    def _number(self) -> int | None:
        start = self._at
        while self._peek() in set("0123456789"):
            self._at += 1
        digits = self._text[start : self._at]
        if len(digits) > 6:
            raise TooLargeError("it repeats a part more than a million times")
        return int(digits) if digits else None

    def _atom(self) -> _Node:
        sign = self._take()
        if sign == "(":
            return self._group()
        if sign == "[":
            return _Set(self._class())
        if sign == ".":
            return _Set(_DOT)
        if sign == "^":
            return _Anchor(_BEGIN)
        if sign == "$":
            return _Anchor(_END)
        if sign == "\\":
            return _Set(self._escape())
        if sign in {"*", "+", "?"}:
            raise self._error("nothing to repeat")
        if sign == "{":
            raise self._error("a '{' that begins no repetition (write it as '\\{')")
        return _Set(((ord(sign), ord(sign)),))

    def _group(self) -> _Node:
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise self._error("too many groups in groups")
        if self._skip("?"):
            self._group_kind()
        node = self._choice()
        if not self._skip(")"):
            raise self._error("a '(' without its ')'")
        self._depth -= 1
        return node

    def _group_kind(self) -> None:
        if self._skip(":"):
            return
        if self._peek() in {"=", "!"} or self._peek(2) in {"<=", "<!"}:
            raise self._error("look-around is not supported")
        if not (self._skip("P<") or self._skip("<")):
            raise self._error("flags and other special groups are not supported")
        name = ""
        while not self._skip(">"):
            name += self._take()
        if not name.isidentifier():
            raise self._error("a group's name that is none")

    def _escape(self) -> Ranges:
        sign = self._take()
        if sign in _CLASSES:
            return _CLASSES[sign]
        if sign in {"b", "B"}:
            raise self._error("word boundaries are not supported")
        if sign in {"p", "P"}:
            raise self._error("Unicode properties are not supported")
        if sign == "k" or "1" <= sign <= "9":
            raise self._error("back-references are not supported")
        code = self._character(sign)
        return ((code, code),)

    def _character(self, sign: str) -> int:
        """The code point of an escape whose first character was taken."""
        if sign in _CONTROLS and not (sign == "0" and self._peek().isdigit()):
            return _CONTROLS[sign]
        if sign == "x":
            return self._hexadecimal(2)
        if sign == "u":
            return self._braced() if self._skip("{") else self._unit()
        if sign == "c" and self._peek().isalpha() and self._peek().isascii():
            return ord(self._take()) % 32
        if sign.isalnum() or sign == "_":
            raise self._error(f"an unknown escape '\\{sign}'")
        return ord(sign)

    def _hexadecimal(self, digits: int) -> int:
        taken = self._peek(digits)
        if len(taken) != digits or not set(taken) <= set("0123456789abcdefABCDEF"):
            raise self._error("an escape with too few hexadecimal digits")
        self._at += digits
        return int(taken, 16)

    def _unit(self) -> int:
        """Four digits; two surrogates together are one character."""
        code = self._hexadecimal(4)
        if 0xD800 <= code < 0xDC00 and self._skip("\\u"):
            low = self._hexadecimal(4)
            if not 0xDC00 <= low < 0xE000:
                raise self._error("half a surrogate pair")
            return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        return code

    def _braced(self) -> int:
        digits = ""
        while not self._skip("}"):
            digits += self._take()
        if (
            not digits
            or len(digits) > 6
            or not set(digits) <= set("0123456789abcdefABCDEF")
            or int(digits, 16) > 0x10FFFF
        ):
            raise self._error("an escape that names no character")
        return int(digits, 16)

    def _class(self) -> Ranges:
        negated = self._skip("^")
        ranges: list[tuple[int, int]] = []
        while not self._skip("]"):
            low = self._class_item()
            if self._peek() == "-" and self._peek(2) not in {"-]", "-"}:
                self._at += 1
                high = self._class_item()
                if not isinstance(low, int) or not isinstance(high, int) or high < low:
                    raise self._error("a range whose ends are not in order")
                ranges.append((low, high))
            else:
                ranges.extend(((low, low),) if isinstance(low, int) else low)
        merged = normalized(ranges)
        return inverted(merged) if negated else merged

    def _class_item(self) -> int | Ranges:
        sign = self._take()
        if sign != "\\":
            return ord(sign)
        sign = self._take()
        if sign in _CLASSES:
            return _CLASSES[sign]
        if sign in {"p", "P"}:
            raise self._error("Unicode properties are not supported")
        return 0x08 if sign == "b" else self._character(sign)


def _refuse_inner_anchors(node: _Node) -> None:
    """An anchor is at an end of whatever it stands in; elsewhere it would ask for an empty text, which nobody means."""
    if isinstance(node, _Repeat) and _marks(node.part):
        raise PatternError("an anchor inside of a repetition is not supported")
    if isinstance(node, _Sequence):
        for index, part in enumerate(node.parts):
            marks = _marks(part)
            if (_BEGIN in marks and index > 0) or (_END in marks and index < len(node.parts) - 1):
                raise PatternError("an anchor in the middle of the pattern is not supported")
    for part in _parts(node):
        _refuse_inner_anchors(part)


def _parts(node: _Node) -> "Sequence[_Node]":
    if isinstance(node, _Sequence):
        return node.parts
    if isinstance(node, _Choice):
        return node.branches
    return (node.part,) if isinstance(node, _Repeat) else ()


def _marks(node: _Node) -> set[int]:
    if isinstance(node, _Anchor):
        return {node.mark}
    return {mark for part in _parts(node) for mark in _marks(part)}


class _Builder:
    """Thompson's construction: a nondeterministic automaton from the parts of a pattern."""

    def __init__(self, anchors: bool) -> None:
        self.edges: Edges = []
        self.skips: list[list[int]] = []
        self._anchors = anchors

    def state(self) -> int:
        if len(self.edges) >= _MAX_PARTS:
            raise TooLargeError(f"it has more than {_MAX_PARTS} parts once its repetitions are written out")
        self.edges.append([])
        self.skips.append([])
        return len(self.edges) - 1

    def add(self, node: _Node, start: int) -> int:
        """Append a part behind a state; the state behind the part."""
        if isinstance(node, _Set):
            return self._edge(start, node.ranges)
        if isinstance(node, _Anchor):
            return self._edge(start, ((node.mark, node.mark),)) if self._anchors else start
        if isinstance(node, _Sequence):
            for part in node.parts:
                start = self.add(part, start)
            return start
        if isinstance(node, _Choice):
            end = self.state()
            for branch in node.branches:
                begin = self.state()
                self.skips[start].append(begin)
                self.skips[self.add(branch, begin)].append(end)
            return end
        return self._repeat(node, start)

    def _edge(self, start: int, ranges: Ranges) -> int:
        end = self.state()
        self.edges[start].append((ranges, end))
        return end

    def _repeat(self, node: _Repeat, start: int) -> int:
        for _ in range(node.least):
            start = self.add(node.part, start)
        if node.most is None:
            begin = self.state()
            self.skips[start].append(begin)
            self.skips[self.add(node.part, begin)].append(begin)
            return begin
        end = self.state()
        self.skips[start].append(end)
        for _ in range(node.most - node.least):
            start = self.add(node.part, start)
            self.skips[start].append(end)
        return end


def _built(node: _Node, *, anchors: bool) -> Automaton:
    builder = _Builder(anchors)
    start = builder.state()
    end = builder.add(node, start)
    return determinized(builder.edges, builder.skips, start, {end})
