"""What a body asks the generated text to be, as one constraint: `response_format`, `structured_outputs`, forced calls.

Owns which of them may stand together. Looks into none of their schemas: that is the grammar compiler's.
"""

from typing import Any

import msgspec

from api.errors import invalid
from api.openai.schema import ChatBody, GenerationBody, StructuredOutputs
from api.tools import Tool, ToolFormat, calls_constraint
from backends.grammar.spec import ConstraintSpec, SpecKind

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_FORMATS = "'text', 'json_object', 'json_schema' or 'structural_tag'"
_OUTPUTS = {
    "json": SpecKind.JSON_SCHEMA,
    "json_object": SpecKind.JSON_OBJECT,
    "regex": SpecKind.REGEX,
    "choice": SpecKind.CHOICE,
    "grammar": SpecKind.EBNF,
    "structural_tag": SpecKind.STRUCTURAL_TAG,
}


class Asked(msgspec.Struct, frozen=True):
    """A constraint, not yet compiled, and the field that asks for it."""

    spec: ConstraintSpec
    field: str


def constraint_of(body: GenerationBody) -> Asked | None:
    """What the text must be, if anything. Raises ApiError for a bad shape and for two constraints."""
    formatted = _of_response_format(body.response_format)
    structured = _of_structured_outputs(body.structured_outputs)
    if formatted is not None and structured is not None:
        raise invalid("structured_outputs and response_format exclude each other", "structured_outputs")
    return formatted or structured


def forced_calls(body: ChatBody, form: ToolFormat) -> Asked | None:
    """That the reply consists of calls, if the body forces any. Raises ApiError where it asks for another text, too."""
    other = constraint_of(body)
    if not body.forces_calls:
        return other
    if other is not None:
        raise invalid(f"{other.field} and a forced tool call exclude each other", other.field)
    tools, choice = tools_of(body), body.tool_choice
    named = choice["function"]["name"] if isinstance(choice, dict) else None
    callable_ones = [tool for tool in tools if named in (None, tool.name)]
    several = named is None and body.parallel_tool_calls is not False
    return Asked(calls_constraint(form, callable_ones, several=several), "tools")


def tools_of(body: ChatBody) -> list[Tool]:
    """The functions of a valid body."""
    return [
        Tool(tool.function.name, tool.function.description, _parameters(tool.function.parameters))
        for tool in body.tools or ()
        if tool.function is not None
    ]


def _parameters(schema: dict[str, Any] | None) -> dict[str, Any]:
    return _NO_PARAMETERS if schema is None else {"type": "object", **schema}


def _of_response_format(wanted: dict[str, Any] | None) -> Asked | None:
    field = "response_format"
    kind = wanted.get("type") if wanted is not None else "text"
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return Asked(ConstraintSpec(SpecKind.JSON_OBJECT), field)
    if kind == "json_schema":
        return Asked(ConstraintSpec(SpecKind.JSON_SCHEMA, _json(_named_schema(wanted.get("json_schema")))), field)
    if kind == "structural_tag":
        return Asked(ConstraintSpec(SpecKind.STRUCTURAL_TAG, _json(wanted)), field)
    raise invalid(f"{field}.type must be {_FORMATS}, not {kind!r}", f"{field}.type")


def _named_schema(wanted: object) -> object:
    field = "response_format.json_schema"
    if not isinstance(wanted, dict):
        raise invalid(f"{field} must be an object", field)
    for name, kind in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(wanted.get(name), (kind, type(None))):
            raise invalid(f"{field}.{name} is of the wrong type", f"{field}.{name}")
    if not isinstance(wanted.get("schema"), dict):
        raise invalid(f"{field}.schema must be an object", f"{field}.schema")
    return wanted["schema"]


def _of_structured_outputs(wanted: StructuredOutputs | None) -> Asked | None:
    if wanted is None:
        return None
    field = "structured_outputs"
    asked = [(name, value) for name in _OUTPUTS if (value := getattr(wanted, name)) is not None and value is not False]
    if len(asked) != 1:
        raise invalid(f"{field} must have exactly one of {', '.join(_OUTPUTS)}", field)
    ((name, value),) = asked
    text = "" if value is True else value if isinstance(value, str) else _json(value)
    return Asked(ConstraintSpec(_OUTPUTS[name], text), field)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
