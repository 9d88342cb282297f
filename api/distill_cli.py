"""`paceline distill`: trains a drafter for a model on the model's own words.

Owns the words. What is asked is in `distill_prompts`, what is done with it in `backends.mlx.distill`.
"""

import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from api.distill_prompts import PromptFileError, digest_of, encoded, opening_of, read_prompts, refuse_too_long
from api.progress import display_on
from api.training_prompts import Asked, training_prompts
from backends.mlx.runtime import BlasChoice, DtypePolicy, describe_device, load_blas, set_blas_threads

if TYPE_CHECKING:
    from backends.mlx.distill.collect import Text
    from backends.mlx.distill.train import Trained

_SHOWN_S = 10.0


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
    started, start = (None, None) if told.start is None else subject.started(told.start)
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
    opening = opening_of(tokenizer) if made_up else None
    own = subject.header((), "")
    run = Distillation(
        told.folder or told.home / "distill" / name,
        plan,
        f"{own.target} {own.tokenizer} {digest_of([*encoded(tokenizer, asked, told.seed)], opening)}",
    )
    shown = Shown(console)
    if opening is not None:
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
