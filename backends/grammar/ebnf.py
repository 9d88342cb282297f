"""Grammars as rules, and their text in xgrammar's GBNF dialect.

Owns escaping, the spelling of automata as rules, and leaving out what can never be completed. Must not know schemas.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from backends.grammar.automaton import Automaton, Ranges, TooLargeError, intersected, inverted

_PRINTABLE = frozenset(map(chr, range(0x20, 0x7F))) - frozenset('"\\')
_SURROGATES: Ranges = ((0xD800, 0xDFFF),)
_SCALARS = inverted(_SURROGATES)
_SHORT_ESCAPES = {0x08: "\\b", 0x09: "\\t", 0x0A: "\\n", 0x0C: "\\f", 0x0D: "\\r", 0x22: '\\"', 0x5C: "\\\\"}
_ESCAPED_IN_JSON: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
UNESCAPED_IN_JSON = intersected(inverted(_ESCAPED_IN_JSON), _SCALARS)
"""What a JSON string holds as it is. Surrogates are no characters: encoded in UTF-8 as if they were, no decoder takes
them.
"""
MAX_TIMES = 10**9
"""xgrammar counts characters and repetitions in 32 bits; a text of so many does not end."""
MAX_RULES = 60_000
COMMA, COLON = ", ", ": "
"""JSON's separators, with the whitespace of the grammars."""
ESCAPE_RULE = "escape"
"""The rule of every character that a JSON string must escape, in its one usual spelling."""


class Ref(NamedTuple):
    """Another rule."""

    name: str


class Times(NamedTuple):
    """A rule several times in a row; without `most`, any number of times from `least` on."""

    name: str
    least: int
    most: int | None


Part = Ref | Times | str
"""A piece of an alternative: a rule, a repeated one, or finished GBNF without references."""
Alternative = tuple[Part, ...]


class Rules:
    """A grammar under construction. Written by whoever makes it."""

    def __init__(self) -> None:
        self._rules: dict[str, list[Alternative]] = {}
        self._budgets: dict[str, int] = {}
        self._numbers = 0

    def new(self, hint: str) -> str:
        """A name that no rule has; its alternatives follow. Raises TooLargeError."""
        if len(self._rules) >= MAX_RULES:
            raise TooLargeError(f"it needs more than {MAX_RULES} rules")
        self._numbers += 1
        name = f"{hint}{self._numbers}"
        self._rules[name] = []
        return name

    def known(self, name: str) -> bool:
        """Whether there is such a rule."""
        return name in self._rules

    def add(self, name: str, alternatives: Iterable[Sequence[Part]]) -> Ref:
        """Append alternatives to a rule, which is made if there is none."""
        self._rules.setdefault(name, []).extend(tuple(alternative) for alternative in alternatives)
        return Ref(name)

    def limit(self, name: str, characters: int) -> None:
        """A rule ends after so many characters of text, or, where it cannot, as soon as it can."""
        self._budgets[name] = min(characters, MAX_TIMES)

    def never(self) -> Ref:
        """A rule that cannot be completed; whatever needs it is left out."""
        return self.add("never", [])

    def text(self, root: str) -> str | None:
        """The grammar, of the rules that the root reaches and that can be completed; None if the root cannot be."""
        productive = self._productive()
        if root not in productive:
            return None
        kept = {
            name: [alternative for alternative in alternatives if _completes(alternative, productive)]
            for name, alternatives in self._rules.items()
            if name in productive
        }
        lines = [f"root ::= {root}"]
        seen = {root}
        waiting = [root]
        for name in waiting:
            budget = f"[max_chars={self._budgets[name]}]" if name in self._budgets else ""
            lines.append(
                f"{name}{budget} ::= " + " | ".join(_alternative_text(alternative) for alternative in kept[name])
            )
            for alternative in kept[name]:
                for part in alternative:
                    if not isinstance(part, str) and part.name not in seen:
                        seen.add(part.name)
                        waiting.append(part.name)
        return "\n".join(lines) + "\n"

    def _productive(self) -> set[str]:
        users: dict[str, list[str]] = {}
        for name, alternatives in self._rules.items():
            for alternative in alternatives:
                for part in alternative:
                    if not isinstance(part, str):
                        users.setdefault(part.name, []).append(name)
        found: set[str] = set()
        waiting = list(self._rules)
        while waiting:
            name = waiting.pop()
            if name not in found and any(_completes(alternative, found) for alternative in self._rules[name]):
                found.add(name)
                waiting.extend(users.get(name, ()))
        return found

    def add_automaton(self, hint: str, automaton: Automaton, *, json_string: bool, end: str = "") -> Ref:
        """The strings of an automaton, each followed by the literal `end`.

        With `json_string`, each character stands as JSON writes it: escaped where it must be, and in one way only.
        """
        names = [self.new(hint) for _ in automaton.states]
        for number, state in enumerate(automaton.states):
            by_target: dict[int, list[tuple[int, int]]] = {}
            for low, high, target in state:
                by_target.setdefault(target, []).append((low, high))
            alternatives: list[Alternative] = []
            for target, ranges in by_target.items():
                follow = Ref(names[target])
                characters = self._characters(tuple(ranges), json_string=json_string)
                alternatives.extend((character, follow) for character in characters)
            if number in automaton.accepting:
                alternatives.append((literal(end),))
            self.add(names[number], alternatives)
        return Ref(names[0])

    def _characters(self, ranges: Ranges, *, json_string: bool) -> list[Part]:
        plain = intersected(ranges, UNESCAPED_IN_JSON if json_string else _SCALARS)
        found: list[Part] = [character_class(plain)] if plain else []
        escaped = intersected(ranges, _ESCAPED_IN_JSON) if json_string else ()
        if escaped == _ESCAPED_IN_JSON:
            found.append(self.escape())
        else:
            found.extend(literal(escape(code)) for low, high in escaped for code in range(low, high + 1))
        return found

    def escape(self) -> Ref:
        """Any character that a JSON string must escape, in its one usual spelling."""
        if not self.known(ESCAPE_RULE):
            texts = [escape(code) for low, high in _ESCAPED_IN_JSON for code in range(low, high + 1)]
            self.add(ESCAPE_RULE, [(literal(text),) for text in texts])
        return Ref(ESCAPE_RULE)


def _completes(alternative: Alternative, productive: set[str]) -> bool:
    return all(isinstance(part, str) or part.name in productive for part in alternative)


def _alternative_text(alternative: Alternative) -> str:
    parts = [_part_text(part) for part in alternative]
    return " ".join(part for part in parts if part != '""') or '""'


def _part_text(part: Part) -> str:
    if isinstance(part, Times):
        most = "" if part.most is None else min(part.most, MAX_TIMES)
        return '""' if part.most == 0 else f"{part.name}{{{part.least},{most}}}"
    return part.name if isinstance(part, Ref) else part


def escape(code: int) -> str:
    """How JSON writes a character that must be escaped."""
    return _SHORT_ESCAPES.get(code, f"\\u{code:04x}")


def literal(text: str) -> str:
    """A text, exactly."""
    return '"' + "".join(character if character in _PRINTABLE else _code(ord(character)) for character in text) + '"'


def character_class(ranges: Ranges) -> str:
    """One character of these; there is at least one. Never by what it is not: that would let surrogates in."""
    return "[" + "".join(_range_text(low, high) for low, high in ranges) + "]"


def _range_text(low: int, high: int) -> str:
    return _class_code(low) if low == high else f"{_class_code(low)}-{_class_code(high)}"


def _class_code(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else _code(code)


def _code(code: int) -> str:
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"
