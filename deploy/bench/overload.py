"""`overload`: ten times more clients than lanes. A full server serves as much as before, refuses at once, and is fair.

Its best is what just as many clients as lanes get; both crowds take turns on one server. Clients of the large one are
refused where the queue is full (429) and come again after a short pause; one API key has ten times the clients of
another. Over the pseudo-model, whose rounds cost nothing, HTTP and the interpreter are what is full: that shows how the
crowd fares with them, and no bound is meant for it.
"""

import asyncio
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer

from deploy.bench.client import Exchange, Load, Record, Target, exchange, read_record, request_bytes
from deploy.bench.options import (
    PROGRAM,
    AnyModel,
    Arguments,
    Backend,
    Json,
    Pairs,
    Program,
    Timeout,
    say,
    warn_if_busy,
)
from deploy.bench.pairs import target_of
from deploy.bench.prefix_asking import run_now
from deploy.bench.prompts import Prompt, draw, ordinary_prompts
from deploy.bench.report import Bound, Spread, bound_table, new_table, percentile, ratios, show, spread
from deploy.bench.servers import Server, ServerError
from deploy.bench.serving import UNBOUNDED, Subject, keep_asking

LANES, QUEUE = 8, 16
CROWD: Mapping[str, int] = {"key-a": 40, "key-b": 20, "key-c": 16, "key-d": 4}
"""Clients of each API key."""
BEST: Mapping[str, int] = dict.fromkeys(CROWD, LANES // len(CROWD))
GOODPUT_FLOOR, FAIR_FLOOR, REFUSAL_CEILING_MS = 0.95, 0.95, 50.0
_TOKENS = (32, 96)
"""Lengths of answers, so that lanes do not all end in the same round."""
_SETTLING = 0.2
"""The share of a run that passes before it counts: until then lanes and queue are filled."""
_MOST_PAUSE_S = 10.0
"""Clients do as Retry-After says, as those of OpenAI and Anthropic do, but come again at the latest then: so there is
pressure. (Each refusal takes time of the processors that the model computes on.)
"""
_PAUSE_S = 1.0
"""Where they are told nothing."""
_RETRY_AFTER = re.compile(rb"\r\nretry-after:\s*(\d+)", re.IGNORECASE)
_REFUSED = b"HTTP/1.1 429 "


@dataclass(frozen=True, slots=True)
class Tried:
    """What one client sent until it was answered or the time was up; refusals are exchanges as well."""

    key: str
    prompt: Prompt
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True)
class Crowd:
    """One run: answers by key, how long refusals took, and the interval (of `time.perf_counter`) that counts."""

    begin: float
    end: float
    answers: Mapping[str, Sequence[Record]]
    refusals_s: Sequence[float]

    def tokens(self, key: str) -> float:
        """Delivered to a key's clients in the interval, of requests that finished."""
        return sum(delivered(record, self.begin, self.end) for record in self.answers[key])

    @property
    def goodput(self) -> float:
        """Tokens a second, over all keys."""
        return sum(self.tokens(key) for key in self.answers) / (self.end - self.begin)

    @property
    def fairness(self) -> float:
        """Jain's index over what the keys got."""
        return jain([self.tokens(key) for key in self.answers])

    @property
    def errors(self) -> list[str]:
        """What went wrong; a refusal is not that."""
        return [f"{each.prompt}: {each.error}" for key in self.answers for each in self.answers[key] if each.error]


