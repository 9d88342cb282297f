"""The flags that several subcommands share, with their defaults."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")]
Pairs = Annotated[int, typer.Option(min=1, help="Interleaved repeats of each measurement.")]
Program = Annotated[Path, typer.Option("--paceline", help="The paceline command to measure.")]
Arguments = Annotated[list[str] | None, typer.Option("--arg", help="A further word for `paceline serve`.")]
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", exists=True, dir_okay=False, help='JSON lines with "prompt", "turns" or "messages".'),
]
Clients = Annotated[list[int] | None, typer.Option("--clients", min=1, help="How many at a time; may be repeated.")]
Model = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A folder with an MLX model.")]
AnyModel = Annotated[
    Path | None, typer.Argument(exists=True, file_okay=False, help="A folder with an MLX model; none for the fake.")
]
Backend = Annotated[Literal["mlx", "fake"], typer.Option(help="fake: the pseudo-model, whose rounds cost nothing.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that one request may take.")]
Limit = Annotated[float, typer.Option("--limit", min=0.1, help="Seconds that one run may take.")]
CacheDir = Annotated[Path, typer.Option("--cache-dir", help="Where float32 copies of models are kept.")]
AsIs = Annotated[bool, typer.Option("--as-is", help="Serve the folder's own weights (on a GPU), not a float32 copy.")]

PROGRAM = Path(sys.executable).with_name("paceline")
CACHE_DIR = Path.home() / ".cache" / "paceline" / "bench"
CLIENTS = (1, 4, 8)


def warn_if_busy() -> None:
    """OpenBLAS's threads wait in a spin: one more busy program can slow a server down ten times, and unevenly."""
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    if load > processors / 4:
        say(f"warning: this machine is busy (load {load:.1f} on {processors} processors); expect a wide spread")


def say(text: str) -> None:
    """Progress, on standard error: standard output is the report's."""
    typer.echo(text, err=True)
