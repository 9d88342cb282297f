"""What the taps noted of each lane's newest tokens, cut with the lane, until a drafter reads it.

A lane's features are of one run of positions without a gap. Where something of a lane is cached that was never seen
here (it came out of the prefix cache, or from a sibling), the run begins anew behind it.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import mlx.core as mx
import msgspec

from backends.mlx.verify import TappedRows
from scheduler.round import Window


class FeaturePiece(msgspec.Struct, frozen=True):
    """Rows `[first, first + count)` of what a round's taps noted."""

    hidden: mx.array
    first: int
    count: int


class LaneFeatures:
    """The features of positions `[start, end)` of one lane. Written by `Features`."""

    def __init__(self, start: int, slot: int) -> None:
        self.start = start
        self.end = start
        self.slot = slot
        """Where the target's own lane was when the newest of them were noted."""
        self.pieces: deque[FeaturePiece] = deque()

    def add(self, piece: FeaturePiece, slot: int) -> None:
        """Go on with the rows of a round."""
        self.pieces.append(piece)
        self.end += piece.count
        self.slot = slot

    def drop(self, start: int) -> None:
        """Forget all before a position."""
        while self.pieces and self.start < start:
            oldest = self.pieces.popleft()
            count = min(oldest.count, start - self.start)
            self.start += count
            if count < oldest.count:
                self.pieces.appendleft(FeaturePiece(oldest.hidden, oldest.first + count, oldest.count - count))


class Features:
    """By request, what its lane's taps noted. Written by the backend; `drop` and `forget` are the reader's."""

    def __init__(self, most: int | None) -> None:
        """Of a lane that nobody reads, the newest `most` positions are kept; None for all."""
        self._most = most
        self._lanes: dict[str, LaneFeatures] = {}
        self._begun: deque[list[tuple[Window, FeaturePiece]]] = deque()
        """The rounds that are under way, by window."""

    def begin(self, windows: Sequence[Window], tapped: TappedRows) -> None:
        """A round's forward was built. Once for each `keep`, in order."""
        firsts = tapped.firsts
        self._begun.append(
            [(window, FeaturePiece(tapped.hidden, firsts[index], window.rows)) for index, window in enumerate(windows)]
        )

    def keep(self, kept: Mapping[int, int]) -> None:
        """Its slots were cut to so much; those that are not named keep all."""
        for window, piece in self._begun.popleft():
            end = min(window.end, kept.get(window.slot, window.end))
            if end > window.start:
                self._add(window, FeaturePiece(piece.hidden, piece.first, end - window.start))

    def _add(self, window: Window, piece: FeaturePiece) -> None:
        lane = self._lanes.get(window.request_id)
        if lane is None or lane.end != window.start:
            lane = self._lanes[window.request_id] = LaneFeatures(window.start, window.slot)
        lane.add(piece, window.slot)
        if self._most is not None:
            lane.drop(lane.end - self._most)

    def of(self, request_id: str) -> LaneFeatures | None:
        """A lane's features, if there are any."""
        return self._lanes.get(request_id)

    def forget(self, request_id: str) -> None:
        """The lane left, which may still be in a round that is under way. Idempotent."""
        self._lanes.pop(request_id, None)
        for begun in self._begun:
            begun[:] = [(window, piece) for window, piece in begun if window.request_id != request_id]

    def reset(self) -> None:
        """All caches are lost, and what was begun will never be kept."""
        self._lanes.clear()
        self._begun.clear()


def gathered(pieces: Iterable[FeaturePiece]) -> mx.array:
    """The rows of some pieces, one after another; at least one. `[rows, width]`."""
    pieces = list(pieces)
    arrays: dict[int, tuple[mx.array, int]] = {}
    before = 0
    for piece in pieces:
        if id(piece.hidden) not in arrays:
            arrays[id(piece.hidden)] = piece.hidden, before
            before += piece.hidden.shape[0]
    rows: list[int] = []
    for piece in pieces:
        first = arrays[id(piece.hidden)][1] + piece.first
        rows.extend(range(first, first + piece.count))
    joined = [hidden for hidden, _ in arrays.values()]
    hidden = joined[0] if len(joined) == 1 else mx.concatenate(joined)
    return hidden[mx.array(rows)]


def normalised(hidden: mx.array, taps: int) -> mx.array:
    """What each of some taps noted, divided by its root mean square over the row; float32 `[rows, width]`."""
    parts = hidden.astype(mx.float32).reshape(hidden.shape[0], taps, -1)
    return mx.fast.rms_norm(parts, None, 1e-6).reshape(hidden.shape)
