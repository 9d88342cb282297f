"""How far back a query of a layer sees, and where the layer keeps what it may still need.

A layer that sees everything keeps position p at place p. One that sees a window, or its own chunk of the text, keeps a
ring of `span` places: position p at place `p % span`. The span has head-room for a verify window, so that a draft, also
a rejected one, never overwrites a key that is still needed; speculation does not stop where the ring wraps. While a
lane fits into a smaller buffer than its ring, it lies there as in any other.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from backends.base import MOST_DRAFT_TOKENS

HEADROOM = MOST_DRAFT_TOKENS + 1
"""Rows of the widest window whose draft may be rejected."""

Positions = npt.NDArray[np.int32]


class Sight(msgspec.Struct, frozen=True):
    """Which positions up to its own a query sees: all of them, the newest `window` ones (its own included), or those
    since the last multiple of `chunk`. With `head`, no more than the first so many are kept at all. With `both_ways` it
    sees those behind it, too, that its window has.
    """

    window: int = 0
    chunk: int = 0
    head: int = 0
    both_ways: bool = False

    @property
    def reach(self) -> int:
        """The most positions that a query sees; 0 for no limit."""
        return self.window or self.chunk

    @property
    def span(self) -> int:
        """Places of the ring; 0 for none."""
        return self.reach + HEADROOM if self.reach else 0

    def places(self, capacity: int) -> int:
        """Places that a lane of a capacity class has."""
        return min(capacity, self.span or self.head or capacity)

    def first(self, queries: Positions) -> Positions:
        """The oldest position that each query sees."""
        if self.window:
            return np.maximum(queries - self.window + 1, 0)
        return queries // self.chunk * self.chunk if self.chunk else np.zeros_like(queries)

    def sees(self, queries: Positions, newest: Positions, keys: Positions) -> npt.NDArray[np.bool_]:
        """Whether queries `[..., width, 1]` see keys `[..., 1, length]`, none of them behind the query's `newest`; a
        key before position 0 is nobody's.
        """
        return (self.first(queries) <= keys) & (keys <= newest)


EVERYTHING = Sight()


def held(places: int, length: int, ends: Positions) -> Positions:
    """Which position stands at each of the first `length` places, once lanes are written up to `ends`; negative where
    none does. Shape of `ends` with the places as a last axis.
    """
    index = np.arange(length, dtype=np.int32)
    return index + (ends[..., None] - 1 - index) // places * places
