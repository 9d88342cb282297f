"""The bodies of OpenAI's requests: their fields and ranges, and which of them this server does not serve yet.

Owns every check that needs no model. Whatever is wrong becomes a 400 that names the field; nothing else may escape.
"""

import json
import math
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from api.errors import ApiError, invalid

_COUNT = Annotated[int, msgspec.Meta(ge=1)]
_PENALTY = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_SHARE = Annotated[float, msgspec.Meta(ge=0, le=1)]
_BIAS = Annotated[float, msgspec.Meta(ge=-100, le=100)]
_LOGPROBS = Annotated[int, msgspec.Meta(ge=0, le=20)]
_MAX_STOPS = 16
_STOP_CHARACTERS = 4096
_MAX_BIASES = 1024
_MAX_TOOLS = 128
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DIAGNOSED_BYTES = 1 << 20
"""Larger bodies that are no JSON are not searched for the field at fault."""


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's `structured_outputs`: exactly one of these, and fields that change nothing here."""

    json: str | dict[str, Any] | None = None
    """A schema, or its text."""
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class ContentPart(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Prediction(msgspec.Struct):
    """`prediction` (Predicted Outputs): a text that the answer is expected to be like. Drafted from, never shown to the
    model, and without effect on the answer.
    """

    type: Literal["content"]
    content: str | list[ContentPart]


class DraftOptions(msgspec.Struct):
    """`draft`, a field of ours: how speculation may serve this request. Without effect on the answer."""

    max: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Tokens drafted in a round at most, within the server's own limit; 0 turns drafting off."""
    sources: list[Literal["grammar", "prediction", "suffix", "draft_model", "drafter"]] | None = None
    """Which sources to draft from; all if absent."""


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
    n: Annotated[int, msgspec.Meta(ge=1, le=16)] | None = None
    top_p: _SHARE | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: _SHARE | None = None
    presence_penalty: _PENALTY | None = None
    frequency_penalty: _PENALTY | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, _BIAS] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    draft: DraftOptions | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    """Only requests with the same one share cached prompts."""
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None
    """How long it may take from its arrival to its end, in seconds."""
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] | None = None
    """As vLLM has it: of the requests that wait, those with a lower number go first."""

    @property
    def choices(self) -> int:
        """How many sequences it asks for, each of which takes a lane."""
        return self.n or 1

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


class FunctionCall(msgspec.Struct):
    """What an earlier call called; `arguments` is JSON text (or what it says)."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(msgspec.Struct):
    """One call in an assistant's message."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    """Which call a message of role `tool` answers."""


class FunctionDefinition(msgspec.Struct):
    """A function that may be called; `parameters` is the schema of an object, absent if it takes none."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDefinition(msgspec.Struct):
    """One of `tools`."""

    type: str
    function: FunctionDefinition | None = None


class ChatBody(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: _LOGPROBS | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None

    @property
    def logged(self) -> int | None:
        """How many of the likeliest tokens are shown beside each; None if none is."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def forces_calls(self) -> bool:
        """Whether the reply is to consist of calls."""
        return bool(self.tools) and self.tool_choice != "none"


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: _LOGPROBS | None = None
    best_of: _COUNT | None = None
    suffix: str | None = None

    @property
    def choices(self) -> int:
        """`n` for each prompt; a list that holds only tokens is one."""
        several = isinstance(self.prompt, list) and not all(isinstance(item, int) for item in self.prompt)
        return (self.n or 1) * (len(self.prompt) if several else 1)

    @property
    def logged(self) -> int | None:
        """How many of the likeliest tokens are shown beside each; None if none is."""
        return self.logprobs


_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "audio": (),
    "suffix": ("",),
}
"""Fields that are known but not served, with the values that may be ignored because they change nothing."""

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
    _check_biases(body)
    if body.seed is not None and not -(2**63) <= body.seed < 2**64:
        raise invalid("seed must be at least -2^63 and below 2^64", "seed")
    if isinstance(body, ChatBody):
        _check_chat(body)
    elif isinstance(body, CompletionBody):
        _check_completion(body)
    return body


