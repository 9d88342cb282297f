"""The server's side of vetting: a few processes that can be killed, and what they say of a constraint.

Owns those processes: they are started when first needed, killed at the limit of time, and replaced by the next
constraint. Must not know what a grammar is.
"""

import logging
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import msgspec

from backends.grammar.base import GrammarError
from backends.grammar.limits import Limits
from backends.grammar.spec import SpecKind
from backends.grammar.translate import Translated
from backends.grammar.vet import Ask, Hello, Verdict, frame, framed_length
from backends.grammar.vocabulary import Vocabulary

_log = logging.getLogger("paceline.grammar")
_HEAD_BYTES = 4
_READ_BYTES = 1 << 16
_STOPPING = "the server is stopping"
_ROOT = Path(__file__).parents[2]
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from backends.grammar.vet import serve; serve()"


class GrammarBusyError(GrammarError):
    """Nobody was free to vet the constraint in time; nothing is known against it."""


class _LostError(Exception):
    """The process is gone, or was killed at the limit."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Process:
    """One vetting process. Belongs to one thread at a time."""

    def __init__(self, hello: Hello, limits: Limits) -> None:
        """Raises _LostError."""
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
        try:
            os.set_blocking(_open(self._child.stdin).fileno(), False)
            os.set_blocking(_open(self._child.stdout).fileno(), False)
            self.exchange(hello, limits.start_seconds)
        except BaseException:
            self.kill()
            raise

    def exchange(self, message: msgspec.Struct, seconds: float) -> Verdict:
        """Send, and wait for the answer. Raises _LostError."""
        to_send = memoryview(frame(message))
        received = bytearray()
        deadline = time.monotonic() + seconds
        reads, writes = _open(self._child.stdout), _open(self._child.stdin)
        with selectors.DefaultSelector() as selector:
            selector.register(reads, selectors.EVENT_READ)
            selector.register(writes, selectors.EVENT_WRITE)
            while not _complete(received):
                left = deadline - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if not ready:
                    raise _LostError(f"it takes more than {seconds:g} s to compile")
                for key, _ in ready:
                    if key.fileobj is reads:
                        _receive(reads, received)
                        continue
                    to_send = to_send[_send(writes, to_send) :]
                    if not to_send:
                        selector.unregister(writes)
        return msgspec.json.decode(bytes(received[_HEAD_BYTES:]), type=Verdict)

    def kill(self) -> None:
        """And leave nothing of it behind. Idempotent; any thread."""
        self._child.kill()
        self._child.wait()

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
        raise _LostError("compiling it takes too much memory or breaks the compiler")
    received += part


def _send(stream: IO[bytes], message: memoryview) -> int:
    try:
        return os.write(stream.fileno(), message)
    except BrokenPipeError:
        raise _LostError("compiling it takes too much memory or breaks the compiler") from None


class Vetting:
    """Vets constraints, several at once. For any thread, never the event loop's: every call blocks."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits) -> None:
        self._hello = Hello(list(vocabulary.tokens), list(vocabulary.stop_tokens), limits.memory_bytes, limits.seconds)
        self._limits = limits
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(limits.processes):
            self._idle.put(None)
        self._lock = threading.Lock()
        self._working: set[_Process] = set()
        self._closed = False
        self.killed = 0
        """Processes that were lost, or killed at the limit."""

    def vet(self, kind: SpecKind, text: str) -> Translated:
        """What xgrammar may compile in this process. Raises GrammarError, GrammarBusyError."""
        if self._closed:
            raise GrammarError(_STOPPING)
        try:
            process = self._idle.get(timeout=self._limits.seconds)
        except queue.Empty:
            raise GrammarBusyError("too many other constraints are being compiled; try again") from None
        kept: _Process | None = None
        try:
            process = self._begin(process)
            verdict = process.exchange(Ask(kind, text), self._limits.seconds)
            kept = process
        except _LostError as lost:
            with self._lock:
                self.killed += 1
                if self._closed:
                    raise GrammarError(_STOPPING) from None
            _log.warning("a vetting process was lost: %s", lost.reason)
            raise GrammarError(lost.reason) from None
        finally:
            self._end(process, kept)
        if verdict.translated is None:
            raise GrammarError(verdict.reason)
        return verdict.translated

    def _begin(self, process: _Process | None) -> _Process:
        if process is None:
            process = _Process(self._hello, self._limits)
        with self._lock:
            if not self._closed:
                self._working.add(process)
                return process
        process.close()
        raise GrammarError(_STOPPING)

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
        """End the processes; whoever waits for one gets a GrammarError. Idempotent."""
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
