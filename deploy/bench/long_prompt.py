"""`long-prompt`: a long prompt arrives among lanes that stream, and short ones right behind it.

While it is prefilled the lanes' inter-token times may grow by `--itl-target` and no more, and the short ones are
answered before it. An inter-token time here is the time between two events: a round that gives several tokens is one.
Each repeat begins with the lanes by themselves, so that what they are held against is of the same minute. A prompt that
is longer still is reported and not bounded: its own attention may take longer than the target whatever a round holds.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated

import typer

from deploy.bench.client import Connection, Endpoint, Exchange, Load, Record, Target, read_record, request_bytes
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
from deploy.bench.prefix_asking import Answer, ask, run_now, token_prompt
from deploy.bench.prompts import Prompt, draw, ordinary_prompts
from deploy.bench.report import Bound, bound_table, percentile, show, spread
from deploy.bench.servers import Server, ServerError
from deploy.bench.serving import UNBOUNDED, Subject

STREAMS, SHORT_ONES, LANES = 8, 3, 16
_STREAMED, _STREAMED_BY_FAKE = 1_800, 8_000
"""Tokens that the streaming lanes ask for: they are left before they have got them all."""
_SHORT = 20
_FEW = 4
"""Tokens of the newcomers' answers."""
_SETTLED = 4
"""Reads of each stream before the time by themselves begins."""
_A_MOMENT_S = 0.05
"""After which the short ones follow the long one, so that it is there first."""
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Repeat:
    """One arrival. `alone` and `beside` are inter-token times of all streams, in seconds: before the newcomers came,
    and until the long one had its first token.
    """

    alone: Sequence[float]
    beside: Sequence[float]
    long: Answer
    short: Sequence[Answer]

    @property
    def grown_ms(self) -> float:
        """By how much the p99 grew. Raises ValueError if there was nothing to compare."""
        times = [percentile(gaps, 0.99) for gaps in (self.alone, self.beside)]
        if times[0] is None or times[1] is None:
            raise ValueError("the streaming lanes gave no two events to compare")
        return 1e3 * (times[1] - times[0])

    @property
    def order(self) -> float:
        """When the last of the short ones had its first token over when the long one had its own, from the moment that
        the long one was sent: below 1 if all of them were first.
        """
        sent = self.long.record.started_at
        return (max(answer.first_at for answer in self.short) - sent) / self.long.ttft_s


@dataclass(frozen=True, slots=True)
class Scene:
    """What all repeats are told. `alone_s`: how long lanes stream by themselves."""

    server: Server
    subject: Subject
    timeout_s: float
    alone_s: float

    @property
    def target(self) -> Target:
        """Where to ask."""
        return target_of(self.server)


def long_prompt(
    model: AnyModel = None,
    backend: Backend = "mlx",
    pairs: Pairs = 5,
    tokens: Annotated[int, typer.Option(min=32, help="Of the long prompt.")] = 1_500,
    longer: Annotated[int, typer.Option(min=0, help="Of the one that is only reported; 0: none.")] = 6_000,
    itl_target: Annotated[float, typer.Option(min=1, help="What the server is given, in milliseconds.")] = 250.0,
    alone: Annotated[float, typer.Option(min=0.1, help="Seconds that the lanes stream by themselves.")] = 4.0,
    program: Program = PROGRAM,
    arguments: Arguments = None,
    timeout: Timeout = 300.0,
    json: Json = False,
) -> None:
    """Measure what a long prompt does to lanes that stream, and to short prompts behind it."""
    warn_if_busy()
    words = ("--max-lanes", str(LANES), "--itl-target", f"{itl_target:g}")
    repeats: dict[int, list[Repeat]] = {length: [] for length in (tokens, longer) if length}
    try:
        subject = Subject.told(model, backend, program, arguments)
        with subject.daemon(*words) as server:
            scene = Scene(server, subject, timeout, alone)
            run_now(arrive(scene, "warm-up", tokens, -1))
            for pair in range(pairs):
                for place, (length, of_length) in enumerate(repeats.items()):
                    seed = place * pairs + pair
                    of_length.append(run_now(arrive(scene, f"{length} tokens, {pair + 1} of {pairs}", length, seed)))
        bounds = bounds_of(repeats[tokens], itl_target)
        notes = [note for length, of_length in repeats.items() for note in told_of(length, of_length)]
        notes += [UNBOUNDED] if backend == "fake" else []
    except (ServerError, OSError, ValueError) as error:
        say(f"long-prompt: {error}")
        raise typer.Exit(2) from None
    show([bound_table("A long prompt among lanes that stream", bounds)], notes, facts_of(bounds, notes), as_json=json)
    raise typer.Exit(0 if backend == "fake" or all(bound.holds for bound in bounds) else 1)


# ---- one arrival -----------------------------------------------------------------------------------------------------


