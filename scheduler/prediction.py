"""Drafts from a text that the client expects (Predicted Outputs): the answer is followed through it, word by word.

A cursor stands where the expected text goes on. A token that is not the expected one loses it; it is found again where
the answer's newest tokens stand in the expected text, nearest behind where it was. Pure.
"""

from collections.abc import Sequence

from scheduler.draft import Draft, DraftAsk
from scheduler.suffix import ANCHORS, Text

_RUNS = (1, 2, 4, 8, 16)
"""Bounds of the classes of confidence: tokens that were as expected, one after the other."""


class _Follower:
    """One lane's answer beside its expected text."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = Text()
        self.expected.extend(expected)
        self.answer = Text()
        self.cursor = 0
        self.run = 0
        """Tokens in a row that were as expected."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The answer goes on."""
        expected = self.expected.tokens
        for token in tokens:
            self.answer.extend((token,))
            if self.cursor < len(expected) and expected[self.cursor] == token:
                self.cursor += 1
                self.run += 1
            else:
                self.run = 0
                self.cursor = self._found()

    def _found(self) -> int:
        """Where the newest tokens stand in the expected text; else one token has taken the place of another."""
        for size in ANCHORS:
            places = [
                place
                for place in self.expected.places(self.answer, size)
                if self.expected.tokens[place - size : place] == self.answer.tokens[-size:]
            ]
            if places:
                behind = [place for place in places if place >= self.cursor]
                return min(behind) if behind else max(places)
        return min(self.cursor + 1, len(self.expected.tokens))

    def draft(self, budget: int) -> Draft:
        tokens = tuple(self.expected.tokens[self.cursor : self.cursor + budget])
        marks = tuple(sum(self.run + place >= bound for bound in _RUNS) for place in range(len(tokens)))
        return Draft(tokens, marks)


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
