"""The prompts of the benchmarks: our own texts (`texts`), or a file of the user's.

A run draws its prompts with `draw`, which opens each with a system message of its own, so that no server answers out
of its prefix cache what another one has to compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from deploy.bench.texts import EDITS, ORDINARY, PASSAGES, ROLES, TASK_WORDS, TASKS

_SHORT = 54
"""Tokens of an ordinary answer beside copying ones."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks. `name` tells it apart in reports."""

    name: str
    messages: tuple[Message, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What its body holds besides."""

    @property
    def text(self) -> str:
        """The same as plain text, for the text-completion route."""
        return "\n\n".join(message.content for message in self.messages)

    @property
    def max_tokens(self) -> int | None:
        """Its own limit; None for that of the run."""
        limit = self.fields.get("max_tokens")
        return None if limit is None else int(limit)

    @property
    def expected(self) -> str:
        """The text of its `prediction`; empty without one."""
        return str(self.fields.get("prediction", {}).get("content", ""))

    @property
    def sources(self) -> tuple[str, ...] | None:
        """The draft sources that it allows; None for all."""
        named = self.fields.get("draft", {}).get("sources")
        return None if named is None else tuple(named)


class PromptFileError(Exception):
    """A line of a prompt file cannot be used."""


class _MessageLine(msgspec.Struct):
    role: str
    content: str


class _Line(msgspec.Struct):
    """A text, or a whole chat, or the user's turns (the first is asked; the others answer a reply not yet given)."""

    id: int | str | None = None
    prompt: str | None = None
    turns: list[str] = []
    messages: list[_MessageLine] = []


def _user(name: str, content: str) -> Prompt:
    return Prompt(name, (Message("user", content),))


_REPEAT = "Repeat the following text exactly, word for word, and add nothing of your own.\n\n"


def ordinary_prompts() -> tuple[Prompt, ...]:
    """Writing, reasoning, code and questions; 20 to 200 tokens each; long answers."""
    return tuple(_user(f"ordinary-{number}", text) for number, text in enumerate(ORDINARY, start=1))


def copying_prompts() -> tuple[Prompt, ...]:
    """Each asks for a passage of about 120 tokens, word for word. No passage repeats itself."""
    return tuple(_user(f"copying-{number}", _REPEAT + passage) for number, passage in enumerate(PASSAGES, start=1))


def editing_prompts() -> tuple[Prompt, ...]:
    """Each asks for a passage, and expects it as it was before an edit: with another word, and without its fourth
    sentence. A small model that is told to edit writes something else, so the edit stands in the passage already;
    only the prediction is drafted from, as copying from the prompt would say nothing of it.
    """
    return tuple(
        replace(
            _user(f"editing-{number}", _REPEAT + passage.replace(edit.old, edit.new)),
            fields={
                "prediction": {"type": "content", "content": _without_fourth_sentence(passage)},
                "draft": {"sources": ["prediction"]},
            },
        )
        for number, (passage, edit) in enumerate(zip(PASSAGES, EDITS, strict=True), start=1)
    )


def _without_fourth_sentence(passage: str) -> str:
    sentences = passage.split(". ")
    return ". ".join(sentences[:3] + sentences[4:])


def roleplay_prompts() -> tuple[Prompt, ...]:
    """Each gives the model a part to play, and says the first line to it."""
    return tuple(
        Prompt(f"roleplay-{number}", (Message("system", part), Message("user", line)))
        for number, (part, line) in enumerate(ROLES, start=1)
    )


def mixed_prompts() -> tuple[Prompt, ...]:
    """Copying and ordinary ones in turn. Answers to ordinary ones are shorter: else theirs alone would say how long a
    run takes, whatever the copying lanes gain.
    """
    copying = copying_prompts()
    return tuple(
        prompt
        for place, ordinary in enumerate(ordinary_prompts())
        for prompt in (copying[place % len(copying)], replace(ordinary, fields={"max_tokens": _SHORT}))
    )


def agent_prompts() -> tuple[Prompt, ...]:
    """Task after task of one shape with new values, a row of each shape. No prompt holds anything to copy an
    answer from, and only earlier answers are drafted from.
    """
    return tuple(
        Prompt(
            f"agents-{shape}-{turn}",
            (Message("user", task.format(words)),),
            {"draft": {"sources": ["suffix"]}},
        )
        for shape, task in enumerate(TASKS, start=1)
        for turn, words in enumerate(TASK_WORDS, start=1)
    )


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a JSON-lines file. Raises PromptFileError, naming the line, for one that cannot be used."""
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt_of_line(msgspec.json.decode(line, type=_Line), number))
        except (msgspec.DecodeError, ValueError) as error:
            raise PromptFileError(f"{path.name}, line {number}: {error}") from error
    if not prompts:
        raise PromptFileError(f"{path.name} holds no prompt")
    return tuple(prompts)


def _prompt_of_line(line: _Line, number: int) -> Prompt:
    name = str(line.id if line.id is not None else number)
    if line.messages:
        return Prompt(name, tuple(Message(message.role, message.content) for message in line.messages))
    content = line.prompt or (line.turns[0] if line.turns else "")
    if not content:
        raise ValueError('want "prompt", "turns" or "messages", not empty')
    return _user(name, content)


def draw(prompts: Sequence[Prompt], count: int, *, start: int, label: str) -> tuple[Prompt, ...]:
    """`count` prompts from position `start` on, round and round, each opened by words that no other run has.

    `label` names the run; two sides of a comparison are given the same one and so the same prompts.
    """
    drawn = (prompts[(start + index) % len(prompts)] for index in range(count))
    return tuple(_opened_by(f"Session {label}-{index}.", prompt) for index, prompt in enumerate(drawn))


def _opened_by(words: str, prompt: Prompt) -> Prompt:
    """The words go into the system message: a small model that finds them in the user's would repeat them."""
    first, *rest = prompt.messages
    if first.role == "system":
        return replace(prompt, messages=(Message("system", f"{words} {first.content}"), *rest))
    return replace(prompt, messages=(Message("system", f"{words} You are a helpful assistant."), first, *rest))
