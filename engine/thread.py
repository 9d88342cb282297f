"""The one thread that owns every MLX object, and its two crossings: a mailbox in, one call per round out.

The event loop starts, drains and stops it; the thread runs `Loop`. Nothing else is shared between the two.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from backends.base import Accompanied, Backend, ModelInfo
from backends.faults import disk_faults
from backends.spill import Spill
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.loop import Loop
from engine.memory import MemoryReport, report
from engine.messages import Message, Task
from engine.prefix import PrefixCache, PrefixStats
from scheduler.draft import DraftSource
from scheduler.pace import Pace
from scheduler.prediction import PredictionDrafts
from scheduler.scheduler import Limits, Scheduler
from scheduler.stats import Stats
from scheduler.suffix import SuffixDrafts

_log = logging.getLogger("paceline.engine")

T = TypeVar("T")

RESTS_AFTER = 5.0
"""Memory that was given back comes again page by page, in the middle of somebody's round: 0.4 s for 190 MB on a virtual
machine whose host has to find the pages. Turns of a conversation, and of agents, lie closer together than this.
"""
_BEAT_SECONDS = 1.0
"""How often an idle engine says that it is alive."""
_WAITING_SECONDS = 0.5
"""How often lanes that wait for a read are looked at without news."""
_CANCEL_SECONDS = 5.0
"""How long a drain waits for its cancels to be seen: one round, generously."""
_QUEUE_BYTES = 256 << 20
"""How much of the prefix cache may wait to be written."""
_FLUSH_SECONDS = 10.0
"""How long the end waits for pieces of the prefix cache to be written."""


class EngineState(StrEnum):
    """What the engine could do with a request now: serve it in READY, finish it in DRAINING, else nothing."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    BROKEN = "broken"
    STOPPED = "stopped"


