"""The load: N concurrent clients that stream completions from any OpenAI-compatible server.

Owns the sockets and the clock. It shares its processors with the server under test, so an exchange is a bare asyncio
protocol that notes what arrived when, and everything is parsed after the run (`wire`). A run is bounded twice: each
request by its timeout, all of them by the run's limit. Nothing raises for what a server does: it becomes a record with
an error.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, cast
from urllib.parse import urlsplit

import h11
import msgspec
import uvloop

from deploy.bench.prompts import Prompt
from deploy.bench.wire import Arrival, Transcript, read_reply, read_transcript, server_sent_events

_ENDS = (b"\ndata: [DONE]", b"\r\n0\r\n\r\n")
"""A stream is over when one of these arrived: its last event, or the last chunk of a chunked body (where the event may
be cut in two by the framing). Neither can be part of an event's JSON, in which line ends are escaped."""

_WORTH_SENDING_S = 0.01
"""A request that has less time than this is not sent at all: timers may fire a millisecond early."""


class Endpoint(StrEnum):
    """Which of the two completion routes to drive."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how it wants to be addressed. `base` is the path in front of the route, with no slash behind."""

    host: str
    port: int
    model: str
    base: str = "/v1"
    key: str | None = None

    @classmethod
    def of_url(cls, url: str, model: str, key: str | None = None) -> "Target":
        """`http://host:port`, with or without a path; without one it is `/v1`. Raises ValueError for anything else."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"want http://host:port, not {url!r}")
        return cls(parts.hostname, parts.port or 80, model, parts.path.rstrip("/") or "/v1", key)


@dataclass(frozen=True, slots=True)
class Load:
    """How to drive a server: greedy, streamed, `max_tokens` a request. Times in seconds."""

    clients: int
    max_tokens: int
    endpoint: Endpoint = Endpoint.CHAT
    ignore_eos: bool = False
    timeout_s: float = 120.0
    limit_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Record:
    """One request as its client saw it. Times are in seconds of `time.perf_counter`; an absent one is None.

    `tokens` is the server's own count where it sent usage, else the number of events with text. `last_at` is when the
    finish reason came (it closes the last token, which may have had no text), else the last text.
    """

    prompt: str
    started_at: float
    ended_at: float
    first_at: float | None
    last_at: float | None
    gaps_s: tuple[float, ...]
    tokens: int
    prompt_tokens: int | None
    events: int
    first_share: float
    text: str
    finish_reason: str | None
    error: str | None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first text, connecting included."""
        return None if self.first_at is None else self.first_at - self.started_at

    @property
    def decoded(self) -> float:
        """Tokens that came after the first event: those that the time from `first_at` to `last_at` has paid for.

        A server that speculates may send several tokens in its first event, so they are taken off by that event's
        share of the text rather than as one.
        """
        return self.tokens * (1.0 - self.first_share)


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one run, in the order of its prompts."""

    clients: int
    records: tuple[Record, ...]


class Connection(asyncio.Protocol):
    """One request on a connection of its own. Written by the event loop alone; `ended` resolves once, always."""

    def __init__(self, request: bytes, *, to_the_end: bool = False, most_reads: int | None = None) -> None:
        """`to_the_end`: the server hangs up; else the client does, once the last event has come. It does after
        `most_reads` in any case.
        """
        self.arrivals: list[Arrival] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: str | None = None
        self._request = request
        self._to_the_end = to_the_end
        self._most_reads = most_reads
        self._tail = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note what came when; hang up if that was enough."""
        self.arrivals.append(Arrival(time.perf_counter(), data))
        tail = self._tail + data
        if len(self.arrivals) == self._most_reads or (not self._to_the_end and any(end in tail for end in _ENDS)):
            self.close()
        self._tail = tail[-16:]

    def connection_lost(self, error: Exception | None) -> None:
        """It is over, however it ended."""
        if error is not None:
            self.failure = f"connection lost: {error}"
        self._end()

    def close(self) -> None:
        """Hang up; the server sees a client that left."""
        if self._transport is not None:
            self._transport.close()
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request that is over, not parsed yet: what arrived when, and what went wrong on the connection."""

    started_at: float
    ended_at: float
    arrivals: tuple[Arrival, ...]
    failure: str | None


def request_bytes(target: Target, prompt: Prompt, load: Load) -> bytes:
    """The whole HTTP request for `prompt`. The connection is not kept: some servers speak HTTP/1.0."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": load.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.endpoint is Endpoint.CHAT:
        route = "/chat/completions"
        body["messages"] = [{"role": message.role, "content": message.content} for message in prompt.messages]
    else:
        route = "/completions"
        body["prompt"] = prompt.text
    body |= prompt.fields
    return http_bytes(target, f"POST {target.base}{route}", msgspec.json.encode(body))


