"""From the flags of `paceline serve` to a running process.

Owns which backend is made and what is refused before anything is bound. MLX is imported on the engine thread, after its
BLAS, and never for another backend.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.panel import Panel

from api.connection import allow_open_files
from api.notify import Notifier, Supervision
from api.progress import Display, display_on, megabytes
from api.security import is_loopback, read_api_keys
from api.server import STALL_SECONDS, Outcome, Process
from api.service import ServedModel, Service, Settings
from api.signals import Signals
from api.sockets import Listeners, Passed, adopt, tcp_address
from backends.base import Backend, Budget, KVQuantization
from backends.fault_plan import read_plan
from backends.faults import FaultyBackend
from backends.grammar.limits import Limits
from backends.mlx.runtime import Blas, BlasChoice, Device, DtypePolicy, MemoryLimit, describe_device, load_blas
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
    drafter: Path | Literal["auto", "mtp"] | None = "auto"
    """One that reads the model: see `backends.mlx.build.Drafter`."""
    quantization: KVQuantization | None = None
    home: Path
    backend: BackendName
    dtype: DtypePolicy
    blas: BlasChoice
    memory: MemoryLimit = MemoryLimit()
    host: str
    port: int
    uds: Path | None
    api_key_file: Path | None
    allowed_hosts: tuple[str, ...]
    served_name: str | None
    max_body_bytes: int
    drain_seconds: float
    stall_seconds: float = STALL_SECONDS
    max_queue: int = 256
    max_requests_per_key: int = 0
    request_seconds: float = 0.0
    write_seconds: float = 60.0
    head_seconds: float = 10.0
    max_connections: int = 1024
    engine: EngineConfig
    grammars: Limits = Limits()
    fault_plan: Path | None = None
    supervision: Supervision = Supervision()
    passed: tuple[Passed, ...] = ()
    """Sockets that a service manager has opened."""
    tcp_told: bool = True
    """Whether `host` or `port` was said, and not only presumed."""


def serve(launch: Launch, console: Console) -> Outcome:
    """Run the server to its end. Raises UsageError, BindError, OSError and ValueError before it has begun."""
    refuse_contradictions(launch)
    passed = adopt(launch.passed)
    settings = settings_of(launch, passed)
    allow_open_files(settings.max_connections)
    host, uds = own_addresses(launch, passed)
    with (
        Signals() as signals,
        Listeners(host, launch.port, uds, passed) as listeners,
        closing(display_on(console)) as display,
    ):
        engine = Engine(with_faults(launch, make_backend(launch, display, console)), launch.engine)

        def ready(model: ServedModel) -> None:
            display.close()
            announce(console, launch, listeners, model)

        process = Process(
            Service(engine, settings),
            listeners,
            launch.drain_seconds,
            ready,
            signals=signals,
            notifier=Notifier(launch.supervision),
            stall_seconds=launch.stall_seconds,
            loading=launch.model,
        )
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
    if launch.draft_model is not None or launch.drafter not in (None, "auto"):
        _refuse_drafts(launch)


def _refuse_drafts(launch: Launch) -> None:
    """Raise UsageError where a model or drafter is named that cannot draft."""
    if launch.draft_model is not None and launch.drafter not in (None, "auto"):
        raise UsageError("--draft-model and --drafter both draft: name one of them")
    flag = "--drafter" if launch.draft_model is None else "--draft-model"
    if launch.draft_model == "":
        raise UsageError("--draft-model names no model")
    if launch.backend != "mlx":
        raise UsageError(f"--backend {launch.backend} has no models: that goes without {flag}")
    if not launch.engine.draft_tokens:
        raise UsageError(f"--draft-tokens 0 turns drafting off: that goes without {flag}")


def own_addresses(launch: Launch, passed: Sequence[socket.socket]) -> tuple[str | None, Path | None]:
    """Host and file that are bound here. A passed socket stands in for what would be bound of its kind; where one is
    passed, the other kind is bound only if a flag asks for it.
    """
    has_tcp = any(tcp_address(one) is not None for one in passed)
    has_unix = any(one.family == socket.AF_UNIX for one in passed)
    binds_tcp = launch.tcp_told if has_unix else True
    return None if has_tcp or not binds_tcp else launch.host, None if has_unix else launch.uds


def settings_of(launch: Launch, passed: Sequence[socket.socket] = ()) -> Settings:
    """The HTTP side's settings. Raises UsageError, OSError and ValueError."""
    keys = read_api_keys(launch.api_key_file) if launch.api_key_file else ()
    own_host, _ = own_addresses(launch, passed)
    told = {f"--host {own_host}": own_host} if own_host is not None else {}
    told |= {f"the passed socket on {address[0]}": address[0] for one in passed if (address := tcp_address(one))}
    for words, host in told.items():
        if not keys and not is_loopback(host.lower()):
            raise UsageError(f"{words} is open to other machines: that needs --api-key-file")
    if launch.max_requests_per_key and not keys:
        raise UsageError("--max-requests-per-key is about API keys: that needs --api-key-file")
    hosts = set(told.values())
    any_address = not _ANY_ADDRESS.isdisjoint(hosts)
    own_names = hosts - _ANY_ADDRESS
    if any_address:
        own_names |= {socket.gethostname(), f"{socket.gethostname()}.local"}
    return Settings(
        served_name=launch.served_name,
        api_keys=keys,
        allowed_hosts=frozenset(own_names.union(launch.allowed_hosts)),
        any_address=any_address,
        max_body_bytes=launch.max_body_bytes,
        max_open=launch.engine.max_lanes + launch.max_queue,
        max_requests_per_key=launch.max_requests_per_key,
        request_seconds=launch.request_seconds,
        write_seconds=launch.write_seconds,
        head_seconds=launch.head_seconds,
        max_connections=launch.max_connections,
        grammars=launch.grammars,
    )


