"""Whether lanes fit into memory: what they and the prefix cache may take together, and who gives way. Pure.

What weights and a forward's own needs leave is one pool. Lanes come first in it: where they need more, prefix blocks
go. At any moment the blocks' share and the lanes' share make up the pool, so that neither can outgrow it between two
rounds.
"""

from collections.abc import Mapping
from typing import Protocol

_AHEAD = 1.25
"""What lanes' share is for what they need, at least, while blocks have the rest: so that buffers need not be copied for
every lane that comes.
"""


class LaneMemory(Protocol):
    """What the lanes' caches take, by slot. Implemented by backends, whose cache classes know it."""

    @property
    def held(self) -> int:
        """Bytes that the lanes' buffers take now, spare rows included."""
        ...

    def needed(self, lengths: Mapping[int, int]) -> int:
        """Bytes that they would take if these slots held so many positions each and nobody else sat anywhere, with no
        spare rows that could be given back or done without.
        """
        ...

    def limit(self, most: int) -> None:
        """What the buffers may take from now on: spare rows that would exceed it are given back, or not taken."""
        ...


class Yielding(Protocol):
    """Whoever gives way: the prefix cache's blocks in RAM. Implemented by `Reuse`."""

    @property
    def used(self) -> int:
        """Bytes that it takes now."""
        ...

    def unyielding(self) -> int:
        """Bytes of it that are in use, and cannot go now."""
        ...

    def limit(self, most: int) -> int:
        """What it may take from now on; what is too much goes, as far as it can. Returns what it takes then."""
        ...


class Room(Protocol):
    """Where lanes must fit. Implemented by `Pool`, and by `Boundless` where nothing is counted."""

    def admits(self, lengths: Mapping[int, int]) -> bool:
        """Whether lanes of these lengths, by slot, would fit if everything gave way that can."""
        ...

    def secure(self, lengths: Mapping[int, int]) -> bool:
        """Make room for lanes of these lengths; False if there is not enough."""
        ...

    def covers(self, lengths: Mapping[int, int]) -> bool:
        """Whether lanes of these lengths fit into the room that was made."""
        ...


class Boundless:
    """Memory without a budget."""

    def admits(self, lengths: Mapping[int, int]) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def secure(self, lengths: Mapping[int, int]) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def covers(self, lengths: Mapping[int, int]) -> bool:  # noqa: ARG002
        """Always."""
        return True


class Pool:
    """So many bytes for lanes and prefix blocks together. Written by `Scheduler`."""

    def __init__(self, size: int, lanes: LaneMemory, blocks: Yielding | None = None, blocks_most: int = 0) -> None:
        """`blocks_most`: what the blocks may take where there is plenty."""
        self._size = size
        self._lanes = lanes
        self._blocks = blocks
        self._blocks_most = min(blocks_most, size) if blocks is not None else 0
        self._blocks_share = self._limit_blocks(self._blocks_most)
        lanes.limit(size - self._blocks_share)

    def admits(self, lengths: Mapping[int, int]) -> bool:
        """Looks only: nothing goes for a lane that does not come."""
        left = self._size - self._lanes.needed(lengths)
        if self._blocks is None or left >= self._blocks.used:
            return left >= 0
        return left >= self._blocks.unyielding()

    def secure(self, lengths: Mapping[int, int]) -> bool:
        """Where lanes need more than their share, blocks go; where they hold much less, blocks may come again."""
        needed = self._lanes.needed(lengths)
        if needed > self._size - self._blocks_share:
            if not self.admits(lengths):
                return False  # some lane must go, and not every block besides
            self._blocks_share = self._limit_blocks(max(0, self._size - int(_AHEAD * needed)))
            self._lanes.limit(self._size - self._blocks_share)
        else:
            share = min(self._blocks_most, self._size - int(_AHEAD * max(needed, self._lanes.held)))
            if share > self._blocks_share:
                self._lanes.limit(self._size - share)
                self._blocks_share = self._limit_blocks(share)
        return needed <= self._size - self._blocks_share

    def covers(self, lengths: Mapping[int, int]) -> bool:
        """Within the lanes' share."""
        return self._lanes.needed(lengths) <= self._size - self._blocks_share

    def _limit_blocks(self, share: int) -> int:
        """What the blocks' share is then: what is in use cannot go at once."""
        return max(share, self._blocks.limit(share)) if self._blocks is not None else 0
