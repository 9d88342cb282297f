"""The engine's loop over rounds, as one step that can be called and tested without a thread.

Owns the scheduler, the executor and the round in flight. Its mailbox and clock are handed in.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

from backends.base import Backend, ModelInfo
from engine.config import EngineConfig
from engine.constraints import Constraints, ForcedText
from engine.executor import Executor, FlyingRound
from engine.messages import Cancel, Finish, Message, Submit, Task
from engine.prefix import PrefixCache
from scheduler.admission import Pool, Room
from scheduler.draft import DraftSource
from scheduler.events import Event
from scheduler.pace import Headlong, Pace, Planner
from scheduler.round import Round
from scheduler.scheduler import Limits, Scheduler
from scheduler.stats import Stats

_log = logging.getLogger("paceline.engine")


class Loop:
    """`step()` serves one round; `mailbox()` returns the messages that came since its last call, without waiting;
    `clock()` returns seconds. Written by the engine thread alone.
    """

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        *,
        sources: Sequence[DraftSource],
        mailbox: Callable[[], Iterable[Message]],
        clock: Callable[[], float],
        pace: Planner | None = None,
        prefix: PrefixCache | None = None,
    ) -> None:
        """`pace` decides what is drafted; None for the one that learns from this loop's own rounds."""
        limits = Limits(
            max_lanes=config.max_lanes,
            round_rows=config.round_rows,
            draft_tokens=config.draft_tokens,
            itl_target=config.itl_target,
            cuttable=backend.info.cuttable,
            pipelines=backend.info.pipelines,
        )
        pace = pace or (_pace(backend.info) if config.paced else Headlong())
        self._scheduler = Scheduler(limits, pace, prefix.reuse if prefix is not None else None, _room(backend, prefix))
        constraints = Constraints(backend.info.vocab_size, config.fill_seconds)
        forced = [ForcedText(constraints)] if config.draft_tokens else []
        drafters = backend.drafters if config.draft_tokens else ()
        self._executor = Executor(self._scheduler, backend, [*forced, *sources, *drafters], constraints, clock, prefix)
        self._prefix = prefix
        self._backend = backend
        self._mailbox = mailbox
        self._clock = clock
        self._ahead: FlyingRound | None = None
        self._landed: float | None = None
        """When the last round was read; None if the next one does not come straight behind it."""
        self.waiting = False
        """Whether lanes wait for what only a message can bring, or time."""

    @property
    def idle(self) -> bool:
        """Nothing to do until a message comes."""
        return self._scheduler.idle and self._ahead is None

    def stats(self) -> Stats:
        """A snapshot of the counters, between two rounds."""
        return self._scheduler.stats()

    def step(self) -> list[Event]:
        """Serve one round: read the mail, launch, look ahead, wait, read the mail again, commit.

        Cancels are seen before the round is launched and again before anything of it is delivered.
        """
        events = self._read_mail()
        events += self._scheduler.expire(self._clock())
        self._executor.dismiss_departed()  # before a newcomer can be given a slot that a cancel has just freed
        flying, self._ahead = self._ahead, None
        planned = flying.round if flying else self._scheduler.plan(self._clock())
        self._executor.dismiss_departed()  # those that had to make room
        self.waiting = planned is None and not self.idle
        if planned is None:
            self._landed = None
            return events
        launched = [planned]
        try:
            if flying is None:
                flying = self._executor.launch(planned)
            else:
                self._executor.offer(planned)
            if flying.flight is None:
                self._landed = None
                return events
            ahead = self._scheduler.plan_ahead(flying.round)
            if ahead is not None:
                launched.append(ahead)
                self._ahead = self._executor.launch(ahead, after=flying)
            drawn = flying.flight.read()
            self._time(flying)
            events += self._read_mail()
            results = self._executor.land(flying, drawn)
        except Exception as error:  # the named boundary of a failed forward: who is guilty ends, the others go on
            return events + self._fail(launched, error)
        events += self._scheduler.commit(results, self._clock())
        self._executor.dismiss_departed()
        if self.idle:
            self._landed = None
        return events

    def _time(self, flown: FlyingRound) -> None:
        """From the landing of the one before: what the host does between two rounds is a price of rounds that cannot be
        planned ahead. What is counted by itself is left out.
        """
        now = self._clock()
        begun = flown.launched if self._landed is None else self._landed + flown.aside
        self._scheduler.timed(flown.round, now - begun)
        self._landed = now

    def _fail(self, lost: Sequence[Round], error: Exception) -> list[Event]:
        """All caches are lost, and with them these rounds, one behind the other. Raises BrokenBackendError if the
        backend can compute nothing any more.
        """
        _log.error("a round's forward failed", exc_info=error)
        self._ahead, self._landed = None, None
        message = f"the model's forward failed: {type(error).__name__}"
        events = self._read_mail()  # a cancel that came during the forward outranks its failure
        events += self._scheduler.fail(lost, message, self._clock())
        self._scheduler.stores()  # nothing of what the caches hold is to be kept
        self._backend.reset()
        self._executor.dismiss_departed()
        self._executor.probe()
        return events

    def _read_mail(self) -> list[Event]:
        events: list[Event] = []
        messages = list(self._mailbox())
        leaving = {message.request_id for message in messages if isinstance(message, Cancel)}
        for message in messages:
            now = self._clock()
            if isinstance(message, Submit):
                self._scheduler.submit(message.request, now)
            elif isinstance(message, Cancel):
                events += self._scheduler.cancel(message.request_id, now)
            elif isinstance(message, Finish):
                if message.request_id not in leaving:  # a cancel outranks the stop string that it came with
                    events += self._scheduler.finish(message.request_id, message.kept, now)
            elif isinstance(message, Task):
                message.call()
            elif self._prefix is not None:
                self._prefix.receive(message)
        return events


def _room(backend: Backend, prefix: PrefixCache | None) -> Room | None:
    """What lanes and prefix blocks share; None where nothing is bounded."""
    budget = backend.info.budget
    if budget is None:
        return None
    if prefix is None:
        return Pool(budget.pool, backend.memory)
    return Pool(budget.pool, backend.memory, prefix.reuse, prefix.ram_bytes)


def _pace(info: ModelInfo) -> Pace:
    pace = Pace(rectangle=info.rectangle)
    for shape, seconds in info.timed_rounds:
        pace.timed(shape, seconds)
    return pace
