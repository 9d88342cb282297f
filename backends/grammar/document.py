"""A JSON schema as it was sent: where each of its parts lies, what its references name, which keywords it may use.

Owns reading and references. Must not know what a keyword means for a grammar.
"""

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

import msgspec

from backends.grammar.base import GrammarError
from backends.grammar.decimals import MAX_DIGITS

_OLD_DRAFTS = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")
"""Where `$ref` stands, these let nothing else count beside it."""
_REFUSED = {
    "$dynamicRef": "dynamic references are not supported",
    "$recursiveRef": "dynamic references are not supported",
    "extends": "it belongs to a draft that is not supported; write allOf",
    "disallow": "it belongs to a draft that is not supported; write not",
    "divisibleBy": "it belongs to a draft that is not supported; write multipleOf",
}
_ONE_SCHEMA = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SCHEMA_MAPS = frozenset({"properties", "patternProperties", "dependentSchemas"})
_COUNTS = frozenset(
    {
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
    }
)
_STRINGS = frozenset({"$ref", "format", "pattern"})
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89A-Fa-f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


class SchemaError(GrammarError):
    """A schema that is none, that nothing satisfies, or that asks for what is not enforced."""

    def __init__(self, pointer: str, reason: str) -> None:
        super().__init__(f"{pointer}: {reason}")


class Place(msgspec.Struct, frozen=True):
    """A subschema and where it lies."""

    value: Any
    pointer: str
    """A JSON pointer behind `#`, for people and as its name."""
    resource: str
    """The pointer of the nearest subschema around it that has an identifier of its own."""

    @property
    def keywords(self) -> Mapping[str, Any]:
        """None for `true` and `false`."""
        return self.value if isinstance(self.value, dict) else {}

    def where(self, *keys: str | int) -> str:
        """The pointer of something inside."""
        return self.pointer + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


class Document:
    """One schema. Parts are checked when they are first looked at, so that what nothing refers to cannot hurt."""

    def __init__(self, text: str) -> None:
        """Raises GrammarError."""
        self._root = read_json(text)
        self._places: dict[str, Place] = {}
        self._identifiers: dict[str, str] | None = None

    @property
    def root(self) -> Place:
        """The whole."""
        return self._place("#", self._root, "#")

    def at(self, pointer: str) -> Place:
        """A place that was handed out before."""
        return self._places[pointer]

    def child(self, place: Place, *keys: str | int) -> Place:
        """A subschema inside another."""
        pointer = place.where(*keys)
        known = self._places.get(pointer)
        if known is not None:
            return known
        value: Any = place.value
        for key in keys:
            value = value[key]
        return self._place(pointer, value, place.resource)

    def _place(self, pointer: str, value: Any, resource: str) -> Place:
        known = self._places.get(pointer)
        if known is None:
            if isinstance(value, dict) and _identifier(value) is not None:
                resource = pointer
            known = Place(value, pointer, resource)
            _check_keywords(known)
            self._places[pointer] = known
        return known

    def only_reference(self, place: Place) -> bool:
        """Whether the drafts before 2019-09 apply, in which nothing counts beside a `$ref`."""
        own = self._resolve_value(place.resource)
        draft = own.get("$schema", self._root.get("$schema", "")) if isinstance(own, dict) else ""
        return "$ref" in place.keywords and any(name in str(draft) for name in _OLD_DRAFTS)

    def target(self, place: Place) -> Place:
        """What a `$ref` names, in this document alone. Raises SchemaError."""
        reference = place.keywords["$ref"]
        address, _, fragment = reference.partition("#")
        resource = place.resource if not address else self._resource(place, address)
        if fragment and not fragment.startswith("/"):
            return self._anchored(place, resource, fragment)
        return self._walk(place, resource, unquote(fragment).split("/")[1:])

    def _walk(self, place: Place, resource: str, parts: list[str]) -> Place:
        value: Any = self._resolve_value(resource)
        pointer, owner = resource, resource
        for part in parts:
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                value = value[int(key)] if isinstance(value, list) else value[key]
            except (LookupError, TypeError, ValueError):
                raise SchemaError(place.where("$ref"), f"nothing lies at {place.keywords['$ref']}") from None
            pointer += "/" + part
            if isinstance(value, dict) and _identifier(value) is not None:
                owner = pointer
        return self._place(pointer, value, owner)

    def _resolve_value(self, pointer: str) -> Any:
        value: Any = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            value = value[int(key)] if isinstance(value, list) else value[key]
        return value

    def _resource(self, place: Place, address: str) -> str:
        if self._identifiers is None:
            self._identifiers = dict(_resources(self._root, "#"))
        found = self._identifiers.get(address)
        if found is None:
            raise SchemaError(
                place.where("$ref"), f"it names {address!r}, which is not in this schema; nothing is fetched"
            )
        return found

    def _anchored(self, place: Place, resource: str, name: str) -> Place:
        found = [
            pointer
            for pointer, value in _parts(self._resolve_value(resource), resource)
            if name in (value.get("$anchor"), str(value.get("$id") or value.get("id")).removeprefix("#"))
        ]
        if len(found) != 1:
            raise SchemaError(place.where("$ref"), f"no single anchor is named {name!r}")
        return self._place(found[0], self._resolve_value(found[0]), resource)


