"""One namespace's folder of the SSD tier: a file per piece under the piece's key, never seen half written.

Owns names, modes and the lock. All goes through the open folder, and no symlink is ever followed, so that whoever
swaps a name for another leads nothing astray. Must not know who else lies in the directory, nor about threads and pace.
"""

import errno
import fcntl
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from io import FileIO

import msgspec

from backends.spill_format import Content, DamagedError, Head, read_data, read_head, write_file
from scheduler.pieces import Key

BLOCK = ".block"
PARTIAL = ".partial"
_LOCK = "lock"
_FOLDER_MODE = 0o700
_FILE_MODE = 0o600
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a fifo would be waited for
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
FAULT_POINTS = ("created", "half", "written", "synced", "renamed", "done")
"""Of a write: there is a file; with a slice of data (again and again); with all; on the disk too; it has its name; that
is on the disk too."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Listed(msgspec.Struct, frozen=True):
    """A file that looks like ours, by its name."""

    name: str
    size: int
    used: int
    """In ns since the epoch."""


def folder_name(namespace: str) -> str:
    """32 hexadecimal digits."""
    return blake2b(namespace.encode(), digest_size=16).hexdigest()


def block_name(key: Key) -> str:
    """The name of a piece's file."""
    return key.hex() + BLOCK


def key_of(name: str) -> Key:
    """The key of the piece whose file has this name."""
    return bytes.fromhex(name.removesuffix(BLOCK))


