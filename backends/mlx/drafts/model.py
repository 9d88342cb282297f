"""A second model that drafts for all lanes: one forward a step, in which every lane is fed its own draw.

Owns the draft model's lanes. Knows of the target only the width of its vocabulary, and of grammars nothing: what they
forbid is cut from a draft by others.
"""

from collections.abc import Sequence
from itertools import count

import mlx.core as mx
import msgspec

from backends.base import Blocks, Companion
from backends.mlx import exponential
from backends.mlx.adjust import LaneTables
from backends.mlx.drafts.steps import Step, Turn, draft_in_steps, drawn_step
from backends.mlx.verify import Draws, Forward, LaneStore
from scheduler.draft import Draft, DraftAsk
from scheduler.pieces import BLOCK_TOKENS

CATCH_UP_ROWS = 256
"""Rows of a forward for tokens before each lane's newest, over all lanes. While others can be drafted for, a lane that
lacks more goes on in the next call and has no draft until then: a long prompt holds nobody up for longer than this.
"""


class DraftModelFacts(msgspec.Struct, frozen=True):
    """What must be known of a draft model and its target."""

    vocab_size: int
    """Tokens that the draft model can be fed."""
    target_vocab_size: int
    """Tokens that may be drafted; its logits may be wider or narrower."""
    context_length: int
    """The most tokens of a lane, draft included."""


class _Lane:
    """What the caches hold of one request: its first `held` tokens, and behind them `fed`, from its newest draft.
    Written by `DraftModel`.
    """

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.held = 0
        self.fed: tuple[int, ...] = ()

    def cut(self, tokens: Sequence[int]) -> None:
        """Keep what of the draft came true; the rest is overwritten. The newest token is always left to be fed, for its
        logits are wanted.
        """
        came = tokens[self.held : self.held + len(self.fed)]
        for drafted, token in zip(self.fed, came, strict=False):
            if drafted != token:
                break
            self.held += 1
        self.fed = ()
        self.held = min(self.held, len(tokens) - 1)


class _Turn(Turn):
    """A lane with what its caches lack."""

    def __init__(self, ask: DraftAsk, lane: _Lane, budget: int) -> None:
        super().__init__(ask, lane.slot, budget)
        self.lane = lane
        self.catch_up(CATCH_UP_ROWS)

    @property
    def lacking(self) -> int:
        """How many tokens before the newest the caches lack."""
        return len(self.ask.tokens) - 1 - self.lane.held

    def catch_up(self, rows: int) -> None:
        """Feed what it lacks and the newest token, so as to draw; of more than so many rows only these."""
        start = self.lane.held
        samples = self.lacking <= rows
        end = len(self.ask.tokens) if samples else start + rows
        self.feed(start, self.ask.tokens[start:end], samples=samples)

    def settle(self) -> Draft:
        """Note what the caches hold now, and return the draft."""
        if self.draft:
            self.lane.held = len(self.ask.tokens)
            self.lane.fed = tuple(self.draft[:-1])
        else:
            self.lane.held = self.window.end
        return Draft(tuple(self.draft), tuple(range(len(self.draft))))


class DraftModel:
    """A `DraftSource` over a forward of its own, on the engine thread. Marks are positions in the draft.

    Penalties and bias are applied as the target applies them. A call that fails loses all lanes, which are then built
    again from their tokens.
    """

    name = "draft_model"
    costly = True

    def __init__(self, forward: Forward, facts: DraftModelFacts, blocks: Blocks | None = None) -> None:
        """`forward` serves no one else; `blocks` are those of its lanes, if they may be shared."""
        self.blocks = blocks
        self.companion: Companion | None = None
        self._forward = forward
        self._facts = facts
        self._lanes: dict[str, _Lane] = {}
        self._slots = count()
        self._tables = LaneTables()
        self._exp = exponential.best_exp()

    @property
    def store(self) -> LaneStore:
        """Where its lanes sit."""
        return self._forward.store

    @property
    def context_length(self) -> int:
        """The most tokens of a lane, draft included."""
        return self._facts.context_length

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """A draft for every lane that is caught up with in one forward, and for one at least; then a forward for each
        further token. Empty also where a lane has no room in the context, or a token that the model does not know.
        """
        try:
            turns = [turn for ask in asks if (turn := self._turn(ask)) is not None]
            feeding = self._catch_up(turns)
            draft_in_steps(feeding, self._run)
        except BaseException:  # whatever it was: what the caches hold is not known any more
            self._reset()
            raise
        drafts = {turn.ask.request_id: turn.settle() for turn in feeding}
        if self.companion is not None:
            for turn in feeding:
                self.companion.store(turn.lane.slot, turn.ask, turn.lane.held)
        return [drafts.get(ask.request_id, Draft()) for ask in asks]

    def forget(self, request_id: str) -> None:
        """Give the lane's seat back. Idempotent."""
        lane = self._lanes.pop(request_id, None)
        if self.companion is not None:
            self.companion.forget(request_id)
        if lane is not None:
            self._forward.release(lane.slot)
            self._tables.release(lane.slot)

    def _reset(self) -> None:
        self._lanes.clear()
        self._forward.reset()
        self._tables.reset()

    def _turn(self, ask: DraftAsk) -> _Turn | None:
        """None for a lane that cannot be drafted for."""
        budget = min(ask.budget, self._facts.context_length - len(ask.tokens))
        if budget < 1:
            if len(ask.tokens) >= self._facts.context_length:
                self.forget(ask.request_id)
            return None
        lane = self._lanes.get(ask.request_id)
        if lane is None:
            lane = self._lanes[ask.request_id] = _Lane(next(self._slots))
        lane.cut(ask.tokens)
        if self.companion is not None and len(ask.tokens) - lane.held > BLOCK_TOKENS:
            lane.held = self.companion.restore(lane.slot, ask, lane.held)
        known = max(ask.tokens[lane.held :]) < self._facts.vocab_size
        return _Turn(ask, lane, budget) if known else None

    def _catch_up(self, turns: Sequence[_Turn]) -> list[_Turn]:
        """Feed prompts until someone can draw in the next forward; who takes part in that."""
        feeding = _share(turns)
        while feeding and not any(turn.window.samples for turn in feeding):
            self._run(feeding, None)
            for turn in feeding:
                turn.settle()
            feeding = _share(turns)
        return feeding

    def _run(self, turns: Sequence[Turn], carried: Draws | None) -> Step | None:
        """Feed each lane's window; the step that was drawn, if any window samples."""
        verified = self._forward.run([turn.window for turn in turns], carried)
        if verified.logits is None:
            mx.eval(self._forward.buffers())
            return None
        logits = verified.logits[:, : self._facts.target_vocab_size]
        drawing = [turns[sampled.index] for sampled in verified.sampled]
        return drawn_step(drawing, logits, self._tables, self._exp)


def _share(turns: Sequence[_Turn]) -> list[_Turn]:
    """Whoever is fed next: those that lack least first; the first that lacks too much gets what is left."""
    feeding: list[_Turn] = []
    room = CATCH_UP_ROWS
    for turn in sorted(turns, key=lambda turn: turn.lacking):
        lacking = turn.lacking
        turn.catch_up(room)
        feeding.append(turn)
        if lacking >= room:
            break
        room -= lacking
    return feeding
