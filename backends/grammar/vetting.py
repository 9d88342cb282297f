"""The server's side of vetting: a few processes that can be killed, and what they say of a constraint.

Owns those processes: they are started when first needed, killed at the limit of time, and replaced by the next
constraint. Whether a process that was lost is the constraint's fault is decided here: it is if that happened twice, or
if it was at work all the while. Must not know what a grammar is.
"""

import logging
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import msgspec

from backends.grammar.base import GrammarError, GrammarUnavailableError
from backends.grammar.limits import Limits
from backends.grammar.spec import SpecKind
from backends.grammar.translate import Translated
from backends.grammar.vet import Ask, Hello, Ping, Verdict, frame, framed_length
from backends.grammar.vocabulary import Vocabulary

_log = logging.getLogger("paceline.grammar")
_HEAD_BYTES = 4
_READ_BYTES = 1 << 16
_PING_SECONDS = 1.0
"""For an idle process to say that it is there; a thousand times what it takes."""
_ATTEMPTS = 2
_BLAMED_SHARE = 0.25
"""Of the limit: a constraint at which less than this was worked is not to blame for the time that went by."""
_STOPPING = "the server is stopping"
_ROOT = Path(__file__).parents[2]
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from backends.grammar.vet import serve; serve()"


class GrammarBusyError(GrammarUnavailableError):
    """Nobody was free to vet the constraint in time."""


class _LostError(Exception):
    """The process is gone."""


class _LateError(Exception):
    """The process did not answer in time; it is of no use any more."""


class _Process:
    """One vetting process. Belongs to one thread at a time, but for its end."""

    def __init__(self, hello: Hello, limits: Limits) -> None:
        """Raises OSError, _LostError, _LateError."""
        self._child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            close_fds=True,
            start_new_session=True,
        )
        self._reaping = threading.Lock()
        self._used_before = self._used = 0.0
        """Seconds of processor time: when it last answered, and when it ended."""
        try:
            os.set_blocking(_open(self._child.stdin).fileno(), False)
            os.set_blocking(_open(self._child.stdout).fileno(), False)
            self.exchange(hello, time.monotonic() + limits.start_seconds)
        except BaseException:
            self.close()
            raise

    def exchange(self, message: msgspec.Struct, deadline: float) -> Verdict:
        """Send, and wait for the answer until a time (`time.monotonic`). Raises _LostError, _LateError."""
        to_send = memoryview(frame(message))
        received = bytearray()
        reads, writes = _open(self._child.stdout), _open(self._child.stdin)
        with selectors.DefaultSelector() as selector:
            selector.register(reads, selectors.EVENT_READ)
            selector.register(writes, selectors.EVENT_WRITE)
            while not _complete(received):
                left = deadline - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if not ready:
                    raise _LateError
                for key, _ in ready:
                    if key.fileobj is reads:
                        _receive(reads, received)
                        continue
                    to_send = to_send[_send(writes, to_send) :]
                    if not to_send:
                        selector.unregister(writes)
        verdict = msgspec.json.decode(bytes(received[_HEAD_BYTES:]), type=Verdict)
        self._used_before = verdict.processor_seconds
        return verdict

    def kill(self) -> None:
        """And leave nothing of it behind. Idempotent; any thread."""
        with self._reaping:
            if self._child.returncode is None:
                os.kill(self._child.pid, signal.SIGKILL)
                _, status, usage = os.wait4(self._child.pid, 0)
                self._child.returncode = os.waitstatus_to_exitcode(status)
                self._used = usage.ru_utime + usage.ru_stime

    def kill_at_work(self) -> float:
        """Kill it; how many seconds of processor time it had used since it last answered."""
        self.kill()
        return self._used - self._used_before

    def close(self) -> None:
        """Kill it, and close its pipes; nobody is waiting for it any more."""
        self.kill()
        for stream in (self._child.stdin, self._child.stdout):
            _open(stream).close()


