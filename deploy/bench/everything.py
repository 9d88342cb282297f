"""`all`: every benchmark that stands in the README, one after the other, on the default model.

Each runs in a process of its own, so that one that needs MLX leaves none behind for the next.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from api.cli import home_folder
from backends.mlx.pull import pull
from deploy.bench.options import say
from deploy.bench.schemas import SCHEMAS

_ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m"
IN_PAIRS = (
    "serve-pair",
    "loop",
    "drafting",
    "prefix",
    "rounds",
    "sampling",
    "constrained",
    "overhead",
    "overload",
    "long-prompt",
)


def everything(
    pairs: Annotated[
        int | None, typer.Option(min=1, help="Repeats of each measurement; by default each its own.")
    ] = None,
) -> None:
    """Print all tables; exit 1 if a bound does not hold. Takes about an hour on two idle cores."""
    folder = pull(MODEL, home_folder(), lambda _stage, _done, _total: None)
    commands = [[name, str(folder), *_option("--pairs", pairs)] for name in IN_PAIRS]
    commands.append(["caches", *_option("--pairs", pairs)])
    commands.append(["fake", *_option("--repeats", pairs)])
    if SCHEMAS.exists():
        commands.append(["schemas", str(folder)])
    failed = [words[0] for words in commands if not _holds(words)]
    say(f"bounds missed in: {', '.join(failed)}" if failed else "every bound holds")
    raise typer.Exit(1 if failed else 0)


def _option(name: str, value: int | None) -> list[str]:
    return [] if value is None else [name, str(value)]


def _holds(words: list[str]) -> bool:
    say(f"--- {words[0]}")
    return subprocess.run([sys.executable, "-m", "deploy.bench", *words], cwd=_ROOT, check=False).returncode == 0