def overload(
    model: AnyModel = None,
    backend: Backend = "mlx",
    pairs: Pairs = 5,
    seconds: Annotated[float, typer.Option(min=1, help="How long clients ask in each run.")] = 30.0,
    program: Program = PROGRAM,
    arguments: Arguments = None,
    timeout: Timeout = 120.0,
    json: Json = False,
) -> None:
    """Measure goodput, refusals and fairness with ten times more clients than lanes."""
    warn_if_busy()
    try:
        subject = Subject.told(model, backend, program, arguments)
        with TemporaryDirectory(prefix="paceline-bench-") as folder:
            keys = Path(folder) / "keys"
            keys.write_text("".join(f"{key}\n" for key in CROWD))
            words = ("--max-lanes", str(LANES), "--max-queue", str(QUEUE), "--api-key-file", str(keys))
            with subject.daemon(*words) as server:
                best, crowds = _take_turns(server, pairs, seconds, timeout)
        bounds = bounds_of(best, crowds)
    except (ServerError, OSError, ValueError) as error:
        say(f"overload: {error}")
        raise typer.Exit(2) from None
    _conclude(best, crowds, bounds, bounded=backend == "mlx", as_json=json)


def _take_turns(server: Server, pairs: int, seconds: float, timeout: float) -> tuple[list[Crowd], list[Crowd]]:
    """Every other pair begins with the crowd, so that neither side always comes after the other."""
    run_now(ask_on(server, BEST, "warm-up", min(5.0, seconds), timeout))
    best: list[Crowd] = []
    crowds: list[Crowd] = []
    for pair in range(pairs):
        turns = [(BEST, best, f"best-{pair}"), (CROWD, crowds, f"crowd-{pair}")]
        for clients, runs, label in turns if pair % 2 == 0 else turns[::-1]:
            runs.append(run_now(ask_on(server, clients, label, seconds, timeout)))
            told = runs[-1]
            say(f"{label}: {told.goodput:.1f} tokens/s, {len(told.refusals_s)} refused, fairness {told.fairness:.3f}")
    return best, crowds


# ---- one run ---------------------------------------------------------------------------------------------------------


async def ask_on(server: Server, clients: Mapping[str, int], label: str, seconds: float, timeout_s: float) -> Crowd:
    """A closed loop for so long, of so many clients of each key."""
    keys = [key for key, count in clients.items() for _ in range(count)]
    targets = {key: target_of(server, key) for key in clients}
    begin = time.perf_counter()
    until = begin + seconds

    async def ask(client: int, turn: int) -> Tried:
        chance = np.random.default_rng([client, turn])
        (prompt,) = draw(ordinary_prompts(), 1, start=client + turn, label=f"{label}-{client}-{turn}")
        load = Load(1, int(chance.integers(_TOKENS[0], _TOKENS[1] + 1)), ignore_eos=True)
        request = request_bytes(targets[keys[client]], prompt, load)
        if turn == 0:  # else all came at once, and all that are refused came back at once
            await asyncio.sleep(float(chance.uniform(0.0, min(_MOST_PAUSE_S, _SETTLING * seconds))))
        return Tried(keys[client], prompt, await _insist(targets[keys[client]], request, until, timeout_s))

    tried = await keep_asking(len(keys), until, ask)
    return crowd_of(tried, clients, begin + _SETTLING * seconds, until)


async def _insist(target: Target, request: bytes, until: float, timeout_s: float) -> tuple[Exchange, ...]:
    """Until it is answered, or no time is left to come again."""
    exchanges = [await exchange(target, request, time.perf_counter() + timeout_s)]
    while (pause := pause_after(exchanges[-1])) is not None and time.perf_counter() + pause < until:
        await asyncio.sleep(pause)
        exchanges.append(await exchange(target, request, time.perf_counter() + timeout_s))
    return tuple(exchanges)


def pause_after(ended: Exchange) -> float | None:
    """Seconds until a refused client may come again; None if it was not refused."""
    head = ended.arrivals[0].data if ended.arrivals else b""
    if not head.startswith(_REFUSED):
        return None
    told = _RETRY_AFTER.search(head)
    return min(float(told.group(1)), _MOST_PAUSE_S) if told else _PAUSE_S


