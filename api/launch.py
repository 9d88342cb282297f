"""From the flags of `paceline serve` to a running process.

Owns which backend is made and what is refused before anything is bound. MLX is imported on the engine thread, after its
BLAS, and never for another backend.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.panel import Panel

from api.progress import Display, display_on, megabytes
from api.security import is_loopback, read_api_keys
from api.server import Outcome, Process
from api.service import ServedModel, Service, Settings
from api.sockets import Listeners
from backends.base import Backend, KVQuantization
from backends.grammar.limits import Limits
from backends.mlx.runtime import Blas, BlasChoice, Device, DtypePolicy, describe_device, load_blas
from engine.config import EngineConfig, PrefixConfig
from engine.thread import Engine

BackendName = Literal["mlx", "fake"]

_ANY_ADDRESS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104


class UsageError(ValueError):
    """Flags that do not go together; the message names them."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `paceline serve` was told."""

    model: str
    draft_model: str | None = None
    quantization: KVQuantization | None = None
    home: Path
    backend: BackendName
    dtype: DtypePolicy
    blas: BlasChoice
    host: str
    port: int
    uds: Path | None
    api_key_file: Path | None
    allowed_hosts: tuple[str, ...]
    served_name: str | None
    max_body_bytes: int
    drain_seconds: float
    engine: EngineConfig
    grammars: Limits = Limits()


def serve(launch: Launch, console: Console) -> Outcome:
    """Run the server to its end. Raises UsageError, BindError, OSError and ValueError before it has begun."""
    refuse_contradictions(launch)
    settings = settings_of(launch)
    with Listeners(launch.host, launch.port, launch.uds) as listeners, closing(display_on(console)) as display:
        engine = Engine(make_backend(launch, display, console), launch.engine)

        def ready(model: ServedModel) -> None:
            display.close()
            announce(console, launch, listeners, model)

        process = Process(Service(engine, settings), listeners, launch.drain_seconds, ready)
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            outcome = runner.run(process.run())
    return outcome


def refuse_contradictions(launch: Launch) -> None:
    """Raise UsageError where something is asked of a backend that has no models, or of a draft model that it does not
    draft.
    """
    if launch.quantization is not None and launch.backend != "mlx":
        raise UsageError(f"--backend {launch.backend} keeps no keys and values: that goes without --kv-bits")
    folder = launch.engine.prefix.folder
    if launch.engine.prefix.ssd_bytes and folder is not None and folder.exists() and not folder.is_dir():
        raise UsageError(f"--prefix-dir {folder} is no folder")
    if launch.draft_model is None:
        return
    if not launch.draft_model:
        raise UsageError("--draft-model names no model")
    if launch.backend != "mlx":
        raise UsageError(f"--backend {launch.backend} has no models: that goes without --draft-model")
    if not launch.engine.draft_tokens:
        raise UsageError("--draft-tokens 0 turns drafting off: that goes without --draft-model")


def settings_of(launch: Launch) -> Settings:
    """The HTTP side's settings. Raises UsageError, OSError and ValueError."""
    keys = read_api_keys(launch.api_key_file) if launch.api_key_file else ()
    if not keys and not is_loopback(launch.host.lower()):
        raise UsageError(f"--host {launch.host} is open to other machines: that needs --api-key-file")
    any_address = launch.host in _ANY_ADDRESS
    own_names = {socket.gethostname(), f"{socket.gethostname()}.local"} if any_address else {launch.host}
    return Settings(
        served_name=launch.served_name,
        api_keys=keys,
        allowed_hosts=frozenset(own_names.union(launch.allowed_hosts)),
        any_address=any_address,
        max_body_bytes=launch.max_body_bytes,
        grammars=launch.grammars,
    )


def make_backend(launch: Launch, display: Display, console: Console) -> Callable[[], Backend]:
    """What the engine thread calls to load the model. Raises what a wrong `--blas` raises."""
    if launch.backend == "fake":
        from backends.fake import FakeBackend

        return FakeBackend

    blas = load_blas(launch.blas)
    if blas.problem is not None:
        console.print(f"slow BLAS: {blas.problem}", style="yellow", highlight=False, soft_wrap=True)

    def load() -> Backend:
        from backends.mlx.build import load_backend
        from backends.mlx.pull import CATALOGUE, pull

        for model in dict.fromkeys((launch.model, launch.draft_model or launch.model)):
            if any(known.name == model for known in CATALOGUE) and not Path(model).is_dir():
                pull(model, launch.home, display)
        device = _words(describe_device(), blas)
        return load_backend(
            launch.model,
            launch.home,
            launch.dtype,
            display,
            device,
            draft_model=launch.draft_model,
            quantization=launch.quantization,
        )

    return load


def _words(device: Device, blas: Blas) -> str:
    """A machine for people; its BLAS only matters on a CPU."""
    return f"{device.kind} ({device.name})" + (f", BLAS {blas.name}" if device.kind == "cpu" else "")


def announce(console: Console, launch: Launch, listeners: Listeners, model: ServedModel) -> None:
    """The banner: where it listens and what it serves."""
    host = f"[{launch.host}]" if ":" in launch.host else launch.host or "0.0.0.0"  # noqa: S104
    facts = {"url": f"http://{host}:{listeners.port}/v1"}
    if launch.uds is not None:
        facts["socket"] = str(launch.uds)
    facts["model"] = model.name
    if launch.draft_model is not None:
        facts["drafter"] = launch.draft_model
    facts["context"] = f"{model.info.context_length} tokens"
    drafts = f"up to {launch.engine.draft_tokens} draft tokens each" if launch.engine.draft_tokens else "no drafts"
    facts["lanes"] = f"{launch.engine.max_lanes}, {drafts}"
    facts["cache"] = _prefix_words(launch.engine.prefix)
    facts["device"] = model.info.device
    text = "\n".join(f"{name:8} {value}" for name, value in facts.items())
    if console.is_terminal:
        console.print(Panel(text, title="paceline is ready", expand=False), highlight=False)
    else:
        console.print(f"paceline is ready\n{text}", highlight=False, soft_wrap=True)


def _prefix_words(prefix: PrefixConfig) -> str:
    """What is kept of earlier texts, for people."""
    parts = [f"{megabytes(prefix.ram_bytes)} of memory"] if prefix.ram_bytes else []
    if prefix.ssd_bytes and prefix.folder is not None:
        parts.append(f"{megabytes(prefix.ssd_bytes)} in {prefix.folder}")
    return ", ".join(parts) or "none"


def _new_event_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()
