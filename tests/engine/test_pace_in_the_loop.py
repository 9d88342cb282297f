"""The planner in the real loop, on machines whose time is what they say it is: it takes what there is to win, and where
there is nothing, a round costs what a plain one does.
"""

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from backends.base import Flight, Masks
from engine.config import EngineConfig
from engine.loop import Loop
from engine.messages import Message, Submit
from scheduler.cost import RoundShape
from scheduler.draft import Draft, DraftAsk, DraftSource
from scheduler.events import Tokens
from scheduler.pace import Headlong
from scheduler.request import Request, Sampling
from scheduler.round import Drawn, Window, shape_of
from scheduler.suffix import SuffixDrafts
from tests.engine.served import Overeager, Prophet, Terse, decode

Cost = Callable[[RoundShape], float]


def linear(shape: RoundShape) -> float:
    return 0.038 + 0.002 * shape.rows


def flat(shape: RoundShape) -> float:
    return 0.02 + 0.001 * max(0, shape.rows - 24)


def cliff(shape: RoundShape) -> float:
    return 0.02 + 0.0001 * shape.rows + 0.015 * shape.wide


class PricedFlight:
    def __init__(self, flight: Flight, pay: Callable[[], None]) -> None:
        self.flight = flight
        self._pay = pay

    def read(self) -> list[Drawn]:
        self._pay()
        return self.flight.read()


