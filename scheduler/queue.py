"""Who waits for a lane, and who goes next. Pure.

Lanes that had to give way go first. Of the others it is the turn of the owner that has had least (Sheng et al. 2024,
"Fairness in Serving Large Language Models", the virtual token counter): a token of a prompt that was computed for it
counts once, one that was generated twice. One who comes anew counts as having had as much as the least of those who
are there: turns cannot be saved up. Of two that have had the same, the one with fewer lanes is next. Among an owner's
own requests lower priority numbers go first, then who came first.
"""

from heapq import heappop, heappush
from itertools import count

from scheduler.lane import Lane

_GENERATED = 2
"""What a generated token counts, in tokens of a prompt."""


class _Owner:
    """One owner's account. Written by `FairQueue`."""

    def __init__(self) -> None:
        self.had = 0
        self.open = 0
        """Requests that wait or are served."""
        self.waits = 0
        """Those of them that wait."""
        self.waiting: list[tuple[int, int, Lane]] = []
        """A heap by priority and arrival; and some that wait no more."""


class FairQueue:
    """Written by `Scheduler`: `push`, then `next` and `remove`, and `close` at a request's end wherever it was."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._lanes: dict[str, Lane] = {}
        """All that wait."""
        self._resuming: dict[str, Lane] = {}
        """Those of them that were served before."""
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._lanes)

    def push(self, lane: Lane) -> None:
        """A request comes."""
        owner = self._owners.setdefault(lane.request.owner, _Owner())
        if not owner.open:
            others = [other.had for other in self._owners.values() if other.open]
            owner.had = max(owner.had, min(others, default=0))
        owner.open += 1
        heappush(owner.waiting, (lane.request.priority, next(self._arrivals), lane))
        self._wait(lane)

    def put_back(self, lane: Lane) -> None:
        """A lane had to give way: it goes on before all that were not served yet."""
        self._resuming[lane.request.request_id] = lane
        self._wait(lane)

    def next(self) -> Lane | None:
        """Whose turn it is."""
        if self._resuming:
            return min(self._resuming.values(), key=lambda lane: lane.turn)
        waiting = [owner for owner in self._owners.values() if self._first(owner) is not None]
        return self._first(min(waiting, key=lambda owner: (owner.had, owner.open - owner.waits))) if waiting else None

    def remove(self, request_id: str) -> Lane | None:
        """It waits no more; None if it did not."""
        self._resuming.pop(request_id, None)
        lane = self._lanes.pop(request_id, None)
        if lane is not None:
            self._owners[lane.request.owner].waits -= 1
        return lane

    def charge(self, owner: str, computed: int, generated: int) -> None:
        """An owner has had so many tokens."""
        self._owners[owner].had += computed + _GENERATED * generated

    def close(self, owner: str) -> None:
        """One of an owner's requests has ended."""
        self._owners[owner].open -= 1
        if not any(each.open for each in self._owners.values()):
            self._owners.clear()

    def _wait(self, lane: Lane) -> None:
        self._lanes[lane.request.request_id] = lane
        self._owners[lane.request.owner].waits += 1

    def _first(self, owner: _Owner) -> Lane | None:
        while owner.waiting:
            lane = owner.waiting[0][2]
            if self._lanes.get(lane.request.request_id) is lane and lane.request.request_id not in self._resuming:
                return lane
            heappop(owner.waiting)
        return None
