"""`prefix` in process: the index without any bytes, and what copying in adds to rounds in which others decode.

The engine's own loop plays the second with the real model, and the clock stands where the executor's does. MLX is
imported by that measurement only, after OpenBLAS.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.bench.prefix_asking import random_tokens
from engine.config import EngineConfig
from engine.loop import Loop
from engine.messages import Cancel, Message, Submit
from engine.prefix import PrefixCache
from scheduler.events import Event, Finished, Tokens
from scheduler.pieces import BLOCK_TOKENS, Key, Piece, extended, root_of
from scheduler.prefix import PrefixIndex
from scheduler.request import Request, Sampling
from scheduler.round import Restore

if TYPE_CHECKING:
    from backends.base import Backend

INDEXED = 8_192
"""Tokens of the index's texts: 128 blocks."""
_TEXTS = 200
RESTORED = 2_000
"""Tokens of the prompt that is copied in."""
DECODING = 4
"""Lanes that decode meanwhile."""
_BESIDE = 100
"""Tokens of their prompts."""
_ANSWER = 500
"""Tokens that they would write: they are called off when the copy is there."""
_RAM_BYTES = 2 << 30


# ---- the index -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IndexTimes:
    """Seconds, of each text."""

    matches: list[float]
    """Of a text that is all there."""
    inserts: list[float]
    """Of all its blocks, hashes included."""


def index_times(texts: int = _TEXTS, *, kept: int = _TEXTS) -> IndexTimes:
    """Insert text after text into one index, and match each; there is room for `kept` of them, so that those behind
    push out others.
    """
    index = PrefixIndex(kept * INDEXED // BLOCK_TOKENS)
    root = root_of("bench")
    times = IndexTimes([], [])
    for seed in range(texts):
        tokens = random_tokens(INDEXED, seed)
        start = time.perf_counter()
        insert(index, root, tokens)
        inserted = time.perf_counter()
        found = index.match(root, tokens)
        times.inserts.append(inserted - start)
        times.matches.append(time.perf_counter() - inserted)
        assert found.length == INDEXED
    return times


def insert(index: PrefixIndex, root: Key, tokens: Sequence[int]) -> None:
    """All whole blocks of a text, as lanes give them: each is hashed when it is there. Every block takes one byte."""
    parent = root
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        end = start + BLOCK_TOKENS
        key = extended(parent, tokens[start:end])
        index.insert(Piece(key, parent, start, end), 1)
        parent = key


# ---- copying in ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Copied:
    """What copying in took. Written by `TimedCache` and `copy_times`."""

    seconds: list[float] = field(default_factory=list)
    """Of each round that copied."""
    sizes: list[int] = field(default_factory=list)
    """Bytes, of the same rounds."""
    spared: list[int] = field(default_factory=list)
    """Tokens that each restored prompt was spared."""
    waits: list[float] = field(default_factory=list)
    """Seconds until its token was there."""


class TimedCache(PrefixCache):
    """A prefix cache in memory alone, with a clock around its copying. Written as the cache is."""

    def __init__(self, backend: "Backend", copied: Copied) -> None:
        assert backend.blocks is not None
        super().__init__(backend.blocks, _RAM_BYTES, None, 0, _nobody)
        self._copied = copied

    def restore(self, restores: Sequence[Restore]) -> int:
        """As the cache."""
        start = time.perf_counter()
        size = super().restore(restores)
        self._copied.seconds.append(time.perf_counter() - start)
        self._copied.sizes.append(size)
        return size


def _nobody(_message: Message) -> None:
    """Without an SSD there is nothing to be told."""


class Crowd:
    """An engine's loop whose clients are driven by hand."""

    def __init__(self, backend: "Backend", cache: PrefixCache) -> None:
        self._mail: deque[Message] = deque()
        self._loop = Loop(
            backend,
            EngineConfig(max_lanes=DECODING + 1, draft_tokens=0),
            sources=(),
            mailbox=lambda: [self._mail.popleft() for _ in range(len(self._mail))],
            clock=time.monotonic,
            prefix=cache,
        )

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Ask greedily, and never for less."""
        self._mail.append(Submit(Request(name, prompt, max_tokens, Sampling(temperature=0.0), ignore_eos=True)))

    def cancel(self, names: Sequence[str]) -> None:
        """Call requests off, and see them gone."""
        self._mail.extend(Cancel(name) for name in names)
        while self._mail or not self._loop.idle:
            self._loop.step()

    def until(self, ended: Callable[[Event], bool], times: int = 1) -> list[Event]:
        """Serve rounds until so many events that end it have come; those."""
        seen: list[Event] = []
        while len(seen) < times:
            seen += [event for event in self._loop.step() if ended(event)]
        return seen


def copy_times(backend: "Backend", pairs: int) -> Copied:
    """Restore one prompt again and again, each time while new lanes decode."""
    copied = Copied()
    crowd = Crowd(backend, TimedCache(backend, copied))
    prompt = random_tokens(RESTORED, 0)
    crowd.submit("first", prompt, 1)
    crowd.until(lambda event: isinstance(event, Finished))
    for pair in range(pairs):
        others = [f"{pair}-{lane}" for lane in range(DECODING)]
        for lane, name in enumerate(others):
            crowd.submit(name, random_tokens(_BESIDE, 1 + pair * DECODING + lane), _ANSWER)
        begun: set[str] = set()
        while len(begun) < DECODING:
            begun |= {event.request_id for event in crowd.until(lambda event: isinstance(event, Tokens))}
        crowd.submit("again", prompt, 1)
        start = time.perf_counter()
        for event in crowd.until(lambda event: isinstance(event, Finished)):
            assert isinstance(event, Finished)
            assert event.request_id == "again"
            copied.spared.append(event.usage.cached_tokens)
        copied.waits.append(time.perf_counter() - start)
        crowd.cancel(others)
    return copied


def load_model(model: Path) -> "Backend":
    """As the daemon has it."""
    from backends.mlx.runtime import load_blas

    load_blas()
    from backends.mlx.build import load_backend

    return load_backend(str(model), Path(), "auto", lambda _stage, _done, _total: None, "bench")
