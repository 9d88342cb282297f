"""One run of the engine's loop over the fake model, with the mail arriving at chosen moments, and the plain decoding of
the same requests, one lane and one token at a time, to hold it against.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.base import Budget, Flight, Masks, MaskWords
from backends.fake import EOS, FakeBackend
from backends.grammar.base import Matcher
from engine.config import EngineConfig
from engine.loop import Loop
from engine.messages import Cancel, Finish, Message, Submit
from engine.prefix import PrefixCache
from scheduler.draft import Draft, DraftAsk, DraftSource
from scheduler.events import Event, Finished, TokenLogprob, Tokens
from scheduler.pace import Headlong, Planner
from scheduler.request import FinishReason, Request
from scheduler.round import Drawn, History, Window
from scheduler.stats import Stats
from scheduler.suffix import SuffixDrafts
from tests.engine.grammars import WORDS, Chart, ChartMatcher
from tests.engine.shelves import MemorySpill, Shelf

PATIENCE = 5000
"""Steps after which a run that should have ended has hung."""
PROBE = "probe"
"""In whose name the loop asks, after a failure, whether anything can be computed."""
TOKEN_BYTES = 12
"""What a position of a lane takes in the fake model."""


class Terse(FakeBackend):
    """The fake model, but it comes to an end every few dozen tokens."""

    def greedy(self, tokens: Sequence[int], state: int) -> int:
        return EOS if state % 37 == 1 else super().greedy(tokens, state)


@dataclass(frozen=True)
class Plain:
    """What a request gets alone and without speculation."""

    tokens: tuple[int, ...]
    """Delivered ones."""
    reason: FinishReason
    completion_tokens: int
    logprobs: tuple[TokenLogprob, ...]

    @property
    def fed(self) -> tuple[int, ...]:
        """Every token that is drawn where it is drafted: behind the end of a grammar, too, a stop token."""
        return (*self.tokens, EOS) if self.reason is FinishReason.STOP else self.tokens


class OneMask:
    """The mask of the one row of the one window that a plain decode has."""

    def __init__(self, matcher: Matcher) -> None:
        self._words = np.zeros((1, WORDS), dtype=np.int32)
        matcher.fill(self._words[0])

    def wait(self) -> Mapping[int, MaskWords]:
        return {0: self._words}


def decode(request: Request) -> Plain:
    """One lane, one token at a time."""
    model = Terse()
    chart = request.constraint
    assert chart is None or isinstance(chart, Chart)
    matcher = ChartMatcher(chart) if chart is not None else None
    text, start = list(request.prompt), 0
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    while len(tokens) < request.max_tokens:
        window = Window(
            0,
            request.request_id,
            start,
            tuple(text[start:]),
            True,
            request.sampling,
            len(text) + 1,
            history=History(text, len(request.prompt)) if request.sampling.counts else None,
            constraint=chart,
        )
        (drawn,) = model.verify([window], masks=OneMask(matcher) if matcher else None).read()
        start = len(text)
        (token,) = drawn.tokens
        if token in request.stop_tokens and (chart is not None or not request.ignore_eos):
            return Plain(tuple(tokens), FinishReason.STOP, len(tokens) + 1, tuple(logprobs))
        tokens.append(token)
        logprobs += drawn.logprobs
        text.append(token)
        if matcher is not None:
            assert matcher.accept(token)
            if matcher.finished:
                return Plain(tuple(tokens), FinishReason.STOP, len(tokens), tuple(logprobs))
    return Plain(tuple(tokens), FinishReason.LENGTH, len(tokens), tuple(logprobs))


def marked(tokens: Sequence[int]) -> Draft:
    """A draft whose source has one mark only."""
    return Draft(tuple(tokens), (0,) * len(tokens))


class Prophet:
    """A `DraftSource` that knows the plain answers, and is right for as long as it likes."""

    name = "prophet"
    costly = False

    def __init__(self, plain: Mapping[str, tuple[int, ...]], seed: int) -> None:
        """`plain` is each request's prompt with all that will be drawn after it."""
        self._plain = plain
        self._random = random.Random(seed)
        self.forgotten: list[str] = []

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [marked(self._draft(ask)) for ask in asks]

    def _draft(self, ask: DraftAsk) -> tuple[int, ...]:
        ahead = self._plain[ask.request_id][len(ask.tokens) :][: self._random.randint(0, ask.budget)]
        wrong = self._random.choices(range(257), k=self._random.randint(0, ask.budget - len(ahead)))
        return (*ahead, *wrong)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


class Overeager:
    """A `DraftSource` that always has a guess, and a longer one than it was asked for."""

    name = "overeager"
    costly = False

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [marked((ask.tokens[-1],) * (ask.budget + 3)) for ask in asks]

    def forget(self, request_id: str) -> None:
        """Remembers nothing."""


