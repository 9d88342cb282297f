"""Where each lane sits: groups by capacity class, rows within a group, and the bytes that they take. Pure bookkeeping.

A lane sits in the group of the smallest class (256 x 2^k positions) that holds it; each group is one buffer per layer,
whose rows are its lanes. A lane that outgrows its class moves alone. A group's rows double when they run out, so that
growth is amortised, and a group that empties is dropped. Where memory is limited, groups grow by no more than fits, and
spare rows are given back: a lane that sits behind a free row then moves into it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

SMALLEST_CLASS = 256
"""Positions of the smallest capacity class."""


class Seat(msgspec.Struct, frozen=True):
    """A lane's place: the group of one capacity class, and a row in it."""

    capacity: int
    row: int


class Resize(msgspec.Struct, frozen=True):
    """The group has `rows` rows from now on (0 drops it); those of them that it had keep what they hold."""

    capacity: int
    rows: int


class Move(msgspec.Struct, frozen=True):
    """Copy positions `[0, length)` of one lane from a seat to another."""

    source: Seat
    target: Seat
    length: int


Change = Resize | Move


def capacity_class(length: int) -> int:
    """The smallest class that holds `length` positions."""
    capacity = SMALLEST_CLASS
    while capacity < length:
        capacity *= 2
    return capacity


def longest_lane(context_length: int, fits: Callable[[int], bool]) -> int | None:
    """How long a lane of up to `context_length` positions can be: all of them, or as many as the largest class holds
    that fits; None if not even the smallest does.
    """
    length = context_length
    while not fits(length):
        if length <= SMALLEST_CLASS:
            return None
        length = capacity_class(length) // 2
    return length


def _positions(capacity: int) -> int:
    """A row's bytes, where nobody asks for them."""
    return capacity


