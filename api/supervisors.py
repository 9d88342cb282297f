"""The programs that keep Paceline running: systemd on Linux, launchd on macOS. Which steps install, start and stop it.

Owns names of units, and the words that `systemctl` and `launchctl` are told. Takes no step by itself: see `api.steps`.
"""

import shlex
from pathlib import Path
from typing import Protocol

import msgspec

from api.steps import StepError, Steps
from api.units import TEMPLATES, fill

WRITER = "paceline service install"
MARK = f"Written by {WRITER}"
"""What a file says that may be written anew, or removed."""
SYSTEM_HOME = Path("/var/lib/paceline")
"""What systemd makes for a system service (StateDirectory)."""


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be installed."""

    command: Path
    """Of `paceline`; absolute."""
    home: Path
    """Where models live; absolute."""
    words: tuple[str, ...]
    """What `paceline serve` is told besides."""
    tcp: str | None
    """Where a socket unit listens besides the Unix socket, as `host:port`; None: no socket unit."""
    account: str | None = None
    """Who runs a system service."""
    clients: str | None = None
    """The addresses that a system service may speak with; None: all."""


class Supervisor(Protocol):
    """One service of one owner. All methods raise StepError."""

    def install(self, told: Installation, steps: Steps) -> None:
        """Put the files in their place and have the service started with the machine or the session."""
        ...

    def start(self, steps: Steps) -> None:
        """Start it now; one that runs is left as it is."""
        ...

    def stop(self, steps: Steps) -> None:
        """Let it drain and end."""
        ...

    def status(self, steps: Steps) -> None:
        """Have the supervisor say how it is."""
        ...

    def uninstall(self, steps: Steps) -> None:
        """Stop it and remove what `install` wrote."""
        ...


class Systemd:
    """A unit of the system, or of one user's manager; and one for its sockets if that was asked for."""

    def __init__(self, folder: Path, *, system: bool, version: int | None = None) -> None:
        """`folder`: where units of this kind stand. `version`: of systemd, if known."""
        self._systemctl = ("systemctl",) if system else ("systemctl", "--user")
        self._system = system
        self._version = version
        self._service = folder / "paceline.service"
        self._socket = folder / "paceline.socket"

    def install(self, told: Installation, steps: Steps) -> None:
        """Enable the socket where there is one, so that the first client starts the service; else the service."""
        steps.need("systemctl")
        if told.home != SYSTEM_HOME or not self._system:
            steps.folder(told.home)
        steps.write(self._service, fill(TEMPLATES["systemd"], self._service_values(told)))
        if told.tcp is not None:
            steps.write(self._socket, fill(TEMPLATES["systemd-socket"], self._socket_values(told, told.tcp)))
        elif self._socket.exists():  # of an installation before this one
            self._run(steps, "disable", "--now", self._socket.name, may_fail=True)
            steps.remove(self._socket)
        self._run(steps, "daemon-reload")
        if told.tcp is not None:  # an installation before this one may have had it started without a client
            self._run(steps, "disable", self._service.name, may_fail=True)
        self._run(steps, "enable", self._service.name if told.tcp is None else self._socket.name)

    def start(self, steps: Steps) -> None:
        """The socket, where there is one: the first client starts the service."""
        self._run(steps, "start", (self._socket if self._socket.exists() else self._service).name)

    def stop(self, steps: Steps) -> None:
        """The socket as well, which would start it again."""
        self._run(steps, "stop", *self._names())

    def status(self, steps: Steps) -> None:
        """What systemd says; not running is no failure of the question."""
        self._run(steps, "status", "--no-pager", *self._names(), may_fail=True)

    def uninstall(self, steps: Steps) -> None:
        """What is not there any more is no matter."""
        self._run(steps, "disable", "--now", *self._names(), may_fail=True)
        steps.remove(self._service)
        steps.remove(self._socket)
        self._run(steps, "daemon-reload")

    def _names(self) -> tuple[str, ...]:
        return tuple(path.name for path in (self._socket, self._service) if path is self._service or path.exists())

    def _run(self, steps: Steps, *words: str, may_fail: bool = False) -> None:
        try:
            steps.run(*self._systemctl, *words, may_fail=may_fail)
        except StepError as error:
            hint = "may you do that? Try sudo" if self._system else "is there a session of this user, or lingering?"
            raise StepError(f"{error} ({hint})") from error

    def _service_values(self, told: Installation) -> dict[str, str]:
        values = {
            "WRITER": WRITER,
            "COMMAND": str(told.command),
            "ARGS": shlex.join(told.words),
            "HOME": str(told.home),
            "WANTED_BY": "multi-user.target" if self._system else "default.target",
        }
        known = {"USER": told.account, "CLIENTS": told.clients, "SOCKET": None if told.tcp is None else "yes"}
        values |= {name: value for name, value in known.items() if value is not None}
        if self._version is not None and self._version >= 254:
            values |= {"RESTART_STEPS": "6", "RESTART_MAX_DELAY": "60"}
        return values

    def _socket_values(self, told: Installation, tcp: str) -> dict[str, str]:
        values = {"WRITER": WRITER, "TCP": tcp}
        return values if told.account is None else values | {"USER": told.account}


class Launchd:
    """An agent of one user's session."""

    def __init__(self, agents: Path, logs: Path, user_id: int) -> None:
        """`agents`: the folder of LaunchAgents."""
        self._file = agents / "dev.paceline.plist"
        self._logs = logs
        self._domain = f"gui/{user_id}"
        self._target = f"{self._domain}/dev.paceline"

    def install(self, told: Installation, steps: Steps) -> None:
        """Have launchd load it at every login from now on; `start` does it at once."""
        steps.need("launchctl")
        steps.folder(told.home)
        steps.folder(self._logs)
        values = {
            "WRITER": WRITER,
            "COMMAND": str(told.command),
            "ARGS": shlex.join(told.words),
            "HOME": str(told.home),
            "LOGS": str(self._logs),
        }
        steps.write(self._file, fill(TEMPLATES["launchd"], values))
        steps.run("launchctl", "enable", self._target)

    def start(self, steps: Steps) -> None:
        """One that is loaded already is only started."""
        steps.run("launchctl", "bootstrap", self._domain, str(self._file), may_fail=True)
        steps.run("launchctl", "kickstart", self._target)

    def stop(self, steps: Steps) -> None:
        """Unloaded until `start` or the next login."""
        steps.run("launchctl", "bootout", self._target)

    def status(self, steps: Steps) -> None:
        """What launchd says."""
        steps.run("launchctl", "print", self._target, may_fail=True)

    def uninstall(self, steps: Steps) -> None:
        """One that is not loaded is no matter."""
        steps.run("launchctl", "bootout", self._target, may_fail=True)
        steps.remove(self._file)
