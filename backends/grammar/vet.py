"""The process that tries a constraint before the server does: it may be killed, the server may not.

Reads framed messages from its standard input and answers on its standard output, one at a time: first a `Hello`, then
any number of `Ask`s. It ends when its input does. Owns its own limits of memory and processor time.
"""

import contextlib
import math
import os
import re
import resource
import struct
import sys
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import numpy as np

from backends.grammar.base import GrammarError
from backends.grammar.spec import SpecKind
from backends.grammar.translate import Translated, translate
from backends.grammar.xgrammar_core import CoreCompiler

Message = TypeVar("Message", bound=msgspec.Struct)
_LENGTH = struct.Struct(">I")
_MAX_GRAMMAR_BYTES = 4 * 1024 * 1024
_TRIAL_TOKENS = 12
"""How far a text is begun: far enough for the first masks of an object's keys and values."""
_PLACE_IN_SOURCE = re.compile(r"^\[[\d:]*\] \S+: ")
"""What xgrammar puts before its messages."""


class Hello(msgspec.Struct, frozen=True):
    """What is to be known before the first constraint."""

    tokens: list[bytes]
    stop_tokens: list[int]
    memory_bytes: int
    seconds: float
    """Of processor time, per constraint."""


class Ask(msgspec.Struct, frozen=True):
    """One constraint to vet."""

    kind: SpecKind
    text: str


class Verdict(msgspec.Struct, frozen=True):
    """What became of it. To a `Hello` the answer is an empty one."""

    translated: Translated | None = None
    reason: str = ""
    """Why it is refused."""


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
    hello = _receive(read, Hello)
    if hello is None:
        return
    os.nice(5)
    compiler = CoreCompiler(hello.tokens, hello.stop_tokens)
    _limit_memory(hello.memory_bytes)
    _send(written, Verdict())
    while (ask := _receive(read, Ask)) is not None:
        _limit_processor(hello.seconds)
        _send(written, _vetted(ask, compiler, len(hello.tokens)))


def _receive(stream: BinaryIO, kind: type[Message]) -> Message | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return msgspec.json.decode(stream.read(framed_length(head)), type=kind)


def _send(stream: BinaryIO, verdict: Verdict) -> None:
    stream.write(frame(verdict))
    stream.flush()


def _limit_memory(above: int) -> None:
    pages = Path("/proc/self/statm")
    if pages.exists():
        now = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + above, resource.RLIM_INFINITY))


def _limit_processor(seconds: float) -> None:
    """For one more constraint; the kernel ends the process, should the server not be there to do it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    until = math.ceil(usage.ru_utime + usage.ru_stime + seconds) + 1
    with contextlib.suppress(ValueError):  # a lower limit was set from outside; it holds
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))


def _vetted(ask: Ask, compiler: CoreCompiler, vocabulary: int) -> Verdict:
    try:
        translated = translate(ask.kind, ask.text)
        if len(translated.text) > _MAX_GRAMMAR_BYTES:
            return Verdict(reason="it is too large a grammar once it is written out")
        _try(translated, compiler, vocabulary)
    except GrammarError as error:
        return Verdict(reason=str(error))
    except RuntimeError as error:  # how xgrammar refuses
        return Verdict(reason=_PLACE_IN_SOURCE.sub("", str(error)).strip())
    except (MemoryError, RecursionError):
        return Verdict(reason="it takes too much memory")
    return Verdict(translated)


def _try(translated: Translated, compiler: CoreCompiler, vocabulary: int) -> None:
    """Compile, and begin a text: whoever is slow or breaks is slow or breaks here."""
    grammar = compiler.structural_tag(translated.text) if translated.tag else compiler.grammar(translated.text)
    matcher = grammar.matcher()
    words = np.zeros(math.ceil(vocabulary / 32), dtype=np.int32)
    for step in range(_TRIAL_TOKENS):
        matcher.fill_next_token_bitmask(words, 0, False)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocabulary])
        if not allowed.size:
            raise GrammarError("no text satisfies it" if step == 0 else "its texts cannot be completed")
        matcher.accept_token(int(allowed[len(allowed) // 2]), False)
        if matcher.is_terminated():
            return
