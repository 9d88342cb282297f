"""Runs one round: propose, prune, choose, verify, accept, keep. The only place where the scheduler's decisions meet a
backend.

Runs on the engine thread. Knows no tensors and no requests, only windows.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from backends.base import Backend, Flight
from engine.constraints import Constraints
from engine.ladder import Guess, Ladder
from engine.prefix import PrefixCache
from scheduler.draft import DraftSource
from scheduler.pace import Offer
from scheduler.round import Drawn, LaneResult, Round
from scheduler.scheduler import Scheduler

Offers = dict[str, tuple[Offer, ...]]
"""What the sources offer, by request."""


class FlyingRound(msgspec.Struct, frozen=True):
    """A round whose forward has been started and not yet read."""

    round: Round
    flight: Flight | None
    """None if it only copied."""
    launched: float
    """When the backend was given it, in seconds."""
    aside: float = 0.0
    """How long was spent on what is counted by itself: sources whose asking takes time, copying; in seconds."""


class Executor:
    """Carries rounds of one scheduler to one backend. Written by `Loop`."""

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        sources: Sequence[DraftSource],
        constraints: Constraints,
        clock: Callable[[], float],
        prefix: PrefixCache | None = None,
    ) -> None:
        """`clock` in seconds."""
        self._scheduler = scheduler
        self._backend = backend
        self._ladder = Ladder(sources, backend.info.vocab_size)
        self._constraints = constraints
        self._clock = clock
        self._prefix = prefix

    def launch(self, planned: Round, after: FlyingRound | None = None) -> FlyingRound:
        """Copy in what is restored, fill in the drafts and start the forward; a round planned ahead feeds on the draws
        of `after`.
        """
        if planned.ahead and after is not None:
            launched = self._clock()
            return FlyingRound(planned, self._backend.verify(planned.windows, after.flight), launched)
        aside = self._restore(planned)
        if not planned.windows:
            return FlyingRound(planned, None, self._clock(), aside)
        self._constraints.open(planned.windows)
        offers = self.offer(planned)
        begun = self._clock()
        drafted = self._ask_costly(planned, offers, self._scheduler.draft(planned))
        aside += self._clock() - begun if self._ladder.costly else 0.0
        masks = self._constraints.fill(drafted.windows)
        launched = self._clock()
        return FlyingRound(drafted, self._backend.verify(drafted.windows, masks=masks), launched, aside)

    def _restore(self, planned: Round) -> float:
        """Copy pieces of the prefix cache to lanes; how long that took."""
        if self._prefix is None or not planned.restores:
            return 0.0
        begun = self._clock()
        try:
            size = self._prefix.restore(planned.restores)
        except Exception:  # the named boundary of copying: whatever it was that cannot be copied is not tried again
            self._prefix.forget(planned.restores)
            raise
        seconds = self._clock() - begun
        self._scheduler.restored(size, seconds)
        return seconds

    def offer(self, coming: Round) -> Offers:
        """Ask the sources how the lanes that draw in a round go on, and tell the scheduler."""
        offers: Offers = {}
        self._take(self._ladder.guesses(self._scheduler.asks(coming)), offers)
        self._scheduler.offer(coming, offers)
        return offers

    def _ask_costly(self, planned: Round, offers: Offers, drafted: Round) -> Round:
        """Sources whose asking takes time are asked for those that have no draft yet, and as deep as pays."""
        for source in self._ladder.costly:
            bare = {window.request_id for window in drafted.windows if window.samples and not window.draft}
            asks = [ask for ask in self._scheduler.asks(planned) if ask.request_id in bare]
            asks = self._ladder.askable(source, asks)
            depth = self._scheduler.depth(source.name, [ask.request_id for ask in asks])
            if not depth:
                continue
            begun = self._clock()
            shallow = [msgspec.structs.replace(ask, budget=min(ask.budget, depth)) for ask in asks]
            self._take(self._ladder.guesses_of(source, shallow), offers)
            self._scheduler.asked(source.name, len(asks), depth, self._clock() - begun)
            self._scheduler.offer(planned, offers)
            drafted = self._scheduler.draft(planned)
        return drafted

    def _take(self, guesses: Iterable[Guess], offers: Offers) -> None:
        """Add to the offers what of the guesses the lanes' grammars allow."""
        by_lane: dict[str, list[Guess]] = {}
        for guess in guesses:
            by_lane.setdefault(guess.request_id, []).append(guess)
        valid = self._constraints.valid_prefixes(
            {name: [guess.draft.tokens for guess in made] for name, made in by_lane.items()}
        )
        for name, made in by_lane.items():
            lengths = valid.get(name, [len(guess.draft.tokens) for guess in made])
            usable = [
                Offer(guess.source, guess.draft.cut(length))
                for guess, length in zip(made, lengths, strict=True)
                if length
            ]
            offers[name] = (*offers.get(name, ()), *usable)

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
        """Keep what the prefix cache can have, and release everything that was held for lanes that left."""
        if self._prefix is not None:
            self._prefix.store(self._scheduler.stores())
        for departure in self._scheduler.departures():
            self._backend.release(departure.slot)
            self._constraints.forget(departure.request_id)
            self._ladder.forget(departure.request_id)
