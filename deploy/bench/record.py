"""`record`: serves prompts once, without drafts, in process, and writes what came and what it cost for `replay`.

A sweep of rounds of many sizes, plain and wide, follows, so that `replay` knows what drafts would have cost. MLX is
imported by the command only, after OpenBLAS.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.bench.options import Model, say, warn_if_busy
from deploy.bench.prompts import Prompt, draw
from deploy.bench.recording import LaneRecord, Recording, RoundRecord, write_recording
from deploy.bench.scenarios import SCENARIOS, scenario_named
from engine.config import EngineConfig
from engine.loop import Loop
from engine.messages import Message, Submit
from scheduler.cost import RoundShape
from scheduler.events import Finished, Tokens
from scheduler.pace import Pace
from scheduler.request import Request, Sampling
from scheduler.round import Window, shape_of

if TYPE_CHECKING:
    from api.text import Tokenizer
    from backends.base import Backend

SWEEP = tuple((lanes, drafts) for lanes in (1, 2, 4, 8, 16, 32) for drafts in (0, 1, 3, 7) if lanes * drafts <= 128)
"""Lanes, and drafts of each, of the rounds that are run to learn their price."""
_SHORT, _LONG = 160, 480
"""Tokens that lanes of the sweep hold: two lengths, so that the price of attention shows."""
_LONG_LANES = 8
"""So many lanes are long ones, too."""
_REPEATS = 5
_GREEDY = Sampling(temperature=0.0)


class TimedPace(Pace):
    """A planner that also keeps every round it is told of. Written by the scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[RoundRecord] = []

    def timed(self, shape: RoundShape, seconds: float) -> None:
        """A round took so long."""
        self.rounds.append(RoundRecord(shape, seconds))
        super().timed(shape, seconds)


def record(
    model: Model,
    out: Annotated[Path, typer.Option(dir_okay=False, help="The file to write.")],
    scenario: Annotated[str, typer.Option(help=f"Of {', '.join(each.name for each in SCENARIOS)}.")] = "mixed",
    clients: Annotated[int, typer.Option(min=1, help="How many at a time.")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="How many in all.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
) -> None:
    """Record rounds and texts for `replay`."""
    warn_if_busy()
    try:
        prompts = scenario_named(scenario).prompts()
    except KeyError:
        say(f"record: there is no scenario {scenario!r}")
        raise typer.Exit(2) from None
    backend, tokenizer = _load(str(model))
    drawn = draw(prompts, requests, start=0, label="record")
    recording = serve(backend, tokenizer, drawn, clients, max_tokens)
    write_recording(out, Recording(clients, recording.lanes, (*recording.rounds, *sweep(backend))))
    tokens = sum(len(lane.output) for lane in recording.lanes)
    say(f"{out}: {tokens} tokens of {len(recording.lanes)} requests in {len(recording.rounds)} rounds")


def _load(reference: str) -> "tuple[Backend, Tokenizer]":
    from backends.mlx.runtime import load_blas

    load_blas()
    from api.text import load_tokenizer
    from backends.mlx.build import load_backend

    backend = load_backend(reference, Path(), "auto", lambda _stage, _done, _total: None, "bench")
    return backend, load_tokenizer(backend.info)


def serve(
    backend: "Backend", tokenizer: "Tokenizer", prompts: Sequence[Prompt], clients: int, max_tokens: int
) -> Recording:
    """Answer the prompts greedily without drafts, `clients` at a time."""
    asked = {str(place): prompt for place, prompt in enumerate(prompts)}
    tokens_of = {name: _tokens(tokenizer, prompt) for name, prompt in asked.items()}
    requests = deque(
        Request(name, tokens_of[name], prompt.max_tokens or max_tokens, _GREEDY, backend.info.eos_tokens)
        for name, prompt in asked.items()
    )
    outputs: dict[str, list[int]] = {name: [] for name in asked}
    mail: deque[Message] = deque(Submit(requests.popleft()) for _ in range(min(clients, len(requests))))
    pace = TimedPace()
    loop = Loop(
        backend,
        EngineConfig(max_lanes=clients, round_rows=max(256, 2 * clients), draft_tokens=0),
        sources=(),
        mailbox=lambda: [mail.popleft() for _ in range(len(mail))],
        clock=time.perf_counter,
        pace=pace,
    )
    while mail or not loop.idle:
        for event in loop.step():
            if isinstance(event, Tokens):
                outputs[event.request_id].extend(event.tokens)
            elif isinstance(event, Finished) and requests:
                mail.append(Submit(requests.popleft()))
    lanes = [
        LaneRecord(
            prompt.name,
            tokens_of[name],
            tuple(outputs[name]),
            tuple(tokenizer.encode(prompt.expected, special=False)) if prompt.expected else (),
            prompt.sources,
        )
        for name, prompt in asked.items()
        if outputs[name]
    ]
    return Recording(clients, tuple(lanes), tuple(pace.rounds))


def _tokens(tokenizer: "Tokenizer", prompt: Prompt) -> tuple[int, ...]:
    chat = [{"role": message.role, "content": message.content} for message in prompt.messages]
    return tuple(tokenizer.encode(tokenizer.render(chat, {}), special=False))


def sweep(backend: "Backend") -> Iterator[RoundRecord]:
    """Rounds of all sizes of `SWEEP`, of lanes that hold some text, and of few lanes that hold more. All take
    turns, so that a hiccup of the machine strikes each of them alike; the first turn is not timed.
    """
    most = max(lanes for lanes, _ in SWEEP)
    contexts = {slot: _SHORT if slot < most else _LONG for slot in range(most + _LONG_LANES)}
    for slot, context in contexts.items():
        backend.verify([Window(slot, str(slot), 0, (1,) * context, False, _GREEDY, context + 9)]).read()
    sizes = [(0, *size) for size in SWEEP] + [(most, *size) for size in SWEEP if size[0] <= _LONG_LANES]
    for turn in range(1 + _REPEATS):
        for first, lanes, drafts in sizes:
            windows = [_window(slot, contexts[slot], drafts) for slot in range(first, first + lanes)]
            start = time.perf_counter()
            backend.verify(windows).read()
            if turn:
                yield RoundRecord(shape_of(windows), time.perf_counter() - start, served=False)
    backend.reset()


def _window(slot: int, context: int, drafts: int) -> Window:
    return Window(slot, str(slot), context, (1,), True, _GREEDY, context + drafts + 2, drafts, (1,) * drafts)