class Priced(Terse):
    """The fake model on a machine with a price for each round; `now` is its clock, in seconds."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self._cost = cost
        self.now = 0.0

    def verify(  # type: ignore[override]
        self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None
    ) -> PricedFlight:
        flown = after.flight if isinstance(after, PricedFlight) else None
        shape = shape_of(windows)
        return PricedFlight(super().verify(windows, flown, masks), lambda: self._pay(shape))

    def _pay(self, shape: RoundShape) -> None:
        self.now += self._cost(shape)


def requests(lanes: int, tokens: int) -> list[Request]:
    return [
        Request(f"r{lane}", (lane, 7, lane * 3), tokens, Sampling(0.0), frozenset(), ignore_eos=True)
        for lane in range(lanes)
    ]


def served(
    cost: Cost, asked: Sequence[Request], sources: Sequence[DraftSource], draft_tokens: int = 6
) -> tuple[float, Loop]:
    """The seconds that it took; every answer is the plain one."""
    backend = Priced(cost)
    mail: list[Message] = [Submit(request) for request in asked]
    told: dict[str, list[int]] = {request.request_id: [] for request in asked}
    loop = Loop(
        backend,
        EngineConfig(8, 100, draft_tokens),
        sources=sources,
        mailbox=lambda: [mail.pop() for _ in range(len(mail))],
        clock=lambda: backend.now,
    )
    while mail or not loop.idle:
        for event in loop.step():
            if isinstance(event, Tokens):
                told[event.request_id] += event.tokens
    for request in asked:
        assert tuple(told[request.request_id]) == decode(request).tokens
    return backend.now, loop


def plain_texts(asked: Sequence[Request]) -> Mapping[str, tuple[int, ...]]:
    return {request.request_id: (*request.prompt, *decode(request).tokens) for request in asked}


class Always(Prophet):
    """Right to the end of its budget."""

    def _draft(self, ask: DraftAsk) -> tuple[int, ...]:
        return self._plain[ask.request_id][len(ask.tokens) :][: ask.budget]


class Never:
    """Wrong from the first token on, with great confidence."""

    name = "never"
    costly = False

    def __init__(self, plain: Mapping[str, tuple[int, ...]]) -> None:
        self._plain = plain

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        drafts = [self._plain[ask.request_id][len(ask.tokens) :][: ask.budget] for ask in asks]
        return [Draft(tuple((token + 1) % 257 for token in draft), (9,) * len(draft)) for draft in drafts]

    def forget(self, request_id: str) -> None:
        """Remembers nothing."""


@pytest.mark.parametrize("lanes", [1, 4, 8])
@pytest.mark.parametrize(("cost", "gain"), [(linear, 1.3), (flat, 2.5), (cliff, 2.0)])
def test_what_there_is_to_win_is_won(cost: Cost, gain: float, lanes: int) -> None:
    asked = requests(lanes, 150)
    drafted, _ = served(cost, asked, [Always(plain_texts(asked), 0)])
    plain, _ = served(cost, asked, [], 0)
    assert plain / drafted >= gain


@pytest.mark.parametrize("lanes", [1, 4, 8])
@pytest.mark.parametrize("cost", [linear, flat, cliff])
def test_where_nothing_comes_true_it_is_as_if_nobody_drafted(cost: Cost, lanes: int) -> None:
    asked = requests(lanes, 300)
    drafted, loop = served(cost, asked, [Never(plain_texts(asked)), Overeager()])
    plain, _ = served(cost, asked, [], 0)
    assert plain / drafted >= 0.97
    if cost is not flat:  # where rows are free, there is no reason to park
        assert loop.stats().draft_rows_per_round.counts[0] > 0.8 * sum(loop.stats().draft_rows_per_round.counts)


def test_a_source_that_wakes_up_is_noticed_without_having_been_tried() -> None:
    """Wrong for 150 tokens, then right: what it would have drafted is held against what came, in plain rounds too."""
    (request,) = requests(1, 400)
    plain = plain_texts([request])[request.request_id]

    class Late(Always):
        def _draft(self, ask: DraftAsk) -> tuple[int, ...]:
            right = super()._draft(ask)
            return right if len(ask.tokens) > 150 else tuple((token + 1) % 257 for token in right)

    late, loop = served(linear, [request], [Late({request.request_id: plain}, 0)])
    off, _ = served(linear, [request], [], 0)
    assert off / late > 1.5
    (stats,) = loop.stats().drafts
    assert sum(stats.accepted) > 150
    assert stats.drafts - stats.accepted[0] < 15


def test_plain_rounds_pipeline_while_all_lanes_are_parked() -> None:
    """A forward is started before the one before it is read, although drafting is on."""
    asked = requests(4, 200)
    backend = Priced(linear)
    ahead: list[bool] = []
    verify = backend.verify

    def watched(windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None) -> PricedFlight:
        ahead.append(after is not None)
        return verify(windows, after, masks)

    backend.verify = watched  # type: ignore[method-assign]
    mail: list[Message] = [Submit(request) for request in asked]
    loop = Loop(
        backend,
        EngineConfig(8, 100, 6),
        sources=[Never(plain_texts(asked))],
        mailbox=lambda: [mail.pop() for _ in range(len(mail))],
        clock=lambda: backend.now,
    )
    while mail or not loop.idle:
        loop.step()
    assert sum(ahead) > 0.8 * len(ahead)


# ---- any source, any lie ---------------------------------------------------------------------------------------------


class Liar:
    """Random, wrong, too long, no tokens at all, no marks, too few drafts, raising, unable to forget."""

    name = "liar"
    costly = False

    def __init__(self, seed: int, *, costly: bool) -> None:
        self._random = random.Random(seed)
        self.costly = costly

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        lie = self._random.random()
        if lie < 0.1:
            raise LookupError("nothing")
        drafts = [self._draft(ask) for ask in asks]
        return drafts[:-1] if lie < 0.2 else drafts

    def _draft(self, ask: DraftAsk) -> Draft:
        length = self._random.choice([0, 1, ask.budget, ask.budget + 5])
        tokens = tuple(self._random.choice([-1, 0, 97, 101, 116, 256, 257, 1 << 40]) for _ in range(length))
        return Draft(tokens, tuple(range(self._random.choice([0, length, length + 3]))))

    def forget(self, request_id: str) -> None:
        if self._random.random() < 0.5:
            raise KeyError(request_id)


@pytest.mark.parametrize("costly", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_no_source_changes_a_token_whatever_it_says(seed: int, costly: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(100, "paceline.engine")
    asked = requests(5, 80)
    served(linear, asked, [Liar(seed, costly=costly), SuffixDrafts(), Liar(seed + 100, costly=not costly)])


# ---- sources whose asking takes time ---------------------------------------------------------------------------------


class Model(Always):
    """A source with a model of its own: each step of it costs time."""

    name = "model"
    costly = True

    def __init__(self, plain: Mapping[str, tuple[int, ...]], price: float, right: float) -> None:
        super().__init__(plain, 0)
        self._price = price
        self._right = right
        self.backend: Priced
        self.asked = 0

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        self.asked += 1
        depth = max(ask.budget for ask in asks)
        self.backend.now += self._price * depth
        return [self._guess(ask) for ask in asks]

    def _guess(self, ask: DraftAsk) -> Draft:
        right = self._draft(ask)
        tokens = tuple(token if self._random.random() < self._right else (token + 1) % 257 for token in right)
        return Draft(tokens, tuple(range(len(tokens))))


def served_with_model(cost: Cost, asked: Sequence[Request], price: float, right: float) -> tuple[float, Model]:
    model = Model(plain_texts(asked), price, right)
    backend = model.backend = Priced(cost)
    mail: list[Message] = [Submit(request) for request in asked]
    loop = Loop(
        backend,
        EngineConfig(8, 100, 6),
        sources=[model],
        mailbox=lambda: [mail.pop() for _ in range(len(mail))],
        clock=lambda: backend.now,
    )
    while mail or not loop.idle:
        loop.step()
    return backend.now, model


@pytest.mark.parametrize(
    ("price", "right", "gain"), [(0.002, 0.9, 1.5), (0.0, 1.0, 2.0), (0.1, 0.9, 0.93), (0.002, 0.0, 0.93)]
)
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_costly_source_is_asked_as_far_as_it_pays(price: float, right: float, gain: float, lanes: int) -> None:
    asked = requests(lanes, 300)
    drafted, model = served_with_model(linear, asked, price, right)
    plain, _ = served(linear, asked, [], 0)
    assert plain / drafted >= gain
    assert model.asked > 2, "it is tried at least"
    if gain < 1:
        assert model.asked < 30


class Recording(Headlong):
    """Writes down how long rounds are said to take."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def timed(self, shape: RoundShape, seconds: float) -> None:
        self.seconds.append(seconds)


class Slow(Always):
    """A source that the host thinks about for three seconds."""

    def __init__(self, plain: Mapping[str, tuple[int, ...]], backend: Priced) -> None:
        super().__init__(plain, 0)
        self._backend = backend

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        self._backend.now += 3.0
        return super().propose(asks)


def test_what_the_host_does_between_two_rounds_is_a_part_of_their_price() -> None:
    """Two requests, one after the other: a round behind an idle time is timed from its launch."""
    backend, planner = Priced(lambda _: 1.0), Recording()
    asked = requests(2, 12)
    mail: list[Message] = []
    loop = Loop(
        backend,
        EngineConfig(1, 100, 3),
        sources=[Slow(plain_texts(asked), backend)],
        mailbox=lambda: [mail.pop() for _ in range(len(mail))],
        clock=lambda: backend.now,
        pace=planner,
    )
    for request in asked:
        mail.append(Submit(request))
        while mail or not loop.idle:
            loop.step()
        backend.now += 100.0
    each = len(planner.seconds) // 2
    assert each >= 3
    assert planner.seconds == [1.0, *[4.0] * (each - 1)] * 2
