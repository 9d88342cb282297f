"""Real servers on real sockets, each on an event loop in its own thread; and pseudo-models that tests can steer."""

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2
import uvloop

from api.server import Process
from api.service import ServedModel, Service, Settings
from api.sockets import Listeners
from backends.base import Backend, Flight, Masks
from backends.fake import EOS, FakeBackend, FakeFlight
from engine.config import EngineConfig
from engine.thread import Engine
from scheduler.round import Window

PATIENCE = 20.0
"""Seconds after which a test gives up waiting for what must happen."""


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.002)


class Parrot(FakeBackend):
    """Greedily says what stands between the last `[[` and `]]` of its prompt, byte by byte, then ends; without such a
    text it is the usual fake. A text in brackets of its own is taken with them.
    """

    def greedy(self, tokens: Sequence[int], state: int) -> int:
        text = bytes(token for token in tokens if token < 256)
        told = _SCRIPT.match(text) if b"[[" in text else None
        if told is None:
            return super().greedy(tokens, state)
        script, said = told["script"], len(told["said"])
        return script[said] if said < len(script) else EOS


_SCRIPT = re.compile(rb".*(?<!\[)\[\[(?P<script>.*?)\]\](?!\]).*?assistant: (?:\[TOOL_CALLS\])?(?P<said>.*)", re.DOTALL)
"""`said` is what was generated; a control token may stand before it."""


class Gated(Parrot):
    """Each forward waits for a permit, so that a test decides when a round happens."""

    def __init__(self, context_length: int = 8192) -> None:
        super().__init__(context_length)
        self._permits = threading.Semaphore(0)
        self._opened = False
        self.waiting = threading.Event()
        """Set while a forward waits."""
        self.forwards = 0

    def verify(self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None) -> FakeFlight:
        if not self._opened:
            self.waiting.set()
            self._permits.acquire()
            self.waiting.clear()
        self.forwards += 1
        return super().verify(windows, after, masks)

    def permit(self, forwards: int) -> None:
        """Let so many forwards pass."""
        for _ in range(forwards):
            self._permits.release()

    def open(self) -> None:
        """Never wait again."""
        self._opened = True
        self._permits.release()


class Raising(Parrot):
    """A forward that meets a prompt with BOOM raises."""

    def verify(self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None) -> FakeFlight:
        if any(b"BOOM" in bytes(token % 256 for token in window.tokens) for window in windows):
            raise ArithmeticError("boom")
        return super().verify(windows, after, masks)


class RunningServer:
    """A server in a thread: `with RunningServer(...) as server: ...`. Stopped, with its engine, on the way out."""

    def __init__(
        self,
        make_backend: Callable[[], Backend] | Gated = Parrot,
        *,
        engine: EngineConfig | None = None,
        settings: Settings | None = None,
        uds: Path | None = None,
        drain_seconds: float = 0.2,
    ) -> None:
        """`make_backend` may be a `Gated` backend itself, which is opened on the way out."""
        self.listeners = Listeners("127.0.0.1", 0, uds)
        self.port = self.listeners.port
        self.uds = uds
        self.url = f"http://127.0.0.1:{self.port}"
        self.status: int | None = None
        self._engine = engine or EngineConfig()
        self._gate = make_backend if isinstance(make_backend, Gated) else None
        self._make_backend = (lambda: make_backend) if isinstance(make_backend, Gated) else make_backend
        self._settings = settings or Settings()
        self._drain_seconds = drain_seconds
        self._started = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server")
        self.service: Service
        self.process: Process
        self.loop: asyncio.AbstractEventLoop

    def __enter__(self) -> "RunningServer":
        self._thread.start()
        assert self._started.wait(PATIENCE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._gate is not None:
            self._gate.open()
        self.terminate()
        self.join()

    def ready(self) -> "RunningServer":
        """Wait until the model is loaded."""
        assert self._ready.wait(PATIENCE)
        return self

    def terminate(self) -> None:
        """What SIGTERM does."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(self.process.drain)

    def join(self) -> None:
        """Wait until the server has ended."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def client(self, **settings: Any) -> httpx2.Client:
        """A client over TCP."""
        return httpx2.Client(base_url=self.url, timeout=PATIENCE, **settings)

    @property
    def open_requests(self) -> int:
        """How many requests the engine still serves."""
        return len(self.service.engine.client)

    @property
    def rounds(self) -> int:
        """How many rounds there were."""
        return sum(self.service.engine.stats.rounds.values())

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self.service = Service(Engine(self._make_backend, self._engine), self._settings)
            self.process = Process(self.service, self.listeners, self._drain_seconds, self._on_ready)
            self._started.set()
            outcome = await self.process.run()
            self.status = outcome.status

        with self.listeners, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    def _on_ready(self, _model: ServedModel) -> None:
        self._ready.set()


@contextlib.contextmanager
def running(make_backend: Callable[[], Backend] | Gated = Parrot, **settings: Any) -> Iterator[RunningServer]:
    """A server that is ready."""
    with RunningServer(make_backend, **settings) as server:
        yield server.ready()
