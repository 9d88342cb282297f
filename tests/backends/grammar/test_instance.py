"""The validator of listed values against `jsonschema`, for every keyword it knows."""

import json
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.grammar.document import Document, SchemaError, read_json
from backends.grammar.instance import Validator, written
from tests.backends.grammar.test_schema import nested_schemas, objects, rooted, values


@st.composite
def more_schemas(draw: st.DrawFn) -> Any:
    """With keywords besides that grammars are not made of."""
    schema = draw(nested_schemas() | objects(nested_schemas()))
    if isinstance(schema, dict) and draw(st.booleans()):
        schema = {
            **schema,
            "contains": draw(nested_schemas()),
            "minContains": draw(st.integers(0, 2)),
            "maxContains": draw(st.integers(1, 3)),
            "dependentSchemas": {"a": draw(nested_schemas())},
        }
    return rooted(schema)


@settings(max_examples=200)
@given(more_schemas(), st.lists(values(), min_size=3, max_size=8))
def test_it_says_what_jsonschema_says(schema: Any, samples: list[Any]) -> None:
    document = Document(json.dumps(schema))
    oracle = jsonschema.Draft202012Validator(schema)
    for sample in samples:
        try:
            held = Validator(document).holds(read_json(json.dumps(sample)), document.root)
        except SchemaError:
            continue
        assert held == oracle.is_valid(sample), sample


@given(values())
def test_what_is_written_is_pythons(value: Any) -> None:
    assert written(read_json(json.dumps(value))) == json.dumps(value, ensure_ascii=False)
