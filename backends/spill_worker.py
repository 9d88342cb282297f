"""A thread for what may take long on a disk: jobs in order, at a pace, and not again too soon where they failed."""

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

_log = logging.getLogger("paceline.spill")
_MOST_PAUSE = 3600.0
_BEHIND = 10
"""The niceness of a thread that stands back."""


class Job(msgspec.Struct, frozen=True):
    """Either is called, once."""

    run: Callable[[], None]
    drop: Callable[[], None]
    """It will not be run."""


class Worker:
    """One daemon thread, and what it is still to do. For any thread but its own."""

    def __init__(self, name: str, *, behind: bool = False) -> None:
        """`behind`: others of the process go first, where threads can be told apart (Linux)."""
        self._behind = behind and sys.platform == "linux"
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._running = 0
        self._ending = False
        """No more jobs are taken."""
        self._dropping = False
        """Those that were are not run any more."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, run: Callable[[], None], drop: Callable[[], None] = lambda: None) -> bool:
        """Take a job. False: too late, and neither will be called."""
        with self._changed:
            if not self._ending:
                self._jobs.append(Job(run, drop))
                self._changed.notify_all()
            return not self._ending

    def flush(self, seconds: float) -> bool:
        """Wait until all is done, for at most so long; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._running, seconds)

    def finish(self, seconds: float) -> None:
        """Take no more jobs, and wait for the end of those that were taken for at most so long."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(seconds)

    def stop(self, seconds: float) -> bool:
        """Drop what is left, and wait for the running job for at most so long. False: it is stuck. Then the thread is
        left behind, and the rest is dropped on this one.
        """
        with self._changed:
            self._ending = self._dropping = True
            self._changed.notify_all()
        self._thread.join(seconds)
        while self._work_one():
            pass
        return not self._thread.is_alive()

    def _work(self) -> None:
        if self._behind:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BEHIND)
        while self._work_one():
            pass

    def _work_one(self) -> bool:
        """In a frame of its own, so that nothing of a job is held while there is no other."""
        job = self._next()
        if job is not None:
            _call(job.drop if self._dropping else job.run)
            with self._changed:
                self._running -= 1
                self._changed.notify_all()
        return job is not None

    def _next(self) -> Job | None:
        """Wait for a job; None if all ends and there is no other."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._ending)
            if not self._jobs:
                return None
            self._running += 1
            return self._jobs.popleft()


def _call(ask: Callable[[], None]) -> None:
    try:
        ask()
    except Exception:  # the named boundary of the spill's threads: they go on with the next job
        _log.exception("a job of the SSD tier failed")


class Throttle:
    """Spreads bytes over time. Written by whoever writes them."""

    def __init__(self, bytes_per_second: float, clock: Callable[[], float], sleep: Callable[[float], object]) -> None:
        """`bytes_per_second`: 0 for no limit. `clock` in seconds; `sleep` may end early."""
        self._rate = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._due = 0.0

    def spent(self, count: int) -> None:
        """So many bytes were written: wait until the next may be. Time in which there were none is not made up for."""
        if self._rate > 0:
            now = self._clock()
            self._due = max(self._due, now) + count / self._rate
            self._sleep(self._due - now)


class Pause:
    """Nothing is tried for a while after a failure, for twice as long after the next. Written by whoever tries."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._first = self._next = seconds
        self._clock = clock
        self._until: float | None = None

    @property
    def over(self) -> bool:
        """Whether it may be tried, for the first time or again."""
        return self._until is None or self._clock() >= self._until

    def failed(self) -> bool:
        """Begin one. True: nothing had failed since the last success."""
        first = self._until is None
        self._until = self._clock() + self._next
        self._next = min(2 * self._next, _MOST_PAUSE)
        return first

    def succeeded(self) -> None:
        """It works again."""
        self._until = None
        self._next = self._first
