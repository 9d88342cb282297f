"""Prefix caches for tests of the engine: a disk in memory, which answers when it likes, and what a cache is made of."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from backends.base import Blocks
from backends.spill import Content, Found, SpillStats
from engine.messages import Message
from engine.prefix import PrefixCache
from scheduler.pieces import Key, Piece

HEADER = 5


class MemorySpill:
    """What `backends.spill.Spill` does, without a disk: every answer comes some turns later. Files outlive it."""

    def __init__(self, files: dict[Key, tuple[Piece, bytes, bytes]], seed: int = 0, *, fails: float = 0.0) -> None:
        """`fails`: how often a write or a read goes wrong."""
        self.files = files
        self._random = random.Random(seed)
        self._fails = fails
        self._queue: deque[Callable[[], None]] = deque()
        self.reads = 0
        self.removed: list[Key] = []

    @property
    def found(self) -> list[Found]:
        """In the order in which they were written, which is also parents first."""
        return [Found(piece, HEADER + len(data)) for piece, _, data in self.files.values()]

    @property
    def stats(self) -> SpillStats:
        size = sum(HEADER + len(data) for _, _, data in self.files.values())
        numbers = dict.fromkeys(SpillStats.__struct_fields__, 0) | {"bytes": size, "read": self.reads}
        return SpillStats(**{**numbers, "writable": True})

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    def turn(self) -> None:
        """Some of what waits is done."""
        for _ in range(self._random.randint(0, 3)):
            if self._queue:
                self._queue.popleft()()

    def size(self, piece: Piece, meta: bytes, nbytes: int) -> int:
        return HEADER + nbytes

    def write(self, piece: Piece, meta: bytes, parts: Sequence[memoryview], done: Callable[[bool], None]) -> bool:
        if len(self._queue) > 6:
            return False
        data = b"".join(parts)

        def finish() -> None:
            good = self._random.random() >= self._fails
            if good:
                self.files[piece.key] = (piece, meta, data)
            done(good)

        self._queue.append(finish)
        return True

    def read(self, key: Key, done: Callable[[Content | None], None]) -> None:
        self.reads += 1

        def finish() -> None:
            found = self.files.get(key)
            if found is None or self._random.random() < self._fails:
                done(None)
            else:
                done(Content(found[0], found[1], memoryview(found[2])))

        self._queue.append(finish)

    def remove(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.removed.append(key)
            self._queue.append(lambda key=key: self.files.pop(key, None) and None)

    def touch(self, keys: Iterable[Key]) -> None:
        """Files have no times here."""

    def close(self, seconds: float) -> None:
        while self._queue:
            self._queue.popleft()()


@dataclass
class Shelf:
    """What a prefix cache is made of."""

    ram: int = 1 << 20
    ssd: int = 0
    disk: MemorySpill | None = None
    block: int = 4
    cuttable: bool = True

    def open(self, blocks: Blocks, send: Callable[[Message], None]) -> PrefixCache:
        return PrefixCache(blocks, self.ram, self.disk, self.ssd, send, block=self.block)