def http_bytes(target: Target, method_and_path: str, content: bytes, content_type: str = "application/json") -> bytes:
    """Any HTTP request, right or wrong."""
    lines = [
        f"{method_and_path} HTTP/1.1",
        f"Host: {target.host}:{target.port}",
        f"Content-Type: {content_type}",
        "Accept: text/event-stream",
        "Connection: close",
        f"Content-Length: {len(content)}",
    ]
    if target.key is not None:
        lines.append(f"Authorization: Bearer {target.key}")
    return "\r\n".join([*lines, "", ""]).encode() + content


async def exchange(
    target: Target, request: bytes, give_up_at: float, *, to_the_end: bool = False, most_reads: int | None = None
) -> Exchange:
    """Send `request` and listen until the stream ends or `give_up_at`; the last two are as `Connection` has them."""
    started_at = time.perf_counter()
    if give_up_at - started_at < _WORTH_SENDING_S:
        return Exchange(started_at, started_at, (), "not sent: the run's time was up")
    connection = Connection(request, to_the_end=to_the_end, most_reads=most_reads)
    failure: str | None = None
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(give_up_at - started_at):
            await loop.create_connection(lambda: connection, target.host, target.port)
            await connection.ended
    except TimeoutError:
        failure = f"timed out after {time.perf_counter() - started_at:.1f} s"
    except OSError as error:
        failure = f"cannot connect: {error}"
    finally:
        connection.close()
    return Exchange(started_at, time.perf_counter(), tuple(connection.arrivals), failure or connection.failure)


def read_record(prompt: Prompt, exchange: Exchange) -> Record:
    """What one exchange amounts to. The first thing that went wrong is its error; what came before it is kept."""
    transcript = Transcript((), None, None, None, None, None)
    error = exchange.failure
    try:
        reply = read_reply(exchange.arrivals)
        if reply.status == 200:
            transcript = read_transcript(server_sent_events(reply.body))
            error = transcript.error or error
        elif reply.status is not None:
            body = b"".join(piece.data for piece in reply.body)
            error = f"HTTP {reply.status}: {body[:200].decode(errors='replace')}"
    except (h11.RemoteProtocolError, msgspec.DecodeError) as broken:
        error = error or f"not understood: {broken}"
    if error is None and transcript.finish_reason is None:
        error = "the stream ended without a finish reason"
    return _record(prompt, exchange, transcript, error)


def _record(prompt: Prompt, exchange: Exchange, transcript: Transcript, error: str | None) -> Record:
    pieces = transcript.pieces
    text = "".join(piece.text for piece in pieces)
    times = [piece.at for piece in pieces]
    counted = transcript.completion_tokens
    return Record(
        prompt=prompt.name,
        started_at=exchange.started_at,
        ended_at=exchange.ended_at,
        first_at=times[0] if times else None,
        last_at=transcript.finished_at or (times[-1] if times else None),
        gaps_s=tuple(later - earlier for earlier, later in pairwise(times)),
        tokens=len(pieces) if counted is None else counted,
        prompt_tokens=transcript.prompt_tokens,
        events=len(pieces),
        first_share=len(pieces[0].text) / len(text) if pieces else 1.0,
        text=text,
        finish_reason=transcript.finish_reason,
        error=error,
    )


async def drive(target: Target, prompts: Sequence[Prompt], load: Load) -> Run:
    """Send every prompt once, `load.clients` at a time: each client takes the next prompt when its last one ended."""
    run_ends_at = time.perf_counter() + load.limit_s
    requests = [request_bytes(target, prompt, load) for prompt in prompts]
    exchanges: list[Exchange | None] = [None] * len(prompts)
    waiting = iter(range(len(prompts)))

    async def client() -> None:
        for index in waiting:
            give_up_at = min(time.perf_counter() + load.timeout_s, run_ends_at)
            exchanges[index] = await exchange(target, requests[index], give_up_at)

    async with asyncio.TaskGroup() as group:
        for _ in range(load.clients):
            group.create_task(client())
    records = (
        read_record(prompt, ended) for prompt, ended in zip(prompts, exchanges, strict=True) if ended is not None
    )
    return Run(load.clients, tuple(records))


def drive_now(target: Target, prompts: Sequence[Prompt], load: Load) -> Run:
    """`drive`, in an event loop of its own."""
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(drive(target, prompts, load))