class Mailbox:
    """Messages to the engine thread. `send` from any thread; `take` and `wait` by the engine thread alone."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._arrived = threading.Event()
        self.closed = False

    def send(self, message: Message) -> None:
        """Leave a message; never waits."""
        self._messages.append(message)
        self._arrived.set()

    def close(self) -> None:
        """Wake the engine for the last time."""
        self.closed = True
        self._arrived.set()

    def wait(self, seconds: float | None = None) -> None:
        """Sleep until there is a message or the mailbox is closed, or for so long at most."""
        self._arrived.wait(seconds)

    def take(self) -> list[Message]:
        """All messages that lie there now."""
        self._arrived.clear()
        if self.closed:
            self._arrived.set()
        taken: list[Message] = []
        while self._messages:
            taken.append(self._messages.popleft())
        return taken


class Engine:
    """Loads a backend on its own thread and serves requests with it. All methods belong to one event loop."""

    def __init__(
        self, make_backend: Callable[[], Backend], config: EngineConfig, *, rests_after: float = RESTS_AFTER
    ) -> None:
        """`make_backend` is called on the engine thread; what it raises is what `ready` raises. When nothing was to be
        done for `rests_after` seconds, the backend gives back what it only holds to be fast.
        """
        self._rests_after = rests_after
        self._make_backend = make_backend
        self._config = config
        self._mailbox = Mailbox()
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._loaded: asyncio.Future[ModelInfo] | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._stats = Scheduler(Limits(config.max_lanes, config.round_rows, config.draft_tokens), Pace()).stats()
        self._state = EngineState.LOADING
        self._info: ModelInfo | None = None
        self._prefix: PrefixCache | None = None
        self._prefix_stats: PrefixStats | None = None
        self._beat: float | None = None
        self._memory: MemoryReport | None = None
        self._asked: set[asyncio.Future[Any]] = set()
        """Questions to the prefix cache that the engine has not answered."""
        self.client = EngineClient(self._mailbox.send)

    @property
    def state(self) -> EngineState:
        """Where the engine stands now."""
        return self._state

    @property
    def beat(self) -> float | None:
        """When the engine thread was last between two rounds, or idle, by `time.monotonic`; None until it serves. An
        engine that serves and whose last beat is long ago is stuck in a forward.
        """
        return self._beat

    @property
    def info(self) -> ModelInfo | None:
        """The loaded model; None until then."""
        return self._info

    @property
    def stats(self) -> Stats:
        """The newest whole snapshot of the counters."""
        return self._stats

    @property
    def prefix_stats(self) -> PrefixStats | None:
        """The prefix cache's newest account; None if there is none."""
        return self._prefix_stats

    @property
    def memory(self) -> MemoryReport | None:
        """What memory is spent on; None until the model is loaded."""
        return self._memory

    def start(self) -> None:
        """Begin loading. Call once, on the event loop that will use the client."""
        self._event_loop = asyncio.get_running_loop()
        self._loaded = self._event_loop.create_future()
        self._thread.start()

    async def ready(self) -> ModelInfo:
        """Wait until the model is loaded; raises what loading raised."""
        if self._loaded is None:
            raise RuntimeError("the engine was not started")
        return await asyncio.shield(self._loaded)

    async def drain(self, seconds: float) -> None:
        """Let the open requests finish; those that have not after `seconds` are cancelled."""
        if self._state is EngineState.READY:
            self._state = EngineState.DRAINING
        for patience in (seconds, _CANCEL_SECONDS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self.client.emptied()
            self.client.cancel_all()

    def give_up(self, reason: str) -> None:
        """It serves no more, whatever its thread is at: every open request ends with an error."""
        self._state = EngineState.BROKEN
        self._fail_all(reason)

    async def stop(self) -> None:
        """End the thread after the round that it is in, and wait for it; a load under way is left behind. What is still
        open ends with an error. Idempotent.
        """
        self._mailbox.close()
        if self._thread.is_alive() and self._state is not EngineState.LOADING:
            await asyncio.to_thread(self._thread.join)
        if self._state is not EngineState.BROKEN:
            self._state = EngineState.STOPPED
        self._fail_all("the engine was stopped")

    def _fail_all(self, reason: str) -> None:
        """Nobody waits for an engine that answers no more."""
        self.client.fail_all(reason)
        for answer in tuple(self._asked):
            _tell(answer, answer.set_exception, LookupError(reason))

    async def ask_prefix(self, call: Callable[[PrefixCache], T]) -> T:
        """Call it on the engine thread, between two rounds. Raises LookupError where there is no prefix cache, and
        what the call raises.
        """
        prefix = self._prefix
        if prefix is None or self._state not in (EngineState.READY, EngineState.DRAINING):
            raise LookupError("there is no prefix cache")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def on_engine_thread() -> None:
            try:
                result = call(prefix)
            except Exception as error:  # the named boundary of a caller's question: it is told
                self._to_event_loop(partial(_tell, answer, answer.set_exception), error)
            else:
                self._to_event_loop(partial(_tell, answer, answer.set_result), result)

        self._asked.add(answer)
        answer.add_done_callback(self._asked.discard)
        self._mailbox.send(Task(on_engine_thread))
        return await answer

    # ---- on the engine thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            backend = self._make_backend()
        except BaseException as error:  # the named boundary of loading: whatever it was, `ready` tells
            self._to_event_loop(self._on_load_failed, error)
            return
        self._to_event_loop(self._on_loaded, backend.info)
        try:
            self._prefix = self._open_prefix(backend)
            loop = Loop(
                backend,
                self._config,
                sources=self._sources(),
                mailbox=self._mailbox.take,
                clock=_now,
                prefix=self._prefix,
            )
            self._serve(loop, backend)
            if self._prefix is not None:
                self._prefix.close(_FLUSH_SECONDS)
        except BaseException as error:  # the named boundary of the engine thread: every client is told
            _log.exception("the engine thread died")
            self._to_event_loop(self._on_broken, error)
        finally:
            backend.rest()

    def _open_prefix(self, backend: Backend) -> PrefixCache | None:
        """Without files where they cannot be had: the reason is logged, and serving goes on."""
        config = self._config.prefix
        if backend.blocks is None or not config.ram_bytes:
            return None
        spill = None
        if config.ssd_bytes and config.folder is not None:
            try:
                spill = Spill(
                    config.folder,
                    backend.blocks.namespace,
                    most_bytes=config.ssd_bytes,
                    queue_bytes=min(_QUEUE_BYTES, config.ram_bytes // 4),  # what waits cannot go from memory
                    bytes_per_second=config.write_bytes_per_second,
                    warn=_log.warning,
                    faults=disk_faults(backend),
                )
            except OSError as error:
                _log.warning("no prefix cache on the SSD: %s", error)
        prefix = PrefixCache(backend.blocks, config.ram_bytes, spill, config.ssd_bytes, self._mailbox.send)
        for drafter in backend.drafters if self._config.draft_tokens else ():
            if isinstance(drafter, Accompanied):
                prefix.accompany(drafter)
        return prefix

    def _sources(self) -> Sequence[DraftSource]:
        return (PredictionDrafts(), SuffixDrafts(self._config.history_bytes)) if self._config.draft_tokens else ()

    def _serve(self, loop: Loop, backend: Backend) -> None:
        busy = _now()
        while not self._mailbox.closed:
            self._beat = _now()
            events = loop.step()
            self._publish(loop, backend)
            if events:
                self._to_event_loop(self.client.deliver, events)
            if not loop.idle:
                busy = _now()
            elif _now() - busy >= self._rests_after:
                backend.rest()
            if loop.idle:
                self._mailbox.wait(_BEAT_SECONDS)
            elif loop.waiting:
                self._mailbox.wait(_WAITING_SECONDS)

    def _publish(self, loop: Loop, backend: Backend) -> None:
        """Whole snapshots, for any thread to read."""
        self._stats = loop.stats()
        self._memory = report(backend, self._prefix)
        if self._prefix is not None:
            self._prefix_stats = self._prefix.stats()

    def _to_event_loop(self, call: Callable[[T], None], argument: T) -> None:
        assert self._event_loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to be told
            self._event_loop.call_soon_threadsafe(call, argument)

    # ---- back on the event loop -----------------------------------------------------------------------------------

    def _on_loaded(self, info: ModelInfo) -> None:
        self._info = info
        if self._state is EngineState.LOADING:
            self._state = EngineState.READY
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(info)

    def _on_load_failed(self, error: BaseException) -> None:
        self._state = EngineState.BROKEN
        if self._loaded is not None and not self._loaded.done():
            unraisable = isinstance(error, StopIteration)  # no future can raise that
            self._loaded.set_exception(RuntimeError("loading raised StopIteration") if unraisable else error)
        self._fail_all("the model could not be loaded")

    def _on_broken(self, error: BaseException) -> None:
        self.give_up(f"the engine died: {type(error).__name__}")


def _tell(answer: "asyncio.Future[Any]", how: Callable[[T], None], what: T) -> None:
    """Unless the asker has left."""
    if not answer.done():
        how(what)


def _now() -> float:
    return time.monotonic()