@dataclass(frozen=True)
class Forward:
    """A verify forward that was started."""

    windows: tuple[Window, ...]
    piped: bool
    mails: int
    """How often the mailbox had been looked at by then."""

    @property
    def request_ids(self) -> set[str]:
        return {window.request_id for window in self.windows}


def agreement(window: Window, text: Sequence[int]) -> int:
    """How many of a window's drafts are what plain decoding draws."""
    agreed = 0
    for drafted, token in zip(window.draft, text[window.start + window.real :], strict=False):
        if drafted != token:
            break
        agreed += 1
    return agreed


@dataclass(frozen=True)
class Harm:
    """What goes wrong in a run. Forwards are counted from 0, and so are the calls of `keep`; probes are neither."""

    verify: frozenset[int] = frozenset()
    """Forwards that raise when they are started."""
    read: frozenset[int] = frozenset()
    """Those that raise when they are read."""
    keep: frozenset[int] = frozenset()
    """Calls that raise."""
    poison: Mapping[str, int] = field(default_factory=dict)
    """Requests for which a forward raises that writes at this position of them, or behind it."""
    nan: Mapping[str, int] = field(default_factory=dict)
    """Requests for which it computes no numbers there."""

    def poisons(self, windows: Sequence[Window]) -> bool:
        return any(window.end > self.poison.get(window.request_id, window.end) for window in windows)

    def spoiled(self, windows: Sequence[Window]) -> list[int]:
        """Their slots."""
        return [window.slot for window in windows if window.end > self.nan.get(window.request_id, window.end)]


NO_HARM = Harm()


class WatchedFlight:
    def __init__(self, flight: Flight, read: Callable[[], None]) -> None:
        self.flight = flight
        self._read = read

    def read(self) -> list[Drawn]:
        self._read()
        return self.flight.read()


class Watched:
    """Implements `Backend` over the fake one: notes what is asked of it, and does the harm it is told to.

    Holds every window and every cache against the texts that plain decoding gives (contract rules 15 and 16), and what
    is in memory against the budget.
    """

    def __init__(
        self,
        texts: Mapping[str, tuple[int, ...]],
        prompts: Mapping[str, int],
        harm: Harm,
        *,
        cuttable: bool = True,
        pool: int | None = None,
    ) -> None:
        """Each request's plain text, prompt included, and how many tokens of it are the prompt. `pool`: bytes for lanes
        and prefix blocks together.
        """
        budget = Budget(pool, 0, 0) if pool is not None else None
        self.model = Terse(cuttable=cuttable, budget=budget, token_bytes=TOKEN_BYTES)
        self.blocks = self.model.blocks
        self.info = self.model.info
        self.memory = self.model.memory
        self.drafters = self.model.drafters
        self.prefix: PrefixCache | None = None
        """Whose blocks are in memory too."""
        self.texts = texts
        self.prompts = prompts
        self.mails = 0
        self._harm = harm
        self.keeps = 0
        self._landing: dict[int, Window] = {}
        """What was read last, by slot."""
        self._landed = 0
        self.forwards: list[Forward] = []
        self.log: list[str] = []
        self.failed: list[int] = []
        """The forwards that raised, or whose `keep` did."""
        self.spoiled: list[tuple[int, int]] = []
        """Forwards, and the slots for which they computed no numbers."""
        self.holders: dict[int, str] = {}
        """Whose cache is in each slot."""
        self.opened: list[str] = []
        self.released: list[str] = []
        self.faults: list[str] = []
        self.resets = 0
        self.probes = 0
        self._probing = False
        self.most_bytes = 0
        """The most that lanes and blocks ever took together."""
        self.copies = 0
        """How many lanes were begun with what another one had cached."""

    def verify(self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None) -> Flight:
        self._probing = windows[0].request_id == PROBE
        if self._probing:
            self.probes += 1
            if self.model.lanes:
                self.faults.append("it was probed while lanes were in their caches")
            return self.model.verify(windows)
        number = len(self.forwards)
        self.forwards.append(Forward(tuple(windows), after is not None, self.mails))
        self.log.append(f"verify {number}")
        for window in windows:
            self._look_at(window)
        if number in self._harm.verify or self._harm.poisons(windows):
            self._fail(number)
        for slot in self._harm.spoiled(windows):
            self.spoiled.append((number, slot))
            self.model.spoil(slot)
        flown = after.flight if isinstance(after, WatchedFlight) else None
        flight = WatchedFlight(self.model.verify(windows, flown, masks), lambda: self._on_read(number))
        self._weigh()
        return flight

    def _fail(self, number: int) -> None:
        self.failed.append(number)
        raise RuntimeError("no more memory")

    def _weigh(self) -> None:
        blocks = self.prefix.reuse.used if self.prefix is not None else 0
        self.most_bytes = max(self.most_bytes, self.memory.held + blocks)

    def _on_read(self, number: int) -> None:
        self.log.append(f"read {number}")
        self._landing = {window.slot: window for window in self.forwards[number].windows}
        self._landed = number
        if number in self._harm.read:
            self._fail(number)

    def _look_at(self, window: Window) -> None:
        holder = self.holders.get(window.slot)
        if holder is None:
            self.holders[window.slot] = window.request_id
            self.opened.append(window.request_id)
        elif holder != window.request_id:
            self.faults.append(f"{window.request_id} was put into the slot of {holder}")
        text = self.texts[window.request_id]
        holds_text = window.slot if window.copies is None else window.copies
        self.copies += window.copies is not None
        if window.start and self._cached(holds_text)[: window.start] != text[: window.start]:
            self.faults.append(f"the cache of {window.request_id} is not its text up to {window.start}")
        if window.tokens != text[window.start : window.start + len(window.tokens)]:
            self.faults.append(f"a window of {window.request_id} is not its text from {window.start}")
        chart = window.constraint
        if isinstance(chart, Chart):
            matcher = ChartMatcher(chart)
            if not all(matcher.accept(token) for token in (*self.generated(window), *window.draft)):
                self.faults.append(f"{window.request_id} drafted what its grammar does not allow")
        if len(window.draft) > window.budget:
            self.faults.append(f"{window.request_id} drafted more than its budget")

    def generated(self, window: Window) -> tuple[int, ...]:
        """What the window's lane has generated when it begins."""
        return self.texts[window.request_id][self.prompts[window.request_id] : window.start + window.real]

    def _cached(self, slot: int) -> tuple[int, ...]:
        return tuple(self.model.lanes[slot].tokens) if slot in self.model.lanes else ()

    def keep(self, kept: Mapping[int, int]) -> dict[int, int]:
        if self._probing:
            return self.model.keep(kept)
        number, self.keeps = self.keeps, self.keeps + 1
        if number in self._harm.keep:
            self._fail(self._landed)
        broken = {slot for forward, slot in self.spoiled if forward == self._landed}
        for slot, length in kept.items():
            window, text = self._landing[slot], self.texts[self.holders[slot]]
            if self._cached(slot)[:length] != text[:length]:
                self.faults.append(f"{window.request_id} keeps what is not its text up to {length}")
            agreed = 0 if slot in broken else agreement(window, text)
            if length != window.start + window.real + agreed:
                self.faults.append(f"{window.request_id} keeps {length}, not its real tokens and the accepted drafts")
        return self.model.keep(kept)

    def release(self, slot: int) -> None:
        if slot in self.holders and not self._probing:
            self.released.append(self.holders.pop(slot))
        self._probing = False
        self.model.release(slot)

    def reset(self) -> None:
        self.resets += 1
        self.model.reset()

    def use(self) -> None:
        """Nothing is measured."""

    def rest(self) -> None:
        """Nothing is held to be fast."""


