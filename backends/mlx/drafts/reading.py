"""A drafter that reads the target: it is fed the target's features of what is known, and its own output from there on.

Owns what the drafter caches of its lanes (see `lanes`).
"""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from backends.mlx import exponential
from backends.mlx.adjust import LaneTables
from backends.mlx.caches.kinds import AttentionKind
from backends.mlx.caches.packed import PackedCache
from backends.mlx.drafts.lanes import ReadLanes, in_rows
from backends.mlx.drafts.steps import Step, Turn, draft_in_steps, drawn_step
from backends.mlx.exponential import Attention
from backends.mlx.features import FeaturePiece, Features, gathered
from backends.mlx.layout import Seated
from backends.mlx.seam import HeadRows, install_attention
from backends.mlx.taps import Tap
from backends.mlx.verify import Draws, LaneStore, PackedForward
from scheduler.draft import Draft, DraftAsk

MOST_UNREAD = 32
"""Of so many positions of a lane, features are kept until they are read. One that nobody drafted for begins there: what
is read in one call holds everybody up, and a drafter that does not pay is asked now and then whether it would.
"""


class ReadingNetwork(Protocol):
    """What guesses. Implemented by `eagle.EagleNetwork` and `mtp.MTPNetwork`."""

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What it reads of the target."""
        ...

    @property
    def module(self) -> nn.Module:
        """Whose attention passes the seam."""
        ...

    @property
    def cached(self) -> AttentionKind:
        """What its layer caches."""
        ...

    @property
    def ids(self) -> mx.array:
        """The tokens that it can draft, uint32, ascending; one for each column of its logits."""
        ...

    @property
    def vocabulary(self) -> int:
        """How many tokens there are in all."""
        ...

    def read(self, features: mx.array) -> mx.array:
        """What the target's features `[rows, width]` stand for, `[rows, dims]`."""
        ...

    def output(self, tokens: mx.array, features: mx.array, cache: PackedCache) -> mx.array:
        """Outputs `[rows, 1, dims]` for tokens `[rows, 1]` and features `[rows, dims]`, its own or what `read` gave."""
        ...

    def logits(self, outputs: mx.array) -> mx.array:
        """`[rows, dims]` to `[rows, drafted]`."""
        ...


class _Fed(nn.Module):
    """The network as a forward knows models: tokens and caches in, logits out. Written by `ReadingDrafter`."""

    def __init__(self, network: ReadingNetwork, chosen: HeadRows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = network.module
        self._network = network
        self._chosen = chosen
        self.features: mx.array | None = None
        """Of all rows, in packed order, `[rows, dims]`."""
        self.outputs: mx.array | None = None
        """Of the sampled rows, `[sampled rows, dims]`."""

    def __call__(self, tokens: mx.array, cache: Sequence[PackedCache]) -> mx.array:
        """Logits `[1, sampled rows, drafted]`."""
        assert self.features is not None
        outputs = self._chosen.pick(self._network.output(tokens, self.features, cache[0]))
        self.outputs = outputs.reshape(-1, outputs.shape[-1])
        return self._network.logits(self.outputs)[None]


class ReadingDrafter:
    """A `DraftSource` over features, on the engine thread. Marks are positions in the draft.

    A call that fails loses all lanes, which then begin anew where they stand.
    """

    name = "drafter"
    costly = True

    def __init__(self, network: ReadingNetwork, features: Features, attention: Attention) -> None:
        """`features` are those that the target's taps note, and are forgotten here once they were read."""
        chosen = HeadRows()
        self._network = network
        self._fed = _Fed(network, chosen)
        install_attention(self._fed)
        self._forward = PackedForward(self._fed, chosen, [network.cached], attention)
        self._forward.arranged = self._arrange
        self._tables = LaneTables()
        self._lanes = ReadLanes(features, self._forward, self._tables)
        self._exp = exponential.best_exp()
        self._columns = _columns(np.array(network.ids), network.vocabulary)
        self._coming: mx.array | None = None
        """The features of the next forward's rows, window by window."""
        self._outputs: dict[int, int] = {}
        """Which row of the newest outputs is a slot's."""

    @property
    def store(self) -> LaneStore:
        """Where its lanes sit."""
        return self._forward.store

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """A draft for every lane of which the target's features are known up to the last token but one."""
        try:
            turns: dict[str, Turn] = {}
            pieces: list[FeaturePiece] = []
            for ask in asks:
                turn = self._turn(ask, pieces)
                if turn is not None:
                    turns[ask.request_id] = turn
            if pieces:
                self._coming = self._network.read(gathered(pieces))
                draft_in_steps(list(turns.values()), self._run)
        except BaseException:  # whatever it was: what the caches hold is not known any more
            self._lanes.reset()
            raise
        return [_drafted(turns.get(ask.request_id)) for ask in asks]

    def forget(self, request_id: str) -> None:
        """Give the lane's seat back. Idempotent."""
        self._lanes.forget(request_id)

    def _turn(self, ask: DraftAsk, pieces: list[FeaturePiece]) -> Turn | None:
        """Feed the positions that came since the last time."""
        unread = self._lanes.read(ask)
        if unread is None:
            return None
        pieces.extend(unread.pieces)
        turn = Turn(ask, unread.lane.slot, ask.budget, origin=unread.lane.first + 1)
        turn.feed(unread.place, ask.tokens[unread.start + 1 :], samples=True)
        return turn

    def _run(self, turns: Sequence[Turn], carried: Draws | None) -> Step:
        if self._coming is None:
            assert self._fed.outputs is not None
            rows = [self._outputs[turn.slot] for turn in turns]
            outputs = self._fed.outputs
            self._coming = outputs if rows == list(range(outputs.shape[0])) else outputs[mx.array(rows)]
        verified = self._forward.run([turn.window for turn in turns], carried)
        assert verified.logits is not None
        self._coming = None
        drawing = [turns[sampled.index] for sampled in verified.sampled]
        self._outputs = {turn.slot: row for row, turn in enumerate(drawing)}
        if not any(turn.needs_host or turn.sampling.logit_bias for turn in drawing):
            return drawn_step(drawing, verified.logits, self._tables, self._exp, self._network.ids)
        return drawn_step(drawing, self._spread(verified.logits), self._tables, self._exp)

    def _arrange(self, seated: Sequence[Seated]) -> None:
        """The features that come, in the order of the forward's rows."""
        assert self._coming is not None
        self._fed.features = in_rows(self._coming, seated)

    def _spread(self, logits: mx.array) -> mx.array:
        """Logits of all tokens, of which those that cannot be drafted have none."""
        none = mx.full((logits.shape[0], 1), mx.finfo(mx.float32).min)
        return mx.concatenate([logits.astype(mx.float32), none], axis=-1)[:, self._columns]


def _columns(ids: np.ndarray, vocabulary: int) -> mx.array:
    """For each token its column among the drafted, or the one behind them."""
    columns = np.full(vocabulary, ids.size, dtype=np.int32)
    columns[ids] = np.arange(ids.size)
    return mx.array(columns)


def _drafted(turn: Turn | None) -> Draft:
    if turn is None:
        return Draft()
    return Draft(tuple(turn.draft), tuple(range(len(turn.draft))))
