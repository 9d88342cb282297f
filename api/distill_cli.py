"""`paceline distill`: trains a drafter for a model on the model's own words.

Owns the words, the files of prompts, and how prompts become tokens. What is done with them is in
`backends.mlx.distill`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from api.progress import display_on
from api.text import TemplateError
from api.training_prompts import Asked, training_prompts
from backends.mlx.runtime import BlasChoice, DtypePolicy, describe_device, load_blas, set_blas_threads
from scheduler.request import Sampling

if TYPE_CHECKING:
    from api.text import Tokenizer
    from backends.mlx.distill.asking import Opening
    from backends.mlx.distill.collect import Prompt, Text
    from backends.mlx.distill.train import Trained
    from backends.mlx.drafts.files import Arrays, DrafterHeader

_TEMPERATURES = (0.0, 0.5, 0.0, 1.0)
"""How the answers are drawn, prompt by prompt."""
_SHOWN_S = 10.0
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


def distill(
    model: Annotated[str, typer.Argument(help="Installed name, folder, or hub repository.")],
    prompts: Annotated[
        Path | None, typer.Option(help="One prompt a line: JSON with prompt, turns or messages, or text; else our own.")
    ] = None,
    count: Annotated[int, typer.Option(min=8, help="Prompts to answer.")] = 4096,
    self_asked: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="The share of the prompts that the model makes up; 0.5, or 0 beside --prompts."
        ),
    ] = None,
    answer: Annotated[int, typer.Option(min=4, help="Tokens of an answer at most.")] = 112,
    lanes: Annotated[int, typer.Option(min=1, help="Prompts answered at once.")] = 96,
    drafted: Annotated[int, typer.Option(min=16, help="Tokens that can be drafted, the most frequent ones.")] = 8192,
    start: Annotated[
        Path | None, typer.Option(help="The file of a drafter that training goes on from; else it begins by chance.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often each text is trained on.")] = 3,
    steps: Annotated[int, typer.Option(min=1, max=8, help="How deep drafts are trained to be.")] = 3,
    rate: Annotated[float, typer.Option(min=1e-6, help="The highest learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is left to chance.")] = 0,
    folder: Annotated[
        Path | None, typer.Option(help="Where texts and checkpoints go; a run that was stopped goes on there.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The drafter's file; by default where `serve` finds it.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="BLAS threads; with a busy neighbour 1 can be the fastest.")
    ] = None,
    dtype: DtypePolicy = "auto",
    blas: BlasChoice = "auto",
) -> None:
    """Train a drafter for MODEL on its own answers, so that `serve` drafts with it."""
    from api.cli import home_folder

    console = Console()
    told = _Told(
        model=model,
        home=home_folder(),
        prompts=prompts,
        count=count,
        self_asked=self_asked if self_asked is not None else 0.5 * (prompts is None),
        answer=answer,
        lanes=lanes,
        drafted=drafted,
        start=start,
        epochs=epochs,
        steps=steps,
        rate=rate,
        seed=seed,
        folder=folder,
        out=out,
    )
    if load_blas(blas).name == "openblas" and threads is not None:
        set_blas_threads(threads)
    try:
        _run(told, dtype, console)
    except (RuntimeError, OSError, ValueError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here", highlight=False)
        raise typer.Exit(130) from None


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """The flags."""

    model: str
    home: Path
    prompts: Path | None
    count: int
    self_asked: float
    answer: int
    lanes: int
    drafted: int
    start: Path | None
    epochs: int
    steps: int
    rate: float
    seed: int
    folder: Path | None
    out: Path | None


def _run(told: _Told, dtype: DtypePolicy, console: Console) -> None:
    from api.text import FolderTokenizer
    from backends.mlx.distill.distillation import Distillation, DistillPlan
    from backends.mlx.distill.subject import load_subject
    from backends.mlx.distill.train import Schedule

    source = read_prompts(told.prompts) if told.prompts is not None else training_prompts(told.seed)
    made_up = round(told.count * told.self_asked)
    asked = list(islice(source, told.count - made_up))
    if not asked and not made_up:
        raise PromptFileError(f"{told.prompts}: there are no prompts")
    with closing(display_on(console)) as display:
        subject = load_subject(told.model, told.home, dtype, display, describe_device().kind)
    own = subject.header((), "")
    started, start = (None, None) if told.start is None else load_start(told.start, own)
    plan = DistillPlan(
        shape=subject.shape,
        seed=told.seed,
        prompts=len(asked) + made_up,
        self_asked=made_up,
        answer=told.answer,
        lanes=told.lanes,
        drafted=min(told.drafted, subject.parts.vocabulary),
        start="" if started is None else started.checksum,
        schedule=Schedule(epochs=told.epochs, steps=told.steps, rate=told.rate),
    )
    name = subject.loaded.name.replace("/", "--")
    tokenizer = FolderTokenizer(subject.loaded.folder)
    opening = opening_of(tokenizer)
    run = Distillation(
        told.folder or told.home / "distill" / name,
        plan,
        f"{own.target} {own.tokenizer} {digest_of([*encoded(tokenizer, asked, told.seed)], opening)}",
    )
    shown = Shown(console)
    if made_up:
        questions = run.questions(subject.backend, opening, shown.asked(made_up))
        asked += [Asked(tokenizer.decode(question).strip()) for question in questions]
        Random(told.seed).shuffle(asked)  # noqa: S311 (nothing is kept secret by it)
    prompts = list(encoded(tokenizer, asked, told.seed))
    refuse_too_long(prompts, told.answer, subject.loaded.context_length)
    run.collect(subject.backend, prompts, shown.collected(len(asked)))
    made = run.train(subject.parts, shown.trained, start=start)
    trained = f"{made.positions} tokens of {len(asked)} answers, {told.epochs} epochs, seed {told.seed}"
    if started is not None:
        trained += f"; before that {started.trained}"
    file = told.out or told.home / "drafters" / f"{name}.safetensors"
    made.save(file, subject.header(made.acceptance, trained))
    shares = ", ".join(f"{share:.3f}" for share in made.acceptance)
    console.print(
        f"held out: acceptance by position {shares}; {made.covered:.1%} of the tokens can be drafted",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"the drafter is in {file}", highlight=False, soft_wrap=True)


def load_start(file: Path, own: "DrafterHeader") -> "tuple[DrafterHeader, Arrays]":
    """A drafter of the same target, with the measures that a new one would have. Raises DrafterError."""
    from backends.mlx.drafts.files import DrafterError, load_drafter

    header, arrays = load_drafter(file)
    if (header.target, header.tokenizer) != (own.target, own.tokenizer):
        raise DrafterError(
            f"the drafter {file} was made for {header.target_name} as it was, and not for {own.target_name}"
        )
    if (header.kind, header.shape) != (own.kind, own.shape):
        raise DrafterError(f"the drafter {file} has other measures than a new one for {own.target_name}")
    return header, arrays


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


def digest_of(prompts: "Sequence[Prompt]", opening: "Opening") -> str:
    """Tells these prompts, and those that are made up behind this opening, from all others."""
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


class Shown:
    """Lines that say how far it has come. Written by the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()
        self._due = 0.0

    def asked(self, wanted: int) -> "Callable[[tuple[int, ...]], None]":
        """To be told of every question that was made up."""
        made = 0

        def told(_: tuple[int, ...]) -> None:
            nonlocal made
            made += 1
            if self._is_due():
                self._say(f"ask: {made} of {wanted} questions made up")

        return told

    def collected(self, prompts: int) -> "Callable[[int, Text], None]":
        """To be told of every text."""
        texts = tokens = 0
        begun = time.monotonic()

        def told(_: int, text: "Text") -> None:
            nonlocal texts, tokens
            texts += 1
            tokens += len(text.tokens) - text.prompt
            if self._is_due():
                speed = tokens / (time.monotonic() - begun)
                self._say(f"collect: {texts} answers of {prompts} in this run, {speed:.0f} tokens/s")

        return told

    def trained(self, update: "Trained") -> None:
        """To be told of every update."""
        if self._is_due() or update.done == update.total:
            losses = " ".join(f"{loss:.2f}" for loss in update.losses)
            agreed = " ".join(f"{share:.2f}" for share in update.agreed)
            self._say(f"train: update {update.done} of {update.total}, loss by position {losses}, agreement {agreed}")

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + _SHOWN_S
        return True

    def _say(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._begun:6.0f} s  {text}", highlight=False, soft_wrap=True)
