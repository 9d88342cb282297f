"""`loop`: Paceline over its socket against the same engine's loop in a bare process: what serving itself costs.

Both make the same forwards on the same prompts, taking turns.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from deploy.bench.bare_loop import Order, Outcome
from deploy.bench.client import Load, Target, drive_now
from deploy.bench.options import (
    CLIENTS,
    PROGRAM,
    Arguments,
    Clients,
    Json,
    Limit,
    Model,
    Pairs,
    Program,
    Timeout,
    say,
    warn_if_busy,
)
from deploy.bench.prompts import Prompt, draw, ordinary_prompts
from deploy.bench.report import Bound, bound_table, ratios, show, summarise
from deploy.bench.servers import Server, ServerError, paceline, running

_ROOT = Path(__file__).parents[2]
FLOOR = 0.95


class BareLoop:
    """The child process, one order at a time."""

    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self._child = child

    def tokens_per_s(self, prompts: Sequence[Prompt], clients: int, max_tokens: int) -> float:
        """Answer the prompts. Raises ServerError if the child has died."""
        chats = tuple(
            tuple({"role": message.role, "content": message.content} for message in prompt.messages)
            for prompt in prompts
        )
        outcome = msgspec.json.decode(self._ask(Order(chats, clients, max_tokens)), type=Outcome)
        return outcome.tokens / outcome.seconds

    def _ask(self, order: Order) -> str:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(msgspec.json.encode(order).decode() + "\n")
        self._child.stdin.flush()
        if not (answer := self._child.stdout.readline()):
            raise ServerError("the bare loop has died")
        return answer


@contextmanager
def bare_loop(folder: Path) -> Iterator[BareLoop]:
    """The bare loop, loaded; ended at the end."""
    argv = [sys.executable, "-m", "deploy.bench.bare_loop", str(folder)]
    child = subprocess.Popen(argv, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        if child.stdout.readline().strip() != "ready":
            raise ServerError("the bare loop did not start")
        yield BareLoop(child)
    finally:
        child.kill()
        child.wait()


def loop(
    model: Model,
    clients: Clients = None,
    pairs: Pairs = 5,
    per_client: Annotated[int, typer.Option(min=1, help="Requests of each client in each run.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    program: Program = PROGRAM,
    arguments: Arguments = None,
    timeout: Timeout = 120.0,
    limit: Limit = 600.0,
    json: Json = False,
) -> None:
    """Compare serving with the bare loop, end to end, plain decoding on both sides."""
    warn_if_busy()
    folder = model.resolve()
    load = Load(clients=1, max_tokens=max_tokens, timeout_s=timeout, limit_s=limit)
    try:
        command = paceline(str(program), str(folder), ("--draft-tokens", "0", *(arguments or ())))
        with running(command) as server, bare_loop(folder) as bare:
            levels = tuple(clients or CLIENTS)
            _pair(server, bare, max(levels), per_client, load, "warm-up")
            bounds = [_bound(server, bare, level, pairs, per_client, load) for level in levels]
    except (ServerError, ValueError) as error:
        say(f"loop: {error}")
        raise typer.Exit(2) from None
    show([bound_table("Serving over a bare loop", bounds)], [], {"bounds": bounds}, as_json=json)
    raise typer.Exit(0 if all(bound.holds for bound in bounds) else 1)


def _bound(server: Server, bare: BareLoop, level: int, pairs: int, per_client: int, load: Load) -> Bound:
    rates = [_pair(server, bare, level, per_client, load, f"{level}-{pair}") for pair in range(pairs)]
    served, looped = zip(*rates, strict=True)
    return Bound("tokens/s over a bare loop", level, ratios(served, looped), FLOOR)


def _pair(server: Server, bare: BareLoop, level: int, per_client: int, load: Load, label: str) -> tuple[float, float]:
    prompts = draw(ordinary_prompts(), level * per_client, start=0, label=label)
    how = Load(level, load.max_tokens, timeout_s=load.timeout_s, limit_s=load.limit_s)
    run = drive_now(Target(server.host, server.port, server.model), prompts, how)
    rates = summarise(run).tokens_per_s, bare.tokens_per_s(prompts, level, load.max_tokens)
    say(f"{level} clients, {label}: served {rates[0]:.1f} tokens/s, bare loop {rates[1]:.1f}")
    return rates
