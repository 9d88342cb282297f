"""The command `paceline`.

Owns flags, words and exit statuses, and is the only place that reads the environment. Imports what a command needs when
it runs, so that `--help` is quick.
"""

import json
import logging
import os
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from api.cache_cli import cache
from api.distill_cli import distill
from api.notify import supervision_of
from api.service_cli import service
from api.sockets import passed_of
from backends.base import MOST_DRAFT_TOKENS, KVQuantization
from backends.grammar.limits import Limits
from backends.mlx.runtime import BlasChoice, DtypePolicy, MemoryLimit, load_blas
from engine.config import EngineConfig, PrefixConfig

DEFAULT_MODEL = "smollm2-135m"

app = typer.Typer(
    name="paceline",
    help="Serve one MLX model to many clients at once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
models = typer.Typer(help="The models on this machine.", no_args_is_help=True)
app.command()(distill)
app.add_typer(models, name="models")
app.add_typer(cache, name="cache")
app.add_typer(service, name="service")

_ENGINE = EngineConfig()
_GRAMMARS = Limits()
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def size(text: str) -> int:
    """Bytes: a number, or one with a unit (`512MiB`, `20GB`)."""
    told = _SIZE.fullmatch(text.strip())
    if told is None:
        raise typer.BadParameter(f"{text!r} is no size: a number of bytes, or one like 512MiB or 20GB")
    number, unit, binary = told.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " "))


def drafter_of(text: str) -> Path | Literal["auto", "mtp"] | None:
    """A file or folder, or how one is found."""
    match text:
        case "auto" | "mtp":
            return text
        case "none":
            return None
        case _:
            return Path(text)


def memory_limit(text: str) -> MemoryLimit:
    """Bytes as of `size`, or a share (`75%`)."""
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if share is None:
        return MemoryLimit(size(text))
    if not 0 < float(share[1]) <= 100:
        raise typer.BadParameter(f"{text!r} is no share: from above 0% to 100%")
    return MemoryLimit(share=float(share[1]) / 100)


HostFlag = Annotated[str, typer.Option(help="Address to listen on; others than the loopback need --api-key-file.")]
PortFlag = Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0 takes a free one.")]
DraftModelFlag = Annotated[
    str | None, typer.Option(help="A model with MODEL's vocabulary that drafts for it: name, folder, or repository.")
]
UdsFlag = Annotated[Path | None, typer.Option(help="Listen on this Unix socket, too.")]
BlasFlag = Annotated[BlasChoice, typer.Option(help="What computes MLX's products on a Linux CPU.")]
BackendFlag = Annotated[Literal["mlx", "fake"], typer.Option(help="fake: a pseudo-model without MLX.")]
LogLevel = Literal["debug", "info", "warning", "error"]


def home_folder() -> Path:
    """`PACELINE_HOME`, else the platform's cache folder."""
    told = os.environ.get("PACELINE_HOME")
    if told:
        return Path(told).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "paceline"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "paceline"


def home_is_told() -> bool:
    """Whether somebody has chosen where models live."""
    return bool(os.environ.get("PACELINE_HOME"))


def config_folder() -> Path:
    """`XDG_CONFIG_HOME`, else where it is by default."""
    told = os.environ.get("XDG_CONFIG_HOME")
    return Path(told) if told else Path.home() / ".config"


def is_told(context: typer.Context, flag: str) -> bool:
    """Whether a flag was given, and not left to its default."""
    source = context.get_parameter_source(flag)
    return source is not None and source.name != "DEFAULT"


