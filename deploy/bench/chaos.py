"""`chaos`: a server that fails at random, clients that leave at random, kills, and what must hold all the same.

A plan has forwards raise, lanes' numbers become NaN, memory and disk run out; clients hang up in the middle; and every
so often the process is killed with SIGKILL and started again over what it left on the disk. Every request must get one
end, and none but at a kill be cut off; what ends well must say what it says alone, on a server without faults, drafts
and prefix cache. Temperatures above 0 are for the fake backend: of a sampled token nobody can tell a near-tie.
"""

import asyncio
import random
import re
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import msgspec
import typer
import uvloop
from rich.table import Table

from api.cli import home_folder
from backends.mlx.pull import pull
from deploy.bench.chaos_client import LOGGED, WRONG, Answer, Fate, Manner, ask, fate
from deploy.bench.client import Load, Target, request_bytes
from deploy.bench.options import PROGRAM, Arguments, Json, Program, Timeout, say
from deploy.bench.prompts import Prompt, copying_prompts, draw, ordinary_prompts
from deploy.bench.report import Bound, Spread, bound_table, new_table, show, spread
from deploy.bench.servers import Command, ServerError, first_model, paceline

MODEL = "smollm2-135m"
ROOT = Path(__file__).parents[2]
PLAIN_STARTS = 3
RESTART = 2.0
"""How much longer a start may take behind a kill than one with nothing to find."""
SHARES: tuple[tuple[dict[str, Any], float], ...] = (
    ({"kind": "raise"}, 0.2),
    ({"kind": "raise_read"}, 0.15),
    ({"kind": "keep"}, 0.1),
    ({"kind": "allocation"}, 0.15),
    ({"kind": "nan"}, 0.3),
    ({"kind": "slow", "seconds": 0.2}, 0.1),
)
"""How the faults of a round are shared out."""
DISK_SHARE = 0.03
"""How many reads and writes of the disk fail."""
_INJECTED = re.compile(r"paceline\.faults: injected: (\w+)")


def plan(seed: int, rate: float) -> dict[str, Any]:
    """A fault plan as JSON has it. `rate`: how many rounds have a fault."""
    rounds = [{**kind, "probability": rate * share} for kind, share in SHARES]
    disk = [
        {"kind": "ssd_write", "error": "ENOSPC", "probability": DISK_SHARE},
        {"kind": "ssd_read", "error": "EIO", "probability": DISK_SHARE},
    ]
    return {"seed": seed, "faults": [*rounds, *disk]}


def manner(draws: random.Random) -> Manner:
    """Most clients hear all; the others leave before, or in the middle."""
    if draws.random() < 0.7:
        return Manner()
    return Manner(draws.randrange(12), abrupt=draws.random() < 0.5)


# ---- one server's life -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Server:
    """A child process and its log. Written by `started` and by `kill`."""

    child: subprocess.Popen[bytes]
    log: Path
    target: Target
    seconds: float
    """From its start to its first good health."""
    killed: bool = False

    def kill(self) -> None:
        """Without a warning, unless it has ended by itself."""
        if self.child.poll() is None:
            self.killed = True
            self.child.kill()

    @property
    def injected(self) -> Counter[str]:
        """What it says that it did, by kind."""
        return Counter(_INJECTED.findall(self.log.read_text(errors="replace")))

    @property
    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-2000:]


