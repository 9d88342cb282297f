"""How many BLAS threads a round should use, decided from measured rounds.

OpenBLAS's threads meet at a spinning barrier after every product, a few hundred times a round. On idle cores two of
them make a round 1.3 to 1.7 times as fast; where other programs keep the cores busy, each barrier waits for the
scheduler, and a round takes ten times as long as on one thread. A server cannot know who else is at work, so it
measures both ways and takes the faster, per size of round. Pure: the clock and the BLAS are handed in.
"""

from collections import deque
from collections.abc import Callable

FIRST_PROBE = 16
"""Rounds after which the other way is tried for one round."""
LAST_PROBE = 512
"""Probes that lose double the wait for the next one, up to this."""
SOON = 4
"""Rounds after which a way that served long is tried again once it was left: it may have been a hiccup."""
LONG = 64
"""Rounds that make a stay a long one. A way that is left sooner than that waits twice as long as the last time."""
_WEIGHT = 0.3
"""Share of the newest round in a way's running mean. Hiccups count in full: they are what all threads suffer from."""


class _Ways:
    """One size of round: the running mean of each way's seconds. Written by `ThreadChoice`."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.waited = 0
        self.wait = FIRST_PROBE
        self.stayed = 0
        """Rounds since the best way changed."""
        self.retreat = SOON

    def best(self) -> int:
        return min(self.seconds, key=lambda threads: self.seconds[threads])

    def move(self, wait: int) -> None:
        """The best way is another one now; the next probe comes after so many rounds."""
        self.wait, self.waited, self.stayed = wait, 0, 0

    def retreating(self) -> int:
        """How long the way that was just left has to wait."""
        self.retreat = SOON if self.stayed >= LONG else min(2 * self.retreat, LAST_PROBE)
        return self.retreat


class ThreadChoice:
    """Chooses between all threads and one. Written by the backend, on the engine thread.

    Rounds are compared within powers of two of their rows; the first round of each size uses all threads, the second
    one.
    """

    def __init__(self, most: int) -> None:
        """`most` is the number of threads that BLAS was given, at least 1."""
        self._choices = (most, 1) if most > 1 else (1,)
        self._sizes: dict[int, _Ways] = {}

    def choose(self, rows: int) -> int:
        """Threads for a round of so many rows."""
        ways = self._sizes.setdefault(rows.bit_length(), _Ways())
        for threads in self._choices:
            if threads not in ways.seconds:
                return threads
        best = ways.best()
        ways.waited += 1
        if ways.waited < ways.wait or len(self._choices) == 1:
            return best
        ways.waited = 0
        return self._choices[0] if best == self._choices[-1] else self._choices[-1]

    def observe(self, rows: int, threads: int, seconds: float) -> None:
        """A round of so many rows took `seconds` on so many threads."""
        ways = self._sizes.setdefault(rows.bit_length(), _Ways())
        mean = ways.seconds.get(threads)
        if mean is None:
            ways.seconds[threads] = seconds
            return
        best = ways.best()
        won = threads != best and seconds < ways.seconds[best]
        ways.seconds[threads] = seconds if won else mean + _WEIGHT * (seconds - mean)
        ways.stayed += 1
        if ways.best() != best:
            ways.move(FIRST_PROBE if won else ways.retreating())
        elif threads != best:
            ways.wait = min(2 * ways.wait, LAST_PROBE)


class _Flight:
    """A round that was launched: its rows, and once it is the one that computes, its threads and its beginning."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.threads = 0
        self.begun = 0.0


class BlasPace:
    """Sets BLAS's threads for each round and times it. Written by `MLXBackend`.

    Rounds land in the order of their launch. One launched while another still flies begins when that one lands.
    """

    def __init__(self, most: int, set_threads: Callable[[int], None], clock: Callable[[], float]) -> None:
        """`clock` tells seconds; `set_threads` acts on the products that begin after it."""
        self._choice = ThreadChoice(most)
        self._set_threads = set_threads
        self._clock = clock
        self._threads = most
        self._flights: deque[_Flight] = deque()

    def launch(self, rows: int) -> Callable[[], None]:
        """A round of so many rows is about to start; call what is returned when it has landed."""
        self._flights.append(_Flight(rows))
        if len(self._flights) == 1:
            self._begin(self._flights[0])
        return self._land

    def reset(self) -> None:
        """Forget the rounds that fly: they failed."""
        self._flights.clear()

    def _begin(self, flight: _Flight) -> None:
        flight.threads = self._choice.choose(flight.rows)
        if flight.threads != self._threads:
            self._set_threads(flight.threads)
            self._threads = flight.threads
        flight.begun = self._clock()

    def _land(self) -> None:
        landed = self._flights.popleft()
        self._choice.observe(landed.rows, landed.threads, self._clock() - landed.begun)
        if self._flights:
            self._begin(self._flights[0])
