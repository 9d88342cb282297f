"""Windows as the scheduler would plan them, written out by hand."""

from collections.abc import Sequence

from scheduler.request import Sampling
from scheduler.round import Window

GREEDY = Sampling(temperature=0.0)


def chunk(slot: int, tokens: Sequence[int], start: int = 0) -> Window:
    """A prefill chunk: `tokens` at positions from `start` on."""
    return Window(slot, str(slot), start, tuple(tokens), False, GREEDY, start + len(tokens) + 1)


def decode(slot: int, tokens: Sequence[int], draft: Sequence[int] = (), sampling: Sampling = GREEDY) -> Window:
    """A decode window of the lane `tokens`, of which all but the last are cached."""
    cached = len(tokens) - 1
    return Window(slot, str(slot), cached, (tokens[-1],), True, sampling, cached + 2, draft=tuple(draft))


def window_of(
    slot: int,
    start: int,
    rows: int,
    *,
    drafted: int = 0,
    tokens: Sequence[int] = (),
    reach: int = 0,
    samples: bool = True,
) -> Window:
    """A window of `rows` rows from `start` on, `drafted` of them a draft; `tokens` where it matters what they are."""
    real = tuple(tokens) or (1,) * (rows - drafted)
    reach = reach or start + rows + 1
    return Window(slot, str(slot), start, real, samples, GREEDY, reach, draft=(1,) * drafted)
