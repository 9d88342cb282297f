"""What the service manager is told: systemd's sd_notify protocol, datagrams of `NAME=VALUE` lines on its socket.

Owns which line is sent when. Knows nothing of the engine: it is told how things stand as often as one likes, and what
has changed goes out. Without a manager nothing does.
"""

import logging
import socket
from collections.abc import Mapping
from typing import Literal

import msgspec

_log = logging.getLogger("paceline.notify")

_STATUS_SECONDS = 1.0
"""The least time between two status lines of one phase: each is a message on the manager's bus."""
_EXTEND_SECONDS = 60.0
"""How much longer than now a load or a drain may take, until it says so again."""
_EXTEND_EVERY_SECONDS = 10.0

Phase = Literal["loading", "serving", "ending"]
_PHASE_LINES: Mapping[Phase, tuple[str, ...]] = {"loading": (), "serving": ("READY=1",), "ending": ("STOPPING=1",)}


class Supervision(msgspec.Struct, frozen=True):
    """What a service manager told the process at its start."""

    address: str | None = None
    """Its socket: a path, or a name of the abstract namespace behind an `@`. None: nobody wants to be told."""
    watchdog_seconds: float | None = None
    """A process that was silent for so long is killed by it. None: it does not watch."""


def supervision_of(environment: Mapping[str, str], pid: int) -> Supervision:
    """Read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID as sd_notify(3) and sd_watchdog_enabled(3) do.

    A watchdog that is another process's, and an address of another kind, are nothing to us. Raises ValueError for a
    time that is none.
    """
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return Supervision()
    told = environment.get("WATCHDOG_USEC")
    if told is None or environment.get("WATCHDOG_PID", str(pid)) != str(pid):
        return Supervision(address)
    if not (told.isascii() and told.isdigit() and int(told)):
        raise ValueError(f"WATCHDOG_USEC={told} is no number of microseconds")
    return Supervision(address, int(told) / 1e6)


class Standing(msgspec.Struct, frozen=True):
    """How the server is now."""

    phase: Phase
    status: str
    """One line for people."""
    alive: bool
    """Whether what does the work does it. The watchdog hears nothing of a server that only answers."""


class Notifier:
    """Turns standings into messages. Written by `report` alone, on one thread; it never waits."""

    def __init__(self, supervision: Supervision) -> None:
        self._address = _address_of(supervision.address)
        self._watchdog_seconds = supervision.watchdog_seconds
        self._socket: socket.socket | None = None
        self._warned = False
        self._told: Standing | None = None
        self._status_at = self._extended_at = self._pinged_at = float("-inf")

    @property
    def interval(self) -> float:
        """How often `report` wants to be called, in seconds, so that the watchdog hears of us in half its time."""
        return float("inf") if self._watchdog_seconds is None else self._watchdog_seconds / 4

    def report(self, standing: Standing, now: float) -> None:
        """Send what is new at `now` (seconds, monotonic). What cannot be sent is tried again by the next call."""
        if self._address is None:
            return
        turned = self._told is None or self._told.phase != standing.phase
        restated = self._told is None or self._told.status != standing.status
        tells = restated and (turned or now - self._status_at >= _STATUS_SECONDS)
        extends = standing.phase != "serving" and (turned or now - self._extended_at >= _EXTEND_EVERY_SECONDS)
        pings = standing.alive and self._watchdog_seconds is not None and now - self._pinged_at >= self.interval
        lines = [
            *(_PHASE_LINES[standing.phase] if turned else ()),
            *([f"STATUS={' '.join(standing.status.split())}"] if tells else ()),
            *([f"EXTEND_TIMEOUT_USEC={_EXTEND_SECONDS * 1e6:.0f}"] if extends else ()),
            *(["WATCHDOG=1"] if pings else ()),
        ]
        if not lines or not self._send("\n".join(lines)):
            return
        if turned or tells:
            self._told = standing
        self._status_at = now if tells else self._status_at
        self._extended_at = now if extends else self._extended_at
        self._pinged_at = now if pings else self._pinged_at

    def _send(self, message: str) -> bool:
        """Whether it went out: a manager that is gone or busy is no reason to end, or to wait."""
        assert self._address is not None
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
            self._socket.sendto(message.encode(), self._address)
        except OSError as error:
            _log.log(
                logging.DEBUG if self._warned else logging.WARNING, "the service manager cannot be told: %s", error
            )
            self._warned = True
            return False
        return True

    def close(self) -> None:
        """Tell no more. Idempotent."""
        self._address = None
        if self._socket is not None:
            self._socket.close()


def _address_of(told: str | None) -> str | bytes | None:
    """As the kernel takes it: an abstract name begins with a zero byte."""
    return b"\0" + told[1:].encode() if told is not None and told.startswith("@") else told
