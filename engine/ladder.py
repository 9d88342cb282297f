"""The draft sources in their order, asked so that none of them can do harm: what a source says is a guess, its failure
is its own, and a lane for which it failed does without it.
"""

import logging
from collections.abc import Iterator, Sequence

import msgspec

from scheduler.draft import Draft, DraftAsk, DraftSource

_log = logging.getLogger("paceline.engine")


class Guess(msgspec.Struct, frozen=True):
    """A source's draft for a lane; not empty."""

    source: str
    request_id: str
    draft: Draft


class Ladder:
    """Asks the sources for the executor. Written by it alone, on the engine thread."""

    def __init__(self, sources: Sequence[DraftSource], vocabulary: int) -> None:
        """`vocabulary`: how many tokens there are; others are cut off."""
        self._sources = sources
        self._vocabulary = vocabulary
        self._failed: dict[str, set[str]] = {}
        """By request: the sources that failed for it."""

    @property
    def costly(self) -> Sequence[DraftSource]:
        """Those whose asking takes time that counts."""
        return [source for source in self._sources if source.costly]

    def guesses(self, asks: Sequence[DraftAsk]) -> Iterator[Guess]:
        """What all others say, source by source."""
        for source in self._sources:
            if not source.costly:
                yield from self.guesses_of(source, self.askable(source, asks))

    def askable(self, source: DraftSource, asks: Sequence[DraftAsk]) -> list[DraftAsk]:
        """Those for whom it may be asked."""
        return [ask for ask in asks if self._may(source, ask)]

    def guesses_of(self, source: DraftSource, asks: Sequence[DraftAsk]) -> Iterator[Guess]:
        """What one source says."""
        for ask, draft in zip(asks, self._propose(source, asks), strict=True):
            if (usable := self._usable(draft, ask.budget)).tokens:
                yield Guess(source.name, ask.request_id, usable)

    def forget(self, request_id: str) -> None:
        """The lane left."""
        self._failed.pop(request_id, None)
        self._forget(request_id, self._sources)

    def pause(self, request_id: str) -> None:
        """The lane left to make room, and comes back: only sources that have caches of their own need to forget it."""
        self._forget(request_id, self.costly)

    def _forget(self, request_id: str, sources: Sequence[DraftSource]) -> None:
        """A source that cannot even forget a lane is no reason to fail."""
        for source in sources:
            try:
                source.forget(request_id)
            except Exception:  # the named boundary of a draft source
                _log.exception("the draft source %s failed", source.name)

    def _may(self, source: DraftSource, ask: DraftAsk) -> bool:
        wanted = ask.sources is None or source.name in ask.sources
        return wanted and source.name not in self._failed.get(ask.request_id, ())

    def _propose(self, source: DraftSource, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        """For all lanes at once; where that fails, lane by lane, to find whom it fails for."""
        if not asks:
            return ()
        try:
            drafts = source.propose(asks)
            if len(drafts) == len(asks):
                return drafts
            _log.error("the draft source %s gave %d drafts for %d lanes", source.name, len(drafts), len(asks))
        except Exception:  # the named boundary of a draft source: without its guesses a round is as right as with them
            _log.exception("the draft source %s failed", source.name)
        return [self._propose_one(source, ask) for ask in asks]

    def _propose_one(self, source: DraftSource, ask: DraftAsk) -> Draft:
        try:
            (draft,) = source.propose([ask])
        except Exception:  # the same boundary
            _log.warning("the draft source %s is parked for %s", source.name, ask.request_id)
            self._failed.setdefault(ask.request_id, set()).add(source.name)
            return Draft()
        return draft

    def _usable(self, draft: Draft, budget: int) -> Draft:
        """As long as was asked for, up to the first thing that is no token."""
        length = min(budget, len(draft.tokens), len(draft.marks))
        for place, token in enumerate(draft.tokens[:length]):
            if not 0 <= token < self._vocabulary:
                return draft.cut(place)
        return Draft(draft.tokens[:length], draft.marks[:length])
