"""Calls as models write them: found wherever their text is cut, asked for and shown in the template's own way."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.text import FolderTokenizer
from api.tools import (
    HERMES,
    LINES,
    LLAMA,
    MISTRAL,
    CallSplitter,
    Tool,
    ToolFormat,
    calls_constraint,
    format_of,
    plain_turns,
    tool_objects,
)
from backends.grammar.spec import SpecKind
from tests.api.tokenizers_at_hand import write_folder

FORMATS = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA, "lines": LINES}
WEATHER = Tool("weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
CLOCK = Tool("clock", None, {"type": "object", "properties": {}})

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(alphabet='aé🦄"\\{}[]<>\n:, ', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='a"}{', max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(
        st.from_regex(r"[a-zA-Z0-9_-]{1,8}", fullmatch=True),
        st.dictionaries(st.text(alphabet='ab"\\}{', max_size=4), VALUES, max_size=3).map(
            lambda value: json.dumps(value, ensure_ascii=False)
        ),
    ),
    min_size=1,
    max_size=4,
)


def written(form: ToolFormat, calls: list[tuple[str, str]]) -> str:
    """A reply of these calls, of names and arguments in JSON."""
    each = [f"{form.open}{name}{form.middle}{arguments}{form.close}" for name, arguments in calls]
    return form.begin + form.separator.join(each) + form.end


def read(form: ToolFormat, pieces: list[str]) -> tuple[list[tuple[str, str]], bool]:
    """The calls that a splitter finds; a name comes once, first, and without arguments."""
    splitter = CallSplitter(form)
    names: list[str] = []
    arguments: list[str] = []
    for piece in pieces:
        for found in splitter.push(piece):
            if found.name is not None:
                assert (found.index, found.arguments) == (len(names), "")
                names.append(found.name)
                arguments.append("")
            else:
                assert found.arguments
                assert found.index == len(names) - 1
                arguments[-1] += found.arguments
    return list(zip(names, arguments, strict=True)), splitter.complete


@given(st.sampled_from(sorted(FORMATS)), CALLS, st.lists(st.integers(0, 400), max_size=40))
def test_wherever_the_text_is_cut_the_calls_are_the_same(
    name: str, calls: list[tuple[str, str]], cuts: list[int]
) -> None:
    form = FORMATS[name]
    text = written(form, calls)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert read(form, [text[start:end] for start, end in pairwise(edges)]) == (calls, True)


@given(st.sampled_from(sorted(FORMATS)), CALLS, st.data())
def test_a_reply_cut_short_has_the_calls_as_far_as_they_came(
    name: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    form = FORMATS[name]
    text = written(form, calls)
    length = data.draw(st.integers(0, len(text)))
    found, complete = read(form, [text[:length]])
    whole = found if complete or not found else found[:-1]
    assert whole == calls[: len(whole)]
    if found and not complete:
        called, arguments = found[-1]
        assert called == calls[len(whole)][0]
        assert calls[len(whole)][1].startswith(arguments)
        assert arguments != calls[len(whole)][1]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_every_character_by_itself(form: ToolFormat) -> None:
    calls = [("weather", '{"city": "Køln \\"}{🦄", "n": [{"a": "\\\\"}]}'), ("clock", "{}")]
    assert read(form, list(written(form, calls))) == (calls, True)


# ---- the constraint


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_the_constraint_writes_what_the_splitter_reads(form: ToolFormat, several: bool) -> None:
    spec = calls_constraint(form, [WEATHER, CLOCK], several=several)
    assert spec.kind is SpecKind.STRUCTURAL_TAG
    tag = json.loads(spec.text)["format"]
    if form is MISTRAL:
        assert [edge["value"] for edge in (tag["elements"][0], tag["elements"][2])] == ["[", "]"]
        tag = tag["elements"][1]
    assert tag["at_least_one"]
    assert tag["stop_after_first"] is not (several and form is not LLAMA)
    assert [one["content"]["json_schema"] for one in tag["tags"]] == [WEATHER.parameters, CLOCK.parameters]
    called = [one["begin"] + "{}" + one["end"] for one in tag["tags"]]
    assert read(form, [form.begin + tag["separator"].join(called) + form.end]) == (
        [("weather", "{}"), ("clock", "{}")],
        True,
    )


# ---- the prompt

QWEN = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools> "
    'answer in <tool_call>{"name": <name>, "arguments": <object>}</tool_call>\n{% endif %}'
    "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}"
    "{% for call in turn.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("", LINES),
        ("{{ messages }}", LINES),
        (QWEN, HERMES),
        (r'"\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"', HERMES),
        ("<tool_call>\n<function=example>\n<parameter=x>", LINES),
        ('<tool_call>\n<function=example>\n{{ call["arguments"] }}', LINES),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", LINES),
        ('{{ "[TOOL_CALLS] [" }}{{ "[AVAILABLE_TOOLS]" }}', MISTRAL),
        ('{{ "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}', LINES),
        ('<|start_header_id|> {{ message.tool_calls }} \'{"name": "\' \'"parameters": \'', LLAMA),
    ],
)
def test_the_form_is_what_the_template_teaches(template: str, form: ToolFormat) -> None:
    assert format_of(template) is form


def test_a_template_that_knows_functions_shows_them_in_its_own_way(tmp_path: Path) -> None:
    tokenizer = FolderTokenizer(write_folder(tmp_path, template=QWEN))
    assert format_of(tokenizer.template) is HERMES
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1", "name": "weather"},
    ]
    text = tokenizer.render(turns, {}, tool_objects([WEATHER]))
    assert '"name": "weather"' in text
    assert '<tool_call>weather {"city": "Rome"}</tool_call>tool: sunny' in text
    assert "<tools>" not in tokenizer.render(turns, {})


def test_of_named_templates_the_one_for_tools_is_looked_at(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": QWEN}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = FolderTokenizer(folder)
    assert format_of(tokenizer.template) is HERMES
    assert tokenizer.render([{"role": "user", "content": "x"}], {}) == "plain"
    assert "<tools>" in tokenizer.render([{"role": "user", "content": "x"}], {}, tool_objects([WEATHER]))


def test_any_other_template_gets_them_as_text() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1", "name": "weather"},
        {"role": "tool", "content": "rain", "tool_call_id": "2"},
        {"role": "assistant", "content": "well", "tool_calls": [call]},
    ]
    system, *rest = plain_turns(turns, [WEATHER, CLOCK])
    assert system["role"] == "system"
    assert system["content"].startswith("be brief\n\n")
    for tool in (WEATHER, CLOCK):
        assert f'"name":"{tool.name}"' in system["content"]
    line = '{"name": "weather", "arguments": {"city": "Rome"}}'
    assert rest == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": f"{line}\n{line}"},
        {"role": "user", "content": "Result of weather: sunny\nResult: rain"},
        {"role": "assistant", "content": f"well\n{line}"},
    ]


def test_without_tools_and_calls_a_conversation_stays_as_it_is() -> None:
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    assert plain_turns(turns, []) == turns
    assert plain_turns(turns[1:], [CLOCK])[1:] == turns[1:]
