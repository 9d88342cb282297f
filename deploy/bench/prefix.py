"""`prefix`: what the prefix cache spares, from memory and from files, how much of what it could; and what it costs.

`repeat`, `restart` and `traffic` ask a daemon over its socket with tokens in place of text, so that it is known to the
token what may be reused; `spill` plays two daemons, taking turns, of which one writes files; `index` and `copy` run in
process (see `prefix_inside`). After a restart the files lie in the operating system's page cache, as nobody has emptied
it: what is measured there is the way from files to lanes and not the speed of a disk.
"""

import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from deploy.bench.client import Endpoint, Load
from deploy.bench.options import PROGRAM, Arguments, Json, Limit, Model, Pairs, Program, Timeout, say, warn_if_busy
from deploy.bench.pairs import Agreement, Comparison, Plan, agreement, take_turns, target_of, warm_up
from deploy.bench.prefix_asking import Answer, ask, gauge, random_tokens, run_now, token_prompt
from deploy.bench.prefix_inside import RESTORED, copy_times, index_times, load_model
from deploy.bench.prefix_traffic import Asked, Script, account, play, spared_too_much, tokenizer_of, told_of
from deploy.bench.prompts import ordinary_prompts
from deploy.bench.report import Bound, Spread, bound_table, percentile, ratios, show, spread
from deploy.bench.scenarios import lane_rate
from deploy.bench.servers import Server, ServerError, paceline, running

PROMPT = 1_000
"""Tokens of the prompts that come again."""
_FEW = 4
"""Tokens of their answers: the first one's time is what counts, and some text to compare."""
_WARM_UP_SEED = 1_000_000
"""Pairs have smaller ones."""
_SPILLING, _SPILLED_TOKENS = 8, 64
"""Clients that decode while blocks are written, and tokens of their answers."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a case sets out to show."""

    claim: str
    clients: int
    bound: float
    at_most: bool = True

    def held_against(self, measured: Spread) -> Bound:
        """What came of it."""
        return Bound(self.claim, self.clients, measured, self.bound, self.at_most)