def _check_served(body: GenerationBody) -> None:
    for field, harmless in _WITHOUT_EFFECT.items():
        value = getattr(body, field, None)
        if value is not None and value not in harmless:
            raise invalid(f"{field} is not supported yet", field, "unsupported_parameter")


def _check_stops(body: GenerationBody) -> None:
    if len(body.stops) > _MAX_STOPS:
        raise invalid(f"stop takes at most {_MAX_STOPS} strings, not {len(body.stops)}", "stop")
    if any(len(stop) > _STOP_CHARACTERS for stop in body.stops):
        raise invalid(f"a stop string has at most {_STOP_CHARACTERS} characters", "stop")
    if "" in body.stops:
        raise invalid("stop must not hold an empty string", "stop")


def _check_biases(body: GenerationBody) -> None:
    biases = body.logit_bias or {}
    if len(biases) > _MAX_BIASES:
        raise invalid(f"logit_bias takes at most {_MAX_BIASES} tokens, not {len(biases)}", "logit_bias")
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) < 10 and str(int(token)) == token):
            raise invalid(f"logit_bias: {token[:20]!r} is no token id in decimal digits", "logit_bias")


def _check_chat(body: ChatBody) -> None:
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    names: set[str] = set()
    for index, tool in enumerate(body.tools or ()):
        _check_tool(tool, names, f"tools[{index}]")
    if len(names) > _MAX_TOOLS:
        raise invalid(f"tools takes at most {_MAX_TOOLS} functions, not {len(names)}", "tools")
    _check_tool_choice(body.tool_choice, names)


def _check_tool(tool: ToolDefinition, names: set[str], field: str) -> None:
    """Adds the function's name to `names`."""
    if tool.type != "function":
        raise invalid(f"{field}.type must be 'function', not {tool.type!r}", f"{field}.type")
    if tool.function is None:
        raise invalid(f"{field}.function is required", f"{field}.function")
    name, parameters = tool.function.name, tool.function.parameters
    if not _TOOL_NAME.fullmatch(name):
        message = f"{field}.function.name must be 1 to 64 of letters, digits, _ and -, not {name!r}"
        raise invalid(message, f"{field}.function.name")
    if name in names:
        raise invalid(f"{field}.function.name: there are two of {name!r}", f"{field}.function.name")
    if parameters is not None and parameters.get("type", "object") != "object":
        raise invalid(f"{field}.function.parameters must be the schema of an object", f"{field}.function.parameters")
    names.add(name)


def _check_tool_choice(choice: str | dict[str, Any] | None, names: set[str]) -> None:
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise invalid('tool_choice must be {"type": "function", "function": {"name": ...}}', "tool_choice")
        if name not in names:
            raise invalid(f"tool_choice: there is no function {name!r} in tools", "tool_choice")
    elif choice not in (None, "none", "auto", "required"):
        raise invalid(f"tool_choice must be 'none', 'required' or a function, not {choice!r}", "tool_choice")
    elif names and choice in (None, "auto"):
        message = "tool_choice 'auto' is not supported yet; with tools it must be 'none', 'required' or a function"
        raise invalid(message, "tool_choice", "unsupported_parameter")
    elif choice == "required" and not names:
        raise invalid("tool_choice 'required' needs tools", "tool_choice")


def _check_completion(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of is served only where it equals n", "best_of", "unsupported_parameter")
    if body.echo and body.logprobs is not None:
        raise invalid("echo with logprobs is not supported yet", "echo", "unsupported_parameter")


def _bad_field(problem: str) -> ApiError:
    """The field in "Expected `int`, got `str` - at `$.messages[0].content`". A key of a mapping is shown as `[...]`
    there; the mapping is named instead.
    """
    what, _, place = problem.partition(" - at `$")
    field = place.rstrip("`").lstrip(".").partition("[...]")[0]
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
            open_values += [(_inside(path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            open_values += [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
        elif not _can_be_said(value):
            return path or "body"
    return None


def _inside(path: str, key: str) -> str:
    """The path of a field; of a key that is no plain word, the path of what it stands in."""
    return f"{path}.{key}".lstrip(".") if _PLAIN_KEY.fullmatch(key) else path


def _can_be_said(value: object) -> bool:
    """Whether a number is finite and a text is Unicode."""
    if isinstance(value, float):
        return math.isfinite(value)
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True
