"""`POST /v1/chat/completions`: a conversation, rendered by the model's own template.

With `tools` and `tool_choice: none` a template that knows functions still shows them, as vLLM has it: the
prompt begins as that of the turns before it did, and their prefix can be shared. Templates that know none are told of
functions only where a call is forced.
"""

import time
from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import msgspec

from api.errors import invalid
from api.openai.calls import CallsShape
from api.openai.constraint import forced_calls, tools_of
from api.openai.prepare import encoded, expected_tokens, make_requests, new_id, seed_of, text_of
from api.openai.reply import Order
from api.openai.schema import ChatBody, ChatMessage, MessageToolCall
from api.openai.shapes import ChatShape, Heading, ReplyShape
from api.service import ServedModel
from api.text import OptionError, TemplateError, Turn
from api.tools import plain_turns, tool_objects

_ROLES = ("system", "developer", "user", "assistant", "tool")


async def prepare_chat(body: ChatBody, model: ServedModel, arrived: float) -> Order:
    """What a conversation asks of the engine. Raises ApiError."""
    constraint = forced_calls(body, model.tool_format)
    prompt, expected = await anyio.to_thread.run_sync(_tokenize, model, turns_of(body.messages), body)
    reply_id, seed = new_id("chatcmpl"), seed_of(body)
    heading = Heading(reply_id, int(time.time()), model.name, body.include_usage)
    return Order(
        reply_id=reply_id,
        model=model,
        shape=_shape(body, heading, model),
        requests=make_requests(
            reply_id, body, model, [prompt], seed=seed, wanted=body.wanted_tokens, field="messages", expected=expected
        ),
        stops=body.stops,
        seed=seed,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        arrived=arrived,
        constraint=constraint,
    )


def _shape(body: ChatBody, heading: Heading, model: ServedModel) -> ReplyShape:
    choices, token_bytes = body.n or 1, model.tokenizer.token_bytes
    if body.forces_calls:
        return CallsShape(heading, choices, token_bytes, model.tool_format)
    return ChatShape(heading, choices, token_bytes)


def turns_of(messages: Sequence[ChatMessage]) -> list[Turn]:
    """A conversation as templates take it. Raises ApiError."""
    if not messages:
        raise invalid("messages is empty", "messages")
    names: dict[str, str] = {}
    return [_turn(message, names, f"messages[{index}]") for index, message in enumerate(messages)]


def _turn(message: ChatMessage, names: dict[str, str], field: str) -> Turn:
    """`names` holds the function that each earlier call called, by the call's id; grows by this message's calls."""
    if message.role == "function":
        raise invalid(f"{field}.role: function is not supported, use tool", f"{field}.role", "unsupported_parameter")
    if message.role not in _ROLES:
        raise invalid(f"{field}.role must be one of {', '.join(_ROLES)}, not {message.role!r}", f"{field}.role")
    turn: dict[str, Any] = {"role": message.role, "content": _text_of(message, f"{field}.content")}
    if message.role == "tool":
        if message.tool_call_id is None:
            raise invalid(f"{field}.tool_call_id is required", f"{field}.tool_call_id")
        turn["tool_call_id"] = message.tool_call_id
        if message.tool_call_id in names:
            turn["name"] = names[message.tool_call_id]
    if message.tool_calls:
        if message.role != "assistant":
            raise invalid(f"{field}.tool_calls: only an assistant calls", f"{field}.tool_calls")
        turn["tool_calls"] = [
            _call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
        names.update((call.id, call.function.name) for call in message.tool_calls if call.id is not None)
    return turn


def _call(call: MessageToolCall, field: str) -> dict[str, Any]:
    """Templates want arguments as values."""
    if call.type != "function":
        raise invalid(f"{field}.type must be 'function', not {call.type!r}", f"{field}.type")
    arguments: object = call.function.arguments or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        place = f"{field}.function.arguments"
        raise invalid(f"{place} must be a JSON object", place)
    called = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return called if call.id is None else {"id": call.id, **called}


def _text_of(message: ChatMessage, field: str) -> str:
    if message.content is not None:
        return text_of(message.content, field)
    if message.role == "assistant":
        return ""
    raise invalid(f"{field} is required", field)


def _tokenize(model: ServedModel, turns: Sequence[Turn], body: ChatBody) -> tuple[list[int], list[int]]:
    """The prompt and the prediction. Runs in a thread."""
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    form, tools = model.tool_format, tools_of(body)
    if not form.native:
        turns, tools = plain_turns(turns, tools if body.forces_calls else ()), []
    try:
        text = model.tokenizer.render(turns, options, tool_objects(tools))
    except OptionError as error:
        raise invalid(str(error), "chat_template_kwargs") from error
    except TemplateError as error:
        raise invalid(str(error), "messages") from error
    prompt = encoded(model, text + form.prime if body.forces_calls else text, "messages", special=False)
    return prompt, expected_tokens(body, model)