GOALS: Mapping[str, Goal] = {
    "repeat": Goal("1,000 tokens again: time to first token over the cold one", 1, 0.04),
    "restart": Goal("1,000 tokens after a restart: time to first token over the cold one", 1, 0.08),
    "traffic": Goal("agents: tokens reused of those that could be", 8, 0.90, at_most=False),
    "spill": Goal("a lane's decode rate while blocks are written over no files", 8, 0.95, at_most=False),
    "match": Goal("index: match of 8,192 tokens, ms", 1, 1.0),
    "insert": Goal("index: insertion of their 128 blocks, ms", 1, 1.0),
    "copy": Goal("copying in beside lanes that decode, ms a round", 4, 5.0),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cases are told."""

    model: Path
    program: Path
    arguments: tuple[str, ...]
    pairs: int
    load: Load

    @contextmanager
    def daemon(self, *words: str, name: str = "paceline") -> Iterator[Server]:
        """One of these flags, ready; stopped by SIGTERM at the end."""
        command = paceline(str(self.program), str(self.model.resolve()), (*words, *self.arguments), name=name)
        with running(command) as server:
            yield server


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case found. `faults` are what must not be, however fast it is."""

    bounds: tuple[Bound, ...]
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Every bound holds, and nothing was wrong."""
        return all(bound.holds for bound in self.bounds) and not self.faults


def prefix(
    model: Model,
    only: Annotated[str, typer.Option(help="One of repeat, restart, traffic, spill, index, copy.")] = "",
    pairs: Pairs = 5,
    program: Program = PROGRAM,
    arguments: Arguments = None,
    timeout: Timeout = 120.0,
    limit: Limit = 600.0,
    json: Json = False,
) -> None:
    """Measure what the prefix cache spares and costs."""
    if only and only not in CASES:
        say(f"prefix: there is no case {only!r}")
        raise typer.Exit(2)
    warn_if_busy()
    load = Load(1, _FEW, Endpoint.COMPLETIONS, ignore_eos=True, timeout_s=timeout, limit_s=limit)
    setting = Setting(model, program, tuple(arguments or ()), pairs, load)
    outcomes: list[Outcome] = []
    try:
        for name, case in CASES.items():
            if only in ("", name):
                say(f"prefix: {name}")
                outcomes.append(case(setting))
    except (ServerError, RuntimeError, OSError, ValueError) as error:
        say(f"prefix: {error}")
        raise typer.Exit(2) from None
    bounds = [bound for outcome in outcomes for bound in outcome.bounds]
    notes = [note for outcome in outcomes for note in outcome.notes]
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    facts = {"bounds": bounds, "notes": notes, "faults": faults}
    show([bound_table("Prefix cache", bounds)], [*notes, *(f"FAULT: {fault}" for fault in faults)], facts, as_json=json)
    raise typer.Exit(0 if all(outcome.good for outcome in outcomes) else 1)


# ---- the same prompt again -------------------------------------------------------------------------------------------


def _ask(setting: Setting, server: Server, seed: int) -> Answer:
    """A prompt of random tokens."""
    prompt = token_prompt(f"prompt {seed}", random_tokens(PROMPT, seed))
    return run_now(ask(target_of(server), prompt, setting.load))


def _repeat(setting: Setting) -> Outcome:
    """Cold, and at once again, from memory."""
    cold, warm = [], []
    with setting.daemon() as server:
        _ask(setting, server, _WARM_UP_SEED)
        for pair in range(setting.pairs):
            cold.append(_ask(setting, server, pair))
            warm.append(_ask(setting, server, pair))
            _say_pair(setting, "repeat", pair, cold[-1], warm[-1])
    return _again("repeat", cold, warm)


def _restart(setting: Setting) -> Outcome:
    """Cold, and again from the files by another process. Each is warmed up by a prompt of its own."""
    with TemporaryDirectory(prefix="paceline-bench-") as folder:
        socket = Path(folder) / "socket"
        words = ("--prefix-ssd", "10GB", "--prefix-dir", str(Path(folder) / "prefix"), "--uds", str(socket))
        with setting.daemon(*words) as server:
            _ask(setting, server, _WARM_UP_SEED)
            cold = [_ask(setting, server, pair) for pair in range(setting.pairs)]
            _flush(setting, socket)
        warm = []
        with setting.daemon(*words) as server:
            _ask(setting, server, _WARM_UP_SEED + 1)
            for pair in range(setting.pairs):
                warm.append(_ask(setting, server, pair))
                _say_pair(setting, "restart", pair, cold[pair], warm[-1])
    return _again("restart", cold, warm)


def _flush(setting: Setting, socket: Path) -> None:
    words = (str(setting.program), "cache", "flush", "--uds", str(socket))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerError(f"not everything was written: {done.stdout}{done.stderr}")


def _say_pair(setting: Setting, name: str, pair: int, cold: Answer, warm: Answer) -> None:
    times = [answer.ttft_s * 1e3 for answer in (cold, warm)]
    say(f"{name}, pair {pair + 1} of {setting.pairs}: {times[0]:.0f} ms cold, {times[1]:.1f} ms again")


def _again(name: str, cold: Sequence[Answer], warm: Sequence[Answer]) -> Outcome:
    warm_s, cold_s = ([answer.ttft_s for answer in answers] for answers in (warm, cold))
    note = f"{name}: {statistics.median(cold_s) * 1e3:.0f} ms cold, {statistics.median(warm_s) * 1e3:.1f} ms again"
    return Outcome((GOALS[name].held_against(ratios(warm_s, cold_s)),), (note,), tuple(unlike(name, cold, warm)))


def unlike(name: str, cold: Sequence[Answer], warm: Sequence[Answer]) -> Iterator[str]:
    """Where an answer is another one than before, or another part of its prompt was spared than all but the last token
    of the second one's.
    """
    for pair, (first, second) in enumerate(zip(cold, warm, strict=True), start=1):
        if first.record.text != second.record.text:
            yield f"{name}, pair {pair}: {second.record.text!r} in place of {first.record.text!r}"
        for answer, spared in ((first, 0), (second, PROMPT - 1)):
            if answer.cached != spared:
                yield f"{name}, pair {pair}: {answer.cached} tokens cached in place of {spared}"


# ---- agents ----------------------------------------------------------------------------------------------------------


def _traffic(setting: Setting) -> Outcome:
    """Conversations that all begin alike; each play is of other words."""
    tokenizer = tokenizer_of(setting.model)
    plays: list[list[Asked]] = []
    with setting.daemon() as server:
        run_now(play(target_of(server), Script(tokenizer, "Warming up"), setting.load, turns=1))
        for pair in range(setting.pairs):
            script = Script(tokenizer, f"{pair} of {setting.pairs}")
            plays.append(run_now(play(target_of(server), script, setting.load)))
            say(f"traffic, {pair + 1} of {setting.pairs}: {account(plays[-1])}")
    measured = spread([account(turns).share for turns in plays])
    faults = [
        f"traffic: client {asked.client}, turn {asked.turn}: {asked.reused} of {len(asked.prompt)} tokens cached, more "
        "than were known"
        for turns in plays
        for asked in spared_too_much(turns)
    ]
    return Outcome((GOALS["traffic"].held_against(measured),), tuple(told_of(plays)), tuple(faults))


# ---- while blocks are written ----------------------------------------------------------------------------------------


def _spill(setting: Setting) -> Outcome:
    """Plain decoding on both sides, with too little memory to keep what is written."""
    load = Load(_SPILLING, _SPILLED_TOKENS, ignore_eos=True, timeout_s=setting.load.timeout_s)
    plan = Plan(ordinary_prompts(), (_SPILLING,), setting.pairs, 1, load, "spill")
    words = ("--prefix-ram", "64MB", "--draft-tokens", "0")
    with TemporaryDirectory(prefix="paceline-bench-") as folder, ExitStack() as stack:
        files = ("--prefix-ssd", "2GB", "--prefix-dir", folder)
        ours = stack.enter_context(setting.daemon(*words, *files, name="files"))
        theirs = stack.enter_context(setting.daemon(*words, "--prefix-ssd", "0", name="no files"))
        for side in (ours, theirs):
            warm_up(side, plan)
        before = _in_files(ours)
        compared = take_turns((ours, theirs), plan)
        grown = _in_files(ours) - before
    bounds = (GOALS["spill"].held_against(compared[0].ratio(lane_rate)),)
    seconds = sum(_seconds(compared))
    note = f"spill: {grown / 1e6:.0f} MB written in {seconds:.1f} s, {grown / 1e6 / seconds:.1f} MB/s"
    return Outcome(bounds, (note,), tuple(_spill_faults(agreement(compared), grown)))


def _spill_faults(agreed: Agreement, grown: float) -> Iterator[str]:
    yield from (f"spill: {error}" for error in agreed.errors)
    if agreed.other_text:
        yield f"spill: {agreed.other_text} of {agreed.requests} answers are not those without files"
    if grown <= 0:
        yield "spill: nothing was written"


def _in_files(server: Server) -> float:
    return gauge(server, "paceline_prefix_cache_bytes", tier="ssd")


def _seconds(compared: Iterable[Comparison]) -> Iterator[float]:
    """How long each of our runs took."""
    for run in (run for comparison in compared for run in comparison.ours):
        yield max(record.ended_at for record in run.records) - min(record.started_at for record in run.records)


# ---- in process ------------------------------------------------------------------------------------------------------


def _index(_setting: Setting) -> Outcome:
    """Many texts; `--pairs` says nothing here."""
    times, full = index_times(), index_times(kept=5)
    matches, inserts = ([seconds * 1e3 for seconds in each] for each in (times.matches, times.inserts))
    note = f"index: insertion where each block pushes out another one {statistics.median(full.inserts) * 1e3:.2f} ms"
    return Outcome(
        (GOALS["match"].held_against(spread(matches)), GOALS["insert"].held_against(spread(inserts))), (note,)
    )


def _copy(setting: Setting) -> Outcome:
    copied = copy_times(load_model(setting.model), setting.pairs)
    milliseconds = [seconds * 1e3 for seconds in copied.seconds]
    rate, wait = sum(copied.sizes) / sum(copied.seconds), statistics.median(copied.waits)
    note = (
        f"copy: {sum(copied.sizes) / 1e6:.0f} MB in {len(milliseconds)} rounds, {rate / 1e9:.2f} GB/s; the longest "
        f"{max(milliseconds):.1f} ms, p90 {percentile(milliseconds, 0.9):.1f} ms; {wait:.2f} s to the first token "
        f"behind {RESTORED}"
    )
    faults = {
        f"copy: {spared} tokens cached in place of {RESTORED - 1}" for spared in copied.spared if spared != RESTORED - 1
    }
    return Outcome((GOALS["copy"].held_against(spread(milliseconds)),), (note,), tuple(sorted(faults)))


CASES: Mapping[str, Callable[[Setting], Outcome]] = {
    "repeat": _repeat,
    "restart": _restart,
    "traffic": _traffic,
    "spill": _spill,
    "index": _index,
    "copy": _copy,
}
