"""How windows lie in one padded `[lanes, width]` forward: the general path.

For models whose attention does not pass through the seam, and the reference that the packed path is measured and
tested against. Every window is right-padded to the widest; padding writes behind its lane's end, where the next window
overwrites it, and its outputs are not read.
"""

from collections.abc import Sequence

import mlx.core as mx
import msgspec
import numpy as np

from backends.groups import LaneGroups, Seat
from backends.mlx.caches.buffers import ScatterWrite
from scheduler.round import Window


class PaddedLayout(msgspec.Struct, frozen=True):
    """Everything a layer needs to know of one padded forward of `lanes` windows, each padded to `width`.

    `order` gives the windows in the order of the rectangle's lanes; `starts` is int32 `[lanes]`; `mask` boolean
    `[lanes, 1, width, length]`. The lanes' buffer rows are `[row, row + lanes)`, or `rows` (int32) where they are not
    neighbours.
    """

    order: tuple[int, ...]
    capacity: int
    row: int
    rows: mx.array | None
    lanes: int
    width: int
    length: int
    starts: mx.array
    mask: mx.array
    write: ScatterWrite


def padded_layout(windows: Sequence[Window], groups: LaneGroups) -> PaddedLayout:
    """Lay out windows whose lanes sit in one group (`LaneGroups(together=True)`) with room for the padding."""
    seats = [groups.seat(window.slot) for window in windows]
    order = tuple(sorted(range(len(windows)), key=lambda index: seats[index].row))
    rows = np.array([seats[index].row for index in order], dtype=np.int32)
    starts = np.array([windows[index].start for index in order], dtype=np.int32)
    width = max(window.rows for window in windows)
    positions = starts[:, None] + np.arange(width, dtype=np.int32)
    length = int(positions.max()) + 1
    neighbours = bool(rows[-1] - rows[0] + 1 == len(rows))
    return PaddedLayout(
        order=order,
        capacity=_capacity(seats),
        row=int(rows[0]),
        rows=None if neighbours else mx.array(rows),
        lanes=len(rows),
        width=width,
        length=length,
        starts=mx.array(starts),
        mask=mx.arange(length) <= mx.array(positions[:, None, :, None]),
        write=_write(_capacity(seats), rows, positions),
    )


def _capacity(seats: Sequence[Seat]) -> int:
    (capacity,) = {seat.capacity for seat in seats}
    return capacity


def _write(capacity: int, rows: np.ndarray, positions: np.ndarray) -> ScatterWrite:
    lanes, width = positions.shape
    return ScatterWrite(
        capacity, 0, lanes * width, mx.array(np.repeat(rows, width)[:, None]), mx.array(positions.reshape(-1, 1))
    )
