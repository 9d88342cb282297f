"""Forced calls of functions over real sockets, in every form, whole and streamed; and with the real `openai` client."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from api.text import ByteTokenizer
from api.tools import HERMES, LINES, LLAMA, MISTRAL, ToolFormat
from engine.config import EngineConfig
from tests.api.servers import PATIENCE, RunningServer, running

CHAT = "/v1/chat/completions"
FORMATS = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA, "lines": LINES}
TEMPLATES = {
    "hermes": '<tool_call>{"name": x, "arguments": y}</tool_call>',
    "mistral": "[TOOL_CALLS]",
    "llama": '<|start_header_id|> tool_calls "parameters": ',
    "lines": "",
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": "clock"}},
]
ROME = ("weather", '{"city": "Røme \\"}🦄"}')
NOW = ("clock", "{}")


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def script(form: ToolFormat, *calls: tuple[str, str]) -> str:
    each = [f"{form.open}{name}{form.middle}{arguments}{form.close}" for name, arguments in calls]
    return form.begin + form.separator.join(each) + form.end


def ask(text: str, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"say [[{text}]]"}
    return {"messages": [message], "temperature": 0, "tools": TOOLS, "tool_choice": "required", **fields}


@pytest.fixture(scope="module", params=FORMATS)
def spoken(request: pytest.FixtureRequest) -> Iterator[tuple[RunningServer, ToolFormat]]:
    """A server whose model's template teaches this form."""

    class Taught(ByteTokenizer):
        template = TEMPLATES[request.param]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("api.service.load_tokenizer", lambda _info: Taught())
        with running(engine=EngineConfig(draft_tokens=4)) as server:
            assert server.service.model().tool_format is FORMATS[request.param]
            yield server, FORMATS[request.param]


