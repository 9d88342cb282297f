"""Grammars of schemas against `jsonschema`: the same values, and only texts that satisfy the schema."""

import json
from itertools import permutations
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from backends.grammar.base import GrammarError
from backends.grammar.spec import SpecKind
from tests.backends.grammar.grammars import accepts, grammar_of, matcher_of, walk

KEYS = ["a", "b", "c"]
PLAIN = st.sampled_from([None, True, False, 0, 1, 2, 5, -1, 1.5, 10, "", "a", "ab", "b1", "abc"])


def values() -> st.SearchStrategy[Any]:
    return st.recursive(
        PLAIN,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
        max_leaves=5,
    )


def leaves() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.just({}),
        st.booleans(),
        st.builds(
            lambda types: {"type": types}, st.sampled_from(["string", "integer", "number", "null", "boolean", "object"])
        ),
        st.builds(
            lambda types: {"type": types},
            st.lists(st.sampled_from(["string", "integer", "array"]), min_size=1, unique=True),
        ),
        st.builds(lambda listed: {"enum": listed}, st.lists(PLAIN, min_size=1, max_size=3)),
        st.builds(lambda value: {"const": value}, PLAIN),
        st.builds(
            lambda low, high: {"type": "number", "minimum": low, "exclusiveMaximum": high},
            st.integers(-2, 3),
            st.integers(0, 9),
        ),
        st.builds(lambda low: {"minimum": low}, st.integers(-2, 3)),
        st.builds(lambda step: {"type": "integer", "multipleOf": step}, st.integers(1, 5)),
        st.builds(
            lambda low, high: {"type": "string", "minLength": low, "maxLength": high},
            st.integers(0, 2),
            st.integers(1, 4),
        ),
        st.builds(
            lambda pattern: {"type": "string", "pattern": pattern}, st.sampled_from(["^a", "b$", "^[ab]*$", "1", "^$"])
        ),
    )


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"properties": draw(st.dictionaries(st.sampled_from(KEYS), inner, max_size=3))}
    if draw(st.booleans()):
        schema["type"] = "object"
    if draw(st.booleans()):
        schema["required"] = draw(st.lists(st.sampled_from(KEYS), max_size=2, unique=True))
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(inner)
    if draw(st.booleans()):
        schema["patternProperties"] = draw(st.dictionaries(st.sampled_from(["^a", "[bc]"]), inner, max_size=2))
    if draw(st.booleans()):
        schema["maxProperties"] = draw(st.integers(0, 3))
    if draw(st.booleans()):
        schema["minProperties"] = draw(st.integers(0, 2))
    if draw(st.integers(0, 3)) == 0:
        schema["dependentRequired"] = {draw(st.sampled_from(KEYS)): [draw(st.sampled_from(KEYS))]}
    if draw(st.integers(0, 3)) == 0:
        schema["propertyNames"] = {"pattern": draw(st.sampled_from(["^[ab]$", "^[^c]"]))}
    return schema


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"} if draw(st.booleans()) else {}
    if draw(st.booleans()):
        schema["items"] = draw(inner)
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    if draw(st.booleans()):
        schema["minItems"] = draw(st.integers(0, 2))
    if draw(st.booleans()):
        schema["maxItems"] = draw(st.integers(0, 3))
    if draw(st.integers(0, 4)) == 0:
        schema["uniqueItems"] = True
    return schema


@st.composite
def combined(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = dict(draw(objects(inner))) if draw(st.booleans()) else {}
    word = draw(st.sampled_from(["allOf", "anyOf", "oneOf", "not", "if", "ref"]))
    if word == "not":
        schema["not"] = draw(inner)
    elif word == "if":
        schema.update({"if": draw(inner), "then": draw(inner), "else": draw(inner)})
    elif word == "ref":
        schema["$ref"] = "#/$defs/x~1y"
    else:
        schema[word] = draw(st.lists(inner, min_size=1, max_size=3))
    return schema


def rooted(schema: Any) -> Any:
    """With what its references name."""
    return (
        {**schema, "$defs": {"x/y": {"type": ["string", "integer", "array"]}}} if isinstance(schema, dict) else schema
    )


def nested_schemas() -> st.SearchStrategy[Any]:
    return st.recursive(leaves(), lambda inner: objects(inner) | arrays(inner) | combined(inner), max_leaves=5)


def schemas() -> st.SearchStrategy[Any]:
    return nested_schemas().map(rooted)


def orders(value: Any) -> list[Any]:
    """A value with the properties of its objects in every order."""
    if isinstance(value, list):
        return [list(parts) for parts in _products([orders(part) for part in value])]
    if isinstance(value, dict):
        found = []
        for keys in permutations(value):
            found.extend(
                dict(zip(keys, parts, strict=True)) for parts in _products([orders(value[key]) for key in keys])
            )
        return found
    return [value]


def _products(lists: list[list[Any]]) -> list[list[Any]]:
    found: list[list[Any]] = [[]]
    for choices in lists:
        found = [[*known, choice] for known in found for choice in choices]
    return found


def validator(schema: Any) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema)


