"""The process: sockets, the event loop, loading, signals, draining, and the status it exits with.

Owns the order of beginning and end. Knows nothing of dialects or models.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import msgspec
import uvicorn

from api.app import create_app
from api.service import ServedModel, Service
from api.sockets import Listeners
from engine.thread import EngineState

_log = logging.getLogger("paceline.server")

_WATCH_SECONDS = 0.25
"""How often the engine's health is looked at."""
_STOP_SECONDS = 20.0
"""How long the engine's last round may take, and writing what the prefix cache has not written yet."""
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
    ) -> None:
        self._service = service
        self._listeners = listeners
        self._drain_seconds = drain_seconds
        self._on_ready = on_ready
        self._outcome = Outcome()
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        config = uvicorn.Config(
            create_app(service),
            http="httptools",
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
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    signal.signal(number, self._on_signal)
        engine = self._service.engine
        engine.start()
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
                self._service.close()
        return self._outcome

    async def _stop_engine(self) -> None:
        """A thread that is stuck in a forward can be left behind only by leaving the process."""
        try:
            await asyncio.wait_for(self._service.engine.stop(), _STOP_SECONDS)
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

    async def _watch(self) -> None:
        """A broken engine ends the process, for its supervisor to start it again."""
        engine = self._service.engine
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if engine.info is not None and engine.state is EngineState.BROKEN:
                return self._fail("the engine broke")

    def _fail(self, reason: str) -> None:
        self._outcome = Outcome(status=1, reason=reason)
        self._server.should_exit = True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """The first one drains; the second one ends the process here and now, whatever the event loop is at."""
        self._signals += 1
        if self._signals > 1:
            self._listeners.close()
            os._exit(128 + number)
        assert self._loop is not None
        with suppress(RuntimeError):  # the event loop has ended by itself
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Begin to end well, as on SIGTERM. Call on the event loop; returns at once."""
        self._begin(self._drain())

    async def _drain(self) -> None:
        """New requests are refused from now on, over connections that still open; then the process ends well."""
        engine = self._service.engine
        _log.info("draining %d requests, for at most %g s", len(engine.client), self._drain_seconds)
        await engine.drain(self._drain_seconds)
        self._server.should_exit = True
