"""What rounds of some sizes cost, found out once at load: their time, so that the planner's first choices are not
blind, and what they take in memory while they run.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import msgspec

from backends.base import Backend
from backends.mlx.memory import DeviceMemory, Scratch, most_held
from scheduler.cost import RoundShape
from scheduler.draft import DraftAsk
from scheduler.request import Sampling
from scheduler.round import Window, shape_of

_LANES = 8
_MOST_SECONDS = 2.0
"""When it has taken so long, larger rounds are left for service to time."""
_CHUNKS = (32, 96, 256)
"""Rows of prefill that are timed too, in another `_MOST_SECONDS`."""
_GREEDY = Sampling(temperature=0.0)
_WARM = Sampling(temperature=1.0, top_p=0.9, min_p=0.01, logprobs=1)
"""What takes most to draw from."""
_MEASURED_ROWS = 512
"""Larger rounds are taken to need as much more as they have more rows."""


class LargestRound(msgspec.Struct, frozen=True):
    """How large a round may become: its rows, and how many lanes draft how much each."""

    rows: int
    lanes: int
    drafts: int


def timed_rounds(backend: Backend) -> tuple[tuple[RoundShape, float], ...]:
    """Shapes and seconds of plain and of wide rounds and of chunks, smallest first; each is run twice and timed the
    second time.

    Call while no lane is served. Leaves the backend empty.
    """
    longest = backend.info.context_length - 1
    chunks = ([_chunk(0, 0, rows)] for rows in _CHUNKS if rows < longest)
    timed = (*_timed(backend, _rounds()), *_timed(backend, chunks))
    _release(backend, range(_LANES))
    return timed


def _timed(backend: Backend, rounds: Iterable[Sequence[Window]]) -> Iterator[tuple[RoundShape, float]]:
    begun = time.perf_counter()
    for windows in rounds:
        _run(backend, windows)
        start = time.perf_counter()
        _run(backend, windows)
        yield shape_of(windows), time.perf_counter() - start
        if time.perf_counter() - begun > _MOST_SECONDS:
            return


def scratch_of(backend: Backend, device: DeviceMemory, largest: LargestRound) -> Scratch:
    """What the largest rounds take while they run: chunks of prefill at two lengths, what is drawn from rows of all
    lanes and their drafts, and what a draft model does before that; whichever is most.

    What depends on the length is attention, in which prefill has the most rows. On the padded path there are up to as
    many rows of padding. Call while no lane is served. Leaves the backend empty.
    """
    rows = min(largest.rows, _MEASURED_ROWS)
    width = max(1, min(rows, backend.info.context_length // 2))
    lanes = range(-(-rows // width))
    short = most_held(device, lambda: _run(backend, [_chunk(slot, 0, width) for slot in lanes]))
    long = most_held(device, lambda: _run(backend, [_chunk(slot, width, width) for slot in lanes]))
    _release(backend, lanes)
    scale = largest.rows / (width * len(lanes)) * (2 if backend.info.rectangle else 1)
    per_position = max(0, long - short) / width
    prefill = long - per_position * 2 * width
    fixed = max(scale * prefill, *_drawn(backend, device, largest))
    return Scratch(int(fixed), scale * per_position)


def _drawn(backend: Backend, device: DeviceMemory, largest: LargestRound) -> Iterator[int]:
    """What it takes to draw for as many lanes as there may be, and to draft for one whose text is not yet fed."""
    room = largest.drafts if backend.info.rectangle else min(largest.drafts, largest.rows // largest.lanes - 1)
    drafts = min(room, backend.info.context_length - 2)
    drawing = [_window(slot, drafts, _WARM) for slot in range(largest.lanes)]
    yield most_held(device, lambda: _run(backend, drawing))
    _release(backend, range(largest.lanes))
    text = (1,) * max(2, min(largest.rows, backend.info.context_length // 2))
    ask = DraftAsk("warm-up", text, len(text), max(1, largest.drafts), sampling=_WARM)
    for source in backend.drafters:
        _run(backend, [Window(0, ask.request_id, 0, text[:-1], False, _WARM, len(text))])  # some read what came of it
        yield most_held(device, partial(source.propose, [ask]))
        source.forget(ask.request_id)
        backend.release(0)


def _release(backend: Backend, slots: Iterable[int]) -> None:
    for slot in slots:
        backend.release(slot)


def _chunk(slot: int, start: int, rows: int) -> Window:
    return Window(slot, f"warm-up {slot}", start, (1,) * rows, False, _GREEDY, 2 * rows)


def _run(backend: Backend, windows: Sequence[Window]) -> None:
    """One round, whose drafts are all right."""
    backend.verify(windows).read()
    backend.keep({window.slot: window.end for window in windows})


def _rounds() -> Iterator[Sequence[Window]]:
    """So many lanes, so many drafts each."""
    for lanes, drafts in ((1, 0), (2, 0), (1, 1), (1, 3), (4, 0), (1, 7), (8, 0), (4, 3), (8, 3), (8, 7)):
        yield [_window(slot, drafts) for slot in range(lanes)]


def _window(slot: int, drafts: int, sampling: Sampling = _GREEDY) -> Window:
    return Window(slot, f"warm-up {slot}", 0, (1,), True, sampling, drafts + 2, drafts, (1,) * drafts)
