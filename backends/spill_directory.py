"""The SSD tier's directory: a folder for every namespace that was ever served, and what may be done to those of others.

Whoever takes a folder's lock, or removes files of a folder whose lock nobody has, has the whole directory to himself
meanwhile; so a folder that is found free stays free until the file is gone. The directory's path may be a symlink: that
is the operator's business. Nothing in it may.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from heapq import heapify, heappop
from pathlib import Path

import msgspec

from backends.spill_folder import BLOCK, PARTIAL, Folder, folder_name, tighten
from backends.spill_format import DamagedError

_FOLDER = re.compile(r"[0-9a-f]{32}")
_MODE = 0o700


class Survey(msgspec.Struct, frozen=True):
    """A namespace's folder, for people."""

    folder: str
    label: str
    """The namespace; the folder's name, if no file tells it."""
    files: int
    """Leftovers of writes included."""
    bytes: int
    locked: bool
    """By a live process."""


class Directory:
    """Open; created if need be. Belongs to one thread at a time."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Raises OSError."""
        if create and not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(_MODE)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def names(self) -> list[str]:
        """Of all that look like a namespace's folder."""
        return sorted(name for name in self._listed() if _FOLDER.fullmatch(name))

    def open(self, name: str) -> Folder:
        """A namespace's folder. Raises OSError, also for a symlink."""
        return Folder(self._fd, name)

    def take(self, namespace: str) -> tuple[Folder, str]:
        """A namespace's own folder, created if need be and locked; and if it can only be read, why. Raises OSError if
        not even that.
        """
        name = folder_name(namespace)
        reason = ""
        with self.alone():
            self._create(name)
            folder = self.open(name)
            try:
                folder.take()
            except BlockingIOError:
                reason = "another process writes there"
            except OSError as error:
                reason = str(error)
        if folder.writable:
            self._tighten()
        return folder, reason

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody else is at the directory, and keep the others waiting."""
        with suppress(OSError):  # where this cannot be had, a folder's lock cannot either, and all is only read
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _create(self, name: str) -> None:
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            os.mkdir(name, _MODE, dir_fd=self._fd)
            os.chmod(name, _MODE, dir_fd=self._fd)  # whatever the umask

    def _tighten(self) -> None:
        """A directory that holds anything else is not ours alone: others may have to read it."""
        with suppress(OSError):
            if all(_FOLDER.fullmatch(name) for name in self._listed()):
                tighten(self._fd, _MODE)

    def _listed(self) -> list[str]:
        with os.scandir(self._fd) as entries:
            return [entry.name for entry in entries]


class _File(msgspec.Struct, frozen=True, order=True):
    used: int
    folder: str
    name: str
    size: int


class Others:
    """The files of namespaces that no live process serves. Written by one thread at a time."""

    def __init__(self, directory: Directory, own: str) -> None:
        """`own`: the folder that is none of them, whatever its lock says to the process that has it."""
        self._directory = directory
        self._own = own
        self._files: list[_File] = []
        """A heap: the oldest first."""
        self.bytes = 0

    def look(self) -> None:
        """Which there are now."""
        self._files = []
        with self._directory.alone(), suppress(OSError):
            for name in self._directory.names():
                if name != self._own:
                    self._files += self._look_into(name)
        heapify(self._files)
        self.bytes = sum(file.size for file in self._files)

    def shrink(self, most_bytes: int) -> None:
        """Remove the oldest until there are at most so many bytes. Those that cannot be had do not count any more."""
        if self.bytes > most_bytes:
            with self._directory.alone():
                while self._files and self.bytes > most_bytes:
                    file = heappop(self._files)
                    self.bytes -= file.size
                    self._remove(file)

    def _look_into(self, name: str) -> list[_File]:
        with suppress(OSError), closing(self._directory.open(name)) as folder:
            if not folder.held():
                return [_File(listed.used, name, listed.name, listed.size) for listed in folder.listing()]
        return []

    def _remove(self, file: _File) -> None:
        with suppress(OSError), closing(self._directory.open(file.folder)) as folder:
            if not folder.held():
                folder.remove(file.name)


# ---- for people, whether a daemon runs or not ------------------------------------------------------------------------


def survey(path: Path) -> list[Survey]:
    """What lies in a directory; nothing if there is none. Raises OSError."""
    return [
        Survey(
            folder.name,
            _label(folder),
            len(listing := folder.listing()),
            sum(listed.size for listed in listing),
            locked=_held(directory, folder),
        )
        for directory, folder in _folders(path)
    ]


def clear(path: Path) -> tuple[int, int]:
    """Remove what no live process serves; how many files, and their bytes. Raises OSError."""
    files = removed = 0
    for directory, folder in _folders(path):
        with directory.alone():
            for listed in [] if folder.held() else folder.listing():
                if folder.remove(listed.name):
                    files += 1
                    removed += listed.size
    return files, removed


def verify(path: Path) -> tuple[int, int]:
    """Read every file; how many are good, and how many damaged. Those are removed where no live process serves them.
    Raises OSError.
    """
    good = damaged = 0
    for directory, folder in _folders(path):
        for listed in folder.listing():
            if listed.name.endswith(PARTIAL):
                continue
            try:
                folder.check(listed.name)
                good += 1
            except FileNotFoundError:
                continue
            except DamagedError:
                damaged += 1
                with directory.alone():
                    if not folder.held():
                        folder.remove(listed.name)
    return good, damaged


def _folders(path: Path) -> Iterator[tuple[Directory, Folder]]:
    """Each is open until the next."""
    try:
        directory = Directory(path)
    except FileNotFoundError:
        return
    with closing(directory):
        for name in directory.names():
            try:
                folder = directory.open(name)
            except OSError:  # it only has the name of one, or is somebody else's
                continue
            with closing(folder):
                yield directory, folder


def _held(directory: Directory, folder: Folder) -> bool:
    with directory.alone():
        return folder.held()


def _label(folder: Folder) -> str:
    for listed in folder.listing():
        if listed.name.endswith(BLOCK):
            with suppress(DamagedError, OSError):
                return folder.find(listed.name).namespace
    return folder.name
