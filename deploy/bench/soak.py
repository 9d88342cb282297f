"""`soak`: half an hour of the traffic that real clients make, well-behaved or not, at 0.8 of what the server can do.

Times and lengths come from recorded traffic, clipped to what a CPU can do and stretched in time to the load, which is
measured first: by as many clients as lanes, in a closed loop over the same lengths. Every request must end, once; bad
ones must be told so; and memory must not grow once the caches have filled, which are kept small so that they do.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.table import Table

from deploy.bench.arrivals import Due, traffic
from deploy.bench.client import Exchange, Target, exchange
from deploy.bench.options import PROGRAM, AnyModel, Arguments, Backend, Json, Program, say, warn_if_busy
from deploy.bench.pairs import target_of
from deploy.bench.prefix_asking import Scrape, run_now, scrape
from deploy.bench.report import Bound, bound_table, new_table, show
from deploy.bench.servers import Server, ServerError, resident_bytes
from deploy.bench.serving import Subject, keep_asking
from deploy.bench.soak_account import FLAT, End, Memory, Outcome, Sample, judge, memory_of, spread_over, tally
from deploy.bench.soak_requests import Ask, Kind, Script, small_schemas

LANES = 8
LOAD = 0.8
"""Of what the server can do."""
_MOST_RATE = 50.0
"""Requests a second: the pseudo-model could do more than a client beside it."""
_SMALL_CACHES = ("--history-bytes", str(4 << 20), "--write-seconds", "10")
_PREFIX_RAM = {"mlx": "64MB", "fake": "1MB"}
_PREFIX_SSD = {"mlx": "256MB", "fake": "8MB"}
"""Small enough to be full in the first third: the files' index is in memory."""
_SAMPLE_S = 5.0
_SHOWN_SAMPLES = 10
_QUIET_S = 30.0
"""How long lanes may take to be free when the last client has gone."""
_MEASURED_FROM = 10_000_000
"""The numbers of requests while the capacity is measured: they ask for other texts."""


@dataclass(frozen=True, slots=True)
class Scene:
    """One server, and how long a request may take in any case before it counts as hung."""

    server: Server
    script: Script
    timeout_s: float

    @property
    def target(self) -> Target:
        """Where to ask."""
        return target_of(self.server)


@dataclass(frozen=True, slots=True)
class Soaked:
    """All that a run showed."""

    seconds: float
    capacity: float
    """Requests a second."""
    outcomes: Sequence[Outcome]
    samples: Sequence[Sample]
    most_prefix: float
    """Bytes that the prefix cache may hold in memory."""
    notes: Sequence[str]
    faults: Sequence[str]


def soak(
    model: AnyModel = None,
    backend: Backend = "mlx",
    minutes: Annotated[float, typer.Option(min=0.1)] = 30.0,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is left to chance.")] = 0,
    measure: Annotated[float, typer.Option(min=1, help="Seconds in which the capacity is measured.")] = 60.0,
    most_prompt: Annotated[int, typer.Option(min=8, help="Tokens that prompts are clipped to.")] = 512,
    most_output: Annotated[int, typer.Option(min=1, help="Tokens that answers are clipped to.")] = 64,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a request counts as hung.")] = 600.0,
    program: Program = PROGRAM,
    arguments: Arguments = None,
    json: Json = False,
) -> None:
    """Serve recorded traffic, with clients that leave, err and never read; look at every end, and at memory."""
    warn_if_busy()

    def due(requests: int, seconds: float) -> list[Due]:
        return [each.clipped(most_prompt, most_output) for each in traffic(requests, seconds, seed)]

    try:
        subject = Subject.told(model, backend, program, arguments)
        with TemporaryDirectory(prefix="paceline-bench-") as folder:
            ram = ("--prefix-ram", _PREFIX_RAM[backend], "--prefix-ssd", _PREFIX_SSD[backend], "--prefix-dir", folder)
            with subject.daemon("--max-lanes", str(LANES), *_SMALL_CACHES, *ram) as server:
                scene = Scene(server, Script(target_of(server), subject.tokens, small_schemas(), seed), timeout)
                soaked = _soaked(scene, due, 60 * minutes, measure, Path(folder))
    except (ServerError, OSError, HTTPException, ValueError) as error:
        say(f"soak: {error}")
        raise typer.Exit(2) from None
    _conclude(soaked, as_json=json)


