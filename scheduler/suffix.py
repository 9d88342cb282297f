"""Suffix drafts: how the text went on the last times that its ending stood before, in the lane's own tokens and in what
lanes of the same owner have lately said.

After Saxena 2023 ("Prompt Lookup Decoding") and Oliaro et al. 2024 ("SuffixDecoding"). Every place where the newest
few tokens (an anchor) stood is found by an index; how far back each match reaches is seen by comparing; the longest
ones vote on each next token. Pure. What a token costs does not grow with the text, and neither does what a draft costs.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from scheduler.draft import Draft, DraftAsk

ANCHORS = (6, 2)
"""Lengths of anchors. The longest that stood before is taken: many short matches do not hide an old long one."""
LONGEST = 32
"""Matches are not followed further back than so many tokens."""
NEWEST = 16
"""Of all places where an anchor stood, so many of the newest are looked at."""
HISTORY_BYTES = 64 << 20
TOKEN_BYTES = 512
"""What a token in the index takes, at most: its place in the text, and one in a list for each length of anchor."""
_SEPARATOR = -1
"""Stands between two outputs in a history; no token of any vocabulary."""
_STEP = 8
"""Tokens compared at once."""
_REACHES = (3, 5, 8, 12, 20)
"""Bounds of the classes that the length of a match falls into."""


class Text:
    """A growing sequence of tokens, with an index of where each anchor last stood. Written by its owner alone."""

    def __init__(self) -> None:
        self.tokens = array("q")
        self._ends: tuple[dict[int, list[int]], ...] = tuple({} for _ in ANCHORS)
        """Per length of anchor, by its hash: the positions behind it, oldest first."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, each at a constant cost."""
        first = len(self.tokens)
        self.tokens.extend(tokens)
        for size, places in zip(ANCHORS, self._ends, strict=True):
            for end in range(max(first + 1, size), len(self.tokens) + 1):
                ends = places.setdefault(_hash(self.tokens, end, size), [])
                ends.append(end)
                if len(ends) > 2 * NEWEST:
                    del ends[:NEWEST]

    def places(self, text: "Text", size: int) -> list[int]:
        """Positions behind the newest places where the last `size` tokens of a text stood, newest first; of a text in
        itself, its own end is left out. Equal hashes of unequal anchors are among them.
        """
        end = len(text.tokens)
        if end < size:
            return []
        ends = self._ends[ANCHORS.index(size)].get(_hash(text.tokens, end, size), ())
        newest = ends[-1 - NEWEST :]
        return [place for place in reversed(newest) if self is not text or place < end][:NEWEST]


class _Match(msgspec.Struct):
    """The text's ending stood in `text` before position `at`, `length` tokens of it; `at` moves on with the draft."""

    text: Text
    at: int
    length: int


class History:
    """What was lately said, by owner, within a cap of tokens. Written by `SuffixDrafts`.

    Each owner has two texts: the newer one grows; when it is half of the cap long it becomes the older one, whose
    tokens are forgotten at once. Owners that have not been heard of for longest go first.
    """

    def __init__(self, tokens: int) -> None:
        """`tokens`: the cap over all owners."""
        self._cap = tokens
        self._texts: OrderedDict[str, tuple[Text, Text]] = OrderedDict()
        self.size = 0
        """Tokens held now."""

    def add(self, owner: str, output: Sequence[int]) -> None:
        """Remember an output; of one longer than half of the cap, its end."""
        half = self._cap // 2
        kept = [*output[-max(0, half - 1) :], _SEPARATOR]
        if not output or half < 2:
            return
        older, newer = self._texts.pop(owner, (Text(), Text()))
        if len(newer.tokens) + len(kept) > half:
            self.size -= len(older.tokens)
            older, newer = newer, Text()
        newer.extend(kept)
        self.size += len(kept)
        self._texts[owner] = (older, newer)
        while self.size > self._cap:
            _, forgotten = self._texts.popitem(last=False)
            self.size -= sum(len(text.tokens) for text in forgotten)

    def of(self, owner: str) -> tuple[Text, ...]:
        """The owner's texts, newest first."""
        older, newer = self._texts.get(owner, (None, None))
        return () if older is None or newer is None else (newer, older)