@settings(max_examples=200)
@given(schemas(), st.lists(values(), min_size=4, max_size=8), st.lists(st.integers(0, 255), max_size=30))
def test_a_schema_is_enforced_exactly_or_refused(schema: Any, samples: list[Any], choices: list[int]) -> None:
    oracle = validator(schema)
    try:
        grammar = grammar_of(SpecKind.JSON_SCHEMA, json.dumps(schema))
    except GrammarError as error:
        if "nothing satisfies" in str(error):
            assert not any(oracle.is_valid(sample) for sample in samples)
        assume(False)
        return
    for sample in samples:
        spellings = [json.dumps(order, ensure_ascii=False) for order in orders(sample)]
        assert any(accepts(grammar, text) for text in spellings) == oracle.is_valid(sample), sample
    text = walk(matcher_of(grammar), choices)
    if text is not None:
        # A text may break off inside of a character of UTF-8 only if masks are wrong, so none is replaced here.
        assert oracle.is_valid(json.loads(text.decode())), text


REFUSED = [
    ({"type": "strin"}, "#/type"),
    ({"type": []}, "#/type"),
    ({"type": ["string", 3]}, "#/type"),
    ({"properties": {"a/b": {"type": "x"}}}, "#/properties/a~1b/type"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "nothing satisfies"),
    ({"type": "string", "enum": [1, 2]}, "nothing satisfies"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "nothing satisfies"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "nothing satisfies"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "nothing satisfies"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "nothing satisfies"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "nothing satisfies"),
    ({"$ref": "#"}, "refers to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}}, "refers to itself"),
    ({"$ref": "https://example.com/schema.json"}, "nothing is fetched"),
    ({"$ref": "#/$defs/missing"}, "nothing lies at"),
    ({"$dynamicRef": "#x"}, r"#/\$dynamicRef"),
    ({"type": "array", "contains": {"type": "string"}}, "#/contains"),
    ({"type": "array", "items": {}, "uniqueItems": True}, "#/uniqueItems"),
    ({"type": "string", "pattern": "a(?!b)"}, "#/pattern"),
    ({"type": "string", "pattern": "["}, "#/pattern"),
    ({"type": "string", "format": "idn-email"}, "#/format"),
    ({"type": "object", "minProperties": 3}, "minProperties"),
    ({"properties": {"a": {"not": {"items": {"type": "string"}}}}}, "#/properties/a/not/items"),
    ({"not": {"const": {"a": 1}}}, "cannot be enforced"),
    ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "#/unevaluatedProperties"),
    ({"required": "a"}, "#/required"),
    ({"items": 3}, "#/items"),
    ({"minLength": -1}, "#/minLength"),
    ({"multipleOf": 0}, "#/multipleOf"),
    ({"enum": []}, "#/enum"),
    ({"type": "array", "minItems": 10**9}, "items at least"),
    ({"type": "object", "maxProperties": 10**9}, "rules"),
    ({"type": "string", "minLength": 10**300}, "characters at least"),
    ({"const": 10**300, "multipleOf": 7}, "nothing satisfies"),
    ({"enum": ["\ud83d"]}, "half a surrogate pair"),
    ({"const": {"a": ["\udc00"]}}, "half a surrogate pair"),
    ({"properties": {"\ud800": {}}}, "half a surrogate pair"),
    ({"not": {"const": "a\ude00\ud83d"}}, "half a surrogate pair"),
    ({"type": "string", "pattern": "^\\ud800$"}, "nothing satisfies"),
    ({"oneOf": []}, "#/oneOf"),
    ([], "a schema is an object"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=[json.dumps(schema) for schema, _ in REFUSED])
def test_what_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        grammar_of(SpecKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", '{"minimum": NaN}', '"\ud800"', "[" * 100_000])
def test_what_is_not_json(text: str) -> None:
    with pytest.raises(GrammarError):
        grammar_of(SpecKind.JSON_SCHEMA, text)


ABSURD = ["1e999999", "1e-999999", "0e401", "-1.5E+99999999999999999999", "9" * 5000, "0." + "1" * 500]


@pytest.mark.parametrize("number", ABSURD, ids=[number[:20] for number in ABSURD])
@pytest.mark.parametrize(
    "text", ['{"minLength": %s}', '{"maxItems": %s}', '{"enum": [1, {"a": %s}]}', '{"maximum": %s}']
)
def test_absurd_numbers_are_refused_for_their_length(text: str, number: str) -> None:
    with pytest.raises(GrammarError, match="more than 400 digits"):
        grammar_of(SpecKind.JSON_SCHEMA, text % number)


@pytest.mark.parametrize(
    ("schema", "right"),
    [
        ('{"type": "string", "maxLength": 1e308}', '"' + "x" * 50 + '"'),
        ('{"type": "array", "maxItems": 1e308}', "[1, 2, 3]"),
        ('{"maximum": 1.7976931348623157e40, "type": "integer"}', "17976931348623157" + "0" * 24),
        ('{"const": 4.9406564584124654e-324}', "4.9406564584124654E-324"),
    ],
)
def test_large_numbers_have_their_meaning(schema: str, right: str) -> None:
    assert accepts(grammar_of(SpecKind.JSON_SCHEMA, schema), right)


# ---- surrogates

SURROGATE_SIGNS = b"\xed\xa0\xbf\xf0\xf4\x8f\\udD8cC"
"""Bytes of surrogates and of their neighbours in UTF-8, and what their escapes are made of."""
STRINGS = [
    {"type": "string"},
    {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 2, "maxLength": 60},
    {"type": "string", "pattern": "^[^a]{1,3}$"},
    {"type": "string", "not": {"const": "x"}},
    {"type": "object", "minProperties": 1},
    {"type": "object", "minProperties": 1, "propertyNames": {"maxLength": 4}, "properties": {"a": {"type": "null"}}},
    {"type": "object", "patternProperties": {"^[\\ud7ff-\\ue000]": {"type": "string"}}, "minProperties": 1},
]


@settings(max_examples=300)
@given(st.sampled_from(STRINGS), st.lists(st.integers(0, 255), max_size=40))
def test_every_text_that_ends_is_unicode_and_of_its_length(schema: Any, choices: list[int]) -> None:
    text = walk(matcher_of(grammar_of(SpecKind.JSON_SCHEMA, json.dumps(schema))), choices, liked=SURROGATE_SIGNS)
    if text is not None:
        value = msgspec.json.decode(text)  # a strict decoder: takes surrogates in no form
        assert value == json.loads(text.decode())
        assert validator(schema).is_valid(value)


@pytest.mark.parametrize("schema", STRINGS[:2])
@pytest.mark.parametrize("code", [0xD800, 0xDBFF, 0xDC00, 0xDFFF])
def test_a_string_holds_no_surrogate(schema: Any, code: int) -> None:
    grammar = grammar_of(SpecKind.JSON_SCHEMA, json.dumps(schema))
    assert not accepts(grammar, b'"' + chr(code).encode("utf-8", "surrogatepass") + b'"')
    assert not accepts(grammar, f'"\\u{code:04x}"')
    for code in (0xD7FF, 0xE000):
        assert accepts(grammar, f'"{chr(code)}\\u{code:04x}"')


@pytest.mark.parametrize("pattern", [r"[^]", r"[\s\S]", ".", "[^a]", r"[\0-\uffff]"])
def test_a_pattern_matches_no_surrogate(pattern: str) -> None:
    grammar = grammar_of(SpecKind.REGEX, pattern)
    assert not accepts(grammar, chr(0xD800).encode("utf-8", "surrogatepass"))
    assert accepts(grammar, chr(0xD7FF))


EXAMPLES = [
    ({"type": "string", "maxLength": 100}, ['"' + "x" * 100 + '"', '"\\n\\u0041"'], ['"' + "x" * 101 + '"', '"\t"']),
    ({"type": "string", "maxLength": 2}, ['"\\ud83d\\ude00😀"', '"\\"\\""'], ['"abc"', '"\\ud83d"']),
    ({"type": "string", "minLength": 40, "maxLength": 41}, ['"' + "é" * 41 + '"'], ['"' + "é" * 39 + '"']),
    ({"type": "string", "pattern": '^["\\\\/\n]+$'}, ['"\\"\\\\/\\n"'], ['"\\/"', '"a"', '"\\u0022"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-04-31"', '"24-01-01"']),
    ({"type": "string", "format": "no-such-format"}, ['"x"'], []),
    ({"type": "string", "format": "ipv6"}, ['"::1"', '"1:2:3:4:5:6:7:8"', '"::ffff:1.2.3.4"'], ['":::"', '"1::2::3"']),
    ({"minimum": 1, "exclusiveMinimum": True}, ["1.1", '"x"'], ["1", "0.9"]),
    ({"const": {"z": [1, 2.50], "a": "/é"}}, ['{"z": [1, 2.5], "a": "/é"}'], ['{"a": "/é", "z": [1, 2.5]}']),
    ({"enum": [1.0, "x"]}, ["1", "1.0"], ["1.00", "x"]),
    (
        {"properties": {"a": {"type": "integer"}}},
        ['{"b": 1}', '{"a": 1, "b": 2}', "{}", '{"\\n": 0}'],
        ['{"a": "x"}', '{"\\u0061": "x"}', '{"b": 1, "a": "x"}'],
    ),
    ({"items": [{"type": "string"}], "additionalItems": False}, ["[]", '["a"]', "3"], ['["a", 1]', "[1]"]),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/a",
            "type": "string",
            "definitions": {"a": {"type": "integer"}},
        },
        ["1"],
        ['"x"'],
    ),
    (
        {"$id": "urn:x", "$defs": {"a": {"$anchor": "here", "type": "integer"}}, "items": {"$ref": "urn:x#here"}},
        ["[1]"],
        ['["x"]'],
    ),
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, ["[]", "[2, 1]"], ["[1, 1]"]),
    (
        {
            "$defs": {
                "t": {"type": "object", "properties": {"next": {"$ref": "#/$defs/t"}}, "additionalProperties": False}
            },
            "$ref": "#/$defs/t",
        },
        ['{"next": {"next": {}}}'],
        ['{"next": {"x": {}}}'],
    ),
    (
        {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]},
        ["1", "2.5"],
        ["2", "5", "1.5"],
    ),
    ({"required": ["a"], "minProperties": 2}, ['{"a": 1, "b": 1}', "3"], ['{"a": 1}', '{"b": 1, "c": 1}']),
    (True, ["null", '[{"a": [1.5e3, "x"]}]'], ["nul", "[1,2]", "{ }"]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), EXAMPLES, ids=[json.dumps(entry[0])[:60] for entry in EXAMPLES])
def test_examples(schema: Any, right: list[str], wrong: list[str]) -> None:
    grammar = grammar_of(SpecKind.JSON_SCHEMA, json.dumps(schema))
    assert [accepts(grammar, text) for text in right] == [True] * len(right)
    assert [accepts(grammar, text) for text in wrong] == [False] * len(wrong)


@given(
    st.integers(33, 80),
    st.integers(0, 3),
    st.lists(st.sampled_from(["x", "é", "\\n", "\\u0041", "\\ud83d\\ude00"]), max_size=90),
)
def test_a_string_never_has_more_characters_than_it_may(most: int, least: int, units: list[str]) -> None:
    grammar = grammar_of(SpecKind.JSON_SCHEMA, json.dumps({"type": "string", "minLength": least, "maxLength": most}))
    text = '"' + "".join(units) + '"'
    written = sum(map(len, units))
    if accepts(grammar, text):
        assert least <= len(units) <= most
    else:
        assert not (least <= len(units) and written <= most)
