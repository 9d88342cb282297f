"""`POST /v1/chat/completions`: a conversation, rendered by the model's own template."""

import time
from collections.abc import Sequence

import anyio.to_thread

from api.errors import invalid
from api.openai.prepare import make_requests, new_id, seed_of
from api.openai.reply import Order
from api.openai.schema import ChatBody, ChatMessage
from api.openai.shapes import ChatShape, Heading
from api.service import ServedModel
from api.text import OptionError, TemplateError, Turn

_ROLES = ("system", "developer", "user", "assistant")
_LATER_ROLES = ("tool", "function")


async def prepare_chat(body: ChatBody, model: ServedModel, arrived: float) -> Order:
    """What a conversation asks of the engine. Raises ApiError."""
    prompt = await anyio.to_thread.run_sync(_tokenize, model, turns_of(body.messages), body)
    reply_id, seed = new_id("chatcmpl"), seed_of(body)
    heading = Heading(reply_id, int(time.time()), model.name, body.include_usage)
    return Order(
        reply_id=reply_id,
        model=model,
        shape=ChatShape(heading, choices=1),
        requests=make_requests(reply_id, body, model, [prompt], seed=seed, wanted=body.wanted_tokens, field="messages"),
        stops=body.stops,
        seed=seed,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        arrived=arrived,
    )


def turns_of(messages: Sequence[ChatMessage]) -> list[Turn]:
    """A conversation as templates take it. Raises ApiError."""
    if not messages:
        raise invalid("messages is empty", "messages")
    return [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _turn(message: ChatMessage, field: str) -> Turn:
    if message.role in _LATER_ROLES:
        raise invalid(f"{field}.role: {message.role} is not supported yet", f"{field}.role", "unsupported_parameter")
    if message.role not in _ROLES:
        raise invalid(f"{field}.role must be one of {', '.join(_ROLES)}, not {message.role!r}", f"{field}.role")
    if message.tool_calls:
        raise invalid(f"{field}.tool_calls is not supported yet", f"{field}.tool_calls", "unsupported_parameter")
    return {"role": message.role, "content": _text_of(message, f"{field}.content")}


def _text_of(message: ChatMessage, field: str) -> str:
    """Text parts become lines of one text."""
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise invalid(f"{field} is required", field)
    texts: list[str] = []
    for index, part in enumerate(message.content):
        if part.type != "text":
            place = f"{field}[{index}].type"
            raise invalid(f"{place}: {part.type!r} is not supported, only 'text'", place, "unsupported_parameter")
        if part.text is None:
            raise invalid(f"{field}[{index}].text is required", f"{field}[{index}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _tokenize(model: ServedModel, turns: Sequence[Turn], body: ChatBody) -> list[int]:
    """Runs in a thread."""
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    try:
        text = model.tokenizer.render(turns, options)
    except OptionError as error:
        raise invalid(str(error), "chat_template_kwargs") from error
    except TemplateError as error:
        raise invalid(str(error), "messages") from error
    return model.tokenizer.encode(text, special=False)