def choice_of(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    with server.client() as client:
        response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"] or ()]


def streamed(server: RunningServer, body: dict[str, Any]) -> tuple[list[tuple[str, str]], str]:
    """The calls that a stream's deltas add up to, checked to begin once and to hold whole characters; its reason."""
    with server.client() as client:
        events = client.post(CHAT, json={**body, "stream": True}).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first, *between, last = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert first["delta"] == {"role": "assistant", "content": None}
    assert last["delta"] == {}
    names: list[str] = []
    arguments: list[str] = []
    for chunk in between:
        (call,) = chunk["delta"]["tool_calls"]
        assert chunk["finish_reason"] is None
        if "id" in call:
            assert call == {
                "index": len(names),
                "id": call["id"],
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": ""},
            }
            names.append(call["function"]["name"])
            arguments.append("")
        else:
            assert call.keys() == {"index", "function"}
            assert call["function"].keys() == {"arguments"}
            arguments[call["index"]] += call["function"]["arguments"]
    return list(zip(names, arguments, strict=True)), last["finish_reason"]


def test_a_call_is_a_call_whole_and_streamed(spoken: tuple[RunningServer, ToolFormat]) -> None:
    server, form = spoken
    body = ask(script(form, ROME))
    choice = choice_of(server, body)
    assert calls_of(choice)[0] == ROME
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert all(call["type"] == "function" for call in choice["message"]["tool_calls"])
    assert streamed(server, body) == (calls_of(choice), "tool_calls")


def test_several_calls_unless_one_is_asked_for(spoken: tuple[RunningServer, ToolFormat]) -> None:
    server, form = spoken
    body = ask(script(form, ROME, NOW, ROME))
    both = choice_of(server, body)
    assert calls_of(both)[:3] == ([ROME, NOW, ROME] if form.several else [ROME])
    ids = [call["id"] for call in both["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids)
    if form is MISTRAL:
        assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert streamed(server, body) == (calls_of(both), "tool_calls")
    for one in ({"parallel_tool_calls": False}, {"tool_choice": named("weather")}):
        assert calls_of(choice_of(server, {**body, **one})) == [ROME]


def test_a_named_function_is_called_whatever_the_model_wants(spoken: tuple[RunningServer, ToolFormat]) -> None:
    server, form = spoken
    body = ask(script(form, ROME), tool_choice=named("clock"))
    assert calls_of(choice_of(server, body)) == [NOW]
    assert streamed(server, body) == ([NOW], "tool_calls")
    ((name, arguments),) = calls_of(choice_of(server, ask("no", tool_choice=named("weather"), max_tokens=300)))
    assert name == "weather"
    assert arguments.startswith("{")


@pytest.mark.parametrize("limit", [1, 45, 52])
def test_a_call_cut_by_the_limit_says_length(spoken: tuple[RunningServer, ToolFormat], limit: int) -> None:
    server, form = spoken
    body = ask(script(form, ROME), max_tokens=limit, parallel_tool_calls=False)
    choice = choice_of(server, body)
    assert choice["finish_reason"] == ("length" if limit < len(script(form, ROME).encode()) else "tool_calls")
    assert streamed(server, body) == (calls_of(choice), choice["finish_reason"])
    for name, arguments in calls_of(choice):
        assert name == "weather"
        assert ROME[1].startswith(arguments.rstrip("\N{REPLACEMENT CHARACTER}"))


def test_a_stop_string_in_a_call_leaves_it_half_made(spoken: tuple[RunningServer, ToolFormat]) -> None:
    server, form = spoken
    body = ask(script(form, ROME), stop="me")
    ((name, arguments), *_) = calls_of(choice_of(server, {**body, "stop": "øme"}))
    assert (name, arguments) == ("weather", '{"city": "R')
    assert choice_of(server, {**body, "stop": "øme"})["finish_reason"] == "stop"


def test_each_choice_has_its_calls_and_its_logprobs(spoken: tuple[RunningServer, ToolFormat]) -> None:
    server, form = spoken
    text = script(form, ROME)
    body = ask(text, n=2, logprobs=True, parallel_tool_calls=False)
    with server.client() as client:
        choices = client.post(CHAT, json=body).json()["choices"]
        events = client.post(CHAT, json={**body, "stream": True}).text.split("\n\n")[:-2]
    assert [calls_of(choice) for choice in choices] == [[ROME], [ROME]]
    contents: list[list[Any]] = [[], []]
    for event in events:
        (chunk,) = json.loads(event.removeprefix("data: "))["choices"]
        contents[chunk["index"]] += chunk["logprobs"]["content"] if chunk["logprobs"] else []
    assert contents == [choice["logprobs"]["content"] for choice in choices]
    assert bytes(byte for entry in contents[0] for byte in entry["bytes"]).decode() == text


def test_without_a_forced_call_the_reply_is_text(spoken: tuple[RunningServer, ToolFormat]) -> None:
    server, _ = spoken
    choice = choice_of(server, ask("plain", tool_choice="none"))
    assert (choice["message"]["content"], choice["finish_reason"]) == ("plain", "stop")
    assert "tool_calls" not in choice["message"]


def test_a_control_token_that_begins_calls_is_part_of_the_prompt(spoken: tuple[RunningServer, ToolFormat]) -> None:
    server, form = spoken
    with server.client() as client:
        forced, free = (
            client.post(CHAT, json=ask("x", max_tokens=1, tool_choice=choice)).json()["usage"]["prompt_tokens"]
            for choice in ("required", "none")
        )
    if form.native:
        assert forced - free == len(form.prime)


def test_the_functions_are_described_where_a_call_is_forced(client: httpx2.Client) -> None:
    def prompt_tokens(**fields: Any) -> int:
        reply = client.post(CHAT, json=ask(script(LINES, NOW), max_tokens=1, **fields)).json()
        return int(reply["usage"]["prompt_tokens"])

    assert prompt_tokens() > prompt_tokens(tool_choice="none") == prompt_tokens(tool_choice=None, tools=None)


def test_a_history_of_calls_goes_on(client: httpx2.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ROME[1]}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "user", "content": "say [[fine]]"},
    ]
    reply = client.post(CHAT, json={"messages": messages, "temperature": 0}).json()
    assert reply["choices"][0]["message"]["content"] == "fine"
    rendered = len("user: weather?\nassistant: \nuser: Result of weather: sunny\nuser: say [[fine]]\nassistant: ")
    assert reply["usage"]["prompt_tokens"] == rendered + len(script(LINES, ROME).encode())


# ---- the real client

SAY: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"say [[{script(LINES, ROME)}]]"}]


@pytest.fixture
def speaker(server: RunningServer) -> Iterator[openai.OpenAI]:
    """To a server that drafts."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


class Person(pydantic.BaseModel):
    name: str
    age: int
    tags: list[str]


def test_the_client_parses_a_reply_into_its_model(speaker: openai.OpenAI) -> None:
    said = '{"name": "Zoë", "age": 42, "tags": ["a", "b"]}'
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"say [[{said}]]"}]
    for settings in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 8, "top_p": 0.9}):
        reply = speaker.chat.completions.parse(
            model="fake", messages=messages, response_format=Person, max_tokens=2000, **settings
        )
        parsed = reply.choices[0].message.parsed
        assert isinstance(parsed, Person)
        if settings["temperature"] == 0:
            assert parsed == Person(name="Zoë", age=42, tags=["a", "b"])


def test_the_client_makes_a_forced_call(speaker: openai.OpenAI) -> None:
    reply = speaker.chat.completions.create(
        model="fake", messages=SAY, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    (call,) = reply.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ROME
    assert reply.choices[0].finish_reason == "tool_calls"


def test_the_clients_own_accumulator_agrees(speaker: openai.OpenAI) -> None:
    with speaker.chat.completions.stream(
        model="fake", messages=SAY, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=0
    ) as stream:
        fragments = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ROME
    assert "".join(fragments) == ROME[1]
