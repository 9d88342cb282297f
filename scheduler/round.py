"""A round as values: the windows that are planned, and what came of them."""

from collections.abc import Sequence

import msgspec

from scheduler.cost import RoundShape
from scheduler.events import TokenLogprob
from scheduler.pieces import Piece
from scheduler.request import Constraint, FinishReason, Sampling


class History(msgspec.Struct, frozen=True):
    """What a lane's penalties count."""

    tokens: Sequence[int]
    """Prompt and generated tokens up to the window's last real one; to be read only, and only until the round's end."""
    prompt: int
    """How many of them are the prompt."""


class Window(msgspec.Struct, frozen=True):
    """One lane's share of a round.

    Feeds `tokens` (real ones) and then `draft` at positions from `start` on. A window that `samples` draws a token at
    its last real token and at every draft position; one that does not is a prefill chunk.
    """

    slot: int
    request_id: str
    start: int
    """How many of the lane's tokens its caches hold before the round."""
    tokens: tuple[int, ...]
    """Empty only if `carried`."""
    samples: bool
    sampling: Sampling
    reach: int
    """A length that the lane is sure to reach; caches are sized for it at once."""
    budget: int = 0
    """How many tokens may be drafted."""
    draft: tuple[int, ...] = ()
    source: str = ""
    """Which draft source wrote `draft`."""
    carried: bool = False
    """The window's one real token is the draw of the round in flight, not yet read back (a pipelined round)."""
    history: History | None = None
    """Only where `sampling.counts`."""
    constraint: Constraint | None = None
    """The grammar that its draws obey."""
    copies: int | None = None
    """The slot of a lane whose first `start` positions are this lane's too: they are copied before anything is
    written.
    """

    @property
    def real(self) -> int:
        """How many real tokens it feeds."""
        return 1 if self.carried else len(self.tokens)

    @property
    def rows(self) -> int:
        """How many rows it takes in the forward."""
        return self.real + len(self.draft)

    @property
    def end(self) -> int:
        """The position behind its last row."""
        return self.start + self.rows


class Restore(msgspec.Struct, frozen=True):
    """Pieces that are copied from the prefix cache to a lane before a round's forward, in order."""

    slot: int
    request_id: str
    pieces: tuple[Piece, ...]
    reach: int
    """As of a window."""


class Store(msgspec.Struct, frozen=True):
    """A piece of a lane that can be kept in the prefix cache."""

    slot: int
    request_id: str
    piece: Piece


class Round(msgspec.Struct, frozen=True):
    """The windows of one forward, one per lane at most."""

    windows: tuple[Window, ...]
    restores: tuple[Restore, ...] = ()
    """What is copied before; there may be nothing else."""
    ahead: bool = False
    """Planned on the unread draws of the round before; all its windows are `carried`."""

    @property
    def kind(self) -> str:
        """`prefill`, `decode` or `mixed`."""
        sampling = sum(window.samples for window in self.windows)
        if sampling == 0:
            return "prefill"
        return "decode" if sampling == len(self.windows) else "mixed"


def shape_of(windows: Sequence[Window]) -> RoundShape:
    """What windows cost."""
    attention = sum(window.rows * window.end for window in windows)
    return RoundShape(sum(window.rows for window in windows), any(window.rows > 1 for window in windows), attention)


class Drawn(msgspec.Struct, frozen=True):
    """What the target draws in one window: a token per sampled row, and their log-probabilities if they were asked for.
    A prefill chunk draws nothing.
    """

    tokens: Sequence[int] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    """What is wrong with the window's numbers (they are none): its lane ends, and nothing of it is to be kept."""


class Acceptance(msgspec.Struct, frozen=True):
    """What the acceptance walk made of one window (contract rules 1 to 3)."""

    emitted: tuple[int, ...]
    """The tokens to deliver."""
    accepted: int
    """How many draft tokens the target agreed with."""
    end: FinishReason | None = None
    ended_by_token: bool = False
    """A stop token was drawn: it is counted, not delivered."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per emitted token if they were asked for, else none."""


class LaneResult(msgspec.Struct, frozen=True):
    """What a round did for one lane."""

    window: Window
    """The planned window, its draft filled in."""
    acceptance: Acceptance | None
    """None for a prefill chunk."""
    cached: int
    """How many of the lane's tokens its caches hold now."""
    error: str | None = None
    """The lane's own failure, which ends it; nothing of this round is delivered."""
    spoiled: bool = False
    """Its caches hold no numbers, so that nothing of them is to be kept."""
