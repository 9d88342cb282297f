"""Drafting step by step: all lanes at once, each fed its own last draw, with the target's keyed noise.

At a position drafter and target take the token whose logit and noise sum to most, so they agree wherever they think
alike, at any temperature (Gumbel coupling; Daliri, Musco and Suresh 2024, "Coupling without Communication and
Drafter-Invariant Speculative Decoding"). Knows no caches and no network: whoever drafts says how a step is computed.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
import msgspec
import numpy as np

from backends.mlx.adjust import Adjustments, LaneTables
from backends.mlx.rows import Exp, SampledRow
from backends.mlx.sampler import DrawnRows, draw
from backends.mlx.verify import Draws
from scheduler.draft import DraftAsk
from scheduler.round import History, Window


class Turn:
    """One lane in one call of `propose`: what it feeds next, and its draft as far as it was read."""

    def __init__(self, ask: DraftAsk, slot: int, budget: int, origin: int = 0) -> None:
        """`origin`: the token behind a window whose last row stands at `end - 1` has the position `end + origin`."""
        self.ask = ask
        self.slot = slot
        self.budget = budget
        self.origin = origin
        self.sampling = msgspec.structs.replace(ask.sampling, logprobs=None)
        self.draft: list[int] = []
        self.window = self._window(0, (), carried=True)

    @property
    def needs_host(self) -> bool:
        """Whether its next token cannot be drawn, or fed, before the host has seen the last one."""
        return self.sampling.counts or self.sampling.truncates

    def feed(self, start: int, tokens: Sequence[int], *, samples: bool) -> None:
        """Tokens of the text, from a place of the lane's caches on; draw behind them if it `samples`."""
        self.window = self._window(start, tuple(tokens), samples=samples)

    def go_on(self, *, carried: bool) -> None:
        """Feed the newest draw, from the device or as it was read."""
        self.window = self._window(self.window.end, () if carried else (self.draft[-1],), carried=carried)

    @property
    def position(self) -> int:
        """Of the token that is drawn behind the window."""
        return self.window.end + self.origin

    def counted(self) -> Window:
        """The window that has the changes by penalties and bias behind everything read so far in its last row."""
        history = History(self.ask.tokens, self.ask.prompt)
        return msgspec.structs.replace(self.window, draft=tuple(self.draft), history=history)

    def _window(self, start: int, tokens: tuple[int, ...], *, samples: bool = True, carried: bool = False) -> Window:
        reach = len(self.ask.tokens) + self.budget
        return Window(self.slot, self.ask.request_id, start, tokens, samples, self.sampling, reach, carried=carried)


class Step(msgspec.Struct, frozen=True):
    """One drafted token for each of some lanes, in the order of the rows drawn."""

    turns: tuple[Turn, ...]
    drawn: DrawnRows

    def draws(self) -> Draws:
        """The tokens on the device; final only if no lane needs the host."""
        return Draws(self.drawn.tokens, {turn.slot: row for row, turn in enumerate(self.turns)})

    def read(self) -> None:
        """Wait for the tokens and add them to the drafts."""
        for turn, token in zip(self.turns, self.drawn.read().tokens, strict=True):
            turn.draft.append(token)


def draft_in_steps(feeding: Sequence[Turn], run: Callable[[Sequence[Turn], Draws | None], Step | None]) -> None:
    """Feed what is lacking and draw the first token in one forward, then one token a forward. Nothing is read before
    the end unless a lane needs the host.

    `run` feeds each lane's window, with the draws of the step before where those are carried, and gives what was drawn;
    None if no window samples.
    """
    drafting = [turn for turn in feeding if turn.window.samples]
    reads = any(turn.needs_host for turn in drafting)
    newest = run(feeding, None) if feeding else None
    unread = [newest] if newest is not None else []
    for drafted in range(1, max((turn.budget for turn in drafting), default=0)):
        if reads:
            unread.pop().read()
        drafting = [turn for turn in drafting if turn.budget > drafted]
        for turn in drafting:
            turn.go_on(carried=not reads)
        newest = run(drafting, None if reads else unread[-1].draws())
        assert newest is not None
        unread.append(newest)
    for step in unread:
        step.read()


def drawn_step(
    drawing: Sequence[Turn], logits: mx.array, tables: LaneTables, exp: Exp, ids: mx.array | None = None
) -> Step:
    """Start drawing from a row of logits `[turns, vocabulary]` for each turn; `ids` as for `draw`."""
    drawing = tuple(drawing)
    rows = [SampledRow(turn.sampling, turn.position) for turn in drawing]
    adjustments = None if ids is not None else _adjustments(drawing, logits.shape[1], tables)
    drawn = draw(logits, rows, adjustments=adjustments, ids=ids, exp=exp)
    drawn.launch()
    return Step(drawing, drawn)


def _adjustments(drawing: Sequence[Turn], vocabulary: int, tables: LaneTables) -> Adjustments | None:
    changes = tables.adjustments([turn.counted() for turn in drawing], vocabulary)
    if changes is None:
        return None
    last = np.cumsum([1 + len(turn.draft) for turn in drawing]) - 1
    return Adjustments(changes.tokens[last], changes.divisors[last], changes.offsets[last])