@contextmanager
def started(command: Command, log: Path, ready_s: float) -> Iterator[Server]:
    """A server that is ready, until it is told to end, or has ended. Raises ServerError if it does not get ready."""
    begun = time.perf_counter()
    with log.open("wb") as output:
        child = subprocess.Popen(command.argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        while not _healthy(command.port):
            if child.poll() is not None or time.perf_counter() - begun > ready_s:
                raise ServerError(f"the server does not get ready; its log ends:\n{log.read_text()[-2000:]}")
            time.sleep(0.02)
        seconds = time.perf_counter() - begun
        yield Server(child, log, Target("127.0.0.1", command.port, first_model("127.0.0.1", command.port)), seconds)
    finally:
        child.terminate()
        try:
            child.wait(45.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _healthy(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chaos:
    """What is asked of whom."""

    faulty: Command
    folder: Path
    """For logs and plans."""
    prompts: tuple[Prompt, ...]
    alone: tuple[Answer, ...]
    """What each of them says where nothing else happens."""
    clients: int
    requests: int
    """In one life of the server, about."""
    rate: float
    seed: int
    timeout_s: float


@dataclass(slots=True)
class Tally:
    """What came of it all. Written by `live`."""

    fates: Counter[Fate] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """What those were told that ended by one."""
    injected: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    starts: list[float] = field(default_factory=list)
    """Seconds to good health, of every start behind a kill."""
    own_ends: int = 0
    """How often the server ended by itself, or not as it was told."""
    notes: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        """Kills included."""
        return sum(self.injected.values()) + self.kills


def live(chaos: Chaos, life: int, tally: Tally, *, last: bool) -> None:
    """One life of the server: start it, ask until it is killed in the middle, and count. The `last` one is told to end,
    when all has been answered.
    """
    path = chaos.folder / f"plan-{life}.json"
    path.write_bytes(msgspec.json.encode(plan(chaos.seed + life, chaos.rate)))
    command = replace(chaos.faulty, argv=(*chaos.faulty.argv, "--fault-plan", str(path)))
    with started(command, chaos.folder / f"log-{life}", chaos.timeout_s) as server:
        if life:
            tally.starts.append(server.seconds)
        draws = random.Random(f"{chaos.seed}/{life}")  # noqa: S311
        doomed = None if last else draws.randint(chaos.requests // 2, chaos.requests)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            heard = runner.run(_ask_all(chaos, server, draws, doomed))
        for each, answer in heard:
            tally.fates[each] += 1
            if each is Fate.ERROR:
                tally.errors[str(answer.error)] += 1
        gone = server.child.poll() is not None and not server.killed
    tally.injected.update(server.injected)
    tally.kills += server.killed
    if gone or (not server.killed and server.child.returncode != 0):
        tally.own_ends += 1
        tally.notes.append(f"life {life} ended with exit code {server.child.returncode}; its log ends:\n{server.tail}")


async def _ask_all(chaos: Chaos, server: Server, draws: random.Random, doomed: int | None) -> list[tuple[Fate, Answer]]:
    """Keep all clients asking. Soon after so many requests as doom it have been sent, the server is killed in the
    middle of others; None for one that is not.
    """
    heard: list[tuple[Fate, Answer]] = []
    sent = 0

    def dead() -> bool:
        return server.killed or server.child.poll() is not None

    async def client() -> None:
        nonlocal sent
        while (doomed is not None or sent < chaos.requests) and not dead():
            sent += 1
            if sent == doomed:
                asyncio.get_running_loop().call_later(draws.random() * 0.5, server.kill)
            which, how = draws.randrange(len(chaos.prompts)), manner(draws)
            load = Load(chaos.clients, 1)
            request = request_bytes(server.target, chaos.prompts[which], load)
            answer = await ask(server.target.host, server.target.port, request, how, chaos.timeout_s)
            heard.append((fate(answer, chaos.alone[which], killed=dead()), answer))

    async with asyncio.TaskGroup() as group:
        for _ in range(chaos.clients):
            group.create_task(client())
    return heard


def solo(command: Command, prompts: Sequence[Prompt], folder: Path, timeout_s: float) -> tuple[list[Answer], float]:
    """What every prompt says alone, and how long a plain start takes. Raises ServerError if one does not end well."""
    seconds = []
    for place in range(PLAIN_STARTS - 1):
        with started(command, folder / f"start-{place}", timeout_s) as server:
            seconds.append(server.seconds)
    with started(command, folder / "solo", timeout_s) as server, asyncio.Runner() as runner:
        seconds.append(server.seconds)
        requests = [request_bytes(server.target, prompt, Load(1, 1)) for prompt in prompts]
        host, port = server.target.host, server.target.port
        answers = [runner.run(ask(host, port, request, Manner(), timeout_s)) for request in requests]
    bad = next((answer for answer in answers if answer.ends != 1 or answer.error is not None), None)
    if bad is not None:
        raise ServerError(f"a request does not even end well alone: {bad.error or 'no end'}")
    return answers, statistics.median(seconds)


def pool(count: int, max_tokens: int, temperature: float) -> tuple[Prompt, ...]:
    """The prompts, which come again and again; each with a seed of its own."""
    drawn = draw((*ordinary_prompts(), *copying_prompts()), count, start=0, label="chaos")
    settings = {"max_tokens": max_tokens, "temperature": temperature, **LOGGED}
    return tuple(
        replace(prompt, fields={**settings, "seed": place, "ignore_eos": place % 2 == 0})
        for place, prompt in enumerate(drawn)
    )


# ---- the subcommand --------------------------------------------------------------------------------------------------


def chaos(
    model: Annotated[Path | None, typer.Argument(help="A folder with an MLX model; by default SmolLM2's.")] = None,
    backend: Annotated[Literal["mlx", "fake"], typer.Option(help="fake: quick, without a model.")] = "mlx",
    faults: Annotated[int, typer.Option(min=1, help="Go on until so many faults and kills.")] = 1000,
    rate: Annotated[float, typer.Option(min=0, max=1, help="How many rounds have a fault.")] = 0.05,
    clients: Annotated[int, typer.Option(min=1, help="How many ask at a time.")] = 8,
    requests: Annotated[int, typer.Option(min=2, help="About the most requests between two kills.")] = 60,
    prompts: Annotated[int, typer.Option(min=1, help="How many different ones there are.")] = 40,
    max_tokens: Annotated[int, typer.Option(min=1)] = 48,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the faults and of the clients.")] = 0,
    program: Program = PROGRAM,
    arguments: Arguments = None,
    timeout: Timeout = 120.0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds after which no other life begins.")] = 7200.0,
    json: Json = False,
) -> None:
    """Let a server fail, be left and be killed at random, and see that nobody gets a wrong answer or none."""
    asked = pool(prompts, max_tokens, temperature)
    try:
        with TemporaryDirectory(prefix="paceline-chaos-") as name:
            folder = Path(name)
            words = (*_model_words(model, backend), *(arguments or ()))
            plain = paceline(str(program), None, (*words, "--draft-tokens", "0", "--prefix-ram", "0"))
            kept = ("--prefix-ssd", "1GB", "--prefix-dir", str(folder / "prefix"), "--log-level", "info")
            say(f"asking {prompts} prompts alone")
            answers, seconds = solo(plain, asked, folder, timeout)
            faulty = paceline(str(program), None, (*words, *kept))
            run = Chaos(faulty, folder, asked, tuple(answers), clients, requests, rate, seed, timeout)
            tally = _live_on(run, faults, limit)
    except ServerError as error:
        say(f"chaos: {error}")
        raise typer.Exit(2) from None
    _conclude(tally, faults, clients, seconds, json)


def _model_words(model: Path | None, backend: str) -> tuple[str, ...]:
    if backend == "fake":
        return ("--backend", "fake")
    folder = model or pull(MODEL, home_folder(), lambda _stage, _done, _total: None)
    return (str(folder.resolve()),)


def _live_on(run: Chaos, faults: int, limit_s: float) -> Tally:
    """Life after life, until there were enough faults; the last one ends in peace."""
    tally = Tally()
    give_up_at = time.monotonic() + limit_s
    life = 0
    while tally.faults < faults and time.monotonic() < give_up_at:
        live(run, life, tally, last=False)
        life += 1
        say(f"life {life}: {tally.faults} faults, {sum(tally.fates.values())} requests, {wrong_of(tally)} wrong")
    live(run, life, tally, last=True)
    return tally


def wrong_of(tally: Tally) -> int:
    """How many requests came to what a server must not do."""
    return sum(tally.fates[each] for each in WRONG)


def bounds_of(tally: Tally, faults: int, clients: int, plain_s: float) -> list[Bound]:
    """What must hold."""
    ended = sum(tally.fates[each] for each in (Fate.SAME, Fate.NEAR_TIE))
    slowest = max(tally.starts, default=0.0) / plain_s
    return [
        Bound("faults and kills", clients, _one(tally.faults), faults),
        Bound("requests that ended well", clients, _one(ended), 1),
        *(Bound(f"requests: {each}", clients, _one(tally.fates[each]), 0, at_most=True) for each in WRONG),
        Bound("times that the server ended by itself", clients, _one(tally.own_ends), 0, at_most=True),
        Bound("slowest start behind a kill over a plain one", clients, spread([slowest]), RESTART, at_most=True),
    ]


def _one(count: int) -> Spread:
    return spread([float(count)])


def _counts(title: str, what: str, counts: Iterable[tuple[str, int]]) -> Table:
    table = new_table(title, (what, "count"))
    for name, count in counts:
        table.add_row(name, str(count))
    return table


def _conclude(tally: Tally, faults: int, clients: int, plain_s: float, as_json: bool) -> None:
    bounds = bounds_of(tally, faults, clients, plain_s)
    injected = [*sorted(tally.injected.items()), ("kill -9", tally.kills)]
    tables = [
        _counts("Faults", "kind", injected),
        _counts("Requests", "what became of them", [(str(each), tally.fates[each]) for each in Fate]),
        bound_table("What must hold", bounds),
    ]
    if tally.errors:
        tables.insert(2, _counts("Errors", "what was told", tally.errors.most_common()))
    behind = f"behind a kill: {spread(tally.starts)}" if tally.starts else "none behind a kill"
    notes = [f"seconds to good health: {plain_s:.3f} plain, {behind}", *tally.notes]
    facts: dict[str, Any] = {"bounds": bounds, "fates": tally.fates, "errors": tally.errors, "injected": dict(injected)}
    facts |= {"starts_s": tally.starts, "plain_start_s": plain_s, "notes": tally.notes}
    show(tables, notes, facts, as_json=as_json)
    raise typer.Exit(0 if all(bound.holds for bound in bounds) else 1)
