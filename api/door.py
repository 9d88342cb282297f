"""How many requests may be open at once, and whose: what comes beyond is refused at once, not kept waiting.

A request counts from the moment that its body is parsed until its reply has ended, once for each of its choices. Who of
those that wait is served next is the scheduler's; the door sees to it that every key gets as far as the queue.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from api.errors import ApiError, invalid
from api.metrics import Refusal

_LATELY = 60.0
"""Seconds back that the rate of ends is taken from; also the longest that a client is told to wait."""
_REMEMBERED = 1024


class Door:
    """Places for choices. Lives on the event loop.

    Where several API keys are in use, half of the places are set aside, an equal share for each of them; the other half
    anybody may take. So one key can take half of the places and its share, and never those of the shares of the others:
    each gets in, whatever the others do.
    """

    def __init__(
        self,
        places: int,
        per_key: int,
        keys: int,
        refused: Callable[[Refusal], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`per_key` choices at most may be of one of the `keys`; 0 for no such limit. `refused` counts refusals."""
        self._places = places
        self._per_key = per_key
        self._keys = max(1, keys)
        self._share = (places // (2 * keys) or int(keys <= places)) if keys > 1 else 0
        self._refused = refused
        self._clock = clock
        self._open: dict[str, int] = {}
        """Choices by owner; none that has none."""
        self._total = 0
        self._busy_since = 0.0
        """When the first of the choices came since there were none."""
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)

    def __len__(self) -> int:
        """How many choices are open."""
        return self._total

    @property
    def largest(self) -> int:
        """How many choices a request may have if it is to be let in at any time."""
        most = self._places - (self._keys - 1) * self._share
        return min(most, self._per_key) if self._per_key else most

    def check(self, owner: str, choices: int = 1) -> None:
        """Raises a 429 that says when to come back, if there is no room for this many more choices."""
        held = self._open.get(owner, 0)
        if self._per_key and held + choices > self._per_key:
            self._refused(Refusal.KEY_LIMIT)
            message = f"this API key has {held} requests open; at most {self._per_key} are served at once"
            raise ApiError(429, message, code="key_limit", retry_after=self._wait(held + choices - self._per_key))
        lacking = self._total + choices + self._set_aside(owner) - self._places
        if lacking > 0:
            self._refused(Refusal.QUEUE_FULL)
            message = f"{self._total} requests are open and no more may wait; try again later"
            raise ApiError(429, message, code="queue_full", retry_after=self._wait(lacking))

    @contextmanager
    def let_in(self, owner: str, choices: int, field: str) -> Iterator[None]:
        """Places for so many choices, to the end of the `with` block. Raises a 400 that names `field` where there would
        never be room, and what `check` raises.
        """
        if choices > self.largest:
            message = f"{field}: {choices} choices are more than the {self.largest} that are served at once"
            raise invalid(message, field)
        self.check(owner, choices)
        if not self._total:
            self._busy_since = self._clock()
        self._count(owner, choices)
        try:
            yield
        finally:
            self._count(owner, -choices)
            self._ends.extend([self._clock()] * choices)

    def _count(self, owner: str, choices: int) -> None:
        self._total += choices
        self._open[owner] = self._open.get(owner, 0) + choices
        if not self._open[owner]:
            del self._open[owner]

    def _set_aside(self, owner: str) -> int:
        """Places that are the other keys' alone: what they have not taken of their shares."""
        others = sum([min(held, self._share) for key, held in self._open.items() if key != owner])
        return (self._keys - 1) * self._share - others

    def _wait(self, choices: int) -> int:
        """Seconds until so many choices will have ended, if they go on ending as they did lately."""
        now = self._clock()
        begin = max(self._busy_since, now - _LATELY)
        ends = sum([ended >= begin for ended in self._ends])
        if ends == _REMEMBERED:
            begin = self._ends[0]
        # Where none has ended yet it takes at least as long as it has taken so far.
        return min(max(1, math.ceil((now - begin) * choices / max(1, ends))), int(_LATELY))
