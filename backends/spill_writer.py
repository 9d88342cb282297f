"""What is written to a namespace's folder: behind the engine's back, at a pace, within bounds, not on a failing disk.

Owns what is under way, and the room that it needs. Must not know what is read, nor what a piece's data means.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import msgspec

from backends.spill_directory import Others
from backends.spill_folder import Folder, block_name
from backends.spill_format import Head
from backends.spill_worker import Pause, Throttle, Worker
from scheduler.pieces import Key

_LOOK_SECONDS = 60.0
"""So often it is looked what other namespaces there are."""


class _AbandonedError(Exception):
    """The write under way is given up, as all ends."""


class _Write(msgspec.Struct, frozen=True):
    head: Head
    parts: tuple[memoryview, ...]
    done: Callable[[bool], None]


class Writer:
    """Asked by one thread. Its own alone changes the folder, but for damaged files that a reader removes."""

    def __init__(
        self,
        folder: Folder,
        others: Others,
        *,
        most_bytes: int,
        queue_bytes: int,
        bytes_per_second: float,
        retry_seconds: float,
        warn: Callable[[str], None],
        faults: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """`folder`: locked. The rest as `backends.spill.Spill` has it."""
        self.written = self.written_bytes = 0
        self.failed = 0
        self.abandoned = 0
        """Writes that were taken, and not tried to the end."""
        self._gone = False
        """Whether the folder is."""
        self._folder = folder
        self._others = others
        self._most_bytes = most_bytes
        self._queue_bytes = queue_bytes
        self._warn = warn
        self._faults = faults
        self._clock = clock
        self._asking = threading.Lock()
        """Over what is both asked for and done: `_queued` and `_touched`."""
        self._queued = 0
        """Bytes of the files that are to be written, the one under way included."""
        self._touched: dict[Key, int] = {}
        self._hurry = threading.Event()
        self._ending = threading.Event()
        self._throttle = Throttle(bytes_per_second, clock, self._hurry.wait)
        self._pause = Pause(retry_seconds, clock)
        self._looked = clock()
        others.look()
        self._make_room(0)
        self._worker = Worker("paceline-spill-writer", behind=True)

    # ---- asked ------------------------------------------------------------------------------------------------------

    @property
    def takes(self) -> bool:
        """Whether a write would be taken, were there room in the queue."""
        return self._pause.over and not self._gone and not self._hurry.is_set()

    def write(self, head: Head, parts: tuple[memoryview, ...], done: Callable[[bool], None]) -> bool:
        """Queue a write; whether it is taken. If so, the parts are released before `done` is called, once."""
        job = _Write(head, parts, done)
        with self._asking:
            if not self.takes or (self._queued and self._queued + head.file_bytes > self._queue_bytes):
                return False
            self._queued += head.file_bytes
        return self._worker.put(partial(self._write, job), partial(self._abandon, job))

    def remove(self, keys: Iterable[Key]) -> None:
        """Queue a removal."""
        names = [block_name(key) for key in keys]
        if names:
            self._worker.put(partial(self._remove, names))

    def touch(self, keys: Iterable[Key]) -> None:
        """Queue a new last use, for those that are there."""
        now = time.time_ns()
        with self._asking:
            asked = bool(self._touched)
            self._touched.update((key, now) for key in keys if self._folder.size(key))
            if self._touched and not asked:
                self._worker.put(self._touch)

    def flush(self, seconds: float) -> bool:
        """Wait until all is done, for at most so long; whether it is."""
        return self._worker.flush(seconds)

    def close(self, seconds: float, grace: float) -> bool:
        """Take nothing more, do what was taken as fast as it goes, for at most so many seconds, and give up the rest.
        False: the thread is stuck in the disk even after the grace, and is left behind.
        """
        if seconds > 0:
            self._hurry.set()
            self._worker.finish(seconds)
        self._ending.set()  # first, so that nobody who wakes up goes on
        self._hurry.set()
        return self._worker.stop(grace)

    # ---- done, on the thread ----------------------------------------------------------------------------------------

    def _write(self, job: _Write) -> None:
        written = False
        try:
            written = self._try_to_write(job)
        except _AbandonedError:
            self.abandoned += 1
        except OSError as error:
            self.failed += 1
            if self._folder.gone:
                self._lose_folder()
            elif self._pause.failed():
                self._warn(f"nothing is written to the prefix cache for a while: {error}")
        finally:
            self._end(job, written)

    def _try_to_write(self, job: _Write) -> bool:
        if not self._pause.over or not self._make_room(job.head.file_bytes, job.head.piece.key):
            self.abandoned += 1
            return False
        self._folder.write(job.head, job.parts, self._paced, self._faults)
        self._pause.succeeded()
        self.written += 1
        self.written_bytes += job.head.file_bytes
        return True

    def _lose_folder(self) -> None:
        if not self._gone:
            self._gone = True
            self._warn("the prefix cache's folder was removed: nothing is written any more until a restart")

    def _abandon(self, job: _Write) -> None:
        self.abandoned += 1
        self._end(job, written=False)

    def _end(self, job: _Write, written: bool) -> None:
        try:
            for part in job.parts:
                part.release()
        finally:
            with self._asking:
                self._queued -= job.head.file_bytes
            job.done(written)

    def _paced(self, count: int) -> None:
        self._throttle.spent(count)
        if self._ending.is_set():
            raise _AbandonedError

    def _make_room(self, size: int, key: Key | None = None) -> bool:
        """Others' files go, never our own: which of those are worth their room is not known here."""
        now = self._clock()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._others.look()
        own = self._folder.bytes + size - (self._folder.size(key) if key is not None else 0)
        self._others.shrink(self._most_bytes - own)
        return own <= self._most_bytes

    def _remove(self, names: list[str]) -> None:
        for name in names:
            try:
                self._folder.remove(name)
            except OSError:
                self.failed += 1

    def _touch(self) -> None:
        with self._asking:
            touched, self._touched = self._touched, {}
        for key, when in touched.items():
            with suppress(OSError):
                self._folder.use(block_name(key), when)
