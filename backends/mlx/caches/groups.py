"""Where each lane sits: groups by capacity class, rows within a group. Pure bookkeeping, no tensors.

A lane sits in the group of the smallest class (256 x 2^k positions) that holds it; each group is one buffer per layer,
whose rows are its lanes. A lane that outgrows its class moves alone. A group's rows double when they run out, so that
growth is amortised, and a group that empties is dropped.
"""

from collections.abc import Iterable, Mapping

import msgspec

SMALLEST_CLASS = 256
"""Positions of the smallest capacity class."""


class Seat(msgspec.Struct, frozen=True):
    """A lane's place: the group of one capacity class, and a row in it."""

    capacity: int
    row: int


class Resize(msgspec.Struct, frozen=True):
    """The group needs `rows` rows in all (0 drops it); the rows that it has keep what they hold."""

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


class LaneGroups:
    """Seats of all lanes. Written by the backend that owns the buffers, which applies every `Change` in order.

    With `together`, all lanes sit in one group whose class is the longest lane's (the general, rectangular path): there
    one lane's growth moves all.
    """

    def __init__(self, *, together: bool = False) -> None:
        self._together = together
        self._seats: dict[int, Seat] = {}
        self._rows: dict[int, int] = {}
        """Rows allocated, by capacity."""

    def seat(self, slot: int) -> Seat:
        """The seat of a lane that has been placed."""
        return self._seats[slot]

    def place(self, needs: Mapping[int, tuple[int, int]]) -> list[Change]:
        """Seat lanes so that each can hold what it needs: slot -> (positions needed, positions held so far)."""
        classes = {slot: capacity_class(needed) for slot, (needed, _) in needs.items()}
        if self._together:
            widest = max([*classes.values(), *(seat.capacity for seat in self._seats.values())])
            classes = dict.fromkeys([*self._seats, *classes], widest)
        movers = {slot: capacity for slot, capacity in classes.items() if self._outgrown(slot, capacity)}
        old = {slot: seat for slot in movers if (seat := self._seats.get(slot)) is not None}
        for slot, capacity in movers.items():
            self._seats[slot] = Seat(capacity, self._free_row(capacity))
        changes = self._resizes(set(movers.values()))
        for slot, source in old.items():
            held = needs[slot][1] if slot in needs else source.capacity
            changes.append(Move(source, self._seats[slot], held))
        return changes + self._drops()

    def leave(self, slot: int) -> list[Change]:
        """Give a lane's row back. Idempotent."""
        self._seats.pop(slot, None)
        return self._drops()

    def clear(self) -> list[Change]:
        """Give all rows back."""
        self._seats.clear()
        return self._drops()

    def _outgrown(self, slot: int, capacity: int) -> bool:
        seat = self._seats.get(slot)
        return seat is None or seat.capacity < capacity

    def _free_row(self, capacity: int) -> int:
        taken = {seat.row for seat in self._seats.values() if seat.capacity == capacity}
        return next(row for row in range(len(taken) + 1) if row not in taken)

    def _resizes(self, capacities: Iterable[int]) -> list[Change]:
        changes: list[Change] = []
        for capacity in sorted(capacities):
            needed = 1 + max(seat.row for seat in self._seats.values() if seat.capacity == capacity)
            rows = self._rows.get(capacity, 0)
            if rows < needed:
                self._rows[capacity] = max(needed, 2 * rows)
                changes.append(Resize(capacity, self._rows[capacity]))
        return changes

    def _drops(self) -> list[Change]:
        used = {seat.capacity for seat in self._seats.values()}
        empty = [capacity for capacity in self._rows if capacity not in used]
        for capacity in empty:
            del self._rows[capacity]
        return [Resize(capacity, 0) for capacity in empty]
