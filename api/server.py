"""The process: sockets, the event loop, loading, watching the engine, draining, and the status it exits with.

Owns the order of beginning and end, and what the service manager is told of it. Knows nothing of dialects or models.
"""

import asyncio
import faulthandler
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import uvicorn

from api.app import create_app
from api.connection import connections
from api.notify import Notifier, Standing, Supervision
from api.service import ServedModel, Service
from api.signals import Signals
from api.sockets import Listeners
from engine.thread import EngineState

_log = logging.getLogger("paceline.server")

STALL_SECONDS = 120.0
"""How long one round of a sound engine never takes, on any machine."""
_WATCH_SECONDS = 0.25
"""How often the engine's health is looked at."""
_TELL_SECONDS = 1.0
"""How long `/health` says that the engine is broken, and errors reach their clients, before the end begins."""
_STOP_SECONDS = 20.0
"""How long the engine's last round may take, and writing what the prefix cache has not written yet."""
_STUCK_SECONDS = 1.0
"""The same for an engine that was given up: it had its time."""
_CLOSE_SECONDS = 5
"""How long responses that are already complete may take to reach slow clients."""


class Outcome(msgspec.Struct):
    """How the process ends. Written by `serve`'s tasks."""

    status: int = 0
    reason: str = ""


class QuietServer(uvicorn.Server):
    """uvicorn's server, which leaves signals to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class Process:
    """One server's life, on one event loop. `run` is its life, `drain` its orderly end."""

    def __init__(
        self,
        service: Service,
        listeners: Listeners,
        drain_seconds: float,
        on_ready: Callable[[ServedModel], None],
        *,
        signals: Signals | None = None,
        notifier: Notifier | None = None,
        stall_seconds: float = STALL_SECONDS,
        loading: str = "the model",
    ) -> None:
        """An engine whose thread gives no sign of life for `stall_seconds` is given up; 0: never. `loading`: what the
        service manager is told that is being loaded.
        """
        self._service = service
        self._listeners = listeners
        self._drain_seconds = drain_seconds
        self._on_ready = on_ready
        self._signals = signals or Signals()
        self._notifier = notifier or Notifier(Supervision())
        self._stall_seconds = stall_seconds
        self._loading = loading
        self._outcome = Outcome()
        self._draining = False
        self._given_up = False
        self._tasks: set[asyncio.Task[None]] = set()
        config = uvicorn.Config(
            create_app(service),
            http=connections(service.settings, service.metrics.refuse),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
        self._server = QuietServer(config)

    async def run(self) -> Outcome:
        """Serve until a signal or a broken engine ends it."""
        event_loop = asyncio.get_running_loop()
        self._service.engine.start()
        self._report()
        self._signals.listen(lambda: self._ask_to_drain(event_loop), self._listeners.close)
        self._begin(self._load())
        self._begin(self._watch())
        try:
            await self._server.serve(sockets=self._listeners.sockets)
        finally:
            for task in self._tasks:
                task.cancel()
            try:
                await self._stop_engine()
            finally:
                self._notifier.close()
                self._service.close()
        return self._outcome

    async def _stop_engine(self) -> None:
        """A thread that is stuck in a forward can be left behind only by leaving the process."""
        try:
            patience = _STUCK_SECONDS if self._given_up else _STOP_SECONDS
            await asyncio.wait_for(self._service.engine.stop(), patience)
        except TimeoutError:
            _log.error("the engine is stuck in a forward and is left behind")
            self._listeners.close()
            self._service.close()
            os._exit(1)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self) -> None:
        try:
            model = await self._service.load()
        except Exception as error:  # the named boundary of loading: whatever it was, the process says so and ends
            _log.debug("loading failed", exc_info=True)
            self._fail(f"the model could not be loaded: {error or type(error).__name__}")
            return
        self._on_ready(model)
        self._report()

    async def _watch(self) -> None:
        """The service manager hears how it goes. A broken or stuck engine ends the process, for its supervisor to start
        it again.
        """
        engine = self._service.engine
        while True:
            await asyncio.sleep(min(_WATCH_SECONDS, self._notifier.interval))
            if self._is_stuck():
                self._give_up()
            elif engine.info is not None and engine.state is EngineState.BROKEN:
                self._outcome = Outcome(status=1, reason="the engine broke")
            self._report()
            if self._outcome.status:
                await asyncio.sleep(_TELL_SECONDS)
                return self._fail(self._outcome.reason)

    def _is_stuck(self) -> bool:
        """Whether an engine that serves is in one round for too long."""
        engine = self._service.engine
        serves = engine.info is not None and engine.state in (EngineState.READY, EngineState.DRAINING)
        if not serves or engine.beat is None or not self._stall_seconds:
            return False
        return time.monotonic() - engine.beat > self._stall_seconds

    def _give_up(self) -> None:
        """Nobody waits any longer for an engine that is stuck. Where it is stands in the log."""
        reason = f"the engine is stuck: no round has ended for {self._stall_seconds:g} s"
        _log.error(reason)
        faulthandler.dump_traceback(2)
        self._given_up = True
        self._outcome = Outcome(status=1, reason=reason)
        self._service.engine.give_up(reason)

    def _fail(self, reason: str) -> None:
        self._outcome = Outcome(status=1, reason=reason)
        self._server.should_exit = True
        self._report()

    def _report(self) -> None:
        self._notifier.report(self._standing(), time.monotonic())

    def _standing(self) -> Standing:
        engine = self._service.engine
        alive = not self._outcome.status and not self._is_stuck()
        if self._outcome.reason:
            return Standing("ending", self._outcome.reason, alive)
        if self._draining:
            return Standing("ending", f"draining {len(engine.client)} requests", alive)
        if self._service.status == EngineState.LOADING:
            return Standing("loading", f"loading {self._loading}", alive)
        stats = engine.stats
        return Standing("serving", f"serving {stats.running} requests, {stats.waiting} waiting", alive)

    def _ask_to_drain(self, event_loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the event loop has ended by itself
            event_loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Begin to end well, as on SIGTERM. Call on the event loop; returns at once. Idempotent."""
        if not self._draining:
            self._draining = True
            self._report()
            self._begin(self._drain())

    async def _drain(self) -> None:
        """New requests are refused from now on, over connections that still open; then the process ends well."""
        engine = self._service.engine
        _log.info("draining %d requests, for at most %g s", len(engine.client), self._drain_seconds)
        await engine.drain(self._drain_seconds)
        self._server.should_exit = True
