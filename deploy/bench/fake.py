"""`fake`: what the server itself costs, without a model: processor time of the whole process for each token.

The fake backend computes nothing to speak of, so what remains is scheduling, detokenising, framing and the socket. The
worst case for the server is one event a token: many streams, no drafts.
"""

from dataclasses import dataclass
from typing import Annotated

import typer

from deploy.bench.client import Load, Run, Target, drive_now
from deploy.bench.engine_round import CEILING_MS, LANES, round_ms
from deploy.bench.options import PROGRAM, Arguments, Json, Limit, Program, Timeout, say, warn_if_busy
from deploy.bench.prompts import draw, ordinary_prompts
from deploy.bench.report import Bound, Spread, bound_table, first_errors, show, spread, summarise, summary_table
from deploy.bench.servers import Server, ServerError, paceline, processor_seconds, running

CEILING_US = 60.0
"""Microseconds of processor time that a token may cost."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One run, and the processor time that the server's process spent during it."""

    run: Run
    processor_s: float

    @property
    def us_per_token(self) -> float:
        """Microseconds."""
        return self.processor_s * 1e6 / max(1, summarise(self.run).tokens)

    @property
    def tokens_per_event(self) -> float:
        """1 where every token came in an event of its own."""
        return summarise(self.run).tokens / max(1, sum(record.events for record in self.run.records))


def fake(
    streams: Annotated[int, typer.Option(min=1)] = 64,
    max_tokens: Annotated[int, typer.Option(min=1)] = 400,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    program: Program = PROGRAM,
    arguments: Arguments = None,
    timeout: Timeout = 120.0,
    limit: Limit = 300.0,
    json: Json = False,
) -> None:
    """Measure the server's own processor time a token, over the fake backend."""
    words = ("--backend", "fake", "--draft-tokens", "0", "--max-lanes", str(streams), *(arguments or ()))
    load = Load(streams, max_tokens, ignore_eos=True, timeout_s=timeout, limit_s=limit)
    warn_if_busy()
    try:
        with running(paceline(str(program), None, words)) as server:
            _measure(server, load, "warm-up")
            costs = [_measure(server, load, f"fake-{repeat}") for repeat in range(repeats)]
    except ServerError as error:
        say(f"fake: {error}")
        raise typer.Exit(2) from None
    _conclude(costs, spread([round_ms() for _ in range(repeats)]), streams, json)


def _measure(server: Server, load: Load, label: str) -> Cost:
    prompts = draw(ordinary_prompts(), load.clients, start=0, label=label)
    before = processor_seconds(server.pid)
    run = drive_now(Target(server.host, server.port, server.model), prompts, load)
    cost = Cost(run, processor_seconds(server.pid) - before)
    say(f"{label}: {cost.us_per_token:.1f} us a token, {cost.tokens_per_event:.2f} tokens an event")
    return cost


def _conclude(costs: list[Cost], a_round: Spread, streams: int, as_json: bool) -> None:
    summary = summarise(*(cost.run for cost in costs))
    measured = spread([cost.us_per_token for cost in costs])
    bound = Bound("processor time a token, us", streams, measured, CEILING_US, at_most=True)
    engine = Bound("scheduler and executor a round, ms", LANES, a_round, CEILING_MS, at_most=True)
    errors = [message for cost in costs for message in first_errors(cost.run.records)][:5]
    events = spread([cost.tokens_per_event for cost in costs])
    tables = [summary_table("Runs (times in ms)", [("paceline", summary)]), bound_table("Cost", [bound, engine])]
    facts = {"bound": bound, "engine": engine, "tokens_per_event": events, "summary": summary}
    show(tables, [f"tokens an event: {events}", *errors], facts, as_json=as_json)
    raise typer.Exit(0 if bound.holds and engine.holds and summary.errors == 0 else 1)