def _open(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _complete(received: bytearray) -> bool:
    return len(received) >= _HEAD_BYTES and len(received) >= _HEAD_BYTES + framed_length(bytes(received[:_HEAD_BYTES]))


def _receive(stream: IO[bytes], received: bytearray) -> None:
    part = os.read(stream.fileno(), _READ_BYTES)
    if not part:
        raise _LostError
    received += part


def _send(stream: IO[bytes], message: memoryview) -> int:
    try:
        return os.write(stream.fileno(), message)
    except BrokenPipeError:
        raise _LostError from None


class Vetting:
    """Vets constraints, several at once. For any thread, never the event loop's: every call blocks."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits) -> None:
        self._hello = Hello(
            list(vocabulary.tokens),
            list(vocabulary.stop_tokens),
            limits.memory_bytes,
            limits.seconds,
            limits.mask_seconds,
        )
        self._limits = limits
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(limits.processes):
            self._idle.put(None)
        self._lock = threading.Lock()
        self._working: set[_Process] = set()
        self._closed = False
        self.killed = 0
        """Processes that were lost, or killed at the limit."""

    def vet(self, kind: SpecKind, text: str, deadline: float) -> Translated:
        """What xgrammar may compile in this process. Raises GrammarError, GrammarUnavailableError.

        `deadline` (`time.monotonic`) is when to give up; what it takes to start a process comes on top.
        """
        ask = Ask(kind, text)
        for _ in range(_ATTEMPTS):
            kept = self._free_place(deadline)
            began = time.monotonic()
            process = self._ready(kept)
            deadline += time.monotonic() - began
            verdict = self._answer(process, ask, deadline)
            if verdict is not None:
                break
        else:
            raise GrammarError("compiling it takes too much memory or breaks the compiler")
        if verdict.translated is None:
            raise GrammarError(verdict.reason)
        return verdict.translated

    def _free_place(self, deadline: float) -> _Process | None:
        """An idle process, or None for the right to start one."""
        try:
            return self._idle.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise GrammarBusyError("too many other constraints are being compiled; try again") from None

    def _ready(self, process: _Process | None) -> _Process:
        """The process if it still answers, else a new one, which is then at work."""
        ready: _Process | None = None
        try:
            ready = self._awake(process) or _Process(self._hello, self._limits)
            with self._lock:
                if not self._closed:
                    self._working.add(ready)
                    return ready
        except (OSError, _LostError, _LateError) as error:
            _log.error("a vetting process cannot be started: %s", error or type(error).__name__)
            self._end(None, None)
            raise GrammarUnavailableError("the server cannot compile constraints now; try again later") from error
        self._end(ready, None)
        raise GrammarUnavailableError(_STOPPING)

    def _awake(self, process: _Process | None) -> _Process | None:
        """A process that was idle, unless it was killed or stopped meanwhile."""
        if process is None:
            return None
        try:
            process.exchange(Ping(), time.monotonic() + _PING_SECONDS)
        except (_LostError, _LateError):
            self._lost("while it was idle")
            process.close()
            return None
        return process

    def _answer(self, process: _Process, ask: Ask, deadline: float) -> Verdict | None:
        """What it says; None if it is lost, which need not be the constraint's fault."""
        kept: _Process | None = None
        try:
            verdict = process.exchange(ask, deadline)
            kept = process
            return verdict
        except _LostError:
            self._lost("at work")
        except _LateError:
            used = process.kill_at_work()
            self._lost(f"after {used:.1f} s of processor time")
            if used < _BLAMED_SHARE * self._limits.seconds:
                raise GrammarBusyError("the server is too busy to compile it in time; try again") from None
            raise GrammarError(f"it takes more than {used:.2g} s to compile") from None
        finally:
            self._end(process, kept)
        return None

    def _lost(self, when: str) -> None:
        with self._lock:
            self.killed += 1
            if self._closed:
                raise GrammarUnavailableError(_STOPPING) from None
        _log.warning("a vetting process was lost %s", when)

    def _end(self, process: _Process | None, kept: _Process | None) -> None:
        """Give the place back; a process that did not answer goes, and so does everything once we are closed."""
        with self._lock:
            if process is not None:
                self._working.discard(process)
            if self._closed:
                kept = None
            self._idle.put(kept)
        if process is not None and kept is None:
            process.close()

    def close(self) -> None:
        """End the processes; whoever waits for one gets a GrammarUnavailableError. Idempotent."""
        idle = []
        with self._lock:
            self._closed = True
            for process in self._working:
                process.kill()
            while not self._idle.empty():
                idle.append(self._idle.get_nowait())
            for _ in idle:
                self._idle.put(None)
        for kept in idle:
            if kept is not None:
                kept.close()
