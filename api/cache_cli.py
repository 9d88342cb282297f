"""`paceline cache ...`: a running daemon's prefix cache, over its Unix socket; or the files alone, where none runs.

Owns the words. What is asked of a daemon is in `api.cache`.
"""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from api.progress import megabytes

cache = typer.Typer(help="What is kept of earlier texts.", no_args_is_help=True)

UdsFlag = Annotated[Path | None, typer.Option(help="The Unix socket of a running daemon.")]
FolderFlag = Annotated[Path | None, typer.Option(help="Without a daemon: the folder of the files.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="For programs.")]

_PATIENCE = 90.0


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_PATIENCE)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket's file."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


@cache.command("ls")
def ls(uds: UdsFlag = None, prefix_dir: FolderFlag = None, as_json: JsonFlag = False) -> None:
    """Show what is held: by a daemon in memory and files, or in the files by model."""
    if uds is not None:
        _show(_ask(uds, "GET", "/admin/cache"), as_json=as_json)
        return
    from backends.spill import survey

    with _files():
        models = survey(_folder(prefix_dir))
    if as_json:
        told = [{"model": one.label, "files": one.files, "bytes": one.bytes, "in_use": one.locked} for one in models]
        typer.echo(json.dumps(told, indent=2))
        return
    if not models:
        typer.echo(f"no files in {_folder(prefix_dir)}")
    for one in models:
        typer.echo(f"{megabytes(one.bytes):>9}  {one.files:6} files  {one.label}{'  (in use)' if one.locked else ''}")


@cache.command("flush")
def flush(uds: Annotated[Path, typer.Option(help="The Unix socket of the daemon.")]) -> None:
    """Have a daemon write to files what it holds in memory alone."""
    whole = _ask(uds, "POST", "/admin/cache/flush")["flushed"]
    typer.echo("everything is written" if whole else "not everything could be written in time")
    raise typer.Exit(0 if whole else 1)


@cache.command("verify")
def verify(uds: UdsFlag = None, prefix_dir: FolderFlag = None) -> None:
    """Check every file against its checksum, and remove those that are damaged."""
    if uds is not None:
        told = _ask(uds, "POST", "/admin/cache/verify")
        good, damaged = told["good"], told["damaged"]
    else:
        from backends.spill import verify as verify_files

        with _files():
            good, damaged = verify_files(_folder(prefix_dir))
    typer.echo(f"{good} files are good, {damaged} were damaged and are removed")
    raise typer.Exit(1 if damaged else 0)


@cache.command("clear")
def clear(uds: UdsFlag = None, prefix_dir: FolderFlag = None) -> None:
    """Forget everything that is not in use."""
    if uds is not None:
        typer.echo(f"{_ask(uds, 'POST', '/admin/cache/clear')['cleared']} blocks are forgotten")
        return
    from backends.spill import clear as clear_files

    with _files():
        files, size = clear_files(_folder(prefix_dir))
    typer.echo(f"{files} files are removed, {megabytes(size)}")


@contextmanager
def _files() -> Iterator[None]:
    """What the disk refuses ends the command."""
    try:
        yield
    except OSError as error:
        _fail(str(error))


def _folder(told: Path | None) -> Path:
    from api.cli import home_folder

    return told or home_folder() / "prefix"


def _ask(uds: Path, method: str, path: str) -> dict[str, Any]:
    """The daemon's answer; its refusal, or nobody's, ends the command."""
    connection = UnixConnection(uds)
    try:
        connection.request(method, path, headers={"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        _fail(f"no daemon answers on {uds}: {error}")
    finally:
        connection.close()
    if response.status != 200:
        _fail(str(answer.get("error", {}).get("message", answer)))
    return answer


def _fail(words: str) -> NoReturn:
    Console(stderr=True).print(f"error: {words}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(1)


def _show(told: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    table = Table("", "blocks", "bytes", "of", "evicted", "refused", box=None)
    for tier in ("ram", "ssd"):
        account = told[tier]
        sizes = (megabytes(account["bytes"]), megabytes(account["most"]))
        table.add_row(tier, str(account["pieces"]), *sizes, str(account["evictions"]), str(account["refused"]))
    Console().print(table)
    if (files := told["spill"]) is not None:
        typer.echo(
            f"files: {files['written']} written, {files['read']} read, {files['damaged']} damaged, "
            f"{files['failed_writes'] + files['failed_reads']} failed"
            + ("" if files["writable"] else "; not being written")
        )