def _soaked(
    scene: Scene, due: Callable[[int, float], list[Due]], seconds: float, measure_s: float, folder: Path
) -> Soaked:
    capacity = run_now(capacity_of(scene, due(1_000, 1.0), measure_s))
    rate = min(LOAD * capacity, _MOST_RATE)
    say(f"{capacity:.2f} requests a second can be served; {rate:.2f} a second come for {seconds:.0f} s")
    most_prefix = scrape(scene.server).value("paceline_prefix_cache_max_bytes", tier="ram")
    outcomes, samples, faults = run_now(play(scene, due(max(1, int(rate * seconds)), seconds), seconds))
    faults += [outcome.complaint for outcome in outcomes if outcome.complaint is not None]
    notes: list[str] = []
    try:
        last = _await_quiet(scene.server)
        faults += _still_there(last)
        notes += _told_by_metrics(last, folder)
    except (ServerError, OSError, HTTPException) as error:
        faults.append(f"the server's account did not come: {error!r}")
    return Soaked(seconds, capacity, outcomes, samples, most_prefix, notes, faults)


async def capacity_of(scene: Scene, dues: Sequence[Due], seconds: float) -> float:
    """Requests a second, in a closed loop; one that is cut by the end counts by the share of its time before that."""
    until = time.perf_counter() + seconds
    numbers = count()

    async def ask(_client: int, _turn: int) -> tuple[Ask, Exchange]:
        number = next(numbers)
        asked = scene.script.plain(_MEASURED_FROM + number, dues[number % len(dues)])
        return asked, await perform(scene, asked)

    served = 0.0
    for asked, ended in await keep_asking(LANES, until, ask):
        outcome = judge(asked, ended)
        if outcome.end is not End.FINISHED:
            raise ServerError(f"while the capacity was measured: {outcome.complaint or outcome.end}")
        served += min(1.0, (until - ended.started_at) / (ended.ended_at - ended.started_at))
    return served / seconds


# ---- clients ---------------------------------------------------------------------------------------------------------


async def play(scene: Scene, dues: Sequence[Due], seconds: float) -> tuple[list[Outcome], list[Sample], list[str]]:
    """Every request when it is due, however many are under way; sampled until the last one was due."""
    outcomes: list[Outcome] = []
    samples: list[Sample] = []
    faults: list[str] = []
    begin = time.perf_counter()

    async def client(asked: Ask) -> None:
        outcomes.append(judge(asked, await perform(scene, asked)))

    async with asyncio.TaskGroup() as group:
        group.create_task(_watch(scene.server, begin, seconds, samples, faults))
        for number, due in enumerate(dues):
            await asyncio.sleep(max(0.0, begin + due.at - time.perf_counter()))
            group.create_task(client(scene.script.good(number, due)))
            if (bad := scene.script.bad(number)) is not None:
                group.create_task(client(bad))
    return outcomes, samples, faults


async def perform(scene: Scene, asked: Ask) -> Exchange:
    """As the client of this kind behaves."""
    now = time.perf_counter()
    if asked.kind is Kind.LEAVING:
        return await exchange(scene.target, asked.request, now + asked.held_s, most_reads=asked.reads)
    if asked.kind is Kind.UNREAD:
        return await _never_read(scene, asked)
    return await exchange(scene.target, asked.request, now + scene.timeout_s, to_the_end=True)


async def _never_read(scene: Scene, asked: Ask) -> Exchange:
    """A socket that nothing is taken from, with as little room for what comes as may be; closed after a while."""
    started_at = time.perf_counter()
    failure: str | None = None
    with socket.socket() as own:
        own.setblocking(False)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(own, (scene.target.host, scene.target.port))
            await loop.sock_sendall(own, asked.request)
            await asyncio.sleep(asked.held_s)
        except OSError as error:
            failure = f"cannot connect: {error}"
    return Exchange(started_at, time.perf_counter(), (), failure)


# ---- the server ------------------------------------------------------------------------------------------------------


async def _watch(server: Server, begin: float, seconds: float, samples: list[Sample], faults: list[str]) -> None:
    """A sample every few seconds. A server that does not answer is a fault and ends it."""
    for place in range(int(seconds / _SAMPLE_S) + 1):
        await asyncio.sleep(max(0.0, begin + place * _SAMPLE_S - time.perf_counter()))
        try:
            samples.append(await asyncio.to_thread(_sample, server, begin))
        except (ServerError, OSError, HTTPException) as error:
            faults.append(f"the server's metrics did not come: {error!r}")
            return


