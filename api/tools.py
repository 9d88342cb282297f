"""Calls of functions as models write them: which form a chat template teaches, the constraint that forces it, and calls
out of the text again.

A form is chosen by what the template says:

- *Hermes* (Qwen, Hermes, SmolLM3, ...): `<tool_call>`, `{"name": ..., "arguments": {...}}` and `</tool_call>`, each on
  a line, for each call.
- *Mistral*: the control token `[TOOL_CALLS]`, which becomes part of the prompt, then a JSON array of
  `{"name": ..., "arguments": {...}}`.
- *Llama*: `{"name": ..., "parameters": {...}}`, one call at most.
- *Lines*, for every other template, known to it or not: `{"name": ..., "arguments": {...}}`, one call a line. The
  functions are described in a system message of our own, earlier calls and results are shown as text.

Knows conversations as templates take them and the text of structural tags; must not know HTTP, tokens or the engine.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from api.text import ToolObject, Turn
from backends.grammar.spec import ConstraintSpec, SpecKind


class Tool(msgspec.Struct, frozen=True):
    """A function that may be called. `parameters` is the JSON schema of its arguments, an object."""

    name: str
    """Of letters, digits, `_` and `-`."""
    description: str | None
    parameters: dict[str, Any]


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a reply that consists of calls is written: `begin`, calls with `separator` between them, `end`; and each call
    as `open`, its name, `middle`, its arguments as a JSON object, `close`.
    """

    open: str
    middle: str
    close: str
    separator: str
    begin: str = ""
    end: str = ""
    prime: str = ""
    """What is put behind the prompt: a control token, which is the same whatever is called, and no grammar allows."""
    several: bool = True
    """Whether a reply may hold more than one call."""
    native: bool = True
    """Whether the template shows functions, earlier calls and results in its own way."""
    id_length: int = 24
    """How many letters and digits an id has behind its prefix."""
    id_prefix: str = "call_"


HERMES = ToolFormat(open='<tool_call>\n{"name": "', middle='", "arguments": ', close="}\n</tool_call>", separator="\n")
MISTRAL = ToolFormat(
    prime="[TOOL_CALLS]",
    begin="[",
    open='{"name": "',
    middle='", "arguments": ',
    close="}",
    separator=", ",
    end="]",
    id_prefix="",
    id_length=9,  # its templates refuse others
)
LLAMA = ToolFormat(open='{"name": "', middle='", "parameters": ', close="}", separator="\n", several=False)
LINES = ToolFormat(open='{"name": "', middle='", "arguments": ', close="}", separator="\n", native=False)


def format_of(template: str) -> ToolFormat:
    """The form that a chat template teaches."""
    if "<tool_call>" in template and '"arguments' in template and "<function=" not in template:
        return HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template and "[CALL_ID]" not in template:
        return MISTRAL
    if '"parameters": ' in template and "tool_calls" in template and "<|start_header_id|>" in template:
        return LLAMA
    return LINES


# ---- the prompt -----------------------------------------------------------------------------------------------------


def tool_objects(tools: Sequence[Tool]) -> list[ToolObject]:
    """As templates take them."""
    return [{"type": "function", "function": _described(tool)} for tool in tools]


def _described(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters}


def plain_turns(turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Turn]:
    """A conversation for a template that knows nothing of functions: `tools` described in its system turn, calls in the
    form that they are asked for, results as what the user says.
    """
    told: list[dict[str, Any]] = [{"role": "system", "content": _describe(tools)}] if tools else []
    for place, turn in enumerate(turns):
        role, content = turn["role"], turn["content"]
        if role == "tool":
            name = turn.get("name")
            content = f"Result of {name}: {content}" if name else f"Result: {content}"
            if told and told[-1].get("results"):
                told[-1]["content"] += f"\n{content}"
                continue
            told.append({"role": "user", "content": content, "results": True})
        elif tools and place == 0 and role in ("system", "developer"):
            told[0]["content"] = f"{content}\n\n{told[0]['content']}"
        else:
            calls = [_line(call["function"]) for call in turn.get("tool_calls", ())]
            told.append({"role": role, "content": "\n".join([content, *calls] if content else calls or [content])})
    return [{"role": turn["role"], "content": turn["content"]} for turn in told]


def _line(call: dict[str, Any]) -> str:
    """As the grammar writes it, so that a reply reads the same when it comes back."""
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return f"{LINES.open}{call['name']}{LINES.middle}{arguments}{LINES.close}"


def _describe(tools: Sequence[Tool]) -> str:
    lines = "\n".join(msgspec.json.encode(_described(tool)).decode() for tool in tools)
    example = f"{LINES.open}<name>{LINES.middle}<object>{LINES.close}"
    return f"These functions are at hand, one a line:\n{lines}\nAnswer with calls only, one a line, each as {example}"


# ---- the constraint -------------------------------------------------------------------------------------------------


def calls_constraint(form: ToolFormat, tools: Sequence[Tool], *, several: bool) -> ConstraintSpec:
    """A reply that consists of calls of these functions: one, or one and more if `several` and the form has room."""
    tags = [
        {
            "type": "tag",
            "begin": f"{form.open}{tool.name}{form.middle}",
            "content": {"type": "json_schema", "json_schema": tool.parameters},
            "end": form.close,
        }
        for tool in tools
    ]
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not (several and form.several),
    }
    edges = [{"type": "const_string", "value": edge} for edge in (form.begin, form.end) if edge]
    whole = {"type": "sequence", "elements": [edges[0], calls, edges[1]]} if edges else calls
    text = msgspec.json.encode({"type": "structural_tag", "format": whole}).decode()
    return ConstraintSpec(SpecKind.STRUCTURAL_TAG, text)


# ---- the reply ------------------------------------------------------------------------------------------------------


class CallPiece(msgspec.Struct, frozen=True):
    """More of call number `index`: the first piece of each has its name and no arguments yet."""

    index: int
    name: str | None
    arguments: str


class CallSplitter:
    """Calls out of a reply's text as it comes. However the text is cut, each call's joined arguments are the same."""

    def __init__(self, form: ToolFormat) -> None:
        self._head = re.compile(re.escape(form.open) + r"([A-Za-z0-9_-]+)" + re.escape(form.middle))
        self._between = ""
        """Text since the last call."""
        self._calls = 0
        self._depth = 0
        self._in_arguments = False
        self._in_string = False
        self._escaped = False

    @property
    def complete(self) -> bool:
        """There is a call, and the last one's arguments are closed."""
        return self._calls > 0 and not self._in_arguments

    def push(self, text: str) -> list[CallPiece]:
        """What the text adds to the calls."""
        return list(self._pieces(text))

    def _pieces(self, text: str) -> Iterator[CallPiece]:
        while text:
            if self._in_arguments:
                length = self._length_of_arguments(text)
                yield CallPiece(self._calls - 1, None, text[:length])
                text = text[length:]
                continue
            self._between += text
            head = self._head.search(self._between)
            if head is None:
                return
            yield CallPiece(self._calls, head[1], "")
            self._calls += 1
            self._in_arguments = True
            text, self._between = self._between[head.end() :], ""

    def _length_of_arguments(self, text: str) -> int:
        """How much of the text belongs to the arguments being read; notices their end."""
        for place, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._in_arguments = False
                    return place + 1
        return len(text)
