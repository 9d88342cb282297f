"""Memory as plain as it can be: lanes in small capacity classes, blocks of which some cannot go, pieces of tokens."""

from collections.abc import Callable, Iterable, Mapping

from scheduler.pieces import Key
from scheduler.prefix import PrefixIndex
from scheduler.request import Request

SMALLEST = 4
"""Positions of the smallest class; each further one has twice as many."""


def class_of(length: int) -> int:
    """How many positions a lane of this length takes."""
    capacity = SMALLEST
    while capacity < length:
        capacity *= 2
    return capacity


class PlainLanes:
    """A byte a position. Buffers hold what they are told to, spare rows included, within their limit."""

    def __init__(self) -> None:
        self.most = 0
        self.held = 0
        self.changed: Callable[[], None] = lambda: None

    def needed(self, lengths: Mapping[int, int]) -> int:
        return sum(class_of(length) for length in lengths.values())

    def limit(self, most: int) -> None:
        self.most = most
        self.held = min(self.held, most)
        self.changed()


class PlainBlocks:
    """Blocks by number; those that are pinned stay whatever the limit is."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.most = 0
        self.changed: Callable[[], None] = lambda: None

    @property
    def used(self) -> int:
        return sum(self.sizes.values())

    def unyielding(self) -> int:
        return sum(size for block, size in self.sizes.items() if block in self.pinned)

    def limit(self, most: int) -> int:
        self.most = most
        for block in sorted(self.sizes):
            if self.used > most and block not in self.pinned:
                del self.sizes[block]
        self.changed()
        return self.used


class PlainShelf:
    """Pieces in RAM, and no SSD."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.tokens: dict[Key, list[int]] = {}

    def fetch(self, key: Key) -> bool:
        return False

    def expect(self, request: Request) -> None:
        """There is nobody else."""

    def limit(self, most: int) -> None:
        gone, forgotten = self.index.limit(most)
        self.drop([*gone, *forgotten])

    def forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.drop(self.index.forget(key))

    def drop(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.tokens.pop(key, None)
