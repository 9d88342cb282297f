"""A client's own grammar, looked at before xgrammar reads it: what it would take and not enforce is refused.

Owns the reading of GBNF as far as that needs: where literals, character classes and comments begin and end, which code
points they name, and how often something is repeated. Whether the rest is a grammar, xgrammar says.
"""

import re
from collections.abc import Callable, Iterator

from backends.grammar.base import GrammarError

_TOKEN = re.compile(
    r'(?P<comment>#[^\r\n]*)|(?P<literal>"(?:[^"\\\r\n]|\\.)*")|(?P<set>\[(?:[^\]\\\r\n]|\\.)*\])|(?P<other>[^#"\[]+|.)',
    re.DOTALL,
)
_CHARACTER = re.compile(r"\\x([0-9A-Fa-f]+)|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\?.", re.DOTALL)
"""One of a literal or a class. Digits behind `\\x` are read as far as they go; every other escape is ASCII."""
_MACRO = re.compile(r"(?<![\w.-])(Token|ExcludeToken|TokenTagDispatch|Regex|Substring)\s*\(")
_OF_TOKENS = frozenset({"Token", "ExcludeToken", "TokenTagDispatch"})
_REPETITION = re.compile(r"\{([\d\s,]*)\}")
_MAX_REPETITIONS = 10**9
"""xgrammar counts in 32 bits and wraps around."""
_FIRST_SURROGATE, _LAST_SURROGATE = 0xD800, 0xDFFF
_SURROGATES = r"\uD800-\uDFFF"
_MAX_CODE_POINT = 0x10FFFF


def enforced(grammar: str) -> str:
    """The grammar with its character classes without surrogates, which UTF-8 does not have. Raises GrammarError."""
    parts: list[str] = []
    syntax: list[str] = []
    for token in _TOKEN.finditer(grammar):
        read, blank = _KINDS[str(token.lastgroup)]
        parts.append(read(token[0]))
        syntax.append(blank if blank is not None else token[0])
    _check_syntax("".join(syntax))
    return "".join(parts)


def _check_syntax(syntax: str) -> None:
    """What is not enforced; literals, classes and comments are blank."""
    if "(=" in syntax:
        raise GrammarError("look-ahead, (= ...), is not supported")
    if re.search(r"\[\]\s*::=", syntax):
        raise GrammarError("an attribute of a rule (max_chars) is not supported")
    macro = _MACRO.search(syntax)
    if macro is not None and macro[1] in _OF_TOKENS:
        raise GrammarError(f"{macro[1]}: a grammar is of text, not of tokens")
    if macro is not None:
        raise GrammarError(f"{macro[1]} is not supported; write it as rules")
    for repetition in _REPETITION.findall(syntax):
        for number in re.findall(r"\d+", repetition):
            if len(number.lstrip("0")) > len(str(_MAX_REPETITIONS)) or int(number) > _MAX_REPETITIONS:
                raise GrammarError(f"something is repeated more than {_MAX_REPETITIONS} times")


def _literal(text: str) -> str:
    for _, code in _characters(text[1:-1]):
        if code is not None and _FIRST_SURROGATE <= code <= _LAST_SURROGATE:
            raise GrammarError(_half_a_pair(code))
    return text


def _class(text: str) -> str:
    negated = text.startswith("[^")
    found = []
    characters = list(_characters(text[1 + negated : -1]))
    while characters:
        low, low_code = characters.pop(0)
        if len(characters) > 1 and characters[0][0] == "-":
            high, high_code = characters[1]
            del characters[:2]
        else:
            high, high_code = "", low_code
        if negated:
            found.append(f"{low}-{high}" if high else low)
            continue
        for code in (low_code, high_code):
            if code is not None and _FIRST_SURROGATE <= code <= _LAST_SURROGATE:
                raise GrammarError(_half_a_pair(code))
        around = (low_code or 0) < _FIRST_SURROGATE and (high_code or 0) > _LAST_SURROGATE
        between = r"-\uD7FF\uE000-" if around else "-"
        found.append(low + between + high if high else low)
    return ("[^" + _SURROGATES if negated else "[") + "".join(found) + "]"


def _characters(text: str) -> Iterator[tuple[str, int | None]]:
    """As they are written, and their code points; None for one of ASCII that is escaped by its name."""
    for found in _CHARACTER.finditer(text):
        digits = found[1] or found[2] or found[3]
        if digits:
            code = int(digits, 16)
            if code > _MAX_CODE_POINT:
                raise GrammarError(f"{found[0][:20]} is no character of Unicode")
            yield found[0], code
        else:
            yield found[0], ord(found[0]) if len(found[0]) == 1 else None


def _half_a_pair(code: int) -> str:
    return f"\\u{code:04X} is half a surrogate pair; a character beyond U+FFFF is written as \\U and eight digits"


def _unchanged(text: str) -> str:
    return text


_KINDS: dict[str, tuple[Callable[[str], str], str | None]] = {
    "comment": (_unchanged, " "),
    "literal": (_literal, '""'),
    "set": (_class, "[]"),
    "other": (_unchanged, None),
}
"""By kind of token: how it is written out again, and how it stands among the syntax; None for as it is."""
