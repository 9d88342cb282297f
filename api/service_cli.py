"""`paceline service ...`: Paceline as a service of systemd or launchd.

Owns the words, and what is asked before anything is done. What is done is in `api.supervisors`.
"""

import ipaddress
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from api.steps import StepError, Steps, Take, Tell
from api.supervisors import MARK, SYSTEM_HOME, Installation, Launchd, Supervisor, Systemd
from api.units import RenderError

service = typer.Typer(help="Paceline as a service of systemd or launchd.", no_args_is_help=True)

SystemFlag = Annotated[bool, typer.Option("--system", help="The machine's service, and not this user's (systemd).")]
DryFlag = Annotated[bool, typer.Option("--dry-run", help="Print every file and command, and change nothing.")]
ForceFlag = Annotated[bool, typer.Option("--force", help="Also files that somebody else has written.")]


@service.command("install")
def install(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="What `paceline serve` is told besides.")
    ] = None,
    system: SystemFlag = False,
    socket: Annotated[
        bool, typer.Option("--socket", help="systemd listens; the first client starts the service.")
    ] = False,
    account: Annotated[str | None, typer.Option(help="With --system: who runs it.")] = None,
    clients: Annotated[
        str | None, typer.Option(help="With --system: the only addresses to speak with, as in `localhost 10.0.0.0/8`.")
    ] = None,
    force: ForceFlag = False,
    dry_run: DryFlag = False,
) -> None:
    """Write the unit or agent, and have it started with the machine or the session. `service start` starts it now."""
    with _told():
        supervisor = _supervisor(system=system)
        _refuse(system=system, account=account, clients=clients, socket=socket)
        flags = _serve_flags(words or [])
        told = Installation(
            command=_own_command(),
            home=_home(system=system),
            words=tuple(words or ()),
            tcp=_tcp(flags) if socket else None,
            account=account,
            clients=clients,
        )
        supervisor.install(told, _steps(dry_run=dry_run, force=force))


@service.command("start")
def start(system: SystemFlag = False, dry_run: DryFlag = False) -> None:
    """Start it now; with a socket, have systemd listen."""
    with _told():
        _supervisor(system=system).start(_steps(dry_run=dry_run))


@service.command("stop")
def stop(system: SystemFlag = False, dry_run: DryFlag = False) -> None:
    """Let open requests end, and stop it until it is started again."""
    with _told():
        _supervisor(system=system).stop(_steps(dry_run=dry_run))


@service.command("status")
def status(system: SystemFlag = False, dry_run: DryFlag = False) -> None:
    """Show what systemd or launchd says of it."""
    with _told():
        _supervisor(system=system).status(_steps(dry_run=dry_run))


@service.command("uninstall")
def uninstall(system: SystemFlag = False, force: ForceFlag = False, dry_run: DryFlag = False) -> None:
    """Stop it and remove what `install` wrote; models and other files stay."""
    with _told():
        _supervisor(system=system).uninstall(_steps(dry_run=dry_run, force=force))


@contextmanager
def _told() -> Iterator[None]:
    """What cannot be done ends the command."""
    try:
        yield
    except (StepError, RenderError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


def _steps(*, dry_run: bool, force: bool = False) -> Steps:
    return Tell(typer.echo) if dry_run else Take(MARK, force=force)


def _supervisor(*, system: bool) -> Supervisor:
    from api.cli import config_folder

    if sys.platform == "darwin":
        if system:
            raise StepError("--system is for systemd: on macOS it runs as an agent of your session")
        library = Path.home() / "Library"
        return Launchd(library / "LaunchAgents", library / "Logs", os.getuid())
    folder = Path("/etc/systemd/system") if system else config_folder() / "systemd" / "user"
    return Systemd(folder, system=system, version=_systemd_version())


def _systemd_version() -> int | None:
    """None where there is none, or none that says so."""
    if shutil.which("systemctl") is None:
        return None
    said = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=False).stdout.split()
    number = said[1].partition(".")[0] if len(said) > 1 else ""
    return int(number) if number.isdigit() else None


def _refuse(*, system: bool, account: str | None, clients: str | None, socket: bool) -> None:
    """Raise StepError for flags that do not go together."""
    if system and account is None:
        raise StepError("--system needs --account: who is to run it?")
    if not system and (account is not None or clients is not None):
        raise StepError("--account and --clients are for --system: a user's service is that user's")
    if socket and sys.platform == "darwin":
        raise StepError("--socket is for systemd")


def _own_command() -> Path:
    """Of the running program, as it was called: a link stays one."""
    for candidate in (shutil.which(sys.argv[0]), Path(sys.executable).parent / "paceline"):
        if candidate is not None and Path(candidate).name == "paceline" and os.access(candidate, os.X_OK):
            return Path(candidate).absolute()
    raise StepError("there is no `paceline` command to install: is the package installed?")


def _home(*, system: bool) -> Path:
    """A system service's folder is no user's, unless PACELINE_HOME says otherwise."""
    from api.cli import home_folder, home_is_told

    return SYSTEM_HOME if system and not home_is_told() else home_folder().absolute()


def _serve_flags(words: Sequence[str]) -> dict[str, Any]:
    """What `paceline serve` would read in these words. Ends the command as `serve` would, if it is wrong.

    Raises StepError for a file's name that means another one where a service runs.
    """
    from api.cli import app

    command = typer.main.get_command(app)
    flags: dict[str, Any] = command.commands["serve"].make_context("serve", list(words)).params  # type: ignore[attr-defined]
    for name, value in flags.items():
        is_path = isinstance(value, Path) or (name in ("model", "draft_model") and value and Path(value).is_dir())
        if is_path and not Path(value).is_absolute():
            raise StepError(f"{value}: a service has no folder of its own, so that must be an absolute path")
    return flags


def _tcp(flags: dict[str, Any]) -> str:
    """Where a socket unit listens: systemd asks no name server."""
    host, port = flags["host"], flags["port"]
    if flags["uds"] is not None:
        raise StepError("with --socket the Unix socket is systemd's: that goes without --uds")
    try:
        address = ipaddress.ip_address({"localhost": "127.0.0.1", "": "::"}.get(host, host))
    except ValueError:
        raise StepError(f"--host {host}: with --socket that must be an address") from None
    if not port:
        raise StepError("--port 0: with --socket that must be a port")
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
