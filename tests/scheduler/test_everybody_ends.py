"""Whatever comes, gives way, fails and is cancelled: everybody who is left alone gets its whole text, as if it had been
served by itself, and never is more memory taken than there is.

The backend is played with lists: a slot holds the tokens that were written to it, and draws depend on all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.admission import Pool
from scheduler.events import Event, Finished, Tokens
from scheduler.pace import Headlong
from scheduler.prefix import PrefixIndex, Tier
from scheduler.request import FinishReason, Request
from scheduler.reuse import Reuse
from scheduler.round import Drawn, LaneResult, Round, Window
from scheduler.scheduler import Limits, Scheduler
from tests.scheduler.memory import PlainLanes, PlainShelf, class_of

BLOCK = 4
ROUNDS = 4000
"""Whoever has not ended then is taken to starve."""
COMMON = tuple(range(24))
"""What many prompts begin with."""


def draw(context: Sequence[int]) -> int:
    return hash(tuple(context)) % 97


def whole_text(request: Request) -> list[int]:
    """What a request says when it is served by itself."""
    text = list(request.prompt)
    while len(text) < len(request.prompt) + request.max_tokens:
        text.append(draw(text))
    return text[len(request.prompt) :]


@dataclass
class Story:
    """Who comes when, and what goes wrong."""

    requests: list[Request]
    arrivals: list[int]
    """The round before which each one comes."""
    cancels: dict[int, int]
    """By request, the round before which it is cancelled."""
    poison: dict[int, int]
    """By request, the place in its text that no forward gets over."""
    lanes: int
    rows: int
    pool: int | None
    blocks_most: int
    cuttable: bool
    crowd: int
    """So many lanes are not too many for a forward."""


@st.composite
def stories(draw: st.DrawFn) -> Story:
    count = draw(st.integers(1, 10))
    requests = []
    for place in range(count):
        own = draw(st.lists(st.integers(100, 102), min_size=1, max_size=8))
        prompt = (*COMMON[: draw(st.sampled_from([0, 4, 7, 16, 24]))], *own)
        deadline = draw(st.none() | st.none() | st.integers(1, 80).map(float))
        owner, priority = draw(st.sampled_from("ab")), draw(st.integers(0, 1))
        length = draw(st.integers(1, 30))
        requests.append(Request(f"r{place}", prompt, length, owner=owner, priority=priority, deadline=deadline))
    some = st.integers(0, count - 1)
    return Story(
        requests,
        [draw(st.sampled_from([0, 0, 3, 20])) for _ in requests],
        draw(st.dictionaries(some, st.integers(1, 60), max_size=2)),
        draw(st.dictionaries(some, st.integers(0, 30), max_size=2)),
        lanes := draw(st.integers(1, 6)),
        lanes + draw(st.integers(1, 20)),
        draw(st.sampled_from([None, 64, 64, 72, 100, 160])),
        draw(st.sampled_from([0, 20, 200])),
        draw(st.booleans()),
        draw(st.sampled_from([2, 100, 100])),
    )


@dataclass
class Play:
    """A scheduler, driven as the engine drives it."""

    story: Story
    now: float = 0.0
    slots: dict[int, list[int]] = field(default_factory=dict)
    told: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, Finished] = field(default_factory=dict)

    def __post_init__(self) -> None:
        story = self.story
        self.index = PrefixIndex(story.blocks_most, block=BLOCK, checkpoints=not story.cuttable)
        self.shelf = PlainShelf(self.index)
        self.lanes = PlainLanes()
        reuse = Reuse(self.index, self.shelf, "model")
        limits = Limits(story.lanes, story.rows, 0, cuttable=story.cuttable)
        room = Pool(story.pool, self.lanes, reuse, story.blocks_most) if story.pool is not None else None
        self.scheduler = Scheduler(limits, Headlong(), reuse, room)
        self.by_id = {request.request_id: request for request in story.requests}
        self.poison = {story.requests[place].request_id: at for place, at in story.poison.items()}

    def run(self) -> None:
        while len(self.ends) < len(self.story.requests):
            assert self.now < ROUNDS, "somebody starves"
            self.come_and_go()
            self.hear(self.scheduler.expire(self.now))
            self.dismiss()
            planned = self.scheduler.plan(self.now)
            self.dismiss()
            if planned is None:
                assert self.scheduler.idle, "somebody is stuck"
            else:
                self.round(planned)
            self.dismiss()
            self.now += 1.0

    def come_and_go(self) -> None:
        for place, request in enumerate(self.story.requests):
            if self.story.arrivals[place] == self.now:
                self.scheduler.submit(request, self.now)
            if self.story.cancels.get(place) == self.now:
                self.hear(self.scheduler.cancel(request.request_id, self.now))

    def round(self, planned: Round) -> None:
        for restore in planned.restores:
            held = self.slots.setdefault(restore.slot, [])
            for piece in restore.pieces:
                held[piece.start :] = self.shelf.tokens[piece.key]
        if planned.restores:
            self.scheduler.restored(1, 0.0)
        self.copy(planned.windows)
        drawn = [self.feed(window) for window in planned.windows]
        self.check_memory()
        if len(planned.windows) > self.story.crowd or any(map(self.is_poisonous, planned.windows)):
            self.hear(self.scheduler.fail([planned], "boom", self.now))
            self.scheduler.stores()
            self.slots.clear()
            return
        results = [
            LaneResult(window, self.scheduler.accept(window, draws) if window.samples else None, window.end)
            for window, draws in zip(planned.windows, drawn, strict=True)
        ]
        self.hear(self.scheduler.commit(results, self.now))

    def copy(self, windows: Sequence[Window]) -> None:
        """What lanes take from others, before anything is written."""
        for window in windows:
            if window.copies is not None:
                source = self.slots[window.copies]
                assert self.story.cuttable or len(source) == window.start
                self.slots[window.slot] = source[: window.start]

    def feed(self, window: Window) -> Drawn:
        """Write a window's tokens, behind what its slot holds, and draw from all of them."""
        held = self.slots.setdefault(window.slot, [])
        assert len(held) >= window.start
        held[window.start :] = window.tokens
        return Drawn((draw(held),) if window.samples else ())

    def is_poisonous(self, window: Window) -> bool:
        return window.start <= self.poison.get(window.request_id, -1) < window.end

    def check_memory(self) -> None:
        taken = sum(class_of(len(held)) for held in self.slots.values())
        assert self.index.stats(Tier.RAM).bytes == sum(map(len, self.shelf.tokens.values()))
        self.lanes.held = taken
        if self.story.pool is not None:
            assert taken <= self.lanes.most
            assert taken + self.index.stats(Tier.RAM).bytes <= self.story.pool

    def dismiss(self) -> None:
        for store in self.scheduler.stores():
            piece, held = store.piece, self.slots[store.slot]
            assert len(held) == piece.end if piece.checkpoint else len(held) >= piece.end
            room = self.index.insert(piece, piece.end - piece.start)
            self.shelf.drop(room.gone)
            if room.granted:
                self.shelf.tokens[piece.key] = held[piece.start : piece.end]
        for departure in self.scheduler.departures():
            if departure.slot is not None:
                self.slots.pop(departure.slot, None)

    def hear(self, events: Iterable[Event]) -> None:
        for event in events:
            assert event.request_id not in self.ends
            if isinstance(event, Finished):
                self.ends[event.request_id] = event
            else:
                assert isinstance(event, Tokens)
                self.told.setdefault(event.request_id, []).extend(event.tokens)


@given(story=stories())
@settings(max_examples=200, deadline=None)
def test_everybody_ends_with_the_text_that_is_its_own(story: Story) -> None:
    play = Play(story)
    play.run()
    for place, request in enumerate(story.requests):
        end, told = play.ends[request.request_id], play.told.get(request.request_id, [])
        assert told == whole_text(request)[: len(told)]
        assert end.usage.completion_tokens == len(told)
        assert end.usage.cached_tokens < len(request.prompt)
        if end.reason is FinishReason.LENGTH:
            assert len(told) == request.max_tokens
        elif end.reason is FinishReason.ERROR:
            assert place in story.poison
        elif end.reason is FinishReason.DEADLINE:
            assert request.deadline is not None
            assert end.timing.finished >= request.deadline
        else:
            assert place in story.cancels
    assert play.scheduler.idle
    assert play.slots == {}
    assert play.index.unyielding(Tier.RAM) == 0, "nothing is held for those that have left"
