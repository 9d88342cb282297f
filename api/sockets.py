"""The sockets that the server listens on: bound here and removed at exit, or passed by a service manager.

A Unix socket is its owner's alone (0600). The file of a dead server is replaced, that of a living one is not touched.
Who may use a passed one is its manager's to say, and its file is never removed. Knows nothing of HTTP.
"""

import os
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

_BACKLOG = 2048
_FIRST_PASSED = 3
"""Passed descriptors follow standard input, output and error."""
_TCP = (socket.AF_INET, socket.AF_INET6)


class BindError(RuntimeError):
    """An address that cannot be had; the message says why."""


class Passed(msgspec.Struct, frozen=True):
    """A descriptor that a service manager left open for this process, and what its socket unit calls it."""

    number: int
    name: str


def passed_of(environment: Mapping[str, str], pid: int) -> tuple[Passed, ...]:
    """Read LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES as sd_listen_fds_with_names(3) does: those of another process are
    nothing to us. Raises BindError for a count or names that cannot be.
    """
    if environment.get("LISTEN_PID") != str(pid):
        return ()
    told = environment.get("LISTEN_FDS", "")
    if not (told.isascii() and told.isdigit()):
        raise BindError(f"LISTEN_FDS={told} is no number of sockets")
    names = environment.get("LISTEN_FDNAMES", ":".join(["unknown"] * int(told))).split(":") if int(told) else []
    if len(names) != int(told):
        raise BindError(f"LISTEN_FDNAMES names {len(names)} sockets, LISTEN_FDS={told}")
    return tuple(Passed(_FIRST_PASSED + place, name) for place, name in enumerate(names))


def adopt(passed: Sequence[Passed]) -> tuple[socket.socket, ...]:
    """The sockets of passed descriptors, which no child of this process inherits from now on.

    Raises BindError for whatever is no listening stream socket of the internet or of Unix.
    """
    return tuple(_adopted(one) for one in passed)


def _adopted(passed: Passed) -> socket.socket:
    words = f"the passed socket {passed.name} (descriptor {passed.number})"
    try:
        adopted = socket.socket(fileno=passed.number)
    except OSError as error:
        raise BindError(f"{words} is none: {error.strerror}") from error
    adopted.set_inheritable(False)
    adopted.setblocking(False)
    known = adopted.family in (*_TCP, socket.AF_UNIX) and adopted.type == socket.SOCK_STREAM
    if not known or not adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        adopted.close()
        raise BindError(f"{words} is no stream socket that listens")
    return adopted


def tcp_address(bound: socket.socket) -> tuple[str, int] | None:
    """Host and port; None for a Unix socket."""
    return bound.getsockname()[:2] if bound.family in _TCP else None


def unix_path(bound: socket.socket) -> str | None:
    """The file, or the abstract name behind an `@`; None for another socket."""
    if bound.family != socket.AF_UNIX:
        return None
    told: str | bytes = bound.getsockname()
    return told if isinstance(told, str) else "@" + told[1:].decode(errors="replace")


class Listeners:
    """Listening sockets, to be used in a `with` block: closed, and the file removed, on the way out."""

    def __init__(self, host: str | None, port: int, uds: Path | None, passed: Sequence[socket.socket] = ()) -> None:
        """Bind what is not None, beside what was passed. `port` 0 takes a free one. Raises BindError."""
        self._uds = uds
        self._file: tuple[int, int] | None = None
        """Device and inode of the socket file that is ours."""
        self.sockets = list(passed)
        try:
            if host is not None:
                self.sockets.append(bind_tcp(host, port))
            if uds is not None:
                self.sockets.append(bind_unix(uds))
                self._file = _identity(uds)
        except BaseException:
            self.close()
            raise
        self.addresses = tuple(address for one in self.sockets if (address := tcp_address(one)) is not None)
        """Host and port of each TCP socket."""
        self.paths = tuple(path for one in self.sockets if (path := unix_path(one)) is not None)
        """The file of each Unix socket."""

    @property
    def port(self) -> int:
        """The first TCP socket's."""
        return self.addresses[0][1]

    def __enter__(self) -> "Listeners":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent. A file that a later server put in the place of ours stays."""
        for bound in self.sockets:
            bound.close()
        if self._uds is not None and self._file is not None and _identity(self._uds) == self._file:
            self._uds.unlink(missing_ok=True)
        self._file = None


def bind_tcp(host: str, port: int) -> socket.socket:
    """A bound TCP socket on a name or an address of either family. Raises BindError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise BindError(f"cannot listen on {host}: {error}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise BindError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    bound.setblocking(False)
    return bound


def bind_unix(path: Path) -> socket.socket:
    """A listening Unix socket that only its owner may use. Raises BindError."""
    remove_stale(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        bound.bind(str(path))
        bound.listen(_BACKLOG)  # at once: a socket that does not listen looks like a dead server's
    except OSError as error:
        bound.close()
        raise BindError(f"cannot listen on {path}: {error.strerror or error}") from error
    finally:
        os.umask(before)
    bound.setblocking(False)
    return bound


def remove_stale(path: Path) -> None:
    """Remove a socket file that nobody listens on. Raises BindError for a living server's, and for any other file."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise BindError(f"cannot listen on {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(kind):
        raise BindError(f"cannot listen on {path}: there is a file that is no socket")
    if is_answered(path):
        raise BindError(f"cannot listen on {path}: another server does")
    path.unlink(missing_ok=True)


def is_answered(path: Path) -> bool:
    """Whether somebody listens on a Unix socket's file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # busy, or not ours: somebody's in any case
            return True
    return True


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