def default_prefix_folder(backend: str) -> Path | None:
    """The pseudo-model leaves no files unless it is told to."""
    return home_folder() / "prefix" if backend == "mlx" else None


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Installed name, folder, or hub repository.")] = DEFAULT_MODEL,
    host: HostFlag = "127.0.0.1",
    port: PortFlag = 8321,
    uds: UdsFlag = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with one API key per line.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="A name that clients call this server by.")] = None,
    served_name: Annotated[str | None, typer.Option(help="The model's id for clients.")] = None,
    max_lanes: Annotated[int, typer.Option(min=1, help="Requests served at once.")] = _ENGINE.max_lanes,
    round_rows: Annotated[int, typer.Option(min=2, help="The most rows of one forward.")] = _ENGINE.round_rows,
    kv_bits: Annotated[
        int | None, typer.Option(help="Keep keys and values in so many bits, 4 or 8, where a layer keeps them all.")
    ] = None,
    kv_group_size: Annotated[int, typer.Option(help="How many numbers share a scale: 32, 64 or 128.")] = 64,
    kv_quant_start: Annotated[int, typer.Option(min=0, help="Positions before this one are not quantized.")] = 0,
    draft_model: DraftModelFlag = None,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="A drafter that reads the model: `distill`'s file, or a published folder; mtp: its own; auto; none.",
        ),
    ] = "auto",
    draft_tokens: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_DRAFT_TOKENS, help="The most tokens to draft for a lane in a round, where it pays; 0: off."
        ),
    ] = _ENGINE.draft_tokens,
    pace: Annotated[
        bool, typer.Option(help="Verify only drafts that pay; --no-pace: all that there are, for measurements.")
    ] = _ENGINE.paced,
    history_bytes: Annotated[
        int, typer.Option(min=0, help="Memory for texts that later requests are drafted from; 0: off.")
    ] = _ENGINE.history_bytes,
    memory: Annotated[
        MemoryLimit,
        typer.Option(
            parser=memory_limit,
            metavar="SIZE",
            help="All that weights, lanes, earlier texts and rounds may hold: a size, or a share of what there is.",
        ),
    ] = "75%",  # type: ignore[assignment]
    prefix_ram: Annotated[
        int, typer.Option(parser=size, metavar="SIZE", help="Memory for beginnings of earlier texts; 0: off.")
    ] = "2GiB",  # type: ignore[assignment]  # typer has it parsed
    prefix_ssd: Annotated[
        int, typer.Option(parser=size, metavar="SIZE", help="Files for the same, for after a restart; 0: none.")
    ] = "10GB",  # type: ignore[assignment]
    prefix_dir: Annotated[
        Path | None, typer.Option(help="Folder of those files; by default `prefix` under PACELINE_HOME.")
    ] = None,
    prefix_write_rate: Annotated[
        int, typer.Option(parser=size, metavar="SIZE", help="Bytes a second written to those files; 0: no limit.")
    ] = "100MB",  # type: ignore[assignment]
    itl_target: Annotated[
        float,
        typer.Option(min=0, help="Milliseconds that prefill may make a round long while others decode; 0: no limit."),
    ] = 1000 * _ENGINE.itl_target,
    fill_seconds: Annotated[
        float, typer.Option(help="How long a grammar may take for one round of one lane.")
    ] = _ENGINE.fill_seconds,
    grammar_seconds: Annotated[
        float, typer.Option(min=0.1, help="How long the compilation of a request's grammar may take.")
    ] = _GRAMMARS.seconds,
    grammar_cache_bytes: Annotated[
        int, typer.Option(min=0, help="How much compiled grammars may hold.")
    ] = _GRAMMARS.cache_bytes,
    backend: BackendFlag = "mlx",
    dtype: Annotated[DtypePolicy, typer.Option(help="What weights are held in; checkpoint: as stored.")] = "auto",
    blas: BlasFlag = "auto",
    drain_seconds: Annotated[float, typer.Option(min=0, help="Time that requests have to end on SIGTERM.")] = 30.0,
    stall_seconds: Annotated[
        float,
        typer.Option(min=0, help="After so long in one round an engine is stuck, and the process ends; 0: never."),
    ] = 120.0,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="The largest body of a request.")] = 32 * 1024 * 1024,
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that may wait for a lane; more are refused.")] = 256,
    max_requests_per_key: Annotated[
        int, typer.Option(min=0, help="Requests that one API key may have open; 0: no limit.")
    ] = 0,
    request_seconds: Annotated[
        float, typer.Option(min=0, help="How long a request may take from its arrival to its end; 0: no limit.")
    ] = 0.0,
    write_seconds: Annotated[
        float, typer.Option(min=0.1, help="How long a client may leave what it was sent unread.")
    ] = 60.0,
    head_seconds: Annotated[float, typer.Option(min=0.1, help="How long a request's head may take to come.")] = 10.0,
    max_connections: Annotated[int, typer.Option(min=1, help="Connections that may be open at once.")] = 1024,
    fault_plan: Annotated[
        Path | None, typer.Option(help="For tests: fail as this JSON file says; see backends/fault_plan.py.")
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="The least important that is logged.")] = "info",
) -> None:
    """Serve MODEL over HTTP until a signal comes."""
    _log_to_stderr(log_level)

    from api.launch import Launch
    from api.launch import serve as run

    try:
        launch = Launch(
            model=model,
            draft_model=draft_model,
            drafter=drafter_of(drafter),
            quantization=None if kv_bits is None else KVQuantization(kv_bits, kv_group_size, kv_quant_start),
            home=home_folder(),
            backend=backend,
            dtype=dtype,
            blas=blas,
            memory=memory,
            host=host,
            port=port,
            uds=uds,
            api_key_file=api_key_file,
            allowed_hosts=tuple(allow_host or ()),
            served_name=served_name,
            max_body_bytes=max_body_bytes,
            drain_seconds=drain_seconds,
            stall_seconds=stall_seconds,
            max_queue=max_queue,
            max_requests_per_key=max_requests_per_key,
            request_seconds=request_seconds,
            write_seconds=write_seconds,
            head_seconds=head_seconds,
            max_connections=max_connections,
            engine=EngineConfig(
                max_lanes=max_lanes,
                round_rows=round_rows,
                draft_tokens=draft_tokens,
                paced=pace,
                itl_target=itl_target / 1000,
                history_bytes=history_bytes,
                prefix=PrefixConfig(
                    prefix_ram, prefix_ssd, prefix_dir or default_prefix_folder(backend), prefix_write_rate
                ),
                fill_seconds=fill_seconds,
            ),
            grammars=Limits(seconds=grammar_seconds, cache_bytes=grammar_cache_bytes),
            fault_plan=fault_plan,
            supervision=supervision_of(os.environ, os.getpid()),
            passed=passed_of(os.environ, os.getpid()),
            tcp_told=is_told(context, "host") or is_told(context, "port"),
        )
        outcome = run(launch, Console())
    except (RuntimeError, OSError, ValueError) as error:
        _fail(error)
    if outcome.reason:
        Console(stderr=True).print(f"error: {outcome.reason}", style="red", highlight=False, soft_wrap=True)
    raise typer.Exit(outcome.status)


