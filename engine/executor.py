"""Runs one round: propose, prune, choose, verify, accept, keep. The only place where the scheduler's decisions meet a
backend.

Runs on the engine thread. Knows no tensors and no requests, only windows.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from backends.base import Backend, Flight
from engine.constraints import Constraints
from engine.ladder import Guess, Ladder
from engine.prefix import PrefixCache
from scheduler.draft import DraftSource
from scheduler.pace import Offer
from scheduler.request import Sampling
from scheduler.round import Drawn, LaneResult, Round, Window
from scheduler.scheduler import Scheduler

_log = logging.getLogger("paceline.engine")

Offers = dict[str, tuple[Offer, ...]]
"""What the sources offer, by request."""
_PROBE = Window(0, "probe", 0, (0,), samples=True, sampling=Sampling(temperature=0.0), reach=2)
"""What is computed to see whether anything can be."""
_PROBES = 3
"""How often that is tried."""


class BrokenBackendError(RuntimeError):
    """The backend fails whatever it is given."""


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
        drafted = self._ask_costly(planned, offers, self._scheduler.drafting.draft(planned))
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
            self._prefix.forget(piece.key for restore in planned.restores for piece in restore.pieces)
            raise
        seconds = self._clock() - begun
        self._scheduler.restored(size, seconds)
        return seconds

    def offer(self, coming: Round) -> Offers:
        """Ask the sources how the lanes that draw in a round go on, and tell the scheduler."""
        offers: Offers = {}
        self._take(self._ladder.guesses(self._scheduler.drafting.asks(coming)), offers)
        self._scheduler.drafting.offer(coming, offers)
        return offers

    def _ask_costly(self, planned: Round, offers: Offers, drafted: Round) -> Round:
        """Sources whose asking takes time are asked for those that have no draft yet, and as deep as pays."""
        for source in self._ladder.costly:
            bare = {window.request_id for window in drafted.windows if window.samples and not window.draft}
            asks = [ask for ask in self._scheduler.drafting.asks(planned) if ask.request_id in bare]
            asks = self._ladder.askable(source, asks)
            depth = self._scheduler.drafting.depth(source.name, [ask.request_id for ask in asks])
            if not depth:
                continue
            begun = self._clock()
            shallow = [msgspec.structs.replace(ask, budget=min(ask.budget, depth)) for ask in asks]
            self._take(self._ladder.guesses_of(source, shallow), offers)
            self._scheduler.drafting.asked(source.name, len(asks), depth, self._clock() - begun)
            self._scheduler.drafting.offer(planned, offers)
            drafted = self._scheduler.drafting.draft(planned)
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
        live = {
            window.request_id: (window, draws)
            for window, draws in zip(flying.round.windows, drawn, strict=True)
            if self._scheduler.serves(window)
        }
        walks = {
            name: self._scheduler.accept(window, draws)
            for name, (window, draws) in live.items()
            if window.samples and draws.error is None
        }
        kept = {
            window.slot: window.start + window.real + (walks[name].accepted if name in walks else 0)
            for name, (window, _) in live.items()
        }
        cached = self._backend.keep(kept)
        walks |= self._constraints.advance(walks)  # the last thing: a round that failed leaves no trace in a matcher
        return [
            LaneResult(
                window,
                walks.get(name),
                cached[window.slot],
                draws.error or self._constraints.failure(name),
                spoiled=draws.error is not None,
            )
            for name, (window, draws) in live.items()
        ]

    def _store(self) -> None:
        stores = self._scheduler.stores()
        if self._prefix is None or not stores:
            return
        try:
            self._prefix.store(stores)
        except Exception:  # the named boundary of copying: what cannot be kept is not, and nobody misses it
            _log.exception("what this round computed cannot be kept in the prefix cache")

    def probe(self) -> None:
        """After a failure, and with no lane in any cache: see whether one token can be computed. Raises
        BrokenBackendError if not, so that no lane is blamed for what is none of theirs.
        """
        self._constraints.settle()
        for _ in range(_PROBES):
            try:
                self._backend.verify((_PROBE,)).read()
                self._backend.keep({_PROBE.slot: _PROBE.end})
            except Exception as error:  # the named boundary of a failed forward
                failure = error
                self._backend.reset()
            else:
                self._backend.release(_PROBE.slot)
                return
        raise BrokenBackendError(f"not one token can be computed: {type(failure).__name__}") from failure

    def dismiss_departed(self) -> None:
        """Keep what the prefix cache can have, and release everything that was held for lanes that left."""
        self._store()
        for departure in self._scheduler.departures():
            if departure.slot is not None:
                self._backend.release(departure.slot)
            if departure.returns:
                self._ladder.pause(departure.request_id)
                continue
            self._constraints.forget(departure.request_id)
            self._ladder.forget(departure.request_id)
