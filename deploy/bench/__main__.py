"""The command line: `python -m deploy.bench SUBCOMMAND`. One module a subcommand; `SUBCOMMANDS` lists them all."""

import signal
import sys
from collections.abc import Callable
from types import FrameType

import typer

from deploy.bench.caches import caches
from deploy.bench.chaos import chaos
from deploy.bench.constrained import constrained
from deploy.bench.drafting import drafting
from deploy.bench.everything import everything
from deploy.bench.fake import fake
from deploy.bench.load import load
from deploy.bench.long_prompt import long_prompt
from deploy.bench.loop import loop
from deploy.bench.overhead import overhead
from deploy.bench.overload import overload
from deploy.bench.picture import picture
from deploy.bench.prefix import prefix
from deploy.bench.record import record
from deploy.bench.replay import replay
from deploy.bench.rounds import rounds
from deploy.bench.sampling import sampling
from deploy.bench.schemas import schemas
from deploy.bench.serve_pair import serve_pair
from deploy.bench.soak import soak

SUBCOMMANDS: tuple[tuple[str, Callable[..., None]], ...] = (
    ("load", load),
    ("serve-pair", serve_pair),
    ("loop", loop),
    ("drafting", drafting),
    ("prefix", prefix),
    ("overhead", overhead),
    ("overload", overload),
    ("long-prompt", long_prompt),
    ("soak", soak),
    ("rounds", rounds),
    ("caches", caches),
    ("sampling", sampling),
    ("schemas", schemas),
    ("constrained", constrained),
    ("fake", fake),
    ("chaos", chaos),
    ("record", record),
    ("replay", replay),
    ("picture", picture),
    ("all", everything),
)

app = typer.Typer(help="Benchmarks of a running server over real sockets.", no_args_is_help=True, add_completion=False)
for name, subcommand in SUBCOMMANDS:
    app.command(name)(subcommand)


def _stop(number: int, _frame: FrameType | None) -> None:
    """Leave by way of every clean-up, so that no server is left behind."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    app()
