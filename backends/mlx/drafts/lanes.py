"""The lanes of a drafter that reads the target: how far each has been read, and what there is to read next.

A lane begins where features of it are first seen, which need not be its first token: what came out of the prefix cache,
or was too long ago, the drafter never saw. Positions are counted from there. Whatever it makes of the rest is a guess
like any other.
"""

from collections.abc import Sequence
from itertools import count

import mlx.core as mx
import msgspec
import numpy as np

from backends.mlx.adjust import LaneTables
from backends.mlx.features import FeaturePiece, Features
from backends.mlx.layout import Seated
from backends.mlx.verify import PackedForward
from scheduler.draft import DraftAsk


class ReadLane:
    """What was made of the target's features at positions `[first, held)` is cached. Written by `ReadLanes`."""

    def __init__(self, slot: int, first: int) -> None:
        self.slot = slot
        self.first = first
        self.held = first


class Unread(msgspec.Struct, frozen=True):
    """What is new of a lane: the features of positions `[start, end)`, and from its first position on counted `[start -
    first, end - first)`.
    """

    lane: ReadLane
    start: int
    pieces: tuple[FeaturePiece, ...]

    @property
    def place(self) -> int:
        """Where in the lane's caches they come."""
        return self.start - self.lane.first


class ReadLanes:
    """Written by one drafter, whose forward and tables have the lanes' slots."""

    def __init__(self, features: Features, forward: PackedForward, tables: LaneTables) -> None:
        """What was read is forgotten in `features`."""
        self._features = features
        self._forward = forward
        self._tables = tables
        self._lanes: dict[str, ReadLane] = {}
        self._slots = count()

    def read(self, ask: DraftAsk) -> Unread | None:
        """The features that came since the last time, up to the last token but one, which count as held from now on;
        None if they are not all known, or none came.
        """
        last = len(ask.tokens) - 1
        noted = self._features.of(ask.request_id)
        if noted is None or not noted.start < noted.end == last or ask.budget < 1:
            return None
        lane = self._lanes.get(ask.request_id)
        if lane is None or not noted.start <= lane.held < last:
            lane = self._begin(ask.request_id, lane, noted.start)
        noted.drop(lane.held)
        unread = Unread(lane, lane.held, tuple(noted.pieces))
        lane.held = last
        noted.drop(last)
        return unread

    def forget(self, request_id: str) -> None:
        """Give the lane's seat back. Idempotent."""
        self._features.forget(request_id)
        self._leave(self._lanes.pop(request_id, None))

    def reset(self) -> None:
        """All of them begin anew where they stand."""
        self._lanes.clear()
        self._forward.reset()
        self._tables.reset()

    def _begin(self, request_id: str, old: ReadLane | None, first: int) -> ReadLane:
        """A lane that starts at a position."""
        self._leave(old)
        lane = self._lanes[request_id] = ReadLane(next(self._slots), first)
        return lane

    def _leave(self, lane: ReadLane | None) -> None:
        if lane is not None:
            self._forward.release(lane.slot)
            self._tables.release(lane.slot)


def in_rows(coming: mx.array, seated: Sequence[Seated]) -> mx.array:
    """Rows that lie window by window, as the windows were planned, in the order of a forward's packed rows."""
    firsts = np.cumsum([0, *(entry.window.rows for entry in sorted(seated, key=lambda entry: entry.index))])
    rows = np.concatenate([firsts[entry.index] + np.arange(entry.window.rows) for entry in seated])
    ordered = np.array_equal(rows, np.arange(rows.size))
    return coming if ordered else coming[mx.array(rows.astype(np.int32))]