def _sample(server: Server, begin: float) -> Sample:
    told = scrape(server)
    return Sample(
        at=time.perf_counter() - begin,
        resident=resident_bytes(server.pid),
        prefix_ram=told.value("paceline_prefix_cache_bytes", tier="ram"),
        prefix_ssd=told.value("paceline_prefix_cache_bytes", tier="ssd"),
        running=told.value("paceline_num_requests_running"),
        waiting=told.value("paceline_num_requests_waiting"),
    )


def _await_quiet(server: Server) -> Scrape:
    """The metrics when nothing runs and waits any more, or when it has had its time for that."""
    give_up_at = time.monotonic() + _QUIET_S
    while any(_open(told := scrape(server)).values()) and time.monotonic() < give_up_at:
        time.sleep(0.2)
    return told


def _open(told: Scrape) -> dict[str, float]:
    return {name: told.value(f"paceline_num_requests_{name}") for name in ("running", "waiting")}


def _still_there(told: Scrape) -> list[str]:
    return [f"{number:g} requests are {name} and nobody is there" for name, number in _open(told).items() if number]


def _told_by_metrics(told: Scrape, folder: Path) -> Iterator[str]:
    """The server's own account, for people."""
    yield f"requests by the server's account: {_words(told, 'paceline_request_success_total', 'finished_reason')}"
    yield f"turned away by its account: {_words(told, 'paceline_requests_refused_total', 'reason')}"
    yield f"{told.value('paceline_num_preemptions_total'):g} lanes gave way for want of memory"
    on_disk = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # it may be gone meanwhile
            on_disk += file.stat().st_size if file.is_file() else 0
    counted = told.value("paceline_prefix_cache_bytes", tier="ssd")
    yield f"prefix files: {on_disk / 1e6:.1f} MB on disk, {counted / 1e6:.1f} MB by the server's account"


def _words(told: Scrape, name: str, label: str) -> str:
    counts = {reason: number for reason, number in told.by_label(name, label).items() if number}
    return ", ".join(f"{reason} {number:g}" for reason, number in counts.items()) or "none"


# ---- the report ------------------------------------------------------------------------------------------------------


def _conclude(soaked: Soaked, *, as_json: bool) -> None:
    faults, notes = list(soaked.faults), list(soaked.notes)
    notes.append(f"{soaked.capacity:.2f} requests a second could be served; requests came for {soaked.seconds:.0f} s")
    bounds: list[Bound] = []
    try:
        memory = memory_of(soaked.samples, soaked.seconds, soaked.most_prefix)
        bounds.append(Bound("resident memory over that when caches were full", LANES, memory.ratio, FLAT, at_most=True))
        notes.append(_told_of_caches(memory))
    except ValueError as error:
        faults.append(str(error))
    shown = spread_over(soaked.samples, _SHOWN_SAMPLES)
    notes += [f"{len(faults)} faults", *(f"FAULT: {fault}" for fault in faults[:20])]
    counts = [
        {"kind": kind, "end": end, "requests": requests}
        for (kind, end), requests in sorted(tally(soaked.outcomes).items())
    ]
    facts = {"bounds": bounds, "counts": counts, "samples": shown, "notes": notes, "faults": faults}
    tables = [_counts_table(soaked.outcomes), _samples_table(shown), bound_table("Soak", bounds)]
    show(tables, notes, facts, as_json=as_json)
    raise typer.Exit(0 if all(bound.holds for bound in bounds) and not faults else 1)


def _told_of_caches(memory: Memory) -> str:
    full = "never" if memory.filled_at is None else f"after {memory.filled_at:.0f} s"
    return f"the prefix cache's memory was full {full}; caches count as full after {memory.begin:.0f} s"


def _counts_table(outcomes: Sequence[Outcome]) -> Table:
    counts = tally(outcomes)
    table = new_table("Requests by what their clients did, and how they ended", ("", "requests", *End))
    for kind in Kind:
        ends = [counts[kind, end] for end in End]
        table.add_row(kind, *(str(number) for number in (sum(ends), *ends)))
    return table


def _samples_table(samples: Sequence[Sample]) -> Table:
    columns = ("s", "resident MB", "prefix RAM MB", "prefix files MB", "running", "waiting")
    table = new_table("The server over time", columns)
    for sample in samples:
        sizes = (sample.resident, sample.prefix_ram, sample.prefix_ssd)
        megabytes = [f"{size / 1e6:.1f}" for size in sizes]
        table.add_row(f"{sample.at:.0f}", *megabytes, f"{sample.running:g}", f"{sample.waiting:g}")
    return table
