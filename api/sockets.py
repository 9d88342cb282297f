"""The sockets that the server listens on, bound here and removed at exit.

A Unix socket is its owner's alone (0600). The file of a dead server is replaced, that of a living one is not touched.
Knows nothing of HTTP.
"""

import os
import socket
import stat
from pathlib import Path
from types import TracebackType

_BACKLOG = 2048


class BindError(RuntimeError):
    """An address that cannot be had; the message says why."""


class Listeners:
    """Bound sockets, to be used in a `with` block: closed, and the file removed, on the way out."""

    def __init__(self, host: str, port: int, uds: Path | None) -> None:
        """`port` 0 takes a free one. Raises BindError."""
        self._uds = uds
        self._file: tuple[int, int] | None = None
        """Device and inode of the socket file that is ours."""
        self.sockets = [bind_tcp(host, port)]
        self.port = int(self.sockets[0].getsockname()[1])
        if uds is not None:
            try:
                self.sockets.append(bind_unix(uds))
                self._file = _identity(uds)
            except BaseException:
                self.close()
                raise

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
