"""Bodies: whatever is wrong with them is a 400 that names the field, and nothing else escapes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from api.openai.chat import turns_of
from api.openai.schema import ChatBody, CompletionBody, parse

MESSAGES = [{"role": "user", "content": "hi"}]


def refusal(raw: bytes, kind: type[ChatBody] | type[CompletionBody] = ChatBody) -> ApiError:
    error = refused(raw, kind)
    assert error is not None, "it was taken"
    return error


def refused(raw: bytes, kind: type[ChatBody] | type[CompletionBody]) -> ApiError | None:
    """The 400 that a body gets; None if it is taken. Anything else that is raised fails the test."""
    try:
        body = parse(raw, kind)
        if isinstance(body, ChatBody):
            turns_of(body.messages)
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
        ("top_p", "0"),
        ("top_p", "1.1"),
        ("logit_bias", "[]"),
        ("chat_template_kwargs", "[]"),
        ("reasoning_effort", "5"),
        ("user", '"\\udfff"'),
    ],
)
def test_a_value_of_the_wrong_type_or_range_names_its_field(name: str, value: str) -> None:
    error = refusal(with_field(name, value))
    assert error.param == name
    assert name in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", "2"),
        ("top_p", "0.9"),
        ("top_k", "5"),
        ("min_p", "0.1"),
        ("presence_penalty", "0.5"),
        ("frequency_penalty", "-1"),
        ("repetition_penalty", "1.1"),
        ("logit_bias", '{"1": 5}'),
        ("response_format", '{"type": "json_object"}'),
        ("logprobs", "true"),
        ("top_logprobs", "2"),
        ("tools", '[{"type": "function"}]'),
        ("tool_choice", '"required"'),
        ("functions", "[{}]"),
        ("audio", "{}"),
        ("modalities", '["audio"]'),
    ],
)
def test_what_later_parts_bring_is_refused_by_name_and_not_ignored(name: str, value: str) -> None:
    error = refusal(with_field(name, value))
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert error.message == f"{name} is not supported yet"


@pytest.mark.parametrize(("name", "value"), [("logprobs", "0"), ("best_of", "2"), ("suffix", '"x"'), ("echo", "1")])
def test_completions_have_their_own_fields(name: str, value: str) -> None:
    assert refusal(with_field(name, value), CompletionBody).param == name


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "x"}, "messages[1].role"),
        ({"role": 5}, "messages[1].role"),
        ({"role": "wizard", "content": "x"}, "messages[1].role"),
        ({"role": "", "content": "x"}, "messages[1].role"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[1].role"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls"),
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
