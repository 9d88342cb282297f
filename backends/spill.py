"""The SSD tier of the prefix cache: pieces as files of one namespace, written behind and read ahead on its own threads.

Bytes only: what a piece's data means is the caller's business, and so is which pieces are worth their room. Whatever
happens to the disk, nothing is raised: what cannot be written is refused, what cannot be read is not there.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import msgspec

from backends.spill_directory import Directory, Others, Survey, clear, survey, verify
from backends.spill_folder import Folder, block_name, key_of
from backends.spill_format import Content, DamagedError, make_head
from backends.spill_scan import Found, Scan, scan
from backends.spill_worker import Worker
from backends.spill_writer import Writer
from scheduler.pieces import Key, Piece

__all__ = ["Content", "Found", "Spill", "SpillStats", "Survey", "clear", "survey", "verify"]

_GRACE_SECONDS = 5.0
"""For what a thread is in the middle of when all ends."""


class SpillStats(msgspec.Struct, frozen=True):
    """What there is, and counters since the start."""

    files: int
    """Of this namespace, the one being written included."""
    bytes: int
    """Of those."""
    written: int
    written_bytes: int
    read: int
    read_bytes: int
    """Of data."""
    failed_writes: int
    """For errors of the disk; removals too."""
    failed_reads: int
    damaged: int
    """Files that were found damaged, of another namespace or another version."""
    dropped: int
    """Writes that were refused, or taken and given up."""
    writable: bool
    """Whether a write would be taken now, were there room in the queue."""


class Spill:
    """Asked by one thread. One thread of its own writes, another one reads."""

    def __init__(
        self,
        directory: Path,
        namespace: str,
        *,
        most_bytes: int,
        queue_bytes: int = 256 << 20,
        bytes_per_second: float = 100e6,
        retry_seconds: float = 60.0,
        warn: Callable[[str], None],
        faults: Callable[[str], None] = lambda _point: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the namespace's folder, creating it if need be, and looks at every header in it. If the folder cannot
        be written, or another process does, all is only read.

        `most_bytes`: for this namespace and for those that nobody serves, whose files go, oldest first, to make room.
        `queue_bytes`: what may wait to be written. `bytes_per_second`: 0 for no limit. `retry_seconds`: for so long
        nothing is written after an error, twice as long after the next one. `warn`: told once why all is only read;
        and, from the writer's thread, whenever a time begins in which nothing can be written. `faults`: see
        `spill_folder.FAULT_POINTS`, and `read` before a piece is read; what it raises, the disk did. `clock`: in
        seconds.
        """
        self._faults = faults
        self._namespace = namespace
        self._read_pieces = self._read_bytes = 0
        self._refused = 0
        self._directory, self._folder, scanned = _opened(directory, namespace, warn)
        self._damaged = scanned.damaged
        self._failed_reads = scanned.unreadable
        self.found: list[Found] = scanned.found
        """What was there at the start: parents before what hangs under them, else by last use, oldest first."""
        self._writer: Writer | None = None
        if self._directory is not None and self._folder is not None and self._folder.writable:
            self._writer = Writer(
                self._folder,
                Others(self._directory, self._folder.name),
                most_bytes=most_bytes,
                queue_bytes=queue_bytes,
                bytes_per_second=bytes_per_second,
                retry_seconds=retry_seconds,
                warn=warn,
                faults=faults,
                clock=clock,
            )
        self._reader = Worker("paceline-spill-reader")

    @property
    def stats(self) -> SpillStats:
        """As of now."""
        folder, writer = self._folder, self._writer
        return SpillStats(
            files=folder.files if folder is not None else 0,
            bytes=folder.bytes if folder is not None else 0,
            written=writer.written if writer is not None else 0,
            written_bytes=writer.written_bytes if writer is not None else 0,
            read=self._read_pieces,
            read_bytes=self._read_bytes,
            failed_writes=writer.failed if writer is not None else 0,
            failed_reads=self._failed_reads,
            damaged=self._damaged,
            dropped=self._refused + (writer.abandoned if writer is not None else 0),
            writable=writer is not None and writer.takes,
        )

    # ---- writing ----------------------------------------------------------------------------------------------------

    def size(self, piece: Piece, meta: bytes, data_bytes: int) -> int:
        """Bytes of the file that a write would make. Raises ValueError as `write` does."""
        return make_head(piece, self._namespace, meta, data_bytes).file_bytes

    def write(self, piece: Piece, meta: bytes, parts: Sequence[memoryview], done: Callable[[bool], None]) -> bool:
        """Queue a write of contiguous views, one behind the other; whether it is taken.

        If so, the views are the writer's, which releases them and then calls `done` from its thread, once: whether all
        is on the disk. If not, they are still the caller's, and `done` is never called. Raises ValueError if `meta` is
        too long for a header.
        """
        assert all(part.c_contiguous for part in parts)
        head = make_head(piece, self._namespace, meta, sum(part.nbytes for part in parts))
        taken = self._writer is not None and self._writer.write(head, tuple(parts), done)
        self._refused += not taken
        return taken

    def remove(self, keys: Iterable[Key]) -> None:
        """Queue a removal: of what was there, and of what was queued to be written before. Unknown keys are ignored."""
        if self._writer is not None:
            self._writer.remove(keys)

    def touch(self, keys: Iterable[Key]) -> None:
        """Pieces were used that did not have to be read. Unknown keys are ignored."""
        if self._writer is not None:
            self._writer.touch(keys)

    def flush(self, seconds: float) -> bool:
        """Wait for all that was queued but reads, for at most so long; whether it is done."""
        return self._writer is None or self._writer.flush(seconds)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def read(self, key: Key, done: Callable[[Content | None], None]) -> None:
        """Read a piece, and call `done` from the reader's thread, once: with None if it is not there, or no good. What
        was queued to be written is not there yet. After `close`, None at once.
        """
        if not self._reader.put(partial(self._read, key, done), partial(done, None)):
            done(None)

    def verify(self) -> tuple[int, tuple[Key, ...]]:
        """Read every file, in between the reads that are asked for: how many are good, and which are damaged. Those are
        removed if that may be. Blocks until all is done, or closed. For any thread but the spill's own.
        """
        outcomes: SimpleQueue[bool | None] = SimpleQueue()
        good, damaged = 0, list[Key]()
        for name in self._folder.names() if self._folder is not None else ():
            if not self._reader.put(partial(self._check, name, outcomes.put), partial(outcomes.put, None)):
                break
            outcome = outcomes.get()
            good += outcome is True
            if outcome is False:
                damaged.append(key_of(name))
        return good, tuple(damaged)

    def _read(self, key: Key, done: Callable[[Content | None], None]) -> None:
        content: Content | None = None
        try:
            if self._folder is not None:
                self._faults("read")
                content = self._folder.read(block_name(key))
                self._read_pieces += 1
                self._read_bytes += content.data.nbytes
        except (DamagedError, OSError) as error:
            self._failed(error)
        finally:
            done(content)

    def _check(self, name: str, done: Callable[[bool | None], None]) -> None:
        good: bool | None = None
        try:
            assert self._folder is not None
            self._folder.check(name)
            good = True
        except (DamagedError, OSError) as error:
            self._failed(error)
            good = False if isinstance(error, DamagedError) else None
        finally:
            done(good)

    def _failed(self, error: DamagedError | OSError) -> None:
        if isinstance(error, DamagedError):
            self._damaged += 1
        elif not isinstance(error, FileNotFoundError):
            self._failed_reads += 1

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self, seconds: float) -> None:
        """Write what is queued, as fast as it goes and for at most so long; drop the rest, and give back the lock.
        Idempotent. A thread that is stuck in the disk is left behind with the lock, and what waits for it is answered
        from here.
        """
        ended = self._reader.stop(_GRACE_SECONDS)
        if self._writer is not None:
            ended &= self._writer.close(seconds, _GRACE_SECONDS)
        if ended:
            for each in (self._folder, self._directory):
                if each is not None:
                    each.close()


def _opened(path: Path, namespace: str, warn: Callable[[str], None]) -> tuple[Directory | None, Folder | None, Scan]:
    """As far as that goes, and what lies in the folder."""
    directory: Directory | None = None
    folder: Folder | None = None
    try:
        directory = Directory(path, create=True)
        folder, reason = directory.take(namespace)
        scanned = scan(folder)
    except OSError as error:
        warn(f"the prefix cache in {path} cannot be opened: {error}")
        for each in (folder, directory):
            if each is not None:
                each.close()
        return None, None, Scan()
    if reason:
        warn(f"the prefix cache in {path} is only read: {reason}")
    return directory, folder, scanned