def crowd_of(tried: Sequence[Tried], keys: Mapping[str, int], begin: float, end: float) -> Crowd:
    """Refusals that were sent and answers that came in the interval."""
    answers: dict[str, list[Record]] = {key: [] for key in keys}
    refusals: list[float] = []
    for each in tried:
        for ended in each.exchanges:
            if pause_after(ended) is None:
                answers[each.key].append(read_record(each.prompt, ended))
            elif begin <= ended.started_at < end:
                refusals.append(ended.arrivals[-1].at - ended.started_at)
    return Crowd(begin, end, answers, refusals)


def delivered(record: Record, begin: float, end: float) -> float:
    """How many of a request's tokens came in the interval, by its events; none of one that failed."""
    if record.error is not None or record.first_at is None:
        return 0.0
    times = accumulate(record.gaps_s, initial=record.first_at)
    return record.tokens * sum(begin <= at < end for at in times) / record.events


def jain(shares: Sequence[float]) -> float:
    """Jain's index: 1 where all have got the same, 1/n where one of n has got all (Jain, Chiu and Hawe 1984)."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


# ---- verdicts --------------------------------------------------------------------------------------------------------


def bounds_of(best: Sequence[Crowd], crowds: Sequence[Crowd]) -> list[Bound]:
    """Of pairs. Raises ValueError if a run delivered nothing, or a crowd was never refused."""
    clients = sum(CROWD.values())
    slowest = [_p99_ms(crowd.refusals_s) for crowd in crowds]
    goodput = ratios([crowd.goodput for crowd in crowds], [each.goodput for each in best])
    fair = spread([crowd.fairness for crowd in crowds])
    return [
        Bound("tokens/s of finished requests over the best", clients, goodput, GOODPUT_FLOOR),
        Bound("refusals, p99, ms", clients, spread(slowest), REFUSAL_CEILING_MS, at_most=True),
        Bound("Jain's index over the keys' tokens", clients, fair, FAIR_FLOOR),
    ]


def _p99_ms(seconds: Sequence[float]) -> float:
    slowest = percentile(seconds, 0.99)
    if slowest is None:
        raise ValueError("nobody was refused: the queue never was full")
    return 1e3 * slowest


@dataclass(frozen=True, slots=True)
class Side:
    """Several runs of one crowd, in numbers."""

    name: str
    clients: int
    goodput: Spread
    refused: int
    tokens: Mapping[str, float] = field(default_factory=dict)
    """By key, the median of the runs."""

    @classmethod
    def of(cls, name: str, clients: Mapping[str, int], runs: Sequence[Crowd]) -> "Side":
        """Of at least one run."""
        tokens = {key: statistics.median(run.tokens(key) for run in runs) for key in clients}
        goodput = spread([run.goodput for run in runs])
        return cls(name, sum(clients.values()), goodput, sum(len(run.refusals_s) for run in runs), tokens)


def _conclude(
    best: Sequence[Crowd], crowds: Sequence[Crowd], bounds: Sequence[Bound], *, bounded: bool, as_json: bool
) -> None:
    sides = [Side.of("best", BEST, best), Side.of("crowd", CROWD, crowds)]
    table = new_table("Sides", ("", "clients", "tokens/s", "refused", *CROWD))
    for side in sides:
        counts = [f"{side.tokens[key]:.0f}" for key in CROWD]
        table.add_row(side.name, str(side.clients), str(side.goodput), str(side.refused), *counts)
    errors = [error for run in (*best, *crowds) for error in run.errors]
    notes = [
        f"clients of each key: {', '.join(f'{key} {count}' for key, count in CROWD.items())}; their columns are tokens",
        *([] if bounded else [UNBOUNDED]),
        f"{len(errors)} requests failed",
        *errors[:5],
    ]
    facts = {"bounds": bounds, "sides": sides, "errors": errors[:5], "failed": len(errors)}
    show([table, bound_table("Overload", bounds)], notes, facts, as_json=as_json)
    raise typer.Exit(0 if not errors and (not bounded or all(bound.holds for bound in bounds)) else 1)
