"""Drafts from a text that the client expects (Predicted Outputs): the answer is followed through it, word by word.

While the answer says what is expected, the follower is at home: its cursor moves on. A token that is not the expected
one leaves home, and home stays where it was: the answer has put something in, or left out, or said otherwise, and comes
back near by. Until it has been seen back for a few tokens, every place that its newest tokens could stand at is weighed
anew: by how many of them stand there, against how far that is from where a word put in or a word replaced would
lead. Pure.
"""

from collections.abc import Iterator, Sequence
from math import log2

from scheduler.draft import Draft, DraftAsk
from scheduler.suffix import ANCHORS, Text, common

_RUNS = (1, 2, 4, 8, 16)
"""Bounds of the classes of confidence: tokens that were as expected, one after the other."""
_BACK = 4
"""So many tokens in a row, and the answer is at home again."""
_NEAR = 8
"""Places so near to home are looked at for a single token that stands there."""
_TOKEN = 2.0
"""What a token that stands at a place weighs, in doublings of its distance."""


class _Follower:
    """One lane's answer beside its expected text."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = Text()
        self.expected.extend(expected)
        self.answer = Text()
        self.cursor = 0
        """Where the expected text goes on, as far as can be told."""
        self.run = 0
        """Tokens in front of the cursor that the answer has said, one after the other; 0 where it is a guess."""
        self.home = 0
        self.away = 0
        """Tokens that were said since home was left; 0 at home."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The answer goes on."""
        expected = self.expected.tokens
        for token in tokens:
            self.answer.extend((token,))
            if not self.away and self.cursor < len(expected) and expected[self.cursor] == token:
                self.cursor += 1
                self.run += 1
            else:
                self.away += 1
                self.cursor, self.run = max(self._places(), key=self._weight)
                if self.run >= _BACK:
                    self.away = 0
            if not self.away:
                self.home = self.cursor

    def _places(self) -> Iterator[tuple[int, int]]:
        """Where the answer may stand in the expected text, and how many of its newest tokens stand there. The first
        is the guess that each token since home was left has taken the place of one.
        """
        expected, answer = self.expected.tokens, self.answer.tokens
        last = len(expected)
        near = range(self.home + 1, min(self.home + _NEAR, last) + 1)
        aligned = min(self.home + self.away, last)
        for place in (aligned, *near, *(far for size in ANCHORS for far in self.expected.places(self.answer, size))):
            run = common(expected, place, answer)
            if run or place == aligned:
                yield place, run

    def _weight(self, place_and_run: tuple[int, int]) -> float:
        place, run = place_and_run
        put_in, replaced = place - run - self.home, place - self.home - self.away
        return _TOKEN * run - log2(1 + min(abs(put_in), abs(replaced))) - (put_in < 0)

    def draft(self, budget: int) -> Draft:
        if not self.run and self.away > _BACK:
            return Draft()
        tokens = tuple(self.expected.tokens[self.cursor : self.cursor + budget])
        marks = tuple(self._mark(self.run + place) for place in range(len(tokens)))
        return Draft(tokens, marks)

    def _mark(self, run: int) -> int:
        """A guess far from home is worth least."""
        return 0 if not run and self.away > 1 else 1 + sum(run >= bound for bound in _RUNS)


class PredictionDrafts:
    """A `DraftSource` for lanes whose request brought an expected text."""

    name = "prediction"
    costly = False

    def __init__(self) -> None:
        self._lanes: dict[str, _Follower] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """Per lane, how its expected text goes on; empty without one, and behind its end."""
        return [self._draft(ask) for ask in asks]

    def forget(self, request_id: str) -> None:
        """Drop the lane's text."""
        self._lanes.pop(request_id, None)

    def _draft(self, ask: DraftAsk) -> Draft:
        if not ask.expected:
            return Draft()
        lane = self._lanes.get(ask.request_id)
        if lane is None:
            lane = self._lanes[ask.request_id] = _Follower(ask.expected)
        lane.extend(ask.tokens[ask.prompt + len(lane.answer.tokens) :])
        return lane.draft(ask.budget)
