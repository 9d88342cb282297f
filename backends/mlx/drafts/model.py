"""A second model that drafts for all lanes: one forward a step, in which every lane is fed its own draw.

It draws with the target's keyed noise. At a position both models take the token whose logit and noise sum to most, so
they agree wherever they think alike, at any temperature (Gumbel coupling; Daliri, Musco and Suresh 2024, "Coupling
without Communication and Drafter-Invariant Speculative Decoding"). Owns the draft model's lanes. Knows of the target
only the width of its vocabulary, and of grammars nothing: what they forbid is cut from a draft by others.
"""

from collections.abc import Sequence
from itertools import count

import mlx.core as mx
import msgspec
import numpy as np

from backends.base import Blocks, Companion
from backends.mlx import exponential
from backends.mlx.adjust import Adjustments, LaneTables
from backends.mlx.rows import SampledRow
from backends.mlx.sampler import DrawnRows, draw
from backends.mlx.verify import Draws, Forward, LaneStore
from scheduler.draft import Draft, DraftAsk
from scheduler.pieces import BLOCK_TOKENS
from scheduler.round import History, Window

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


class _Turn:
    """One lane in one call of `propose`: what it feeds next, and its draft as far as it was read."""

    def __init__(self, ask: DraftAsk, lane: _Lane, budget: int) -> None:
        self.ask = ask
        self.lane = lane
        self.budget = budget
        self.sampling = msgspec.structs.replace(ask.sampling, logprobs=None)
        self.draft: list[int] = []
        self.catch_up(CATCH_UP_ROWS)

    @property
    def lacking(self) -> int:
        """How many tokens before the newest the caches lack."""
        return len(self.ask.tokens) - 1 - self.lane.held

    @property
    def needs_host(self) -> bool:
        """Whether its next token cannot be drawn, or fed, before the host has seen the last one."""
        return self.sampling.counts or self.sampling.truncates

    def catch_up(self, rows: int) -> None:
        """Feed what it lacks and the newest token, so as to draw; of more than so many rows only these."""
        start = self.lane.held
        samples = self.lacking <= rows
        end = len(self.ask.tokens) if samples else start + rows
        self.window = self._window(start, tuple(self.ask.tokens[start:end]), samples=samples)

    def go_on(self, *, carried: bool) -> None:
        """Feed the newest draw, from the device or as it was read."""
        self.window = self._window(self.window.end, () if carried else (self.draft[-1],), carried=carried)

    def counted(self) -> Window:
        """The window that has the changes by penalties and bias behind everything read so far in its last row."""
        history = History(self.ask.tokens, self.ask.prompt)
        return msgspec.structs.replace(self.window, draft=tuple(self.draft), history=history)

    def settle(self) -> Draft:
        """Note what the caches hold now, and return the draft."""
        if self.draft:
            self.lane.held = len(self.ask.tokens)
            self.lane.fed = tuple(self.draft[:-1])
        else:
            self.lane.held = self.window.end
        return Draft(tuple(self.draft), tuple(range(len(self.draft))))

    def _window(self, start: int, tokens: tuple[int, ...], *, samples: bool = True, carried: bool = False) -> Window:
        reach = len(self.ask.tokens) + self.budget
        request_id = self.ask.request_id
        return Window(self.lane.slot, request_id, start, tokens, samples, self.sampling, reach, carried=carried)


class _Step(msgspec.Struct, frozen=True):
    """One drafted token for each of some lanes, in the order of the rows drawn."""

    turns: tuple[_Turn, ...]
    drawn: DrawnRows

    def draws(self) -> Draws:
        """The tokens on the device; final only if no lane needs the host."""
        return Draws(self.drawn.tokens, {turn.lane.slot: row for row, turn in enumerate(self.turns)})

    def read(self) -> None:
        """Wait for the tokens and add them to the drafts."""
        for turn, token in zip(self.turns, self.drawn.read().tokens, strict=True):
            turn.draft.append(token)


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
            self._draft(feeding)
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

    def _draft(self, feeding: Sequence[_Turn]) -> None:
        """Feed what is lacking and draw the first token in one forward, then one token a forward. Nothing is read
        before the end unless a lane needs the host.
        """
        drafting = [turn for turn in feeding if turn.window.samples]
        reads = any(turn.needs_host for turn in drafting)
        unread = self._run(feeding, None) if feeding else []
        for drafted in range(1, max((turn.budget for turn in drafting), default=0)):
            if reads:
                unread.pop().read()
            drafting = [turn for turn in drafting if turn.budget > drafted]
            for turn in drafting:
                turn.go_on(carried=not reads)
            unread += self._run(drafting, None if reads else unread[-1].draws())
        for step in unread:
            step.read()

    def _run(self, turns: Sequence[_Turn], carried: Draws | None) -> list[_Step]:
        """Feed each lane's window; the step that was drawn, if any window samples."""
        verified = self._forward.run([turn.window for turn in turns], carried)
        if verified.logits is None:
            mx.eval(self._forward.buffers())
            return []
        drawing = tuple(turns[sampled.index] for sampled in verified.sampled)
        logits = verified.logits[:, : self._facts.target_vocab_size]
        rows = [SampledRow(turn.sampling, turn.window.end) for turn in drawing]
        drawn = draw(logits, rows, adjustments=self._adjustments(drawing, logits.shape[1]), exp=self._exp)
        drawn.launch()
        return [_Step(drawing, drawn)]

    def _adjustments(self, drawing: Sequence[_Turn], vocabulary: int) -> Adjustments | None:
        changes = self._tables.adjustments([turn.counted() for turn in drawing], vocabulary)
        if changes is None:
            return None
        last = np.cumsum([1 + len(turn.draft) for turn in drawing]) - 1
        return Adjustments(changes.tokens[last], changes.divisors[last], changes.offsets[last])


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
