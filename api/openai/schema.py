"""The bodies of OpenAI's requests: their fields, and which of them this server does not serve yet.

Owns every check that needs no model. Whatever is wrong becomes a 400 that names the field; nothing else may escape.
"""

import json
import math
import re
from typing import Annotated, Any, TypeVar

import msgspec

from api.errors import ApiError, invalid

_COUNT = Annotated[int, msgspec.Meta(ge=1)]
_PENALTY = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_MAX_STOPS = 16
_DIAGNOSED_BYTES = 1 << 20
"""Larger bodies that are no JSON are not searched for the field at fault."""


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What chat and text completions share. None is what an absent field means."""

    model: str | None = None
    max_tokens: _COUNT | None = None
    max_completion_tokens: _COUNT | None = None
    """The newer name; it wins."""
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    # Served by later parts; until then only values that change nothing are taken.
    n: _COUNT | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: _PENALTY | None = None
    frequency_penalty: _PENALTY | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, as a list in any case."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wanted_tokens(self) -> int | None:
        """How many tokens the client wants at most."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ContentPart(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None


class ChatBody(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    best_of: _COUNT | None = None
    suffix: str | None = None


_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "logprobs": (),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "audio": (),
    "suffix": ("",),
}
"""Fields that are known but not served yet, with the values that may be ignored because they change nothing."""

Body = TypeVar("Body", bound=GenerationBody)


def parse(raw: bytes, kind: type[Body]) -> Body:
    """A body whose fields are of their types and ranges, and served. Raises ApiError."""
    try:
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _bad_field(str(error)) from None
    except RecursionError:
        raise invalid("the body is nested too deeply", None, "invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad_json(raw, str(error)) from None
    _check_served(body)
    _check_stops(body)
    if body.seed is not None and not -(2**63) <= body.seed < 2**64:
        raise invalid("seed must be at least -2^63 and below 2^64", "seed")
    return body


def _check_served(body: GenerationBody) -> None:
    for field, harmless in _WITHOUT_EFFECT.items():
        value = getattr(body, field, None)
        if value is None or value in harmless or (field == "logprobs" and value is False):
            continue
        raise invalid(f"{field} is not supported yet", field, "unsupported_parameter")


def _check_stops(body: GenerationBody) -> None:
    if len(body.stops) > _MAX_STOPS:
        raise invalid(f"stop takes at most {_MAX_STOPS} strings, not {len(body.stops)}", "stop")
    if "" in body.stops:
        raise invalid("stop must not hold an empty string", "stop")


def _bad_field(problem: str) -> ApiError:
    """The field in "Expected `int`, got `str` - at `$.messages[0].content`"."""
    what, _, place = problem.partition(" - at `$")
    field = place.rstrip("`").lstrip(".")
    missing = re.search(r"missing required field `(\w+)`", what)
    if missing:
        field = f"{field}.{missing[1]}".lstrip(".")
        what = "it is required"
    what = what.replace(" | null`", "`")
    return invalid(f"{field or 'body'}: {what[:1].lower()}{what[1:]}", field or None)


def _bad_json(raw: bytes, problem: str) -> ApiError:
    """Names the field where the body is JSON but for a number or a string that JSON cannot carry."""
    field = _unspeakable(raw) if len(raw) <= _DIAGNOSED_BYTES else None
    if field is not None:
        return invalid(f"{field}: not a number or text that JSON can carry", field, "invalid_json")
    return invalid(f"the body is not valid JSON: {problem}", None, "invalid_json")


def _unspeakable(raw: bytes) -> str | None:
    """Where a NaN, an infinity or half of a surrogate pair stands; Python's parser lets them pass."""
    try:
        open_values: list[tuple[str, Any]] = [("", json.loads(raw))]
    except (ValueError, RecursionError):
        return None
    while open_values:
        path, value = open_values.pop()
        if isinstance(value, dict):
            if not all(map(_can_be_said, value)):
                return path or "body"
            open_values += [(f"{path}.{key}".lstrip("."), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            open_values += [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
        elif not _can_be_said(value):
            return path
    return None


def _can_be_said(value: object) -> bool:
    """Whether a number is finite and a text is Unicode."""
    if isinstance(value, float):
        return math.isfinite(value)
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True