@models.command("ls")
def models_ls(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """List the installed models and their folders."""
    from api.progress import megabytes
    from backends.mlx.pull import list_models

    installed = list_models(home_folder())
    if as_json:
        told = [
            {"name": one.name, "folder": str(one.folder), "bytes": one.bytes, "dtype": one.dtype} for one in installed
        ]
        typer.echo(json.dumps(told, indent=2))
        return
    if not installed:
        typer.echo(f"no models in {home_folder()}")
    width = max((len(one.name) for one in installed), default=0)
    for one in installed:
        typer.echo(f"{one.name:{width}}  {megabytes(one.bytes):>8}  {one.dtype:10}  {one.folder}")


@models.command("pull")
def models_pull(name: Annotated[str, typer.Argument(help="A model of the catalogue.")] = DEFAULT_MODEL) -> None:
    """Bring a model onto this machine."""
    from api.progress import display_on

    load_blas("auto")  # the conversion computes with MLX
    from backends.mlx.pull import pull

    console = Console()
    try:
        with closing(display_on(console)) as display:
            folder = pull(name, home_folder(), display)
    except (RuntimeError, OSError, ValueError) as error:
        _fail(error)
    console.print(f"{name} is in {folder}", highlight=False, soft_wrap=True)


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="The model that is to be served.")] = DEFAULT_MODEL,
    host: HostFlag = "127.0.0.1",
    port: PortFlag = 8321,
    uds: UdsFlag = None,
    blas: BlasFlag = "auto",
    draft_model: DraftModelFlag = None,
) -> None:
    """Look at what `serve` would need. The exit status is not zero if something is in its way."""
    from api.doctor import examine

    findings = examine(
        model=model, home=home_folder(), host=host, port=port, uds=uds, blas=blas, draft_model=draft_model
    )
    table = Table("", "what", "finding", box=None)
    for finding in findings:
        table.add_row("[red]bad[/]" if finding.trouble else "[green]ok[/]", finding.what, finding.text)
    Console().print(table)
    raise typer.Exit(1 if any(finding.trouble for finding in findings) else 0)


def main() -> None:
    """The console script.

    A process that holds MLX ends without exit handlers: threads of MLX and OpenBLAS may still run (a load cannot be
    interrupted), and a handler that meets them aborts, which a supervisor takes for a failure. Whatever is ours has
    been closed by then.
    """
    try:
        app()
    except SystemExit as ending:
        if "mlx.core" not in sys.modules:
            raise
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ending.code if isinstance(ending.code, int) else int(ending.code is not None))


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(max(logging.getLevelName(level.upper()), logging.WARNING))
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _fail(error: Exception) -> NoReturn:
    Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(1) from error
