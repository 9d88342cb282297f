"""Lanes whose states of the target are made up, and a drafter that is told them."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from backends.mlx.features import Features
from backends.mlx.verify import TappedRows
from scheduler.draft import Draft, DraftAsk, DraftSource
from scheduler.request import Sampling
from tests.backends.mlx.serving import prompt_of
from tests.backends.mlx.windows import window_of

Floats = npt.NDArray[np.float64]


class Lane(msgspec.Struct):
    """A text, with states of the target at all positions but the newest."""

    slot: int
    tokens: tuple[int, ...]
    sampling: Sampling
    hidden: Floats


class HandFed:
    """A drafter that is told states by hand; every draft is checked against the states that it has seen."""

    def __init__(
        self,
        drafter: DraftSource,
        features: Features,
        check: Callable[[Draft, DraftAsk, Floats], None],
        *,
        width: int,
        vocabulary: int,
        budgets: Sequence[int],
    ) -> None:
        """`width` of a state; `budgets` by the lanes' slots."""
        self.drafter = drafter
        self._features = features
        self._check = check
        self._width = width
        self._vocabulary = vocabulary
        self._budgets = budgets

    def ask(self, lane: Lane) -> DraftAsk:
        """For a draft behind the whole text."""
        budget = self._budgets[lane.slot % len(self._budgets)]
        return DraftAsk(str(lane.slot), lane.tokens, len(lane.tokens) - 1, budget, sampling=lane.sampling)

    def join(self, slot: int, length: int, sampling: Sampling) -> Lane:
        """A lane with a text of so many tokens."""
        lane = Lane(slot, (), sampling, np.zeros((0, self._width)))
        self.go_on(lane, prompt_of(slot, length, self._vocabulary))
        return lane

    def go_on(self, lane: Lane, tokens: Sequence[int]) -> None:
        """The lane is some tokens longer."""
        lane.tokens = (*lane.tokens, *tokens)
        start, end = len(lane.hidden), len(lane.tokens) - 1
        rng = np.random.default_rng([lane.slot, start])
        fresh = rng.normal(0, 2, (end - start, self._width)).astype(np.float32)
        lane.hidden = np.concatenate([lane.hidden, fresh.astype(np.float64)])
        self.tell(lane.slot, start, fresh)

    def tell(self, slot: int, start: int, rows: npt.NDArray[np.float32]) -> None:
        """The states of positions from `start` on."""
        self._features.begin([window_of(slot, start, len(rows))], TappedRows(mx.array(rows), {0: 0}))
        self._features.keep({})

    def told_at_once(self, lane: Lane) -> None:
        """All states of another one's lane."""
        self.tell(lane.slot, 0, lane.hidden.astype(np.float32))

    def propose(self, *lanes: Lane) -> list[Draft]:
        """What is drafted for these lanes, which is checked."""
        asks = [self.ask(lane) for lane in lanes]
        drafts = self.drafter.propose(asks)
        for lane, ask, draft in zip(lanes, asks, drafts, strict=True):
            self._check(draft, ask, lane.hidden)
        return drafts