def read_json(text: str) -> Any:
    """JSON with exact numbers: integers, and Decimal for whatever has a point or an exponent; and with texts that are
    Unicode. Raises GrammarError.
    """
    try:
        text.encode()
        value = json.loads(text, parse_int=_integer, parse_float=_decimal, parse_constant=_refuse_constant)
    except GrammarError:
        raise
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is not JSON: {error}") from None
    if _SURROGATE_ESCAPE.search(text):
        _refuse_surrogates(value)
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise GrammarError(f"it has a number of more than {MAX_DIGITS} digits")
    return int(digits)


def _decimal(text: str) -> Decimal:
    """Refuses, by its length alone, what would take for ever to be compared with an integer."""
    digits, _, exponent = text.lower().partition("e")
    power = exponent.lstrip("+-").lstrip("0")
    if len(digits) > MAX_DIGITS or len(power) > len(str(MAX_DIGITS)) or int(power or "0") > MAX_DIGITS:
        raise GrammarError(f"it has a number of more than {MAX_DIGITS} digits")
    return Decimal(text)


def _refuse_surrogates(value: Any) -> None:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting.extend((*part, *part.values()))
        elif isinstance(part, list):
            waiting.extend(part)
        elif isinstance(part, str) and (half := _SURROGATE.search(part)):
            raise GrammarError(f"it holds half a surrogate pair, \\u{ord(half[0]):04x}")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _identifier(value: Mapping[str, Any]) -> str | None:
    found = value.get("$id", value.get("id"))
    return found if isinstance(found, str) and not found.startswith("#") else None


def _parts(value: Any, pointer: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All objects inside, wherever they lie."""
    waiting = [(pointer, value)]
    while waiting:
        pointer, value = waiting.pop()
        if isinstance(value, dict):
            yield pointer, value
            inside = [(key.replace("~", "~0").replace("/", "~1"), part) for key, part in value.items()]
        else:
            inside = [(str(index), part) for index, part in enumerate(value)] if isinstance(value, list) else []
        waiting.extend((f"{pointer}/{key}", part) for key, part in inside)


def _resources(value: Any, pointer: str) -> Iterator[tuple[str, str]]:
    for where, part in _parts(value, pointer):
        identifier = _identifier(part)
        if identifier is not None:
            yield identifier, where
            yield identifier.removesuffix("#"), where


def _check_keywords(place: Place) -> None:
    """Whether what stands in a subschema has the shape that its keywords want. Raises SchemaError."""
    if not isinstance(place.value, dict | bool):
        raise SchemaError(place.pointer, "a schema is an object, true or false")
    for name, value in place.keywords.items():
        if name in _REFUSED:
            raise SchemaError(place.where(name), _REFUSED[name])
        reason = _wrong_shape(name, value)
        if reason is not None:
            raise SchemaError(place.where(name), reason)


def _wrong_shape(name: str, value: Any) -> str | None:
    if name in _ONE_SCHEMA or name in _SCHEMA_LISTS or name in _SCHEMA_MAPS:
        return _wrong_schemas(name, value)
    if name in _COUNTS:
        return None if is_number(value) and value >= 0 and value == int(value) else "it must be a count"
    if name in _STRINGS:
        return None if isinstance(value, str) else "it must be a string"
    if name == "type":
        return _wrong_type(value)
    if name in {"minimum", "maximum", "multipleOf"}:
        return None if is_number(value) and (name != "multipleOf" or value > 0) else "it must be a number"
    if name in {"exclusiveMinimum", "exclusiveMaximum"}:
        return None if is_number(value) or isinstance(value, bool) else "it must be a number"
    if name == "enum":
        return None if isinstance(value, list) and value else "it must be a list that is not empty"
    return _wrong_names(name, value)


def _wrong_schemas(name: str, value: Any) -> str | None:
    if name in _ONE_SCHEMA:
        return None if isinstance(value, dict | bool) else "it must be a schema"
    if name in _SCHEMA_LISTS:
        return None if isinstance(value, list) and value else "it must be a list of schemas that is not empty"
    return None if isinstance(value, dict) else "it must be an object of schemas"


def _wrong_type(value: Any) -> str | None:
    names = value if isinstance(value, list) else [value]
    unknown = [name for name in names if not isinstance(name, str) or name not in TYPES]
    if unknown or not names:
        return f"it names a type that JSON does not have: {unknown}" if unknown else "it names no type"
    return None


def _wrong_names(name: str, value: Any) -> str | None:
    if name == "required" and not (isinstance(value, list) and all(isinstance(key, str) for key in value)):
        return "it must be a list of names"
    if name == "uniqueItems" and not isinstance(value, bool):
        return "it must be true or false"
    if name == "items" and not isinstance(value, dict | bool | list):
        return "it must be a schema"
    if name in {"dependencies", "dependentRequired"} and not isinstance(value, dict):
        return "it must be an object"
    return None


def is_number(value: Any) -> bool:
    """Of JSON: an integer or Decimal, but no boolean."""
    return isinstance(value, int | Decimal) and not isinstance(value, bool)