@dataclass(frozen=True)
class Leave:
    """A client cancels at the given look into the mailbox, counted from its own arrival."""

    after: int


@dataclass(frozen=True)
class StopString:
    """A client finds a stop string at the given look into the mailbox, ending with a token that it was told."""

    after: int
    behind: int
    """How many tokens it has been told behind the last one that it wants kept."""


@dataclass(frozen=True)
class Guest:
    """A request, when it comes (in looks into the mailbox), and how its client goes before the end, if it does."""

    request: Request
    arrives: int = 0
    goes: Leave | StopString | None = None


@dataclass(frozen=True)
class Step:
    """What one step of the loop said, and the looks into the mailbox that it took: `[first, last]`."""

    first: int
    last: int
    events: tuple[Event, ...]


@dataclass
class Served:
    """The record of a run."""

    guests: dict[str, Guest]
    backend: Watched
    steps: list[Step] = field(default_factory=list)
    stopped: dict[str, int] = field(default_factory=dict)
    """How many tokens each stop string kept, where one was found."""
    prophets: list[Prophet] = field(default_factory=list)
    stats: Stats | None = None
    prefix: PrefixCache | None = None
    strayed: list[str] = field(default_factory=list)
    """Whose matcher stood, after some round, elsewhere than behind the tokens delivered."""
    matchers: dict[str, object] = field(default_factory=dict)
    """Each constrained request's."""

    def look_at_matchers(self, loop: Loop) -> None:
        for name, lane in loop._executor._constraints._lanes.items():
            if self.matchers.setdefault(name, lane) is not lane:
                self.strayed.append(f"{name} got another one")
            chart, matcher = self.guests[name].request.constraint, lane.matcher
            assert isinstance(chart, Chart)
            assert isinstance(matcher, ChartMatcher)
            fresh = ChartMatcher(chart)
            if not all(fresh.accept(token) for token in self.tokens(name)) or matcher.states != fresh.states:
                self.strayed.append(name)

    def logprobs(self, request_id: str) -> tuple[TokenLogprob, ...]:
        return tuple(
            logprob for event in self.events(request_id) if isinstance(event, Tokens) for logprob in event.logprobs
        )

    def events(self, request_id: str) -> list[Event]:
        return [event for step in self.steps for event in step.events if event.request_id == request_id]

    def tokens(self, request_id: str) -> tuple[int, ...]:
        return tuple(token for event in self.events(request_id) if isinstance(event, Tokens) for token in event.tokens)

    def end(self, request_id: str) -> Finished:
        """The terminal event; there must be exactly one."""
        (end,) = (event for event in self.events(request_id) if isinstance(event, Finished))
        return end

    def undisturbed(self) -> list[str]:
        """Whose clients stayed to the end, and who had time enough and did no harm."""
        left = (FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.DEADLINE)
        return [name for name in self.guests if self.end(name).reason not in left and name not in self.stopped]


