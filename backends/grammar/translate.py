"""What a client sent, as something that xgrammar compiles and enforces as it stands.

Owns the kinds of `ConstraintSpec`. Runs in the process that vets (`backends.grammar.vet`): nothing here is bounded in
time.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from backends.grammar.automaton import TooLargeError
from backends.grammar.base import GrammarError
from backends.grammar.document import is_number, read_json
from backends.grammar.ebnf import MAX_TIMES, Rules, literal
from backends.grammar.gbnf import enforced
from backends.grammar.pattern import PatternError, matching
from backends.grammar.schema import schema_grammar
from backends.grammar.spec import SpecKind

_MAX_CHOICES = 1000
_WHOLE_JSON = {"style": "json", "any_order": False, "excludes": []}
"""Fields of a structural tag's schema that would change what we translate, and their harmless values."""
_INNER = ("content", "format")
_INNER_LISTS = ("elements", "tags")
_PLAIN_FORMATS = frozenset(
    {
        "any_text",
        "const_string",
        "dispatch",
        "optional",
        "or",
        "plus",
        "repeat",
        "sequence",
        "star",
        "structural_tag",
        "tag",
        "tags_with_separator",
        "triggered_tags",
    }
)


class Translated(msgspec.Struct, frozen=True):
    """A text for xgrammar."""

    text: str
    tag: bool = False
    """A structural tag as JSON; else a GBNF grammar."""


def translate(kind: SpecKind, text: str) -> Translated:
    """Raises GrammarError."""
    try:
        return _KINDS[kind](text)
    except (PatternError, TooLargeError) as error:
        raise GrammarError(str(error)) from None


def _json_schema(text: str) -> Translated:
    return Translated(schema_grammar(text))


def _json_object(_text: str) -> Translated:
    return Translated(schema_grammar('{"type": "object"}'))


def _regex(text: str) -> Translated:
    language = matching(text)
    rules = Rules()
    start = rules.add_automaton("s", language, json_string=False)
    found = rules.text(start.name)
    if found is None:  # none at all, or none without half a surrogate pair
        raise GrammarError("no text matches this pattern")
    return Translated(found)


def _choice(text: str) -> Translated:
    choices = read_json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("a choice is a list of strings that is not empty")
    if "" in choices:
        raise GrammarError("an empty text cannot be chosen")
    if len(set(choices)) != len(choices):
        raise GrammarError("a text is listed twice")
    if len(choices) > _MAX_CHOICES:
        raise GrammarError(f"more than {_MAX_CHOICES} texts to choose from")
    return Translated("root ::= " + " | ".join(map(literal, choices)) + "\n")


def _ebnf(text: str) -> Translated:
    return Translated(enforced(text))


def _structural_tag(text: str) -> Translated:
    tag = read_json(text)
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
        raise GrammarError('a structural tag is an object of the type "structural_tag"')
    if "structures" in tag:
        tag = _modern_tag(tag)
    return Translated(json.dumps(_enforced_tag(tag, "#"), default=float), tag=True)


def _modern_tag(tag: Mapping[str, Any]) -> dict[str, Any]:
    """The older spelling, with schemas instead of formats, in the newer one."""
    structures = tag["structures"]
    if not isinstance(structures, list) or not all(isinstance(structure, dict) for structure in structures):
        raise GrammarError("#/structures: it must be a list of objects")
    tags = [
        {
            "type": "tag",
            "begin": structure.get("begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", True)},
            "end": structure.get("end"),
        }
        for structure in structures
    ]
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags},
    }


def _enforced_tag(value: Any, where: str) -> Any:
    """A format whose schemas and patterns are grammars of ours."""
    if not isinstance(value, dict):
        raise GrammarError(f"{where}: it must be an object")
    kind = value.get("type")
    if kind == "json_schema":
        return _inner_schema(value, where)
    if kind == "regex":
        return _inner(_regex, value.get("pattern"), f"{where}/pattern")
    if kind == "grammar":
        if value.get("syntax", "ebnf") != "ebnf":
            raise GrammarError(f"{where}/syntax: only ebnf is supported")
        return _inner(_ebnf, value.get("grammar"), f"{where}/grammar")
    if kind not in _PLAIN_FORMATS:
        raise GrammarError(f"{where}/type: the format {kind!r} is not supported")
    return {name: _enforced_field(name, part, where) for name, part in value.items()}


def _enforced_field(name: str, value: Any, where: str) -> Any:
    where = f"{where}/{name}"
    if name in _INNER:
        return _enforced_tag(value, where)
    if name in {"begin", "end"} and isinstance(value, dict):
        raise GrammarError(f"{where}: it must be a text; tokens are not supported")
    if name in _INNER_LISTS or name == "rules":
        if not isinstance(value, list):
            raise GrammarError(f"{where}: it must be a list")
        if name == "rules":
            return [_enforced_rule(part, f"{where}/{index}") for index, part in enumerate(value)]
        return [_enforced_tag(part, f"{where}/{index}") for index, part in enumerate(value)]
    if name in {"min", "max"} and is_number(value) and value > MAX_TIMES:
        raise GrammarError(f"{where}: it is more than {MAX_TIMES}")
    return value


def _enforced_rule(value: Any, where: str) -> Any:
    if not isinstance(value, list) or len(value) != 2:
        raise GrammarError(f"{where}: it must be a pair of a text and a format")
    return [value[0], _enforced_tag(value[1], f"{where}/1")]


def _inner_schema(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name, harmless in _WHOLE_JSON.items():
        if value.get(name, harmless) != harmless:
            raise GrammarError(f"{where}/{name}: it is not supported")
    schema = json.dumps(value.get("json_schema", True), default=_number_text)
    return _inner(_json_schema, schema, f"{where}/json_schema")


def _number_text(value: Any) -> float:
    return float(value)


def _inner(read: Callable[[str], Translated], text: Any, where: str) -> dict[str, Any]:
    if not isinstance(text, str):
        raise GrammarError(f"{where}: it must be a text")
    try:
        return {"type": "grammar", "grammar": read(text).text}
    except (GrammarError, PatternError, TooLargeError) as error:
        raise GrammarError(f"{where}: {error}") from None


_KINDS: Mapping[SpecKind, Callable[[str], Translated]] = {
    SpecKind.JSON_SCHEMA: _json_schema,
    SpecKind.JSON_OBJECT: _json_object,
    SpecKind.REGEX: _regex,
    SpecKind.EBNF: _ebnf,
    SpecKind.CHOICE: _choice,
    SpecKind.STRUCTURAL_TAG: _structural_tag,
}
