"""Whether a value satisfies a schema: for the values that a schema lists itself, and for names of properties.

Where a schema says `enum` or `const`, everything else it says only thins the list out, so it is asked of each value;
this is exact for every keyword that is known here, also for those that no grammar is made of.
"""

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

from backends.grammar.automaton import Automaton, TooLargeError
from backends.grammar.document import Document, Place, SchemaError, is_number
from backends.grammar.formats import REFUSED, format_language
from backends.grammar.pattern import PatternError, containing

_MAX_DEPTH = 64
_DOUBLE_DIGITS = 300
"""Numbers of so many digits and fewer are within a double's range."""


def equal(left: Any, right: Any) -> bool:
    """As JSON has it: 1 and 1.0 are one number, true and 1 are not."""
    if is_number(left) and is_number(right):
        return bool(left == right)
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    return bool(left == right)


def type_of(value: Any) -> str:
    """One of JSON's types; a number is an `integer`, or a `fraction` if it is not whole."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, Decimal):
        return "integer" if value == value.to_integral_value() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def types_named(value: Any) -> frozenset[str]:
    """What `type` allows, in the words of `type_of`."""
    names = value if isinstance(value, list) else [value]
    return frozenset(part for name in names for part in (("integer", "fraction") if name == "number" else (name,)))


def written(value: Any) -> str:
    """JSON text in the whitespace of the grammars: one space behind comma and colon."""
    if isinstance(value, Decimal):
        return _written_number(value)
    if isinstance(value, list):
        return "[" + ", ".join(written(part) for part in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(key)}: {written(part)}" for key, part in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def spellings(value: Any) -> list[str]:
    """The texts of a value that a schema lists: a whole number may be written as one."""
    texts = [written(value)]
    if isinstance(value, Decimal) and value == value.to_integral_value() and abs(value.adjusted()) < _DOUBLE_DIGITS:
        texts.append(str(int(value)))
    return list(dict.fromkeys(texts))


def _written_number(value: Decimal) -> str:
    short = json.dumps(float(value)) if abs(value.adjusted()) < _DOUBLE_DIGITS else ""
    return short if short and Decimal(short) == value else str(value)


@cache
def pattern_language(pattern: str) -> Automaton:
    """Texts in which a pattern is found. Raises PatternError, TooLargeError."""
    return containing(pattern)


class Validator:
    """Asks a document's subschemas about values."""

    def __init__(self, document: Document) -> None:
        self._document = document

    def holds(self, value: Any, place: Place, depth: int = 0) -> bool:
        """Raises SchemaError for a keyword whose meaning is not known here."""
        if depth > _MAX_DEPTH:
            raise SchemaError(place.pointer, "it refers to itself without an end")
        if isinstance(place.value, bool):
            return place.value
        words = place.keywords
        if "$ref" in words:
            if not self.holds(value, self._document.target(place), depth + 1):
                return False
            if self._document.only_reference(place):
                return True
        return self._own(value, place) and self._applied(value, place, depth) and self._inside(value, place, depth)

    def _own(self, value: Any, place: Place) -> bool:
        """What a subschema says of the value itself."""
        words = place.keywords
        if "type" in words and type_of(value) not in types_named(words["type"]):
            return False
        if "const" in words and not equal(value, words["const"]):
            return False
        if "enum" in words and not any(equal(value, entry) for entry in words["enum"]):
            return False
        if is_number(value):
            return _number_holds(value, words)
        if isinstance(value, str):
            return self._string_holds(value, place)
        if isinstance(value, list | dict):
            return _size_holds(value, words)
        return True

    def _string_holds(self, value: str, place: Place) -> bool:
        words = place.keywords
        if not words.get("minLength", 0) <= len(value) <= words.get("maxLength", len(value)):
            return False
        return all(language.accepts(value) for language in string_languages(place))

    def _applied(self, value: Any, place: Place, depth: int) -> bool:
        """What its subschemas say of the same value."""
        document, words = self._document, place.keywords

        def kept(name: str) -> Sequence[bool]:
            parts = range(len(words.get(name, ())))
            return [self.holds(value, document.child(place, name, index), depth + 1) for index in parts]

        if not all(kept("allOf")) or ("anyOf" in words and not any(kept("anyOf"))):
            return False
        if "oneOf" in words and sum(kept("oneOf")) != 1:
            return False
        if "not" in words and self.holds(value, document.child(place, "not"), depth + 1):
            return False
        if "if" in words:
            branch = "then" if self.holds(value, document.child(place, "if"), depth + 1) else "else"
            return branch not in words or self.holds(value, document.child(place, branch), depth + 1)
        return True

    def _inside(self, value: Any, place: Place, depth: int) -> bool:
        if isinstance(value, dict):
            return self._object_holds(value, place, depth)
        return not isinstance(value, list) or self._array_holds(value, place, depth)

    def _object_holds(self, value: Mapping[str, Any], place: Place, depth: int) -> bool:
        words = place.keywords
        if any(key not in value for key in words.get("required", ())):
            return False
        if "propertyNames" in words:
            names = self._document.child(place, "propertyNames")
            if not all(self.holds(key, names, depth + 1) for key in value):
                return False
        for key, part in value.items():
            if not all(self.holds(part, schema, depth + 1) for schema in property_places(self._document, place, key)):
                return False
        return self._dependencies_hold(value, place, depth)

    def _dependencies_hold(self, value: Mapping[str, Any], place: Place, depth: int) -> bool:
        for name in ("dependentRequired", "dependentSchemas", "dependencies"):
            for key, entry in place.keywords.get(name, {}).items():
                if key not in value:
                    continue
                if isinstance(entry, list):
                    if any(needed not in value for needed in entry):
                        return False
                elif not self.holds(value, self._document.child(place, name, key), depth + 1):
                    return False
        return True

    def _array_holds(self, value: Sequence[Any], place: Place, depth: int) -> bool:
        words = place.keywords
        if words.get("uniqueItems"):
            for index, part in enumerate(value):
                if any(equal(part, other) for other in value[:index]):
                    return False
        if "contains" in words:
            wanted = self._document.child(place, "contains")
            found = sum(self.holds(part, wanted, depth + 1) for part in value)
            if not words.get("minContains", 1) <= found <= words.get("maxContains", found):
                return False
        for index, part in enumerate(value):
            schema = item_place(self._document, place, index)
            if schema is not None and not self.holds(part, schema, depth + 1):
                return False
        return True


