"""What rounds of some sizes cost, timed once at load, so that the planner's first choices are not blind."""

import time
from collections.abc import Iterator, Sequence

from backends.base import Backend
from scheduler.cost import RoundShape
from scheduler.request import Sampling
from scheduler.round import Window, shape_of

_LANES = 8
_MOST_SECONDS = 2.0
"""When it has taken so long, larger rounds are left for service to time."""
_GREEDY = Sampling(temperature=0.0)


def timed_rounds(backend: Backend) -> tuple[tuple[RoundShape, float], ...]:
    """Shapes and seconds of plain and of wide rounds, smallest first; each is run twice and timed the second time.

    Call while no lane is served. Leaves the backend empty.
    """
    begun = time.perf_counter()
    timed: list[tuple[RoundShape, float]] = []
    for windows in _rounds():
        _run(backend, windows)
        start = time.perf_counter()
        _run(backend, windows)
        timed.append((shape_of(windows), time.perf_counter() - start))
        if time.perf_counter() - begun > _MOST_SECONDS:
            break
    for slot in range(_LANES):
        backend.release(slot)
    return tuple(timed)


def _run(backend: Backend, windows: Sequence[Window]) -> None:
    """One round, whose drafts are all right."""
    backend.verify(windows).read()
    backend.keep({window.slot: window.end for window in windows})


def _rounds() -> Iterator[Sequence[Window]]:
    """So many lanes, so many drafts each."""
    for lanes, drafts in ((1, 0), (2, 0), (1, 1), (1, 3), (4, 0), (1, 7), (8, 0), (4, 3), (8, 3), (8, 7)):
        yield [_window(slot, drafts) for slot in range(lanes)]


def _window(slot: int, drafts: int) -> Window:
    return Window(slot, f"warm-up {slot}", 0, (1,), True, _GREEDY, drafts + 2, drafts, (1,) * drafts)
