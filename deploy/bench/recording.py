"""What was served once, as a file: each lane's tokens and each round's shape and time, from which `replay` plays other
ways of drafting without a model.

JSON lines. Owns the format, and what a round of a shape that was not recorded would have cost. Pure.
"""

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from scheduler.cost import RoundShape


class LaneRecord(msgspec.Struct, frozen=True, tag="lane"):
    """One request, and what the target answered."""

    name: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    expected: tuple[int, ...] = ()
    """What its client expected the answer to be like."""
    sources: tuple[str, ...] | None = None
    """Which sources it may be drafted from; None for all."""


class RoundRecord(msgspec.Struct, frozen=True, tag="round"):
    """One round that was run, with its time in seconds."""

    shape: RoundShape
    seconds: float
    served: bool = True
    """Whether it served lanes; else it was run to learn what it costs."""


class Recording(msgspec.Struct, frozen=True):
    """`lanes` in the order in which they were asked for."""

    clients: int
    """How many requests were under way at a time."""
    lanes: tuple[LaneRecord, ...]
    rounds: tuple[RoundRecord, ...]


class _Head(msgspec.Struct, frozen=True, tag="recording"):
    clients: int


class RecordingError(Exception):
    """A file is no recording."""


_LEAST = 1e-6
"""No round is free, whatever its attention is thought to cost; in seconds."""
_LINE = msgspec.json.Decoder(_Head | LaneRecord | RoundRecord)


def write_recording(path: Path, recording: Recording) -> None:
    """One line for each lane and each round, behind a head."""
    lines = [_Head(recording.clients), *recording.lanes, *recording.rounds]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def read_recording(path: Path) -> Recording:
    """Raises RecordingError, naming the line, for what is no recording, and for one without lanes or rounds."""
    head: _Head | None = None
    lanes: list[LaneRecord] = []
    rounds: list[RoundRecord] = []
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = _LINE.decode(text)
        except msgspec.DecodeError as error:
            raise RecordingError(f"{path.name}, line {number}: {error}") from error
        if isinstance(line, _Head):
            head = line
        elif isinstance(line, LaneRecord):
            lanes.append(line)
        else:
            rounds.append(line)
    if head is None or not lanes or not rounds:
        raise RecordingError(f"{path.name} wants a head, lanes and rounds")
    return Recording(head.clients, tuple(lanes), tuple(rounds))


class RecordedCosts:
    """What rounds cost, by those that were recorded: per kind (plain, wide) the median of each number of rows, made to
    rise with them, straight lines between neighbours, and one price for every attended key.

    Not the planner's own table: what is simulated must not be what is judged. Where rounds of a kind were run to learn
    what they cost, those are believed, as they were run one right after the other; served ones for larger rounds only.
    """

    def __init__(self, rounds: Iterable[RoundRecord]) -> None:
        """Raises RecordingError if there are none."""
        recorded = tuple(rounds)
        if not recorded:
            raise RecordingError("no round was recorded, so none can be priced")
        swept = {kind: _largest(recorded, wide=kind) for kind in (False, True)}
        believed = [each for each in recorded if not each.served or each.shape.rows > swept[each.shape.wide]]
        groups = _by_size(believed)
        told = [each for each in recorded if not each.served] or recorded
        self.attention = _attention(list(_by_size(told).values()))
        """Seconds per attended key."""
        self.points: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
        """By kind: rows, and seconds of such a round without its attention; fewest rows first."""
        for kind, points in self.points.items():
            sizes = sorted(rows for wide, rows in groups if wide is kind)
            medians = [self._alone(groups[kind, rows]) for rows in sizes]
            points.extend(zip(sizes, _rising(medians, [len(groups[kind, rows]) for rows in sizes]), strict=True))

    def _alone(self, members: Sequence[RoundRecord]) -> float:
        """The median without attention."""
        return max(_LEAST, statistics.median(each.seconds - self.attention * each.shape.attention for each in members))

    def seconds(self, shape: RoundShape) -> float:
        """The time of a round of this shape. A kind that was never recorded costs what the other one does."""
        points = self.points[shape.wide] or self.points[not shape.wide]
        return _between(points, shape.rows) + self.attention * shape.attention


def _largest(rounds: Iterable[RoundRecord], *, wide: bool) -> int:
    """The most rows of the rounds of this kind that served nobody; 0 if there are none."""
    return max((each.shape.rows for each in rounds if each.shape.wide is wide and not each.served), default=0)


def _by_size(rounds: Iterable[RoundRecord]) -> dict[tuple[bool, int], list[RoundRecord]]:
    groups: dict[tuple[bool, int], list[RoundRecord]] = {}
    for record in rounds:
        groups.setdefault((record.shape.wide, record.shape.rows), []).append(record)
    return groups


def _attention(groups: Sequence[Sequence[RoundRecord]]) -> float:
    """How time grows with attention among rounds of equal rows: least squares, pooled over all groups."""
    together = spread = 0.0
    for members in groups:
        keys = statistics.median(record.shape.attention for record in members)
        seconds = statistics.median(record.seconds for record in members)
        for record in members:
            more = record.shape.attention - keys
            # A hiccup of the machine would outweigh all others by its square.
            together += more * (min(record.seconds, 2 * seconds) - seconds)
            spread += more * more
    return max(0.0, together / spread) if spread else 0.0


def _rising(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The values that never fall and lie nearest to the given ones: neighbours that do fall are one mean (isotonic
    regression, by pooling adjacent violators). Only noise makes more rows cheaper.
    """
    pools: list[tuple[float, int, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, heavy, count = pools.pop()
            both = heavy + pool[1]
            pool = ((mean * heavy + pool[0] * pool[1]) / both, both, count + pool[2])
        pools.append(pool)
    return [mean for mean, _, count in pools for _ in range(count)]


def _between(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Along the line through the two nearest points; before the first one as that, behind the last one at its slope
    from the first.
    """
    right = bisect_left(points, rows, key=lambda point: point[0])
    if right == 0:
        return points[0][1]
    if right < len(points):
        (few, low), (many, high) = points[right - 1], points[right]
        return low + (high - low) * (rows - few) / (many - few)
    (few, low), (many, high) = points[0], points[-1]
    slope = (high - low) / (many - few) if many > few else high / many
    return high + max(0.0, slope) * (rows - many)