class Mail:
    """Delivers each message at its look into the mailbox."""

    def __init__(self, served: Served, disk: MemorySpill | None) -> None:
        self._served = served
        self._disk = disk
        self.looks = 0
        self.letters: deque[Message] = deque()
        """From others than clients."""

    def __call__(self) -> Iterable[Message]:
        look, self.looks = self.looks, self.looks + 1
        self._served.backend.mails = self.looks
        if self._disk is not None:
            self._disk.turn()
        while self.letters:
            yield self.letters.popleft()
        for guest in self._served.guests.values():
            if guest.arrives == look:
                yield Submit(guest.request)
            if guest.goes is not None and guest.arrives + guest.goes.after == look:
                yield from self._go(guest.request.request_id, guest.goes)

    def _go(self, request_id: str, goes: Leave | StopString) -> Iterable[Message]:
        if isinstance(goes, Leave):
            yield Cancel(request_id)
            return
        kept = len(self._served.tokens(request_id)) - goes.behind
        ended = any(isinstance(event, Finished) for event in self._served.events(request_id))
        if kept > 0 and not ended:
            self._served.stopped[request_id] = kept
            yield Finish(request_id, kept)

    @property
    def last(self) -> int:
        """The look at which the last message comes."""
        guests = self._served.guests.values()
        return max((guest.arrives + (guest.goes.after if guest.goes else 0) for guest in guests), default=0)


def sources_named(names: str, texts: Mapping[str, tuple[int, ...]], seed: int) -> list[DraftSource]:
    """Names of sources with a `+` between them, in the order of the ladder; empty for none."""
    made: dict[str, DraftSource] = {
        "suffix": SuffixDrafts(),
        "prophet": Prophet(texts, seed),
        "overeager": Overeager(),
    }
    return [made[name] for name in names.split("+") if name]


def serve(
    guests: Iterable[Guest],
    config: EngineConfig,
    sources: str = "",
    *,
    seed: int = 0,
    harm: Harm = NO_HARM,
    pace: Planner | None = None,
    shelf: Shelf | None = None,
    pool: int | None = None,
) -> Served:
    """Run the loop until everything has ended; drafts are taken as they come, unless there is a pace. With a `shelf`
    there is a prefix cache, with a `pool` only so many bytes for lanes and blocks.
    """
    by_name = {guest.request.request_id: guest for guest in guests}
    texts = {name: (*guest.request.prompt, *decode(guest.request).fed) for name, guest in by_name.items()}
    prompts = {name: len(guest.request.prompt) for name, guest in by_name.items()}
    backend = Watched(texts, prompts, harm, cuttable=shelf is None or shelf.cuttable, pool=pool)
    served = Served(by_name, backend)
    mail = Mail(served, shelf.disk if shelf is not None else None)
    ladder = sources_named(sources, texts, seed)
    served.prophets = [source for source in ladder if isinstance(source, Prophet)]
    prefix = shelf.open(backend.blocks, mail.letters.append) if shelf is not None else None
    served.prefix = backend.prefix = prefix
    loop = Loop(
        backend,
        config,
        sources=ladder,
        mailbox=mail,
        clock=lambda: float(mail.looks),
        pace=pace or Headlong(),
        prefix=prefix,
    )
    for _ in range(PATIENCE):
        if loop.idle and mail.looks > mail.last and not (shelf and shelf.disk and shelf.disk.busy):
            served.stats = loop.stats()
            assert not loop._executor._constraints._lanes, "a matcher was kept for a lane that left"
            assert backend.memory.held == 0, "memory was kept for a lane that left"
            return served
        first = mail.looks
        events = loop.step()
        served.steps.append(Step(first, mail.looks - 1, tuple(events)))
        served.look_at_matchers(loop)
    raise AssertionError("the loop never came to rest")
