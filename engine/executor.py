"""Runs one round: propose, prune, verify, accept, keep. The only place where the scheduler's decisions meet a backend.

Runs on the engine thread. Knows no tensors and no requests, only windows.
"""

import logging
from collections.abc import Sequence

import msgspec

from backends.base import Backend, Flight
from engine.constraints import Constraints
from scheduler.draft import DraftAsk, DraftSource
from scheduler.round import Drawn, LaneResult, Round, Window
from scheduler.scheduler import Scheduler

_log = logging.getLogger("paceline.engine")


class FlyingRound(msgspec.Struct, frozen=True):
    """A round whose forward has been started and not yet read."""

    round: Round
    flight: Flight


class Executor:
    """Carries rounds of one scheduler to one backend. Written by `Loop`."""

    def __init__(
        self, scheduler: Scheduler, backend: Backend, sources: Sequence[DraftSource], constraints: Constraints
    ) -> None:
        self._scheduler = scheduler
        self._backend = backend
        self._sources = sources
        self._constraints = constraints

    def launch(self, planned: Round, after: FlyingRound | None = None) -> FlyingRound:
        """Fill in the drafts and start the forward; a round planned ahead feeds on the draws of `after`."""
        if planned.ahead and after is not None:
            return FlyingRound(planned, self._backend.verify(planned.windows, after.flight))
        self._constraints.open(planned.windows)
        windows = self._pruned(self._propose(planned.windows))
        flight = self._backend.verify(windows, masks=self._constraints.fill(windows))
        return FlyingRound(Round(windows), flight)

    def land(self, flying: FlyingRound, drawn: Sequence[Drawn]) -> list[LaneResult]:
        """Walk each live lane's draft against its draws, and cut its caches to what it keeps."""
        live = [
            (window, self._scheduler.accept(window, draws) if window.samples else None)
            for window, draws in zip(flying.round.windows, drawn, strict=True)
            if self._scheduler.serves(window)
        ]
        walks = {window.request_id: walk for window, walk in live if walk is not None}
        walks |= self._constraints.advance(walks)
        results = [(window, walks.get(window.request_id)) for window, _ in live]
        kept = {
            window.slot: window.start + window.real + (walk.accepted if walk is not None else 0)
            for window, walk in results
        }
        cached = self._backend.keep(kept)
        return [
            LaneResult(window, walk, cached[window.slot], self._constraints.failure(window.request_id))
            for window, walk in results
        ]

    def dismiss_departed(self) -> None:
        """Release everything that was held for lanes that left."""
        for departure in self._scheduler.departures():
            self._backend.release(departure.slot)
            self._constraints.forget(departure.request_id)
            for source in self._sources:
                source.forget(departure.request_id)

    def _propose(self, windows: tuple[Window, ...]) -> tuple[Window, ...]:
        """Ask each source in turn for the lanes that no source before it had a guess for."""
        filled = list(windows)
        for source in self._sources:
            open_places = [place for place, window in enumerate(filled) if window.budget > 0 and not window.draft]
            if not open_places:
                break
            asks = [self._ask(filled[place]) for place in open_places]
            for place, draft in zip(open_places, _drafts(source, asks), strict=True):
                if draft:
                    filled[place] = _with_draft(filled[place], draft, source.name)
        return tuple(filled)

    def _pruned(self, windows: tuple[Window, ...]) -> tuple[Window, ...]:
        """Cut every constrained draft to its valid prefix."""
        valid = self._constraints.valid_prefixes({w.request_id: w.draft for w in windows if w.draft})
        return tuple(
            msgspec.structs.replace(window, draft=window.draft[: valid[window.request_id]])
            if window.request_id in valid
            else window
            for window in windows
        )

    def _ask(self, window: Window) -> DraftAsk:
        return DraftAsk(window.request_id, self._scheduler.tokens(window.request_id), window.budget)


def _drafts(source: DraftSource, asks: Sequence[DraftAsk]) -> Sequence[tuple[int, ...]]:
    try:
        return source.propose(asks)
    except Exception:  # the named boundary of a draft source: a round without its guesses is as right as one with them
        _log.exception("the draft source %s failed", source.name)
        return [()] * len(asks)


def _with_draft(window: Window, draft: tuple[int, ...], source: str) -> Window:
    return msgspec.structs.replace(window, draft=draft[: window.budget], source=source)
