"""What `paceline distill` asks: lines of a file, the opening behind which a model asks itself, and how all that becomes
tokens, by the model's own template.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from api.text import TemplateError
from api.training_prompts import Asked
from scheduler.request import Sampling

if TYPE_CHECKING:
    from api.text import Tokenizer
    from backends.mlx.distill.asking import Opening
    from backends.mlx.distill.collect import Prompt

_TEMPERATURES = (0.0, 0.5, 0.0, 1.0)
"""How the answers are drawn, prompt by prompt."""
_SAID = "What-a-user-says"


class PromptFileError(ValueError):
    """A line of a file with prompts that cannot be used."""


class _Message(msgspec.Struct):
    role: str
    content: str


class _Line(msgspec.Struct):
    """A text, the first of a user's turns, or a whole conversation."""

    prompt: str | None = None
    turns: list[str] = []
    messages: list[_Message] = []


def refuse_too_long(prompts: "Sequence[Prompt]", answer: int, context: int) -> None:
    """Raise PromptFileError for a prompt that is empty, or leaves no room for an answer of so many tokens."""
    for number, prompt in enumerate(prompts, start=1):
        length = len(prompt.tokens)
        if not 0 < length <= context - answer:
            raise PromptFileError(
                f"prompt {number} has {length} tokens, beside an answer of {answer} in a context of {context}"
            )


def opening_of(tokenizer: "Tokenizer") -> "Opening":
    """Where a user's turn begins and how it ends, by the model's template. Raises TemplateError."""
    from backends.mlx.distill.asking import Opening

    before, said, behind = tokenizer.render([{"role": "user", "content": _SAID}], {}).partition(_SAID)
    if not said:
        raise TemplateError("the model's chat template does not show what a user says")
    ends = tokenizer.encode(behind, special=False)[:1]
    return Opening(tuple(tokenizer.encode(before.rstrip(" "), special=False)), frozenset(ends))


def digest_of(prompts: "Sequence[Prompt]", opening: "Opening | None") -> str:
    """Tells these prompts, and those that are made up behind this opening, if any are, from all others."""
    return blake2b(msgspec.json.encode((prompts, opening)), digest_size=16).hexdigest()


def read_prompts(file: Path) -> Iterator[Asked]:
    """Raises PromptFileError and OSError."""
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if line.startswith("{"):
            try:
                told = msgspec.json.decode(line, type=_Line)
            except msgspec.DecodeError as error:
                raise PromptFileError(f"{file}, line {number}: {error}") from None
            yield _asked(told, f"{file}, line {number}")
        elif line.strip():
            yield Asked(line.strip())


def _asked(told: _Line, where: str) -> Asked:
    if told.messages:
        spoken = [message.content for message in told.messages if message.role == "user"]
        system = [message.content for message in told.messages if message.role == "system"]
    else:
        spoken, system = [told.prompt or "", *told.turns], []
    user = next((text for text in spoken if text), "")
    if not user:
        raise PromptFileError(f"{where}: nothing is asked")
    return Asked(user, system[0] if system else "")


def encoded(tokenizer: "Tokenizer", asked: Sequence[Asked], seed: int) -> "Iterator[Prompt]":
    """As the model's template has it; every second is answered greedily, the others more or less by chance."""
    from backends.mlx.distill.collect import Prompt

    for place, each in enumerate(asked):
        turns = [{"role": "system", "content": each.system}] if each.system else []
        text = tokenizer.render([*turns, {"role": "user", "content": each.user}], {})
        sampling = Sampling(temperature=_TEMPERATURES[place % 4], seed=seed + place)
        yield Prompt(tuple(tokenizer.encode(text, special=False)), sampling)
