"""The process that tries a constraint before the server does: it may be killed, the server may not.

Reads framed messages from its standard input and answers on its standard output, one at a time: first a `Hello`, then
any number of `Ping`s and `Ask`s. It ends when its input does. Owns its own limits of memory and processor time.
"""

import math
import os
import re
import resource
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from backends.grammar.base import GrammarError
from backends.grammar.spec import SpecKind
from backends.grammar.translate import Translated, translate
from backends.grammar.xgrammar_core import CoreCompiler, CoreMatcher

_LENGTH = struct.Struct(">I")
_MAX_GRAMMAR_BYTES = 4 * 1024 * 1024
_TRIAL_TOKENS = 12
"""How far a text is begun: far enough for the first masks of an object's keys and values."""
_WALK_TOKENS = 48
"""How many tokens are then drawn, for a grammar that is slow only later."""
_WALK_SECONDS = 0.25
"""Of processor time, after which no more of them are drawn: who is slow by then is slow by a little at every token."""
_PLACE_IN_SOURCE = re.compile(
    r"^\[[\d:]*\] \S+: (Check failed: .*? is false: ?)?(Invalid structural tag error: )?", re.DOTALL
)
"""What xgrammar puts before its messages: where in its source, and which check of its own."""


class Hello(msgspec.Struct, frozen=True):
    """What is to be known before the first constraint."""

    tokens: list[bytes]
    stop_tokens: list[int]
    memory_bytes: int
    seconds: float
    """Of processor time, per constraint."""
    mask_seconds: float
    """Of processor time, per token of a trial."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Is anybody there? The answer is an empty `Verdict`."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """One constraint to vet."""

    kind: SpecKind
    text: str


class Verdict(msgspec.Struct, frozen=True):
    """What became of it. To a `Hello` and a `Ping` the answer is an empty one."""

    translated: Translated | None = None
    reason: str = ""
    """Why it is refused."""
    processor_seconds: float = 0.0
    """That the process has used since it was started."""


def frame(message: msgspec.Struct) -> bytes:
    """A message with its length before it."""
    body = msgspec.json.encode(message)
    return _LENGTH.pack(len(body)) + body


def framed_length(head: bytes) -> int:
    """How long the message behind a frame's first four bytes is."""
    return int(_LENGTH.unpack(head)[0])


def serve() -> None:
    """Until the input ends."""
    read, written = sys.stdin.buffer, sys.stdout.buffer
    first = _receive(read)
    if first is None:
        return
    hello = msgspec.json.decode(first, type=Hello)
    os.nice(5)
    compiler = CoreCompiler(hello.tokens, hello.stop_tokens)
    _limit_memory(hello.memory_bytes)
    trial = Trial(compiler, len(hello.tokens), hello.mask_seconds)
    _send(written, Verdict())
    while (body := _receive(read)) is not None:
        asked = msgspec.json.decode(body, type=Ask | Ping)
        verdict = Verdict()
        if isinstance(asked, Ask):
            _limit_processor(hello.seconds)
            verdict = _vetted(asked, trial)
        _send(written, msgspec.structs.replace(verdict, processor_seconds=_processor_seconds()))


def _receive(stream: BinaryIO) -> bytes | None:
    head = stream.read(_LENGTH.size)
    return stream.read(framed_length(head)) if len(head) == _LENGTH.size else None


def _send(stream: BinaryIO, verdict: Verdict) -> None:
    stream.write(frame(verdict))
    stream.flush()


def _limit_memory(above: int) -> None:
    pages = Path("/proc/self/statm")
    if pages.exists():
        _limit(resource.RLIMIT_AS, int(pages.read_text().split()[0]) * resource.getpagesize() + above)


def _limit_processor(seconds: float) -> None:
    """For one more constraint; the kernel ends the process, should the server not be there to do it."""
    _limit(resource.RLIMIT_CPU, math.ceil(_processor_seconds() + seconds) + 1)


def _limit(kind: int, wanted: int) -> None:
    """A lower limit that was set from outside holds."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _vetted(ask: Ask, trial: "Trial") -> Verdict:
    try:
        translated = translate(ask.kind, ask.text)
        if len(translated.text) > _MAX_GRAMMAR_BYTES:
            return Verdict(reason="it is too large a grammar once it is written out")
        trial.run(translated)
    except GrammarError as error:
        return Verdict(reason=str(error))
    except RuntimeError as error:  # how xgrammar refuses
        return Verdict(reason=_readable(str(error), ask.kind))
    except (MemoryError, RecursionError):
        return Verdict(reason="it takes too much memory")
    return Verdict(translated)


def _readable(message: str, kind: SpecKind) -> str:
    """What xgrammar has to say to the author of a constraint, if it has."""
    if "bad_alloc" in message:
        return "it takes too much memory"
    said = _PLACE_IN_SOURCE.sub("", message, count=1).strip()
    name = "structural tag" if kind == SpecKind.STRUCTURAL_TAG else "grammar"
    if not said or "Check failed" in said or "/cpp/" in said:
        return f"it is not a valid {name}"
    return f"it is not a valid {name}: {said}"


class Trial:
    """Compiles grammars and begins texts that they allow: whoever is slow or breaks is slow or breaks here."""

    def __init__(self, compiler: CoreCompiler, vocabulary: int, mask_seconds: float) -> None:
        self._compiler = compiler
        self._vocabulary = vocabulary
        self._mask_seconds = mask_seconds

    def run(self, translated: Translated) -> None:
        """Raises GrammarError, and RuntimeError for what xgrammar refuses."""
        tag = translated.tag
        grammar = self._compiler.structural_tag(translated.text) if tag else self._compiler.grammar(translated.text)
        self._walk(grammar.matcher(), _TRIAL_TOKENS, lambda count: count // 2)
        drawn = np.random.default_rng(0)
        until = time.process_time() + _WALK_SECONDS
        left = _WALK_TOKENS
        while left > 0 and time.process_time() < until:
            left -= self._walk(grammar.matcher(), left, lambda count: int(drawn.integers(count)), until)

    def _walk(
        self,
        matcher: CoreMatcher,
        tokens: int,
        choose: Callable[[int], int],
        until: float = math.inf,
    ) -> int:
        """Go on by so many tokens, to the end of the text, or to a time of the processor; how many there were. `choose`
        picks one of so many.
        """
        words = np.zeros(math.ceil(self._vocabulary / 32), dtype=np.int32)
        for step in range(tokens):
            began = time.process_time()
            if began >= until:
                return step
            matcher.fill_next_token_bitmask(words, 0, False)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: self._vocabulary])
            if not allowed.size:
                raise GrammarError("no text satisfies it" if step == 0 else "its texts cannot be completed")
            matcher.accept_token(int(allowed[choose(allowed.size)]), False)
            if time.process_time() - began > self._mask_seconds:
                raise GrammarError(f"one token of it takes more than {self._mask_seconds:g} s")
            if matcher.is_terminated():
                return step + 1
        return tokens