class Folder:
    """Any thread may read. Who holds the lock may also write and remove, from any thread."""

    def __init__(self, directory: int, name: str) -> None:
        """Raises OSError, also for a symlink. `directory`: open."""
        self.name = name
        self._fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
        self._lock: int | None = None
        self._naming = threading.Lock()
        """Held while a name comes or goes, so that nobody removes what has just been put in a damaged file's place."""
        self._sizes: dict[str, int] = {}
        self._bytes = 0

    def close(self) -> None:
        """Give the lock back too. Idempotent."""
        for fd in (self._fd, self._lock):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._fd, self._lock = -1, None

    # ---- the lock ---------------------------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """Whether the lock was taken."""
        return self._lock is not None

    def take(self) -> None:
        """Lock it for as long as it is open. Raises BlockingIOError if another process does, OSError if it cannot be
        written.
        """
        lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _FILE_MODE, dir_fd=self._fd)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._try_to_write()
            tighten(self._fd, _FOLDER_MODE)
            with suppress(OSError):  # it need not be ours
                os.fchmod(lock, _FILE_MODE)
        except OSError:
            os.close(lock)
            raise
        self._lock = lock

    def held(self) -> bool:
        """Whether a live process has it; also if that cannot be told. Ask while nobody can begin to."""
        try:
            lock = os.open(_LOCK, _READ, dir_fd=self._fd)
        except OSError as error:
            return not isinstance(error, FileNotFoundError)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock)
        return False

    def _try_to_write(self) -> None:
        name = f"{secrets.token_hex(8)}{PARTIAL}"
        try:
            os.close(os.open(name, _CREATE, _FILE_MODE, dir_fd=self._fd))
            os.unlink(name, dir_fd=self._fd)
        except OSError as error:
            if error.errno not in _FULL:  # which passes
                raise

    @property
    def gone(self) -> bool:
        """Whether somebody has removed the folder: what is open is in no directory any more."""
        return os.fstat(self._fd).st_nlink == 0

    # ---- what lies in it --------------------------------------------------------------------------------------------

    @property
    def files(self) -> int:
        """How many were found or written and not removed, the one being written included."""
        return len(self._sizes)

    @property
    def bytes(self) -> int:
        """Of those."""
        return self._bytes

    def names(self) -> list[str]:
        """Of those, but for the one being written."""
        with self._naming:
            return [name for name in self._sizes if name.endswith(BLOCK)]

    def size(self, key: Key) -> int:
        """Of a piece's file; 0 if there is none."""
        return self._sizes.get(block_name(key), 0)

    def listing(self) -> list[Listed]:
        """All regular files that look like ours. Raises OSError."""
        listed: list[Listed] = []
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._fd)
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    if entry.name.endswith((BLOCK, PARTIAL)) and entry.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            listed.append(Listed(entry.name, status.st_size, status.st_mtime_ns))
        finally:
            os.close(fd)
        return listed

    # ---- one file ---------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Head:
        """Look at a file's head, and count it. Raises DamagedError, OSError; removes what is damaged if it may."""
        with self._opened(name) as file, self._mending(file, name):
            head = self._head(file, name)
            if self.writable:
                with suppress(OSError):
                    tighten(file.fileno(), _FILE_MODE)
        with self._naming:
            self._count(name, head.file_bytes)
        return head

    def read(self, name: str) -> Content:
        """For use. Raises DamagedError, OSError; removes what is damaged if it may."""
        with self._opened(name) as file, self._mending(file, name):
            head = self._head(file, name)
            data = read_data(file, head)
            if self.writable:
                with suppress(OSError):
                    _use(file.fileno(), time.time_ns())
        return Content(head.piece, head.meta, data)

    def check(self, name: str) -> None:
        """Read it, and leave no trace. Raises DamagedError, OSError; removes what is damaged if it may."""
        with self._opened(name) as file, self._mending(file, name):
            read_data(file, self._head(file, name))

    def use(self, name: str, when: int) -> None:
        """When it was last used, in ns since the epoch. Raises OSError."""
        with self._opened(name) as file:
            _use(file.fileno(), when)

    def write(
        self, head: Head, parts: Sequence[memoryview], paced: Callable[[int], None], faults: Callable[[str], None]
    ) -> None:
        """A whole file, or none. Raises OSError, and whatever `paced` does, which is told of every slice's bytes."""

        def behind_slice(count: int) -> None:
            faults("half")
            paced(count)

        name = block_name(head.piece.key)
        place = f"{head.piece.key.hex()}.{secrets.token_hex(8)}{PARTIAL}"
        try:
            with self._naming:
                self._count(place, head.file_bytes)
            fd = os.open(place, _CREATE, _FILE_MODE, dir_fd=self._fd)
            with os.fdopen(fd, "wb", buffering=0) as file:
                os.fchmod(fd, _FILE_MODE)
                faults("created")
                write_file(file, head, parts, behind_slice)
                faults("written")
                _use(fd, time.time_ns())
                os.fsync(fd)  # a drive's own cache may still be lost with the power: that is what checksums are for
                faults("synced")
            with self._naming:
                os.rename(place, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
                self._count(place, 0)
                place = name
                self._count(name, head.file_bytes)
            faults("renamed")
            os.fsync(self._fd)
            faults("done")
        except BaseException:
            with suppress(OSError):
                self.remove(place)
            raise

    def remove(self, name: str, inode: int | None = None) -> bool:
        """False: there is no such regular file, or not with this inode. Raises OSError."""
        with self._naming:
            try:
                status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            except FileNotFoundError:
                self._count(name, 0)
                return False
            if not stat.S_ISREG(status.st_mode) or inode not in (None, status.st_ino):
                return False
            os.unlink(name, dir_fd=self._fd)
            self._count(name, 0)
            return True

    # ---- inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self, name: str) -> Iterator[FileIO]:
        try:
            fd = os.open(name, _READ, dir_fd=self._fd)
        except FileNotFoundError:
            self._missed(name)
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is no regular file", name)
        with os.fdopen(fd, "rb", buffering=0) as file:
            yield file

    def _missed(self, name: str) -> None:
        """Somebody else removed it: whoever holds the lock, or a person."""
        with self._naming:
            try:
                os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            except FileNotFoundError:
                self._count(name, 0)

    @contextmanager
    def _mending(self, file: FileIO, name: str) -> Iterator[None]:
        try:
            yield
        except DamagedError:
            if self.writable:
                with suppress(OSError):
                    self.remove(name, os.fstat(file.fileno()).st_ino)
            raise

    def _head(self, file: FileIO, name: str) -> Head:
        head = read_head(file)
        if folder_name(head.namespace) != self.name:
            raise DamagedError("it is of another namespace")
        if block_name(head.piece.key) != name:
            raise DamagedError("its name is not its key")
        status = os.fstat(file.fileno())
        if status.st_size != head.file_bytes:
            raise DamagedError(f"it has {status.st_size} bytes, not {head.file_bytes}")
        return head

    def _count(self, name: str, size: int) -> None:
        self._bytes += size - self._sizes.pop(name, 0)
        if size:
            self._sizes[name] = size


def _use(fd: int, when: int) -> None:
    os.utime(fd, ns=(when, when))


def tighten(fd: int, mode: int) -> None:
    """Take from everybody else what `mode` does not grant, if it is ours. Raises OSError."""
    status = os.fstat(fd)
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        os.fchmod(fd, stat.S_IMODE(status.st_mode) & mode)
