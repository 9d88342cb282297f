"""Counters of the engine, kept by the scheduler and published as whole, immutable snapshots.

Times, HTTP and per-request latencies are not its business.
"""

from bisect import bisect_left

import msgspec

LANE_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Upper bounds of the lanes-per-round histogram."""
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Upper bounds of the rows-per-round histogram."""


DRAFT_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of the drafted-rows-per-round histogram."""


class HistogramCount(msgspec.Struct, frozen=True):
    """A histogram: `counts[i]` observations fell into bucket i (not cumulated; the last one is above all bounds)."""

    bounds: tuple[int, ...]
    counts: tuple[int, ...]
    total: int


class DraftStats(msgspec.Struct, frozen=True):
    """What one draft source did so far: drafts proposed, and tokens drafted and accepted by position from 0."""

    source: str
    drafts: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


class Stats(msgspec.Struct, frozen=True):
    """One consistent snapshot, taken between two rounds."""

    running: int
    """Lanes that are being served."""
    waiting: int
    """Requests in the queue."""
    rounds: dict[str, int]
    """Rounds by kind: `prefill`, `decode`, `mixed`."""
    lanes_per_round: HistogramCount
    rows_per_round: HistogramCount
    draft_rows_per_round: HistogramCount
    drafts: tuple[DraftStats, ...]
    preemptions: int = 0
    """How often a lane had to give way to others."""
    failed_forwards: int = 0


class Histogram:
    """Counts of small integers by bucket. Written by the scheduler alone."""

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0

    def observe(self, value: int) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramCount:
        """The counts as they stand."""
        return HistogramCount(self._bounds, tuple(self._counts), self._total)


class DraftCounter:
    """Drafts of one source, by position. Written by the scheduler alone."""

    def __init__(self) -> None:
        self.drafts = 0
        self.drafted: list[int] = []
        self.accepted: list[int] = []

    def observe(self, drafted: int, accepted: int) -> None:
        """Count one draft of `drafted` tokens, the first `accepted` of which the target agreed with."""
        self.drafts += 1
        missing = drafted - len(self.drafted)
        if missing > 0:
            self.drafted.extend([0] * missing)
            self.accepted.extend([0] * missing)
        for position in range(drafted):
            self.drafted[position] += 1
        for position in range(accepted):
            self.accepted[position] += 1