class _Lane:
    """One lane's text, and what of it is its output."""

    def __init__(self, ask: DraftAsk) -> None:
        self.text = Text()
        self.prompt = ask.prompt
        self.owner = ask.owner


class SuffixDrafts:
    """A `DraftSource` over each lane's own text and its owner's history. Marks tell the reach of the match and whether
    all matches agree.
    """

    name = "suffix"
    costly = False

    def __init__(self, history_bytes: int = HISTORY_BYTES) -> None:
        self._lanes: dict[str, _Lane] = {}
        self.history = History(history_bytes // TOKEN_BYTES)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """Per lane, what its longest matches agree on; a match that runs into the present goes on in its period."""
        return [self._draft(ask) for ask in asks]

    def forget(self, request_id: str) -> None:
        """The lane's output joins its owner's history."""
        lane = self._lanes.pop(request_id, None)
        if lane is not None:
            self.history.add(lane.owner, lane.text.tokens[lane.prompt :])

    def _draft(self, ask: DraftAsk) -> Draft:
        lane = self._lanes.get(ask.request_id)
        if lane is None:
            lane = self._lanes[ask.request_id] = _Lane(ask)
        lane.text.extend(ask.tokens[len(lane.text.tokens) :])
        return _vote(lane.text, _longest_matches(lane.text, self.history.of(lane.owner)), ask.budget)


def _longest_matches(text: Text, history: Sequence[Text]) -> list[_Match]:
    """The matches of the text's ending that reach furthest back, and those that reach at least half as far."""
    for size in ANCHORS:
        found = [
            _Match(where, place, length)
            for where in (text, *history)
            for place in where.places(text, size)
            if (length := common(where.tokens, place, text.tokens)) >= size
        ]
        if found:
            reach = max(match.length for match in found)
            return [match for match in found if 2 * match.length >= reach]
    return []


def _vote(text: Text, matches: list[_Match], budget: int) -> Draft:
    """Token by token the one whose matches reach furthest together; those that say otherwise are heard no more."""
    tokens: list[int] = []
    marks: list[int] = []
    while len(tokens) < budget:
        ballots: dict[int, list[_Match]] = {}
        for match in matches:
            token = _next(match, text, tokens)
            if token != _SEPARATOR:
                ballots.setdefault(token, []).append(match)
        if not ballots:
            break
        token = max(ballots, key=lambda candidate: sum(match.length for match in ballots[candidate]))
        unanimous = len(ballots) == 1
        matches = ballots[token]
        reach = max(match.length for match in matches) + len(tokens)
        tokens.append(token)
        marks.append(2 * sum(reach >= bound for bound in _REACHES) + unanimous)
        for match in matches:
            match.at += 1
    return Draft(tuple(tokens), tuple(marks))


def _next(match: _Match, text: Text, drafted: Sequence[int]) -> int:
    """What followed; behind the end of the lane's own text stands its draft, behind that of a history nothing."""
    behind = match.at - len(match.text.tokens)
    if behind < 0:
        return match.text.tokens[match.at]
    return drafted[behind] if match.text is text else _SEPARATOR


def _hash(tokens: "array[int]", end: int, size: int) -> int:
    return hash(tokens[end - size : end].tobytes())


def common(left: "array[int]", left_end: int, right: "array[int]") -> int:
    """How many tokens before a position are those that `right` ends with, `LONGEST` at most."""
    right_end = len(right)
    most = min(LONGEST, left_end, right_end)
    common = 0
    while common + _STEP <= most:
        near, far = common, common + _STEP
        if left[left_end - far : left_end - near] != right[right_end - far : right_end - near]:
            break
        common = far
    while common < most and left[left_end - common - 1] == right[right_end - common - 1]:
        common += 1
    return common
