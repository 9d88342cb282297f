"""A drafter that guesses a block of tokens at once: the newest token and a mask for each that is to come, over what the
target made of the text before.

Owns what the drafter caches of its lanes (see `lanes`). All lanes are read in one forward, which only stores what their
context came to, and guessed in one more; nothing of a guess is kept.
"""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import msgspec

from backends.mlx import exponential
from backends.mlx.adjust import LaneTables
from backends.mlx.caches.kinds import AttentionKind
from backends.mlx.caches.packed import PackedCache
from backends.mlx.drafts.lanes import ReadLanes, Unread, in_rows
from backends.mlx.exponential import Attention
from backends.mlx.features import Features, gathered
from backends.mlx.layout import Seated
from backends.mlx.rows import SampledRow
from backends.mlx.sampler import draw
from backends.mlx.seam import HeadRows, install_attention
from backends.mlx.taps import Tap
from backends.mlx.verify import LaneStore, PackedForward, SampledWindow
from scheduler.draft import Draft, DraftAsk
from scheduler.round import History, Window

MOST_CONTEXT = 512
"""Of so many positions of a lane, features are kept until they are read: it is the context that such a drafter lives
on, and reading it costs little beside a forward of the target.
"""


class BlockNetwork(Protocol):
    """What guesses. Implemented by `dflash.DFlashNetwork`."""

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What it reads of the target."""
        ...

    @property
    def module(self) -> nn.Module:
        """Whose attention passes the seam."""
        ...

    @property
    def cached(self) -> Sequence[AttentionKind]:
        """What its layers cache, one after the other."""
        ...

    @property
    def most(self) -> int:
        """How many tokens it can guess at once."""
        ...

    @property
    def mask(self) -> int:
        """The token that stands for one that is to be guessed."""
        ...

    def store(self, features: mx.array, caches: Sequence[PackedCache]) -> None:
        """Cache what the target's features `[rows, width]` come to."""
        ...

    def outputs(self, tokens: mx.array, caches: Sequence[PackedCache]) -> mx.array:
        """What the head reads at tokens and masks `[rows, 1]`: `[rows, 1, dims]`."""
        ...

    def logits(self, outputs: mx.array) -> mx.array:
        """`[rows, dims]` to `[rows, vocabulary]`."""
        ...


class _Fed(nn.Module):
    """The network as a forward knows models. Written by `BlockDrafter`."""

    def __init__(self, network: BlockNetwork, chosen: HeadRows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = network.module
        self._network = network
        self._chosen = chosen
        self.features: mx.array | None = None
        """Of all rows in packed order, where they are read; None where tokens are guessed."""

    def __call__(self, tokens: mx.array, cache: Sequence[PackedCache]) -> mx.array:
        """Logits `[1, sampled rows, vocabulary]`; of rows that are only read there are none."""
        if self.features is not None:
            self._network.store(self.features, cache)
            return mx.zeros((1, 1, 1))
        outputs = self._chosen.pick(self._network.outputs(tokens, cache))
        return self._network.logits(outputs.reshape(-1, outputs.shape[-1]))[None]


class _Turn(msgspec.Struct, frozen=True):
    """One lane in one call of `propose`."""

    ask: DraftAsk
    unread: Unread
    most: int

    @property
    def budget(self) -> int:
        """How many tokens are guessed."""
        return min(self.ask.budget, self.most)

    def context(self) -> Window:
        """The positions that are new, whose tokens do not matter."""
        known = len(self.ask.tokens) - 1 - self.unread.start
        return self._window(self.unread.place, (0,) * known, samples=False)

    def block(self, mask: int) -> Window:
        """The newest token, and masks; what is guessed at each is the token that stands there."""
        last = len(self.ask.tokens) - 1
        tokens = (self.ask.tokens[last], mask)
        return self._window(last - self.unread.lane.first, tokens, (mask,) * (self.budget - 1))

    def rows(self) -> list[SampledRow]:
        """How each guess is drawn: as the target will draw it."""
        sampling = msgspec.structs.replace(self.ask.sampling, logprobs=None)
        return [SampledRow(sampling, len(self.ask.tokens) + ahead) for ahead in range(self.budget)]

    def _window(
        self, start: int, tokens: tuple[int, ...], draft: tuple[int, ...] = (), *, samples: bool = True
    ) -> Window:
        slot, reach = self.unread.lane.slot, len(self.ask.tokens) + self.budget
        history = History(self.ask.tokens, self.ask.prompt)
        return Window(
            slot, self.ask.request_id, start, tokens, samples, self.ask.sampling, reach, draft=draft, history=history
        )


class BlockDrafter:
    """A `DraftSource` over features, on the engine thread. Marks are positions in the draft.

    Guesses are drawn with the target's keyed noise, as in `steps`; each by itself, so that penalties count what was
    generated, and nothing that is drafted. A call that fails loses all lanes, which then begin anew where they stand.
    """

    name = "drafter"
    costly = True

    def __init__(self, network: BlockNetwork, features: Features, attention: Attention) -> None:
        """`features` are those that the target's taps note, and are forgotten here once they were read."""
        chosen = HeadRows()
        self._network = network
        self._fed = _Fed(network, chosen)
        install_attention(self._fed)
        self._forward = PackedForward(self._fed, chosen, network.cached, attention)
        self._forward.arranged = self._arrange
        self._tables = LaneTables()
        self._lanes = ReadLanes(features, self._forward, self._tables)
        self._exp = exponential.best_exp()
        self._coming: mx.array | None = None
        """The features of the next forward's rows, window by window."""

    @property
    def store(self) -> LaneStore:
        """Where its lanes sit."""
        return self._forward.store

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """A draft for every lane of which the target's features are known up to the last token but one."""
        try:
            turns = [
                _Turn(ask, unread, self._network.most) for ask in asks if (unread := self._lanes.read(ask)) is not None
            ]
            drafts = self._guess(turns) if turns else {}
        except BaseException:  # whatever it was: what the caches hold is not known any more
            self._coming = self._fed.features = None
            self._lanes.reset()
            raise
        return [drafts.get(ask.request_id, Draft()) for ask in asks]

    def forget(self, request_id: str) -> None:
        """Give the lane's seat back. Idempotent."""
        self._lanes.forget(request_id)

    def _guess(self, turns: Sequence[_Turn]) -> dict[str, Draft]:
        """By request."""
        self._coming = gathered([piece for turn in turns for piece in turn.unread.pieces])
        self._forward.run([turn.context() for turn in turns], None)
        self._coming = None
        windows = [turn.block(self._network.mask) for turn in turns]
        verified = self._forward.run(windows, None)
        assert verified.logits is not None
        order = [sampled.index for sampled in verified.sampled]
        rows = [row for index in order for row in turns[index].rows()]
        adjustments = self._tables.adjustments([windows[index] for index in order], verified.logits.shape[1])
        drawn = draw(verified.logits, rows, adjustments=adjustments, exp=self._exp)
        drawn.launch()
        tokens = drawn.read().tokens
        return {turns[each.index].ask.request_id: _drafted(tokens, each) for each in verified.sampled}

    def _arrange(self, seated: Sequence[Seated]) -> None:
        """The features that come, in the order of the forward's rows."""
        self._fed.features = None if self._coming is None else in_rows(self._coming, seated)


def _drafted(tokens: Sequence[int], sampled: SampledWindow) -> Draft:
    return Draft(tuple(tokens[sampled.first : sampled.last]), tuple(range(sampled.last - sampled.first)))
