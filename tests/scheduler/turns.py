"""Whose turn it is, naively: lists of those that wait, and a count of what every owner had. The oracle of the queue."""

from collections import Counter
from typing import Generic, Protocol, TypeVar

from scheduler.request import Request


class Waiter(Protocol):
    """Whatever waits for a lane."""

    request: Request
    turn: int


One = TypeVar("One", bound=Waiter)


class Turns(Generic[One]):
    """Those that were served before go first, as they came; then the first of the owner that had least."""

    def __init__(self) -> None:
        self.had: dict[str, int] = {}
        """In the order in which owners came, until nobody is there."""
        self.open: Counter[str] = Counter()
        self.new: list[One] = []
        self.resuming: list[One] = []

    @property
    def waiting(self) -> list[One]:
        return [*self.resuming, *self.new]

    def come(self, one: One) -> None:
        owner = one.request.owner
        if not self.open[owner]:
            least = min((self.had[other] for other in +self.open), default=0)
            self.had[owner] = max(self.had.get(owner, 0), least)
        self.open[owner] += 1
        self.new.append(one)

    def next(self) -> One | None:
        if self.resuming:
            return min(self.resuming, key=lambda one: one.turn)
        waiting = [owner for owner in self.had if any(one.request.owner == owner for one in self.new)]
        if not waiting:
            return None
        owner = min(waiting, key=lambda owner: (self.had[owner], self._served(owner)))
        return min((one for one in self.new if one.request.owner == owner), key=lambda one: one.request.priority)

    def _served(self, owner: str) -> int:
        return self.open[owner] - sum(one.request.owner == owner for one in self.waiting)

    def take(self, one: One) -> None:
        (self.resuming if one in self.resuming else self.new).remove(one)

    def give_way(self, one: One) -> None:
        self.resuming.append(one)

    def charge(self, owner: str, computed: int, generated: int) -> None:
        self.had[owner] += computed + 2 * generated

    def close(self, owner: str) -> None:
        self.open[owner] -= 1
        if not +self.open:
            self.had.clear()
