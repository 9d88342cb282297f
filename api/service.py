"""What every endpoint shares: the engine, the tokenizer of its model, the settings, the counters.

Owns the answer to "can a request be served now?". Must not know HTTP or any dialect.
"""

import time

import anyio.to_thread
import msgspec

from api.errors import ApiError, unavailable
from api.metrics import RequestMetrics, create_registry
from api.text import Tokenizer, load_tokenizer
from backends.base import ModelInfo
from engine.thread import Engine, EngineState


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


class ServedModel:
    """The loaded model as clients see it. Frozen after its making."""

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, public_name: str | None) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.name = public_name or info.name
        self.created = int(time.time())
        """When it was loaded, in seconds since 1970."""


class Service:
    """Lives on the event loop. `load` is its one writer."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = RequestMetrics()
        self.registry = create_registry(engine, self.metrics)
        self._model: ServedModel | None = None

    async def load(self) -> ServedModel:
        """Wait for the engine and load the tokenizer beside it; raises what either raises."""
        info = await self.engine.ready()
        tokenizer = await anyio.to_thread.run_sync(load_tokenizer, info)
        self._model = ServedModel(info, tokenizer, self.settings.served_name)
        return self._model

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
