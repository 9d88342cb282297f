"""Requests for `prefix` and for crowds: prompts of exact tokens, and what the server says it was spared; its metrics.

Owns one exchange on asyncio's streams. What came is read by `client` and `wire`; only the `usage` that tells of cached
tokens is read here.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any, TypeVar

import msgspec
import numpy as np
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from deploy.bench.client import Exchange, Load, Record, Target, read_record, request_bytes
from deploy.bench.prompts import Prompt
from deploy.bench.servers import Server, ServerError
from deploy.bench.wire import Arrival, read_reply, server_sent_events

T = TypeVar("T")

_FIRST, _LAST = 1_000, 40_000
"""Tokens of random prompts: none of a vocabulary's special ones."""
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """A request as its client saw it; `cached` tokens of its prompt need not have been computed, says the server."""

    record: Record
    cached: int

    @property
    def first_at(self) -> float:
        """When the first text came; of an answer that has none, its end."""
        return self.record.first_at or self.record.ended_at

    @property
    def ttft_s(self) -> float:
        """Time to the first text, connecting included."""
        return self.first_at - self.record.started_at


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    usage: _Usage | None = None


def random_tokens(count: int, seed: int) -> tuple[int, ...]:
    """A prompt that no other seed begins alike."""
    return tuple(np.random.default_rng(seed).integers(_FIRST, _LAST + 1, size=count).tolist())


def token_prompt(name: str, tokens: Sequence[int], **fields: Any) -> Prompt:
    """For the text-completion route: nothing is left to a tokenizer."""
    return Prompt(name, (), {"prompt": list(tokens), **fields})


async def ask(target: Target, prompt: Prompt, load: Load) -> Answer:
    """One request on a connection of its own. Raises ServerError if it fails, or is not over in `load.timeout_s`."""
    exchange = await _exchange(target, request_bytes(target, prompt, load), load.timeout_s)
    record = read_record(prompt, exchange)
    if record.error is not None:
        raise ServerError(f"{prompt.name}: {record.error}")
    return Answer(record, cached_tokens(exchange.arrivals))


async def _exchange(target: Target, request: bytes, timeout_s: float) -> Exchange:
    arrivals: list[Arrival] = []
    failure: str | None = None
    started_at = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(target.host, target.port)
            try:
                writer.write(request)
                while data := await reader.read(_READ_BYTES):
                    arrivals.append(Arrival(time.perf_counter(), data))
            finally:
                writer.close()
    except TimeoutError:
        failure = f"timed out after {timeout_s:g} s"
    except OSError as error:
        failure = f"connection lost: {error}"
    return Exchange(started_at, time.perf_counter(), tuple(arrivals), failure)


def cached_tokens(arrivals: Sequence[Arrival]) -> int:
    """Of the usage in a stream that was read whole; 0 where it says nothing of them."""
    cached = 0
    for event in server_sent_events(read_reply(arrivals).body):
        if event.data != b"[DONE]":
            usage = msgspec.json.decode(event.data, type=_Event).usage
            if usage is not None and usage.prompt_tokens_details is not None:
                cached = usage.prompt_tokens_details.cached_tokens
    return cached


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """In an event loop of its own."""
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


class Scrape:
    """A server's metrics at one moment."""

    def __init__(self, text: str, name: str) -> None:
        """`name` is the server's."""
        self._server = name
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """One sample. Raises ServerError if there is none."""
        found = self._samples.get((name, frozenset(labels.items())))
        if found is None:
            raise ServerError(f"{self._server} has no metric {name} {labels}")
        return found

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """All samples of a name, which has no other label."""
        return {
            told: value
            for (sample, labels), value in self._samples.items()
            for key, told in labels
            if (sample, key) == (name, label)
        }

    def all(self, name: str) -> list[tuple[dict[str, str], float]]:
        """All samples of a name with their labels."""
        return [(dict(labels), value) for (sample, labels), value in self._samples.items() if sample == name]


def scrape(server: Server, key: str = "") -> Scrape:
    """With an API key where one is asked for. Raises OSError and HTTPException if the server does not answer, and
    ServerError if it answers with something else.
    """
    connection = HTTPConnection(server.host, server.port, timeout=5.0)
    try:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise ServerError(f"{server.name} does not show its metrics: {text[:200]}")
    return Scrape(text, server.name)


def gauge(server: Server, name: str, **labels: str) -> float:
    """A sample of the server's metrics. Raises ServerError if there is none."""
    return scrape(server).value(name, **labels)
