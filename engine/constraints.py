"""The grammars of the lanes being served: drafts are pruned to what they allow, masks filled while the forward runs.

Owns one matcher per constrained lane; between rounds it stands behind the lane's emitted tokens, never behind a draft
(contract rule 5). A matcher is foreign code over a client's text: whatever is asked of one is asked on a thread that
can be left behind, and costs the lane that takes too long, never the round.
"""

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np

from backends.base import MaskWords
from backends.grammar.base import Grammar, Matcher
from scheduler.draft import Draft, DraftAsk
from scheduler.request import FinishReason
from scheduler.round import Acceptance, Window

_log = logging.getLogger("paceline.engine")


class LaneGrammar:
    """A lane's matcher, and what became of it. Written by the `LaneWork` that is being done for it."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher: Matcher | None = None
        self.failure: str | None = None
        """Why the lane must end."""

    @property
    def matcher(self) -> Matcher:
        """Made when it is first needed."""
        if self._matcher is None:
            self._matcher = self._grammar.matcher()
        return self._matcher

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


class LaneWork:
    """Something to ask of a lane's matcher. Done once, by whichever thread claims it first."""

    def __init__(self, lane: LaneGrammar, ask: Callable[[], None]) -> None:
        self.lane = lane
        self.done = threading.Event()
        self._ask = ask
        self._claim = threading.Lock()

    def run(self) -> None:
        """Do it, unless another thread does."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._ask()
        except Exception:  # the named boundary of a grammar: its lane ends, the others do not notice
            _log.exception("a grammar failed")
            self.lane.failure = "the grammar failed"
        self.done.set()


class Working:
    """Work for several lanes, under way on a thread of its own."""

    def __init__(self, works: Sequence[LaneWork], seconds: float) -> None:
        """`seconds`: how long each lane's work may take."""
        self._works = works
        self._seconds = seconds
        _begin(works)

    def wait(self) -> None:
        """Until all is done. A lane whose grammar takes longer than its limit has failed; the thread that is stuck in
        it is left behind, and another one does the rest.
        """
        for place, work in enumerate(self._works):
            if not work.done.wait(self._seconds):
                _log.warning("a grammar took more than %g s for one round", self._seconds)
                work.lane.failure = f"the grammar took more than {self._seconds:g} s for one round"
                _begin(self._works[place + 1 :])


def _begin(works: Sequence[LaneWork]) -> None:
    def run_all() -> None:
        for work in works:
            work.run()

    if works:
        threading.Thread(target=run_all, name="paceline-grammars", daemon=True).start()


class FillingMasks:
    """The masks of one round, under way. Implements `backends.base.Masks`."""

    def __init__(self, working: Working, words: Mapping[int, tuple[LaneGrammar, MaskWords]]) -> None:
        self._working = working
        self._words = words

    def wait(self) -> Mapping[int, MaskWords]:
        """Each window's masks; a lane that has failed has none."""
        self._working.wait()
        return {index: words for index, (lane, words) in self._words.items() if lane.failure is None}


class Constraints:
    """Matchers by request. Written by `Executor`."""

    def __init__(self, vocabulary: int, seconds: float) -> None:
        """`vocabulary`: how many logits a row has. `seconds`: how long a lane's grammar may take for one answer."""
        self._words = math.ceil(vocabulary / 32)
        self._seconds = seconds
        self._lanes: dict[str, LaneGrammar] = {}
        self._filling: Working | None = None
        """What fills the newest masks."""

    def open(self, windows: Sequence[Window]) -> None:
        """Take up every newcomer among the constrained lanes."""
        for window in windows:
            if window.constraint is not None and window.request_id not in self._lanes:
                self._lanes[window.request_id] = LaneGrammar(cast("Grammar", window.constraint))

    def forced(self, limits: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """What the grammars of these lanes say must come next, so many tokens at most; free lanes are left out."""
        forced: dict[str, tuple[int, ...]] = {}

        def ask(lane: LaneGrammar, request_id: str) -> None:
            forced[request_id] = lane.matcher.forced(limits[request_id])

        self._ask_all(ask, limits)
        return forced

    def valid_prefixes(self, drafts: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, list[int]]:
        """How many tokens of each of a lane's drafts its grammar allows; free lanes are left out."""
        valid: dict[str, list[int]] = {}

        def ask(lane: LaneGrammar, request_id: str) -> None:
            valid[request_id] = [lane.valid_prefix(draft) for draft in drafts[request_id]]

        self._ask_all(ask, drafts)
        return valid

    def fill(self, windows: Sequence[Window]) -> FillingMasks | None:
        """Begin to fill the masks of all constrained windows; None if there is none."""
        words = {
            index: (lane, np.full((len(window.draft) + 1, self._words), -1, dtype=np.int32))
            for index, window in enumerate(windows)
            if window.constraint is not None and (lane := self._sound(window.request_id)) is not None
        }
        if not words:
            return None
        works = [
            LaneWork(lane, partial(lane.fill, windows[index].draft, rows)) for index, (lane, rows) in words.items()
        ]
        self._filling = Working(works, self._seconds)
        return FillingMasks(self._filling, words)

    def settle(self) -> None:
        """Wait for masks that nobody will ask for: a matcher is not asked anything while it is walked for them."""
        if self._filling is not None:
            self._filling.wait()

    def advance(self, walks: Mapping[str, Acceptance]) -> dict[str, Acceptance]:
        """Move the lanes' matchers over what their walks emitted; the walks, cut where a grammar ends. Free lanes are
        left out.
        """
        advanced: dict[str, Acceptance] = {}

        def ask(lane: LaneGrammar, request_id: str) -> None:
            advanced[request_id] = lane.advance(walks[request_id])

        self._ask_all(ask, walks)
        return advanced

    def failure(self, request_id: str) -> str | None:
        """Why a constrained lane must end, if it must."""
        lane = self._lanes.get(request_id)
        return None if lane is None else lane.failure

    def forget(self, request_id: str) -> None:
        """The lane left. Idempotent."""
        self._lanes.pop(request_id, None)

    def _ask_all(self, ask: Callable[[LaneGrammar, str], None], request_ids: Mapping[str, object]) -> None:
        """Of every constrained lane among these that has not failed; waits."""
        lanes = [(lane, name) for name in request_ids if (lane := self._sound(name)) is not None]
        Working([LaneWork(lane, partial(ask, lane, name)) for lane, name in lanes], self._seconds).wait()

    def _sound(self, request_id: str) -> LaneGrammar | None:
        lane = self._lanes.get(request_id)
        return lane if lane is not None and lane.failure is None else None


class ForcedText:
    """A `DraftSource`: the text that a grammar leaves no choice about (a schema's keys and punctuation, mostly)."""

    name = "grammar"
    costly = False

    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """Per lane, the forced text as tokens; empty for free lanes and where there is a choice."""
        forced = self._constraints.forced({ask.request_id: ask.budget for ask in asks})
        drafts = [forced.get(ask.request_id, ()) for ask in asks]
        return [Draft(tokens, (0,) * len(tokens)) for tokens in drafts]

    def forget(self, request_id: str) -> None:
        """Its matcher belongs to `Constraints`."""
