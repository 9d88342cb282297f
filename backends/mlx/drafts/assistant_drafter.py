"""A drafter that attends what its target has cached, in the target's own lanes.

Owns no lanes. What it knows of a lane is the target's hidden state at the newest cached position and the keys and
values up to there, which it reads where the target wrote them. All its work is done before a call returns, so that no
view of the target's buffers outlives it: the target's next write would copy what is viewed.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count

import mlx.core as mx
import msgspec

from backends.mlx import exponential
from backends.mlx.adjust import LaneTables
from backends.mlx.caches.buffers import LayerBuffers
from backends.mlx.caches.packed import PackedCache, take_back
from backends.mlx.drafts.assistant import Assistant, LayerType
from backends.mlx.drafts.steps import Step, Turn, draft_in_steps, drawn_step
from backends.mlx.exponential import Attention
from backends.mlx.features import FeaturePiece, Features, gathered
from backends.mlx.layout import PackedRound
from backends.mlx.verify import Draws, LaneStore
from scheduler.draft import Draft, DraftAsk
from scheduler.round import Window


class TargetLanes(msgspec.Struct, frozen=True):
    """What an assistant has of its target."""

    store: LaneStore
    """Where the lanes sit."""
    layers: Mapping[LayerType, LayerBuffers]
    """What layers of each type attend."""
    embedding: Callable[[mx.array], mx.array]
    """Tokens `[rows]` to what the target's first layer reads, `[rows, dims]`."""


class _Seen(msgspec.Struct, frozen=True):
    """A lane in one call: its turn, its newest hidden state, and a window of one row at its newest cached position."""

    turn: Turn
    hidden: FeaturePiece
    window: Window


class AssistantDrafter:
    """A `DraftSource` over the target's lanes, on the engine thread. Marks are positions in the draft."""

    name = "drafter"
    costly = True
    store: LaneStore | None = None
    """It has no lanes of its own."""

    def __init__(self, network: Assistant, target: TargetLanes, features: Features, attention: Attention) -> None:
        """`features` are what the target's head reads at each lane's newest position, as its taps note it."""
        self.network = network
        self._target = target
        self._features = features
        self._caches = {kind: PackedCache(layer, attention) for kind, layer in target.layers.items()}
        self._numbers: dict[str, int] = {}
        """By which a lane's penalties are counted: the target's slots are given to others without a word."""
        self._fresh = count()
        self._tables = LaneTables()
        self._exp = exponential.best_exp()

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """A draft for every lane whose newest token is the only one that the target has not been fed."""
        seen = {ask.request_id: lane for ask in asks if (lane := self._see(ask)) is not None}
        if seen:
            call = _Call(self.network, self._target, self._caches, list(seen.values()))
            draft_in_steps([lane.turn for lane in seen.values()], lambda *step: self._step(call, *step))
        drafts = [seen[ask.request_id].turn.draft if ask.request_id in seen else () for ask in asks]
        return [Draft(tuple(tokens), tuple(range(len(tokens)))) for tokens in drafts]

    def forget(self, request_id: str) -> None:
        """The lane left. Idempotent."""
        self._features.forget(request_id)
        number = self._numbers.pop(request_id, None)
        if number is not None:
            self._tables.release(number)

    def _see(self, ask: DraftAsk) -> _Seen | None:
        """None for a lane that cannot be drafted for."""
        last = len(ask.tokens) - 1
        noted = self._features.of(ask.request_id)
        if noted is None or not noted.start < noted.end == last or ask.budget < 1:
            return None
        if not self._target.store.groups.seated({noted.slot: (last, last)}):  # it left and was not forgotten yet
            return None
        number = self._numbers.setdefault(ask.request_id, next(self._fresh))
        turn = Turn(ask, number, ask.budget)
        turn.feed(last, ask.tokens[-1:], samples=True)
        (hidden,) = noted.pieces
        return _Seen(turn, hidden, Window(noted.slot, ask.request_id, last - 1, (0,), True, ask.sampling, last))

    def _step(self, call: "_Call", turns: Sequence[Turn], carried: Draws | None) -> Step:
        drawing, logits = call.run(turns, carried)
        return drawn_step(drawing, logits, self._tables, self._exp)


class _Call:
    """Some lanes from their newest tokens to their last drafted ones. Written by `AssistantDrafter.propose`."""

    def __init__(
        self,
        network: Assistant,
        target: TargetLanes,
        caches: Mapping[LayerType, PackedCache],
        lanes: Sequence[_Seen],
    ) -> None:
        self._network = network
        self._target = target
        self._caches = caches
        self._windows = {lane.turn.slot: lane.window for lane in lanes}
        self._hidden = gathered(lane.hidden for lane in lanes)
        """What the next step reads."""
        self._rows = {lane.turn.slot: row for row, lane in enumerate(lanes)}
        """Whose row of that is where."""
        self._packed: PackedRound | None = None

    def run(self, turns: Sequence[Turn], carried: Draws | None) -> tuple[list[Turn], mx.array]:
        """Feed each lane one token: the turns in the order of the rows, and their logits `[rows, vocabulary]`."""
        packed = self._round(turns)
        ordered = [turns[entry.index] for entry in packed.seated]
        embedded = self._target.embedding(_tokens(ordered, carried))
        hidden = self._hidden[mx.array([self._rows[turn.slot] for turn in ordered])].astype(embedded.dtype)
        try:
            lent = {kind: cache.lend() for kind, cache in self._caches.items()}
            outputs = self._network(embedded, hidden, lent, packed.positions + 1)
        finally:
            take_back()
        self._hidden = self._network.carried(outputs)
        self._rows = {turn.slot: row for row, turn in enumerate(ordered)}
        return ordered, self._network.logits(outputs)

    def _round(self, turns: Sequence[Turn]) -> PackedRound:
        """How the lanes that still draft lie in the target's buffers; the same until one has enough."""
        if self._packed is None or len(self._packed.seated) != len(turns):
            windows = [self._windows[turn.slot] for turn in turns]
            self._packed = PackedRound(windows, self._target.store.groups)
            for cache in self._caches.values():
                cache.begin(self._packed)
        return self._packed


def _tokens(turns: Sequence[Turn], carried: Draws | None) -> mx.array:
    """Token ids `[rows]`."""
    if carried is not None:
        return carried.tokens[mx.array([carried.newest[turn.slot] for turn in turns])]
    return mx.array([turn.window.tokens[0] for turn in turns])
