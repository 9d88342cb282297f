"""The grammars of the lanes being served: drafts are pruned to what they allow, masks filled while the forward runs.

Owns one matcher per constrained lane; between rounds it stands behind the lane's emitted tokens, never behind a draft
(contract rule 5). Lives on the engine thread; a fill borrows a matcher for one round.
"""

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
import numpy as np

from backends.base import MaskWords
from backends.grammar.base import Grammar, Matcher
from scheduler.draft import DraftAsk
from scheduler.request import FinishReason
from scheduler.round import Acceptance, Window

_log = logging.getLogger("paceline.engine")


class LaneGrammar:
    """A lane's matcher, and what became of it. Written by `Constraints` and, during a fill, by the filler."""

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.failure: str | None = None
        """Why the lane must end."""

    def valid_prefix(self, draft: Sequence[int]) -> int:
        """How many tokens of a draft the grammar allows."""
        accepted = 0
        for token in draft:
            if not self.matcher.accept(token):
                break
            accepted += 1
        self.matcher.rollback(accepted)
        return accepted

    def fill(self, draft: Sequence[int], words: MaskWords) -> None:
        """One row of `words` per position of a pruned draft, its end included; the matcher ends where it began."""
        for row, token in enumerate(draft):
            self.matcher.fill(words[row])
            self.matcher.accept(token)
        self.matcher.fill(words[-1])
        self.matcher.rollback(len(draft))
        if not words.any(axis=1).all():
            self.failure = "the grammar allows no token here"

    def advance(self, walk: Acceptance) -> Acceptance:
        """Go on by what a walk emitted, and cut it where the grammar can only end (contract rule 4)."""
        for count, token in enumerate(walk.emitted, start=1):
            if not self.matcher.accept(token):
                self.failure = "the grammar does not allow the token that was drawn"
                return walk
            if self.matcher.finished:
                emitted, logprobs = walk.emitted[:count], walk.logprobs[:count]
                return Acceptance(emitted, walk.accepted, FinishReason.STOP, logprobs=logprobs)
        return walk


class Fill(msgspec.Struct):
    """One window's masks: asked by the engine thread, filled by whichever thread claims them first."""

    index: int
    lane: LaneGrammar
    draft: tuple[int, ...]
    words: MaskWords
    claim: threading.Lock
    done: threading.Event

    def run(self) -> None:
        """Fill them, unless another thread does."""
        if not self.claim.acquire(blocking=False):
            return
        try:
            self.lane.fill(self.draft, self.words)
        except Exception:  # the named boundary of a grammar: its lane ends, the others do not notice
            _log.exception("a grammar failed")
            self.lane.failure = "the grammar failed"
        self.done.set()


class FillingMasks:
    """The masks of one round, under way on a thread of their own. Implements `backends.base.Masks`."""

    def __init__(self, fills: Sequence[Fill], seconds: float) -> None:
        self._fills = fills
        self._seconds = seconds
        self._masks: dict[int, MaskWords] | None = None
        _begin(fills)

    def wait(self) -> Mapping[int, MaskWords]:
        """Each window's masks. A lane whose grammar takes longer than its limit has failed, and has no mask; the thread
        that is stuck in it is left behind, and another one does the rest.
        """
        if self._masks is None:
            for place, fill in enumerate(self._fills):
                if not fill.done.wait(self._seconds):
                    _log.warning("a grammar took more than %g s for the masks of one round", self._seconds)
                    fill.lane.failure = f"the grammar took more than {self._seconds:g} s for one token"
                    _begin(self._fills[place + 1 :])
            self._masks = {fill.index: fill.words for fill in self._fills if fill.lane.failure is None}
        return self._masks


def _begin(fills: Sequence[Fill]) -> None:
    def run_all() -> None:
        for fill in fills:
            fill.run()

    threading.Thread(target=run_all, name="paceline-masks", daemon=True).start()


class Constraints:
    """Matchers by request. Written by `Executor`."""

    def __init__(self, vocabulary: int, fill_seconds: float) -> None:
        """`vocabulary`: how many logits a row has. `fill_seconds`: how long one lane's masks of a round may take."""
        self._words = math.ceil(vocabulary / 32)
        self._fill_seconds = fill_seconds
        self._lanes: dict[str, LaneGrammar] = {}

    def open(self, windows: Sequence[Window]) -> None:
        """Give every newcomer among the constrained lanes its matcher."""
        for window in windows:
            if window.constraint is not None and window.request_id not in self._lanes:
                grammar = cast("Grammar", window.constraint)
                self._lanes[window.request_id] = LaneGrammar(grammar.matcher())

    def forced(self, request_id: str, limit: int) -> tuple[int, ...]:
        """What a lane's grammar says must come next; nothing for a free lane."""
        lane = self._lanes.get(request_id)
        return () if lane is None else lane.matcher.forced(limit)

    def prune(self, windows: tuple[Window, ...]) -> tuple[Window, ...]:
        """Cut every constrained draft to its valid prefix."""
        return tuple(self._pruned(window) if window.constraint is not None else window for window in windows)

    def fill(self, windows: Sequence[Window]) -> FillingMasks | None:
        """Begin to fill the masks of all constrained windows; None if there is none."""
        fills = [
            Fill(
                index,
                self._lanes[window.request_id],
                window.draft,
                np.full((len(window.draft) + 1, self._words), -1, dtype=np.int32),
                threading.Lock(),
                threading.Event(),
            )
            for index, window in enumerate(windows)
            if window.constraint is not None
        ]
        if not fills:
            return None
        return FillingMasks(fills, self._fill_seconds)

    def advance(self, window: Window, walk: Acceptance) -> Acceptance:
        """Move the lane's matcher over what a walk emitted; the walk, cut where its grammar ends."""
        return self._lanes[window.request_id].advance(walk) if window.constraint is not None else walk

    def failure(self, window: Window) -> str | None:
        """Why a constrained lane must end, if it must."""
        return self._lanes[window.request_id].failure if window.constraint is not None else None

    def forget(self, request_id: str) -> None:
        """The lane left. Idempotent."""
        self._lanes.pop(request_id, None)

    def _pruned(self, window: Window) -> Window:
        valid = self._lanes[window.request_id].valid_prefix(window.draft)
        return window if valid == len(window.draft) else msgspec.structs.replace(window, draft=window.draft[:valid])


class ForcedText:
    """A `DraftSource`: the text that a grammar leaves no choice about (a schema's keys and punctuation, mostly)."""

    name = "grammar"

    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints

    def propose(self, asks: Sequence[DraftAsk]) -> list[tuple[int, ...]]:
        """Per lane, the forced text as tokens; empty for free lanes and where there is a choice."""
        return [self._constraints.forced(ask.request_id, ask.budget) for ask in asks]

    def forget(self, request_id: str) -> None:
        """Its matcher belongs to `Constraints`."""