class LaneGroups:
    """Seats of all lanes. Written by the backend that owns the buffers, which applies every `Change` in order.

    With `together`, all lanes sit in one group whose class is the longest lane's (the general, rectangular path): there
    one lane's growth moves all.
    """

    def __init__(self, *, together: bool = False, row_bytes: Callable[[int], int] = _positions) -> None:
        """`row_bytes` tells what a row of a class takes over all layers; asked once a class."""
        self.lane_bytes = 0
        """What a lane takes beside its row; to be set before any is seated."""
        self._together = together
        self._row_bytes = row_bytes
        self._known_bytes: dict[int, int] = {}
        self._most: int | None = None
        self._seats: dict[int, Seat] = {}
        self._rows: dict[int, int] = {}
        """Rows allocated, by capacity."""

    # ---- what they take ---------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Bytes that the groups take, spare rows included."""
        return self._total(self._rows) + self.lane_bytes * len(self._seats)

    def needed(self, lengths: Mapping[int, int]) -> int:
        """Bytes that they would take without spare rows, if these slots held so many positions each and nobody else sat
        anywhere. A lane that sits in a larger class than it needs stays there.
        """
        capacities = [self._capacity(slot, length) for slot, length in lengths.items()]
        if self._together and capacities:
            capacities = [max(capacities)] * len(capacities)
        return sum(map(self.bytes_of_row, capacities)) + self.lane_bytes * len(capacities)

    def needed_by(self, lengths: Iterable[int]) -> int:
        """The same for lanes whose seats, if they have any, are no larger than they need, whichever those are; but with
        `together`, where nobody has less than the present class.
        """
        capacities = [capacity_class(length) for length in lengths]
        if self._together and capacities:
            capacities = [max([*capacities, *self._rows])] * len(capacities)
        return sum(map(self.bytes_of_row, capacities)) + self.lane_bytes * len(capacities)

    def needed_with(self, needs: Mapping[int, tuple[int, int]]) -> int:
        """What `place` would take at the least."""
        lengths = {slot: seat.capacity for slot, seat in self._seats.items()}
        return self.needed(lengths | {slot: length for slot, (length, _) in needs.items()})

    def bytes_of_row(self, capacity: int) -> int:
        """What a row of a class takes."""
        known = self._known_bytes.get(capacity)
        if known is None:
            known = self._known_bytes[capacity] = self._row_bytes(capacity)
        return known

    def limit(self, most: int) -> list[Change]:
        """Take no spare rows beyond so many bytes from now on, and give back those that are beyond it."""
        self._most = most
        return self._give_back()

    # ---- who sits where ---------------------------------------------------------------------------------------------

    def seat(self, slot: int) -> Seat:
        """The seat of a lane that has been placed."""
        return self._seats[slot]

    def seated(self, needs: Mapping[int, tuple[int, int]]) -> bool:
        """Whether everybody has a seat already that holds what they need (as of `place`)."""
        return all(self._holds(slot, length) for slot, (length, _) in needs.items())

    def place(self, needs: Mapping[int, tuple[int, int]]) -> list[Change]:
        """Seat lanes so that each can hold what it needs: slot -> (positions needed, positions held so far).

        Takes more than the limit only where that cannot be helped.
        """
        if self.seated(needs):
            return []
        before = dict(self._seats)
        movers = self._movers(needs)
        for slot in movers:
            self._seats.pop(slot, None)
        for slot, capacity in movers.items():
            self._seats[slot] = Seat(capacity, self._free_row(capacity))
        lanes = self._lanes()
        rows = self._tightened(self._grown(lanes), lanes)
        return self._settle(before, rows, {slot: held for slot, (_, held) in needs.items()})

    def leave(self, slot: int) -> list[Change]:
        """Give a lane's row back. Idempotent."""
        self._seats.pop(slot, None)
        return [*self._drops(), *self._give_back()]

    def clear(self) -> list[Change]:
        """Give all rows back."""
        self._seats.clear()
        return self._drops()

    def _holds(self, slot: int, length: int) -> bool:
        seat = self._seats.get(slot)
        return seat is not None and seat.capacity >= length

    def _capacity(self, slot: int, length: int) -> int:
        seat = self._seats.get(slot)
        return seat.capacity if seat is not None and seat.capacity >= length else capacity_class(length)

    def _movers(self, needs: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        """Who needs another seat, and of which class."""
        classes = {slot: capacity_class(length) for slot, (length, _) in needs.items()}
        if self._together:
            widest = max([*classes.values(), *(seat.capacity for seat in self._seats.values())])
            classes = dict.fromkeys([*self._seats, *classes], widest)
        return {slot: capacity for slot, capacity in classes.items() if not self._holds(slot, capacity)}

    def _free_row(self, capacity: int) -> int:
        taken = {seat.row for seat in self._seats.values() if seat.capacity == capacity}
        return next(row for row in range(len(taken) + 1) if row not in taken)

    # ---- how many rows the groups have ------------------------------------------------------------------------------

    def _lanes(self) -> Counter[int]:
        """How many lanes each group has."""
        return Counter(seat.capacity for seat in self._seats.values())

    def _total(self, rows: Mapping[int, int]) -> int:
        return sum(count * self.bytes_of_row(capacity) for capacity, count in rows.items())

    def _excess(self, rows: Mapping[int, int]) -> int:
        """By how many bytes the groups would go beyond the limit with so many rows."""
        if self._most is None:
            return -1
        return self._total(rows) + self.lane_bytes * len(self._seats) - self._most

    def _grown(self, lanes: Mapping[int, int]) -> dict[int, int]:
        """Rows for all lanes: twice as many as there were where they run out, or as many of those as fit."""
        rows = {capacity: max(count, self._rows.get(capacity, 0)) for capacity, count in lanes.items()}
        for capacity in sorted(rows):
            had = self._rows.get(capacity, 0)
            if had < lanes[capacity] < 2 * had:
                excess = max(0, self._excess(rows | {capacity: 2 * had}))
                beyond = -(-excess // max(1, self.bytes_of_row(capacity)))
                rows[capacity] = max(lanes[capacity], 2 * had - beyond)
        return rows

    def _tightened(self, rows: dict[int, int], lanes: Mapping[int, int]) -> dict[int, int]:
        """Rows within the limit, if need be without spare ones; where most is spare, it is given back first."""
        spare = {capacity: (count - lanes[capacity]) * self.bytes_of_row(capacity) for capacity, count in rows.items()}
        for capacity in sorted(spare, key=lambda capacity: -spare[capacity]):
            excess = self._excess(rows)
            if excess <= 0 or not spare[capacity]:
                break
            given = -(-excess // self.bytes_of_row(capacity))
            rows[capacity] = max(lanes[capacity], rows[capacity] - given)
        return rows

    def _give_back(self) -> list[Change]:
        """Be within the limit again, as far as spare rows allow."""
        if self._excess(self._rows) <= 0:
            return []
        return self._settle(dict(self._seats), self._tightened(dict(self._rows), self._lanes()), {})

    def _settle(self, before: Mapping[int, Seat], rows: dict[int, int], held: Mapping[int, int]) -> list[Change]:
        """Have so many rows; what is to be done, for lanes that sat as in `before` and held so much (else all)."""
        had, self._rows = self._rows, rows | {capacity: 0 for capacity in self._rows if capacity not in rows}
        self._close_ranks()
        moves = [
            Move(seat, self._seats[slot], held.get(slot, seat.capacity))
            for slot, seat in before.items()
            if self._seats[slot] != seat
        ]
        # A row is read before another lane is written into it: lanes leave for larger groups, those of the largest
        # first, and only then do others take their rows.
        moves.sort(key=lambda move: (-move.source.capacity, -move.target.capacity))
        resizes = [Resize(capacity, rows[capacity]) for capacity in sorted(rows)]
        grown = [resize for resize in resizes if resize.rows > had.get(resize.capacity, 0)]
        shrunk = [resize for resize in resizes if resize.rows < had.get(resize.capacity, 0)]
        return [*grown, *moves, *shrunk, *self._drops()]

    def _close_ranks(self) -> None:
        """Seat lanes that sit behind their group's last row in free rows before it."""
        for slot, seat in self._seats.items():
            if seat.row >= self._rows[seat.capacity]:
                self._seats[slot] = Seat(seat.capacity, self._free_row(seat.capacity))

    def _drops(self) -> list[Change]:
        used = {seat.capacity for seat in self._seats.values()}
        empty = [capacity for capacity in self._rows if capacity not in used]
        for capacity in empty:
            del self._rows[capacity]
        return [Resize(capacity, 0) for capacity in empty]