class Stream:
    """A request whose events are watched while they come, and that may be left. Written by the event loop alone."""

    def __init__(self, target: Target, prompt: Prompt, load: Load) -> None:
        self._target = target
        self._prompt = prompt
        self._connection = Connection(request_bytes(target, prompt, load))
        self._started_at = 0.0

    async def begin(self) -> None:
        """Raises OSError if nobody listens."""
        self._started_at = time.perf_counter()
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self._connection, self._target.host, self._target.port)

    @property
    def reads(self) -> int:
        """How often something came."""
        return len(self._connection.arrivals)

    @property
    def over(self) -> bool:
        """Whether it ended by itself."""
        return self._connection.ended.done()

    def leave(self) -> Record:
        """Hang up; what came until now. That it has no end is no fault here."""
        self._connection.close()
        arrivals = tuple(self._connection.arrivals)
        return read_record(self._prompt, Exchange(self._started_at, time.perf_counter(), arrivals, None))


async def arrive(scene: Scene, label: str, length: int, seed: int) -> Repeat:
    """Raises ServerError if a request fails, TimeoutError (an OSError) if it takes too long."""
    load = Load(STREAMS, _STREAMED if scene.subject.model else _STREAMED_BY_FAKE, ignore_eos=True)
    prompts = draw(ordinary_prompts(), STREAMS, start=(seed + 1) * STREAMS, label=f"long-prompt-{seed}")
    streams = [Stream(scene.target, prompt, load) for prompt in prompts]
    try:
        async with asyncio.timeout(scene.timeout_s + scene.alone_s):
            for stream in streams:
                await stream.begin()
            while any(stream.reads < _SETTLED for stream in streams):
                _all_stream(streams)
                await asyncio.sleep(_LOOK_S)
            begin = time.perf_counter()
            await asyncio.sleep(scene.alone_s)
            long, *short = await _newcomers(scene, length, seed)
            _all_stream(streams)
    finally:
        records = [stream.leave() for stream in streams]
    repeat = repeat_of(records, begin, long, short)
    say(f"{label}: p99 grew by {repeat.grown_ms:.0f} ms; the long one's first token after {long.ttft_s:.2f} s")
    return repeat


def _all_stream(streams: Sequence[Stream]) -> None:
    for stream in streams:
        if stream.over:
            record = stream.leave()
            how = record.error or f"{record.finish_reason} after {record.tokens} tokens"
            raise ServerError(f"a lane ended before the long prompt had its first token: {how}")


async def _newcomers(scene: Scene, length: int, seed: int) -> Sequence[Answer]:
    """The long one first."""
    load = Load(1, _FEW, Endpoint.COMPLETIONS, ignore_eos=True, timeout_s=scene.timeout_s)
    first = 1_000 * (seed + 2)
    prompts = [token_prompt("long", scene.subject.tokens(length, first))]
    prompts += [
        token_prompt(f"short {place}", scene.subject.tokens(_SHORT, first + place))
        for place in range(1, SHORT_ONES + 1)
    ]

    async def come(place: int, prompt: Prompt) -> Answer:
        await asyncio.sleep(_A_MOMENT_S if place else 0.0)
        return await ask(scene.target, prompt, load)

    return await asyncio.gather(*(come(place, prompt) for place, prompt in enumerate(prompts)))


def repeat_of(streams: Sequence[Record], begin: float, long: Answer, short: Sequence[Answer]) -> Repeat:
    """Times that lie between `begin` and the arrival; and those of which a part lies between that and the long one's
    first token.
    """
    sent, first = long.record.started_at, long.first_at
    gaps = list(_gaps(streams))
    alone = [end - start for start, end in gaps if begin <= start and end <= sent]
    beside = [end - start for start, end in gaps if sent < end and start < first]
    return Repeat(alone, beside, long, short)


def _gaps(records: Sequence[Record]) -> Iterator[tuple[float, float]]:
    """Begin and end of each time between two events of a stream."""
    for record in records:
        if record.first_at is not None:
            yield from pairwise(accumulate(record.gaps_s, initial=record.first_at))


# ---- verdicts --------------------------------------------------------------------------------------------------------


def bounds_of(repeats: Sequence[Repeat], itl_target: float) -> list[Bound]:
    """By the medians of the repeats. Raises ValueError if the streams gave nothing to compare."""
    grown = spread([repeat.grown_ms for repeat in repeats])
    order = spread([repeat.order for repeat in repeats])
    return [
        Bound("p99 inter-token time beside the prompt less that without it, ms", STREAMS, grown, itl_target, True),
        Bound("last of the short ones' first tokens over the long one's", SHORT_ONES, order, 1.0, True),
    ]


def told_of(length: int, repeats: Sequence[Repeat]) -> Iterator[str]:
    """For people."""
    alone, beside = (
        spread([1e3 * (percentile(gaps, 0.99) or 0.0) for gaps in all_gaps])
        for all_gaps in ([repeat.alone for repeat in repeats], [repeat.beside for repeat in repeats])
    )
    yield f"{length} tokens: p99 inter-token time {alone} ms without, {beside} ms beside"
    long = spread([repeat.long.ttft_s for repeat in repeats])
    short = spread([max(answer.ttft_s for answer in repeat.short) for repeat in repeats])
    yield f"{length} tokens: first token after {long} s; the short ones' after {short} s at most"
    spared = sum(repeat.long.cached for repeat in repeats)
    if spared:
        yield f"{length} tokens: {spared} tokens were cached, which none should be"


def facts_of(bounds: Sequence[Bound], notes: Sequence[str]) -> dict[str, Sequence[Bound] | Sequence[str]]:
    """For programs."""
    return {"bounds": bounds, "notes": notes}
