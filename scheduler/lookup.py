"""Prompt lookup: drafts what followed the last time that a lane's newest tokens stood in its own context.

(Saxena 2023, "Prompt Lookup Decoding".) An index from n-grams to where they last ended is updated per token, never
rescanned. Pure; knows nothing of other lanes' texts.
"""

from collections.abc import Sequence

from scheduler.draft import DraftAsk


class LookupIndex:
    """Where each n-gram of one growing sequence last ended. Written by `PromptLookup`.

    `continuation()` is where the text after the longest earlier occurrence of the sequence's ending begins.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sorted(sizes, reverse=True)
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0
        self._continuation: int | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the tokens of the sequence that are new since the last call; costs O(new tokens)."""
        for end in range(self._indexed + 1, len(tokens) + 1):
            self._continuation = self._insert(tokens, end)
        self._indexed = max(self._indexed, len(tokens))

    def _insert(self, tokens: Sequence[int], end: int) -> int | None:
        found = None
        for size in self._sizes:
            if size > end:
                continue
            gram = tuple(tokens[end - size : end])
            earlier = self._ends.get(gram)
            if found is None:
                found = earlier
            self._ends[gram] = end
        return found

    def continuation(self) -> int | None:
        """The position after the latest earlier occurrence of the longest indexed n-gram that ends the sequence."""
        return self._continuation


class PromptLookup:
    """A `DraftSource` over each lane's own prompt and output."""

    name = "prompt_lookup"

    def __init__(self, sizes: Sequence[int] = (2, 3, 5)) -> None:
        self._sizes = tuple(sizes)
        self._indices: dict[str, LookupIndex] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[tuple[int, ...]]:
        """Per lane, what followed the longest match; a match that runs into the present goes on in its period."""
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: DraftAsk) -> tuple[int, ...]:
        index = self._indices.setdefault(ask.request_id, LookupIndex(self._sizes))
        index.extend(ask.tokens)
        start = index.continuation()
        if start is None:
            return ()
        period = len(ask.tokens) - start
        return tuple(ask.tokens[start + offset % period] for offset in range(ask.budget))

    def forget(self, request_id: str) -> None:
        """Drop the lane's index."""
        self._indices.pop(request_id, None)
