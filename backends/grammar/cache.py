"""Compiled grammars, kept for the next request with the same constraint, within a bound of bytes.

xgrammar's own cache does not keep grammars that grow, and a grammar whose masks are computed on demand does grow. So
sizes are asked for anew: of one entry when a matcher is made of it, of all when one is looked up or added.
"""

import threading
from collections import OrderedDict
from typing import Protocol

import msgspec


class Sized(Protocol):
    """Something that is kept."""

    @property
    def memory_bytes(self) -> int:
        """What it holds now."""
        ...


class CacheStats(msgspec.Struct, frozen=True):
    """Counters since the start, and what is kept now."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int


class GrammarCache:
    """Least recently used goes first. For any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, ...], Sized] = OrderedDict()
        self._sizes: dict[tuple[str, ...], int] = {}
        self._hits = self._misses = self._evictions = 0

    def get(self, key: tuple[str, ...], *, again: bool = False) -> Sized | None:
        """What is kept under a key. With `again`, whoever misses it looks once more, and is counted then."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                self._misses += not again
                return None
            self._hits += 1
            self._kept.move_to_end(key)
            self._trim()
            return found

    def put(self, key: tuple[str, ...], grammar: Sized) -> None:
        """Keep something; whatever does not fit goes, this included if it is too large by itself."""
        with self._lock:
            self._kept[key] = grammar
            self._kept.move_to_end(key)
            self._trim()

    def grown(self, key: tuple[str, ...]) -> None:
        """Something that may be kept has been used and is larger than before."""
        with self._lock:
            if key in self._kept:
                self._trim(key)

    def _trim(self, measured: tuple[str, ...] | None = None) -> None:
        for key in self._kept if measured is None else (measured,):
            self._sizes[key] = self._kept[key].memory_bytes
        while self._kept and sum(self._sizes.values()) > self._limit:
            key, _ = self._kept.popitem(last=False)
            del self._sizes[key]
            self._evictions += 1

    def stats(self) -> CacheStats:
        """As of now, sizes included."""
        with self._lock:
            self._trim()
            return CacheStats(self._hits, self._misses, self._evictions, len(self._kept), sum(self._sizes.values()))
