"""Bodies: whatever is wrong with them is a 400 that names the field, and nothing else escapes."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from api.openai.chat import turns_of
from api.openai.constraint import constraint_of, forced_calls
from api.openai.prepare import Seed, sampling_of
from api.openai.schema import ChatBody, CompletionBody, parse
from api.tools import LINES
from backends.base import ModelInfo
from backends.fake import FakeBackend
from backends.grammar.spec import ConstraintSpec, SpecKind
from scheduler.request import Sampling

INFO = FakeBackend().info

MESSAGES = [{"role": "user", "content": "hi"}]
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def refusal(raw: bytes, kind: type[ChatBody] | type[CompletionBody] = ChatBody) -> ApiError:
    error = refused(raw, kind)
    assert error is not None, "it was taken"
    return error


def refused(raw: bytes, kind: type[ChatBody] | type[CompletionBody]) -> ApiError | None:
    """The 400 that a body gets; None if it is taken. Anything else that is raised fails the test."""
    try:
        body = parse(raw, kind)
        if isinstance(body, ChatBody):
            forced_calls(body, LINES)
            turns_of(body.messages)
        else:
            constraint_of(body)
    except ApiError as error:
        return error if error.status == 400 else pytest.fail(f"status {error.status}")
    return None


def with_field(name: str, value: str) -> bytes:
    """A body with one more field, given as JSON source."""
    return f'{{"messages": [{{"role": "user", "content": "hi"}}], "prompt": "p", "{name}": {value}}}'.encode()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "5"),
        ("max_tokens", "0"),
        ("max_tokens", "-1"),
        ("max_tokens", "1.5"),
        ("max_tokens", '"5"'),
        ("max_tokens", "true"),
        ("max_tokens", "1e999"),
        ("max_tokens", "9" * 5000),
        ("max_completion_tokens", "0"),
        ("temperature", "-0.1"),
        ("temperature", "2.1"),
        ("temperature", "1e999"),
        ("temperature", "1" + "0" * 400),
        ("temperature", '"hot"'),
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("seed", "1.5"),
        ("seed", '"x"'),
        ("seed", str(2**64)),
        ("seed", str(-(2**63) - 1)),
        ("seed", "1" + "0" * 400),
        ("stop", "5"),
        ("stop", '""'),
        ("stop", '["a", ""]'),
        ("stop", json.dumps(["x"] * 17)),
        ("stop", '"\\ud800"'),
        ("stream", '"yes"'),
        ("stream_options", "true"),
        ("ignore_eos", "1"),
        ("messages", "5"),
        ("messages", "[]"),
        ("messages", "null"),
        ("n", "0"),
        ("n", "17"),
        ("n", "1.5"),
        ("n", "true"),
        ("top_p", "-0.1"),
        ("top_p", "1.1"),
        ("top_p", "NaN"),
        ("top_k", "-2"),
        ("top_k", "1.5"),
        ("top_k", '"5"'),
        ("min_p", "-0.1"),
        ("min_p", "1.5"),
        ("presence_penalty", "2.1"),
        ("presence_penalty", "-2.1"),
        ("presence_penalty", "Infinity"),
        ("frequency_penalty", "3"),
        ("frequency_penalty", '"x"'),
        ("repetition_penalty", "0"),
        ("repetition_penalty", "-1"),
        ("repetition_penalty", "10.5"),
        ("repetition_penalty", "1e999"),
        ("logit_bias", "[]"),
        ("logit_bias", '{"x": 1}'),
        ("logit_bias", '{"-1": 1}'),
        ("logit_bias", '{"1.5": 1}'),
        ("logit_bias", '{"05": 1}'),
        ("logit_bias", '{"": 1}'),
        ("logit_bias", '{"\u0663": 1}'),
        ("logit_bias", '{"%s": 1}' % ("9" * 5000)),
        ("logit_bias", json.dumps({str(token): 1 for token in range(10_000)})),
        ("logprobs", '"yes"'),
        ("top_logprobs", "2"),
        ("top_logprobs", "-1"),
        ("top_logprobs", "21"),
        ("response_format", '"json"'),
        ("structured_outputs", '"json"'),
        ("tools", "{}"),
        ("tool_choice", '"required"'),
        ("tool_choice", '"always"'),
        ("tool_choice", "5"),
        ("tool_choice", '{"type": "function", "function": {"name": "f"}}'),
        ("parallel_tool_calls", '"yes"'),
        ("chat_template_kwargs", "[]"),
        ("reasoning_effort", "5"),
        ("timeout", "0"),
        ("timeout", "-1"),
        ("timeout", "86400.5"),
        ("timeout", "1e999"),
        ("timeout", "NaN"),
        ("timeout", "true"),
        ("timeout", '"5"'),
        ("priority", "1001"),
        ("priority", "-1001"),
        ("priority", "0.5"),
        ("priority", "true"),
        ("user", '"\\udfff"'),
    ],
)
def test_a_value_of_the_wrong_type_or_range_names_its_field(name: str, value: str) -> None:
    error = refusal(with_field(name, value))
    assert error.param == name
    assert name in error.message


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", '{"1": 101}'), ("logit_bias", '{"1": -100.5}'), ("logit_bias", '{"1": "x"}')]
)
def test_a_bad_bias_names_its_field(name: str, value: str) -> None:
    error = refusal(with_field(name, value))
    assert error.param == name
    assert error.message.startswith(f"{name}: expected")


def test_the_field_of_a_value_that_json_cannot_carry_is_a_plain_path() -> None:
    for key, path in (
        ("a-b", "logit_bias.a-b"),
        ("a b", "logit_bias"),
        ("x" * 5000, "logit_bias"),
        ("$[0]", "logit_bias"),
    ):
        assert refusal(with_field("logit_bias", f'{{"{key}": NaN}}')).param == path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", "[{}]"),
        ("audio", "{}"),
        ("modalities", '["audio"]'),
    ],
)
def test_what_later_parts_bring_is_refused_by_name_and_not_ignored(name: str, value: str) -> None:
    error = refusal(with_field(name, value))
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert error.message == f"{name} is not supported yet"


@pytest.mark.parametrize(
    ("name", "value"), [("logprobs", "21"), ("logprobs", "true"), ("best_of", "2"), ("suffix", '"x"'), ("echo", "1")]
)
def test_completions_have_their_own_fields(name: str, value: str) -> None:
    assert refusal(with_field(name, value), CompletionBody).param == name


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "x"}, "messages[1].role"),
        ({"role": 5}, "messages[1].role"),
        ({"role": "wizard", "content": "x"}, "messages[1].role"),
        ({"role": "", "content": "x"}, "messages[1].role"),
        ({"role": "function", "content": "x", "name": "f"}, "messages[1].role"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[1].tool_call_id"),
        ({"role": "tool", "tool_call_id": "1"}, "messages[1].content"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "messages[1].tool_calls[0].type"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL, {"function": {"name": "f", "arguments": "{"}}]},
            "messages[1].tool_calls[1].function.arguments",
        ),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [5]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0].type"),
        ("hi", "messages[1]"),
    ],
)
def test_a_bad_message_is_named_by_its_place(message: object, field: str) -> None:
    assert refusal(json.dumps({"messages": [*MESSAGES, message]}).encode()).param == field


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b'{"messages": []} trailing',
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\x00"}]}',
        b'{"\\ud800": 1}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "messages": []}',
        b'{"tools": ' + b"[" * 100_000 + b"]" * 100_000 + b', "messages": []}',
        b'{"tools": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b', "messages": []}',
    ],
)
def test_a_body_that_is_no_object_of_ours_is_a_400(raw: bytes) -> None:
    refusal(raw)


def test_half_a_surrogate_pair_is_found_wherever_it_stands() -> None:
    raw = b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud83d"}]}]}'
    assert refusal(raw).param == "messages[0].content[0].text"


@given(st.binary(max_size=60))
def test_no_bytes_at_all_do_more_than_that(raw: bytes) -> None:
    error = refused(raw, ChatBody)
    assert error is not None
    assert error.message


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__})


@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4), st.sampled_from([ChatBody, CompletionBody]))
def test_no_json_at_all_does_more_than_that(
    fields: dict[str, Any], kind: type[ChatBody] | type[CompletionBody]
) -> None:
    raw = json.dumps({"messages": MESSAGES, "prompt": "p", **fields}).encode()
    error = refused(raw, kind)
    if error is not None and error.param is not None:
        assert error.param.partition(".")[0].partition("[")[0] in {*FIELDS, "body"}


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**64 - 1])
def test_the_whole_range_of_seeds_is_taken(seed: int) -> None:
    assert parse(with_field("seed", str(seed)), ChatBody).seed == seed


def test_text_with_an_escaped_null_character_is_text() -> None:
    body = parse(b'{"messages": [{"role": "user", "content": "a\\u0000b"}]}', ChatBody)
    assert body.messages[0].content == "a\0b"


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([{"function": {"name": "f"}}], "tools[0].type"),
        ([{"type": "custom", "custom": {"name": "f"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "f\n"}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "é"}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "x" * 65}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "f", "description": 5}}], "tools[0].function.description"),
        ([{"type": "function", "function": {"name": "f", "parameters": "x"}}], "tools[0].function.parameters"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            "tools[0].function.parameters",
        ),
        ([TOOL, TOOL], "tools[1].function.name"),
        ([{"type": "function", "function": {"name": f"f{number}"}} for number in range(129)], "tools"),
        ([5], "tools[0]"),
    ],
)
def test_a_bad_tool_is_named_by_its_place(tools: object, field: str) -> None:
    raw = json.dumps({"messages": MESSAGES, "tools": tools, "tool_choice": "required"}).encode()
    assert refusal(raw).param == field


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": None}])
def test_an_automatic_choice_is_refused_with_what_is_served(choice: dict[str, Any]) -> None:
    error = refusal(json.dumps({"messages": MESSAGES, "tools": [TOOL], **choice}).encode())
    assert (error.param, error.code) == ("tool_choice", "unsupported_parameter")
    assert "'none'" in error.message
    assert "'required'" in error.message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_object"}, "tools": [TOOL], "tool_choice": "required"},
            "response_format",
        ),
        (
            {
                "structured_outputs": {"regex": "a"},
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            "structured_outputs",
        ),
    ],
)
def test_a_bad_constraint_or_two_of_them_name_the_field(fields: dict[str, Any], field: str) -> None:
    assert refusal(json.dumps({"messages": MESSAGES, **fields}).encode()).param == field


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text"}, "tools": [TOOL], "tool_choice": "none"}, None),
        ({"response_format": {"type": "json_object"}}, ConstraintSpec(SpecKind.JSON_OBJECT)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"b": 1, "a": 2}}}},
            ConstraintSpec(SpecKind.JSON_SCHEMA, '{"b":1,"a":2}'),
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            ConstraintSpec(SpecKind.STRUCTURAL_TAG, '{"type":"structural_tag","format":{"type":"any_text"}}'),
        ),
        ({"structured_outputs": {"json": {"a": 1}}}, ConstraintSpec(SpecKind.JSON_SCHEMA, '{"a":1}')),
        ({"structured_outputs": {"json": ' {"a": 1}'}}, ConstraintSpec(SpecKind.JSON_SCHEMA, ' {"a": 1}')),
        ({"structured_outputs": {"json_object": True}}, ConstraintSpec(SpecKind.JSON_OBJECT)),
        (
            {"structured_outputs": {"regex": "a+", "disable_any_whitespace": True, "json_object": False}},
            ConstraintSpec(SpecKind.REGEX, "a+"),
        ),
        ({"structured_outputs": {"choice": ["é", '"']}}, ConstraintSpec(SpecKind.CHOICE, '["é","\\""]')),
        ({"structured_outputs": {"grammar": "root ::= x"}}, ConstraintSpec(SpecKind.EBNF, "root ::= x")),
        ({"structured_outputs": {"structural_tag": "{}"}}, ConstraintSpec(SpecKind.STRUCTURAL_TAG, "{}")),
    ],
)
def test_what_is_asked_of_the_text_is_one_constraint(fields: dict[str, Any], spec: ConstraintSpec | None) -> None:
    for kind in (ChatBody, CompletionBody):
        body = parse(json.dumps({"messages": MESSAGES, "prompt": "p", **fields}).encode(), kind)
        asked = constraint_of(body)
        assert (asked.spec if asked else None) == spec


def test_only_a_best_of_that_changes_nothing_is_taken() -> None:
    raw = b'{"prompt": "p", "n": 3, "best_of": %d}'
    assert parse(raw % 3, CompletionBody).best_of == 3
    assert refusal(raw % 4, CompletionBody).param == "best_of"


def test_an_echoed_prompt_has_no_logprobs() -> None:
    assert refusal(b'{"prompt": "p", "echo": true, "logprobs": 0}', CompletionBody).param == "echo"


# ---- sampling


def sampling(info: ModelInfo = INFO, kind: type[ChatBody] | type[CompletionBody] = ChatBody, **fields: Any) -> Sampling:
    body = parse(json.dumps({"messages": MESSAGES, "prompt": "p", **fields}).encode(), kind)
    return sampling_of(body, info, Seed(7, drawn=False))


def test_without_fields_sampling_is_plain() -> None:
    assert sampling() == Sampling(seed=7)


def test_every_setting_arrives() -> None:
    fields = {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {"255": -100, "0": 1.5},
        "logprobs": True,
        "top_logprobs": 3,
    }
    told = {**fields, "logit_bias": ((255, -100.0), (0, 1.5)), "logprobs": 3, "seed": 7}
    del told["top_logprobs"]
    assert sampling(**fields) == Sampling(**told)


def test_what_a_body_leaves_open_is_the_models_own() -> None:
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20.0, "min_p": 0.1, "repetition_penalty": 1.05}
    info = msgspec.structs.replace(INFO, defaults=own)
    assert sampling(info) == Sampling(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05, seed=7)
    off = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    assert sampling(info, **off) == Sampling(seed=7)


@pytest.mark.parametrize(("fields", "field"), [({"top_k": 258}, "top_k"), ({"logit_bias": {"257": 1}}, "logit_bias")])
def test_what_lies_outside_the_vocabulary_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as refused:
        sampling(**fields)
    assert (refused.value.status, refused.value.param) == (400, field)


@pytest.mark.parametrize(
    ("kind", "fields", "logged"),
    [
        (ChatBody, {"logprobs": True}, 0),
        (ChatBody, {"logprobs": True, "top_logprobs": 20}, 20),
        (ChatBody, {"logprobs": False, "top_logprobs": 0}, None),
        (CompletionBody, {"logprobs": 0}, 0),
        (CompletionBody, {"logprobs": 5}, 5),
        (CompletionBody, {}, None),
    ],
)
def test_each_dialect_asks_for_logprobs_in_its_way(
    kind: type[ChatBody] | type[CompletionBody], fields: dict[str, Any], logged: int | None
) -> None:
    assert sampling(kind=kind, **fields).logprobs == logged


def test_a_temperature_of_almost_nothing_is_greedy() -> None:
    assert sampling(temperature=1e-9).temperature == 0


@pytest.mark.parametrize(
    ("fields", "choices"),
    [
        ({"prompt": "p"}, 1),
        ({"prompt": "p", "n": 3}, 3),
        ({"prompt": ["p", "q"], "n": 3}, 6),
        ({"prompt": [1, 2, 3], "n": 2}, 2),
        ({"prompt": [[1, 2, 3], [4]]}, 2),
        ({"prompt": []}, 1),
    ],
)
def test_what_a_body_asks_for_is_counted_by_prompt_and_choice(fields: dict[str, Any], choices: int) -> None:
    assert parse(json.dumps(fields).encode(), CompletionBody).choices == choices


@pytest.mark.parametrize("seconds", [1e-9, 1, 86400])
def test_the_whole_range_of_timeouts_and_priorities_is_taken(seconds: float) -> None:
    body = parse(json.dumps({"messages": MESSAGES, "timeout": seconds, "priority": -1000}).encode(), ChatBody)
    assert (body.timeout, body.priority) == (seconds, -1000)