def _number_holds(value: Any, words: Mapping[str, Any]) -> bool:
    low, high = words.get("minimum", value), words.get("maximum", value)
    if value < low or value > high:
        return False
    for name, side in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        limit = words.get(name)
        if limit is True:  # draft 4: a flag beside the bound
            limit = words.get("minimum" if side > 0 else "maximum")
        if limit is not None and limit is not False and (value - limit) * side <= 0:
            return False
    return "multipleOf" not in words or Fraction(value) % Fraction(words["multipleOf"]) == 0


def _size_holds(value: Any, words: Mapping[str, Any]) -> bool:
    names = ("minItems", "maxItems") if isinstance(value, list) else ("minProperties", "maxProperties")
    return bool(words.get(names[0], 0) <= len(value) <= words.get(names[1], len(value)))


def string_languages(place: Place) -> list[Automaton]:
    """What `pattern` and `format` allow. Raises SchemaError."""
    found = []
    words = place.keywords
    if "pattern" in words:
        try:
            found.append(pattern_language(words["pattern"]))
        except (PatternError, TooLargeError) as error:
            raise SchemaError(place.where("pattern"), str(error)) from None
    name = words.get("format")
    if name in REFUSED:
        raise SchemaError(place.where("format"), f"the format {name} is not enforced")
    language = None if name is None else format_language(name)
    return found if language is None else [*found, language]


def property_places(document: Document, place: Place, key: str) -> list[Place]:
    """The subschemas that a subschema has for a property."""
    words = place.keywords
    found = [document.child(place, "properties", key)] if key in words.get("properties", {}) else []
    matching = (name for name in words.get("patternProperties", {}) if property_pattern(place, name).accepts(key))
    found.extend(document.child(place, "patternProperties", pattern) for pattern in matching)
    additional = additional_keyword(place)
    return found if found or additional is None else [document.child(place, additional)]


def additional_keyword(place: Place) -> str | None:
    """The keyword for the properties that have no subschema of their own. Raises SchemaError."""
    words = place.keywords
    if "additionalProperties" in words:
        return "additionalProperties"
    if words.get("unevaluatedProperties", True) is True:
        return None
    _refuse_beside(place, "unevaluatedProperties", ("dependencies", "dependentSchemas"))
    return "unevaluatedProperties"


def _refuse_beside(place: Place, keyword: str, others: Sequence[str]) -> None:
    applied = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", *others)
    beside = [name for name in applied if name in place.keywords]
    if beside:
        raise SchemaError(place.where(keyword), f"beside {beside[0]} it is not supported")


def property_pattern(place: Place, pattern: str) -> Automaton:
    """The names of `patternProperties`. Raises SchemaError."""
    try:
        return pattern_language(pattern)
    except (PatternError, TooLargeError) as error:
        raise SchemaError(place.where("patternProperties", pattern), str(error)) from None


def item_place(document: Document, place: Place, index: int) -> Place | None:
    """The subschema that a subschema has for an item; None for none."""
    words = place.keywords
    prefix, rest = item_keywords(place)
    if prefix is not None and index < len(words[prefix]):
        return document.child(place, prefix, index)
    return None if rest is None else document.child(place, rest)


def item_keywords(place: Place) -> tuple[str | None, str | None]:
    """The keywords for the first items, one by one, and for all further ones. Raises SchemaError."""
    words = place.keywords
    if isinstance(words.get("items"), list):
        prefix: str | None = "items"
        rest = "additionalItems" if "additionalItems" in words else None
    else:
        prefix = "prefixItems" if "prefixItems" in words else None
        rest = "items" if "items" in words else None
    if rest is None and words.get("unevaluatedItems", True) is not True:
        _refuse_beside(place, "unevaluatedItems", ("contains",))
        rest = "unevaluatedItems"
    return prefix, rest