def make_backend(launch: Launch, display: Display, console: Console) -> Callable[[], Backend]:
    """What the engine thread calls to load the model. Raises what a wrong `--blas` raises."""
    if launch.backend == "fake":
        from backends.fake import FakeBackend

        size = launch.memory.bytes  # it has no weights and takes next to nothing: a share of the machine is no limit
        return partial(FakeBackend, budget=None if size is None else Budget(size, 0, 0))

    blas = load_blas(launch.blas)
    if blas.problem is not None:
        console.print(f"slow BLAS: {blas.problem}", style="yellow", highlight=False, soft_wrap=True)

    def load() -> Backend:
        from backends.mlx.build import load_backend
        from backends.mlx.pull import CATALOGUE, pull
        from backends.mlx.warmup import LargestRound

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
            drafter=launch.drafter if launch.engine.draft_tokens else None,
            quantization=launch.quantization,
            memory=launch.memory,
            largest=LargestRound(launch.engine.round_rows, launch.engine.max_lanes, launch.engine.draft_tokens),
        )

    return load


def with_faults(launch: Launch, load: Callable[[], Backend]) -> Callable[[], Backend]:
    """The same; but if there is a fault plan, what it loads fails as that says. Raises OSError and PlanError."""
    if launch.fault_plan is None:
        return load
    plan = read_plan(launch.fault_plan)
    return lambda: FaultyBackend(load(), plan)


def _words(device: Device, blas: Blas) -> str:
    """A machine for people; its BLAS only matters on a CPU."""
    return f"{device.kind} ({device.name})" + (f", BLAS {blas.name}" if device.kind == "cpu" else "")


def announce(console: Console, launch: Launch, listeners: Listeners, model: ServedModel) -> None:
    """The banner: where it listens and what it serves."""
    facts = {}
    if listeners.addresses:
        facts["url"] = f"http://{_host_words(launch, listeners)}:{listeners.port}/v1"
    if listeners.paths:
        facts["socket"] = ", ".join(listeners.paths)
    facts["model"] = model.name
    if model.info.drafter is not None:
        facts["drafter"] = model.info.drafter
    facts["context"] = f"{model.info.context_length} tokens"
    drafts = f"up to {launch.engine.draft_tokens} draft tokens each" if launch.engine.draft_tokens else "no drafts"
    facts["lanes"] = f"{launch.engine.max_lanes}, {drafts}"
    facts["cache"] = _prefix_words(launch.engine.prefix)
    if launch.fault_plan is not None:
        facts["faults"] = f"INJECTED from {launch.fault_plan}"
    facts["device"] = model.info.device
    text = "\n".join(f"{name:8} {value}" for name, value in facts.items())
    if console.is_terminal:
        console.print(Panel(text, title="paceline is ready", expand=False), highlight=False)
    else:
        console.print(f"paceline is ready\n{text}", highlight=False, soft_wrap=True)


def _host_words(launch: Launch, listeners: Listeners) -> str:
    """The host as it was told, where it was; a passed socket knows its address."""
    host, _ = listeners.addresses[0] if launch.passed else (launch.host, 0)
    return f"[{host}]" if ":" in host else host or "0.0.0.0"  # noqa: S104


def _prefix_words(prefix: PrefixConfig) -> str:
    """What is kept of earlier texts, for people."""
    parts = [f"{megabytes(prefix.ram_bytes)} of memory"] if prefix.ram_bytes else []
    if prefix.ssd_bytes and prefix.folder is not None:
        parts.append(f"{megabytes(prefix.ssd_bytes)} in {prefix.folder}")
    return ", ".join(parts) or "none"


def _new_event_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()
