"""What every endpoint shares: the engine, the tokenizer and the grammars of its model, the door, the settings, the
counters.

Owns the answer to "can a request be served now?". Must not know HTTP or any dialect.
"""

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import anyio.to_thread
import msgspec

from api.body import Bodies
from api.door import Door
from api.errors import ApiError, unavailable
from api.metrics import RequestMetrics, create_registry
from api.text import Tokenizer, load_tokenizer
from api.tools import format_of
from backends.base import ModelInfo
from backends.grammar.base import Grammar
from backends.grammar.compile import CompilerStats, GrammarCompiler
from backends.grammar.limits import Limits
from backends.grammar.spec import ConstraintSpec
from backends.grammar.vetting import GrammarBusyError
from engine.thread import Engine, EngineState

_BODIES = 8
"""Largest bodies that may be in memory at once."""


class Settings(msgspec.Struct, frozen=True):
    """What the HTTP side is told at its start."""

    served_name: str | None = None
    """The model's public id; None takes the repo's or folder's name."""
    api_keys: tuple[str, ...] = ()
    """Any one of them opens everything; without any, everything is open."""
    allowed_hosts: frozenset[str] = frozenset()
    """Names that a `Host` header may carry besides the loopback's."""
    any_address: bool = False
    """Bound to all interfaces: a `Host` that is an address is right, whichever it is."""
    max_body_bytes: int = 32 * 1024 * 1024
    keepalive_seconds: float = 15.0
    """A stream that was silent for so long carries a comment."""
    max_open: int = 264
    """How many choices may be asked for at once, in lanes and in the queue; more are refused."""
    max_requests_per_key: int = 0
    """How many of those may be one API key's; 0 for no such limit."""
    request_seconds: float = 0.0
    """How long a request may take from its arrival to its end; 0 for any time."""
    max_connections: int = 1024
    head_seconds: float = 10.0
    """How long the head of a request may take to come, from its first byte."""
    body_seconds: float = 60.0
    """How long a body may take to come, beside what its length takes at a slow line's rate."""
    write_seconds: float = 60.0
    """How long a client may leave what it was sent unread."""
    grammars: Limits = Limits()
    """What a constraint may cost before it is refused."""

    @property
    def max_bodies_bytes(self) -> int:
        """What the bodies that are being read may take together."""
        return _BODIES * self.max_body_bytes


class ServedModel:
    """The loaded model as clients see it. Frozen after its making."""

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, public_name: str | None) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.tool_format = format_of(tokenizer.template)
        self.name = public_name or info.name
        self.created = int(time.time())
        """When it was loaded, in seconds since 1970."""


class Service:
    """Lives on the event loop. `load` is its one writer."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = RequestMetrics()
        self.registry = create_registry(engine, self.metrics, self.grammar_stats, lambda: self.status == "ready")
        self.door = Door(settings.max_open, settings.max_requests_per_key, len(settings.api_keys), self.metrics.refuse)
        self.bodies = Bodies(settings.max_body_bytes, settings.max_bodies_bytes, self.metrics.refuse)
        self._model: ServedModel | None = None
        self._grammars: GrammarCompiler | None = None
        # As many threads as processes that vet: so all who wait do it here, where they can leave.
        self._compiling = ThreadPoolExecutor(settings.grammars.processes, "paceline-grammar")
        self._compilers = asyncio.Semaphore(settings.grammars.processes)
        self._waiting = 0
        self._looking_up = ThreadPoolExecutor(1, "paceline-grammar-cache")

    async def load(self) -> ServedModel:
        """Wait for the engine and load the tokenizer beside it; raises what either raises."""
        info = await self.engine.ready()
        tokenizer = await anyio.to_thread.run_sync(load_tokenizer, info)
        self._grammars = GrammarCompiler(info, self.settings.grammars)
        self._model = ServedModel(info, tokenizer, self.settings.served_name)
        return self._model

    async def compile(self, spec: ConstraintSpec) -> Grammar:
        """A constraint as the engine takes it. Raises GrammarError, or GrammarUnavailableError if it is not to blame.

        One that is kept is found without waiting for those that are compiled. One who is cancelled leaves at once: what
        had not begun never does, and a thread that is at work is not free until it is done.
        """
        grammars = self._grammars
        assert grammars is not None, "compiled for a model that is ready"
        deadline = time.monotonic() + self.settings.grammars.seconds
        loop = asyncio.get_running_loop()
        kept = await loop.run_in_executor(self._looking_up, grammars.cached, spec)
        if kept is not None:
            return kept
        await self._free_compiler(deadline)
        job = self._compiling.submit(grammars.compile, spec, deadline)
        job.add_done_callback(lambda _: self._compiler_is_free(loop))
        return await asyncio.wrap_future(job)

    async def _free_compiler(self, deadline: float) -> None:
        """Wait in the queue, which has an end; leaving it leaves nothing behind."""
        if self._waiting >= self.settings.grammars.waiting:
            raise GrammarBusyError("too many other constraints wait to be compiled; try again")
        self._waiting += 1
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._compilers.acquire()
        except TimeoutError:
            raise GrammarBusyError("too many other constraints are being compiled; try again") from None
        finally:
            self._waiting -= 1

    def _compiler_is_free(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._compilers.release)

    def grammar_stats(self) -> CompilerStats | None:
        """What became of the constraints so far; None until there is a model."""
        return None if self._grammars is None else self._grammars.stats

    def close(self) -> None:
        """Compile no more. Idempotent."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._looking_up.shutdown(wait=False, cancel_futures=True)
        if self._grammars is not None:
            self._grammars.close()

    @property
    def status(self) -> str:
        """One word: `ready` only if a request could be served now."""
        if self.engine.state is EngineState.READY and self._model is None:
            return str(EngineState.LOADING)
        return str(self.engine.state)

    def model(self) -> ServedModel:
        """The model, ready to serve. Raises a 503 otherwise."""
        if self._model is None or self.engine.state is not EngineState.READY:
            raise unavailable(self.status)
        return self._model

    def model_named(self, name: str | None) -> ServedModel:
        """The same, if that is its public id; None means whichever is served. Raises a 404 for another."""
        model = self.model()
        if name is not None and name != model.name:
            message = f"the model {name!r} does not exist; this server serves {model.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model
