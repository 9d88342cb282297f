"""The engine on its own thread, under a real event loop: loading, serving, draining, stopping and dying."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import msgspec
import pytest

from backends.base import Backend, Budget, Flight, Masks
from backends.fake import EOS, FakeFlight
from engine.client import Generation
from engine.config import EngineConfig
from engine.messages import Cancel
from engine.thread import Engine, EngineState, Mailbox
from scheduler.events import Finished, Tokens
from scheduler.request import FinishReason, Request, Sampling
from scheduler.round import Window
from tests.api.servers import eventually
from tests.engine.served import Terse, decode

STOPS = frozenset({EOS})
ENDLESS = 1_000_000_000
CONFIGS = [EngineConfig(4, 32, 0), EngineConfig(4, 32, 4)]


def request(name: str, max_tokens: int = 30, *, seed: int = 0, ignore_eos: bool = True) -> Request:
    return Request(name, (1, 2, 3, 1, 2, 3), max_tokens, Sampling(1.0, seed), STOPS, ignore_eos)


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test on an event loop of its own, and not for ever."""

    async def run(*given: object) -> None:
        async with asyncio.timeout(60):
            await test(*given)

    def one(config: EngineConfig) -> None:
        asyncio.run(run(config))

    def none() -> None:
        asyncio.run(run())

    chosen: Callable[..., None] = one if "config" in test.__code__.co_varnames[: test.__code__.co_argcount] else none
    chosen.__name__ = test.__name__
    return chosen


@contextlib.asynccontextmanager
async def engine_of(
    make_backend: Callable[[], Backend], config: EngineConfig = CONFIGS[0], *, rests_after: float = 0.0
) -> AsyncIterator[Engine]:
    engine = Engine(make_backend, config, rests_after=rests_after)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def read(generation: Generation) -> tuple[tuple[int, ...], Finished]:
    """All tokens, and the one end."""
    tokens: list[int] = []
    end = None
    async for event in generation:
        assert end is None
        if isinstance(event, Tokens):
            tokens += event.tokens
        else:
            end = event
    assert end is not None
    return tuple(tokens), end


async def ask(engine: Engine, asked: Request) -> tuple[tuple[int, ...], Finished]:
    with engine.client.submit(asked) as generation:
        return await read(generation)


# ---- serving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "drafted"])
@on_a_loop
async def test_many_clients_get_their_plain_answers(config: EngineConfig) -> None:
    asked = [request(f"r{seed}", 40, seed=seed, ignore_eos=False) for seed in range(12)]
    async with engine_of(Terse, config) as engine:
        info = await engine.ready()
        assert (engine.info, engine.state) == (info, EngineState.READY)
        answers = await asyncio.gather(*(ask(engine, each) for each in asked))
        for each, (tokens, end) in zip(asked, answers, strict=True):
            plain = decode(each)
            assert (tokens, end.reason) == (plain.tokens, plain.reason)
            assert end.usage.completion_tokens == plain.completion_tokens
        assert (engine.stats.running, engine.stats.waiting) == (0, 0)
        drafted = sum(count.drafts for _, end in answers for count in end.usage.drafts)
        assert drafted == sum(counter.drafts for counter in engine.stats.drafts)
        assert (drafted > 0) == (config.draft_tokens > 0)


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "drafted"])
@on_a_loop
async def test_leaving_frees_the_lane_for_the_next_client(config: EngineConfig) -> None:
    narrow = EngineConfig(1, 16, config.draft_tokens)
    async with engine_of(Terse, narrow) as engine:
        for attempt in range(5):
            with engine.client.submit(request(f"endless{attempt}", ENDLESS)) as generation:
                assert isinstance(await anext(generation), Tokens)
            asked = request(f"r{attempt}", seed=attempt)
            tokens, end = await ask(engine, asked)
            assert (tokens, end.reason) == (decode(asked).tokens, FinishReason.LENGTH)


@on_a_loop
async def test_a_stop_string_ends_the_lane_with_what_was_kept() -> None:
    asked = request("a", ENDLESS)
    async with engine_of(Terse) as engine:
        with engine.client.submit(asked) as generation:
            assert isinstance(await anext(generation), Tokens)
            assert isinstance(await anext(generation), Tokens)
            generation.finish(2)
            tokens, end = await read(generation)
        assert (end.reason, end.usage.completion_tokens) == (FinishReason.STOP, 2)
        said = decode(request("a", 2 + len(tokens))).tokens
        assert tokens == said[2:]


@on_a_loop
async def test_the_backend_is_touched_by_one_thread_alone() -> None:
    touched: set[int] = set()

    class Noting(Terse):
        def __init__(self) -> None:
            super().__init__()
            touched.add(threading.get_ident())

        def verify(
            self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None
        ) -> FakeFlight:
            touched.add(threading.get_ident())
            return super().verify(windows, after, masks)

        def keep(self, kept: Mapping[int, int]) -> dict[int, int]:
            touched.add(threading.get_ident())
            return super().keep(kept)

        def release(self, slot: int) -> None:
            touched.add(threading.get_ident())
            super().release(slot)

    async with engine_of(Noting) as engine:
        await asyncio.gather(*(ask(engine, request(f"r{place}")) for place in range(6)))
    assert len(touched) == 1
    assert threading.get_ident() not in touched


# ---- the mailbox -----------------------------------------------------------------------------------------------------


def test_the_mailbox_gives_every_message_once_and_in_order() -> None:
    mailbox = Mailbox()
    mailbox.send(Cancel("a"))
    mailbox.send(Cancel("b"))
    mailbox.wait()
    assert mailbox.take() == [Cancel("a"), Cancel("b")]
    assert mailbox.take() == []


def test_a_message_wakes_who_waits() -> None:
    mailbox = Mailbox()
    mailbox.send(Cancel("a"))
    mailbox.take()
    sender = threading.Thread(target=mailbox.send, args=(Cancel("b"),))
    sender.start()
    mailbox.wait()
    assert mailbox.take() == [Cancel("b")]
    sender.join()


def test_a_closed_mailbox_never_puts_anybody_to_sleep_again() -> None:
    mailbox = Mailbox()
    mailbox.close()
    for _ in range(3):
        assert mailbox.closed
        mailbox.take()
        mailbox.wait()


# ---- loading ---------------------------------------------------------------------------------------------------------


class Gate:
    """Makes a backend when it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._opened = threading.Event()
        self._error = error

    def open(self) -> None:
        self._opened.set()

    def __call__(self) -> Backend:
        assert self._opened.wait(60)
        if self._error is not None:
            raise self._error
        return Terse()


@on_a_loop
async def test_what_came_while_it_loaded_is_served_after() -> None:
    gate = Gate()
    async with engine_of(gate) as engine:
        answer = asyncio.ensure_future(ask(engine, request("a")))
        impatient = asyncio.ensure_future(engine.ready())
        await asyncio.sleep(0)
        assert (engine.state, engine.info) == (EngineState.LOADING, None)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        gate.open()
        await engine.ready()
        assert (await answer)[0] == decode(request("a")).tokens


@on_a_loop
async def test_what_loading_raised_is_what_ready_raises() -> None:
    gate = Gate(LookupError("no such model"))
    async with engine_of(gate) as engine:
        answer = asyncio.ensure_future(ask(engine, request("a")))
        await asyncio.sleep(0)
        gate.open()
        for _ in range(2):
            with pytest.raises(LookupError, match="no such model"):
                await engine.ready()
        assert engine.state is EngineState.BROKEN
        tokens, end = await answer
        assert (tokens, end.reason) == ((), FinishReason.ERROR)
    assert engine.state is EngineState.BROKEN


@on_a_loop
async def test_stopping_does_not_wait_for_a_load() -> None:
    gate = Gate()
    async with engine_of(gate) as engine:
        generation = engine.client.submit(request("a"))
        await engine.stop()
        assert engine.state is EngineState.STOPPED
        assert (await read(generation))[1].reason is FinishReason.ERROR
        gate.open()
        await engine.ready()
        assert engine.state is EngineState.STOPPED, "a load that ends too late changes nothing"


@on_a_loop
async def test_an_engine_that_was_not_started_says_so() -> None:
    engine = Engine(Terse, CONFIGS[0])
    with pytest.raises(RuntimeError, match="not started"):
        await engine.ready()
    await engine.stop()
    assert engine.state is EngineState.STOPPED


# ---- draining and stopping -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "drafted"])
@on_a_loop
async def test_a_drain_lets_everybody_finish(config: EngineConfig) -> None:
    asked = [request(f"r{seed}", 50, seed=seed) for seed in range(6)]
    async with engine_of(Terse, config) as engine:
        await engine.ready()
        answers = [asyncio.ensure_future(ask(engine, each)) for each in asked]
        await asyncio.sleep(0)
        await engine.drain(60)
        assert engine.state is EngineState.DRAINING
        assert len(engine.client) == 0
        for each, answer in zip(asked, answers, strict=True):
            tokens, end = await answer
            assert (tokens, end.reason) == (decode(each).tokens, FinishReason.LENGTH)


@on_a_loop
async def test_a_drain_cancels_at_its_deadline_those_who_run_and_those_who_wait() -> None:
    async with engine_of(Terse, EngineConfig(2, 16)) as engine:
        await engine.ready()
        generations = [engine.client.submit(request(f"r{place}", ENDLESS)) for place in range(4)]
        assert isinstance(await anext(generations[0]), Tokens)
        await engine.drain(0)
        ends = [(await read(generation))[1] for generation in generations]
        assert {end.reason for end in ends} == {FinishReason.CANCELLED}
        assert [end.timing.admitted is None for end in ends] == [False, False, True, True]


@on_a_loop
async def test_a_drain_with_nobody_there_is_over_at_once() -> None:
    async with engine_of(Terse) as engine:
        await engine.ready()
        await engine.drain(3600)
        assert engine.state is EngineState.DRAINING


@on_a_loop
async def test_stopping_twice_is_stopping_once() -> None:
    async with engine_of(Terse) as engine:
        await engine.ready()
        await ask(engine, request("a"))
        await engine.stop()
        await engine.stop()
        assert engine.state is EngineState.STOPPED
        await engine.drain(0)
        assert engine.state is EngineState.STOPPED


@on_a_loop
async def test_rule_9_what_is_open_when_the_engine_stops_ends_too() -> None:
    async with engine_of(Terse) as engine:
        await engine.ready()
        generation = engine.client.submit(request("a", ENDLESS))
        assert isinstance(await anext(generation), Tokens)
        await engine.stop()
        assert (await read(generation))[1].reason is FinishReason.ERROR
        assert engine.state is EngineState.STOPPED


# ---- failing and dying -----------------------------------------------------------------------------------------------


class KeepsBadly(Terse):
    """Fails once while it cuts caches: inside the boundary of a forward."""

    failed = False

    def keep(self, kept: Mapping[int, int]) -> dict[int, int]:
        if not self.failed:
            self.failed = True
            raise OSError("the caches are gone")
        return super().keep(kept)


class ReleasesBadly(Terse):
    """Cannot let a lane go: outside of every boundary but the thread's own."""

    def release(self, slot: int) -> None:
        raise OSError("the device is gone")


class ComputesNothing(Terse):
    """Breaks at its tenth forward, and for good."""

    forwards = 0

    def verify(self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None) -> FakeFlight:
        self.forwards += 1
        if self.forwards > 9:
            raise MemoryError("the device is gone")
        return super().verify(windows, after, masks)


class Interrupted(Terse):
    """Raises in a forward what is no Exception."""

    def verify(self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None) -> FakeFlight:
        raise KeyboardInterrupt


@on_a_loop
async def test_the_engine_survives_a_failed_round() -> None:
    async with engine_of(KeepsBadly) as engine:
        await engine.ready()
        tokens, end = await ask(engine, request("a"))
        assert (tokens, end.reason) == (decode(request("a")).tokens, FinishReason.LENGTH)
        assert engine.state is EngineState.READY
        assert engine.stats.failed_forwards == 1


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "drafted"])
@on_a_loop
async def test_when_the_thread_dies_every_stream_ends_with_an_error(config: EngineConfig) -> None:
    async with engine_of(ReleasesBadly, config) as engine:
        await engine.ready()
        asked = [request("short", 5), *(request(f"long{place}", ENDLESS) for place in range(6))]
        answers = await asyncio.gather(*(ask(engine, each) for each in asked))
        for _, end in answers:
            assert end.reason is FinishReason.ERROR
            assert end.error == "the engine died: OSError"
        assert engine.state is EngineState.BROKEN
        await engine.drain(60)
        await engine.stop()
        assert engine.state is EngineState.BROKEN, "its supervisor must still see it"


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "drafted"])
@on_a_loop
async def test_when_the_backend_is_broken_every_stream_ends_with_an_error(config: EngineConfig) -> None:
    """Those that are served, and those that wait."""
    async with engine_of(ComputesNothing, config) as engine:
        await engine.ready()
        answers = await asyncio.gather(*(ask(engine, request(f"r{place}", ENDLESS)) for place in range(9)))
        assert {end.error for _, end in answers} == {"the engine died: BrokenBackendError"}
        assert any(tokens for tokens, _ in answers), "it had begun well"
        assert (engine.state, len(engine.client)) == (EngineState.BROKEN, 0)


@on_a_loop
async def test_what_is_no_exception_ends_every_stream_too() -> None:
    async with engine_of(Interrupted) as engine:
        _, end = await ask(engine, request("a"))
        assert (end.reason, end.error) == (FinishReason.ERROR, "the engine died: KeyboardInterrupt")
        assert (engine.state, len(engine.client)) == (EngineState.BROKEN, 0)


def cannot_load() -> Backend:
    raise LookupError("no such model")


@pytest.mark.parametrize("make_backend", [Interrupted, cannot_load])
def test_a_request_that_comes_after_the_end_fails_at_once(make_backend: Callable[[], Backend]) -> None:
    """Once, it waited for ever: nobody reads the mailbox any more."""

    async def run() -> None:
        async with asyncio.timeout(60), engine_of(make_backend) as engine:
            _, first = await ask(engine, request("a"))
            for _ in range(2):
                tokens, end = await ask(engine, request("a"))
                assert (tokens, end.reason, end.error) == ((), FinishReason.ERROR, first.error)
                assert len(engine.client) == 0
            await engine.drain(3600)
            await engine.stop()
            _, end = await ask(engine, request("b"))
            assert end.error == "the engine was stopped"

    asyncio.run(run())


# ---- time ------------------------------------------------------------------------------------------------------------


@on_a_loop
async def test_who_has_had_its_time_ends_served_or_not() -> None:
    """The clock is `time.monotonic`: a deadline that is over ends a request before it is served."""
    async with engine_of(Terse, EngineConfig(1, 16)) as engine:
        await engine.ready()
        with engine.client.submit(request("endless", ENDLESS)) as generation:
            assert isinstance(await anext(generation), Tokens)
            late = msgspec.structs.replace(request("late", ENDLESS), deadline=time.monotonic())
            tokens, end = await ask(engine, late)
            assert (tokens, end.reason, end.timing.admitted) == ((), FinishReason.DEADLINE, None)
        soon = msgspec.structs.replace(request("soon", ENDLESS), deadline=time.monotonic() + 0.2)
        tokens, end = await ask(engine, soon)
        assert end.reason is FinishReason.DEADLINE
        assert end.usage.completion_tokens == len(tokens) > 0
        assert tokens == decode(request("soon", len(tokens))).tokens


class Resting(Terse):
    """Counts how often it may rest."""

    def __init__(self) -> None:
        super().__init__(budget=Budget(40_000, 1000, 3000))
        self.rested = threading.Semaphore(0)

    def rest(self) -> None:
        self.rested.release()


@on_a_loop
async def test_an_idle_engine_says_that_it_is_alive() -> None:
    backend = Resting()
    assert Engine(lambda: backend, CONFIGS[0]).beat is None
    async with engine_of(lambda: backend) as engine:
        await engine.ready()
        beats = set()
        for _ in range(3):
            await asyncio.to_thread(backend.rested.acquire)
            beats.add(engine.beat)
        assert len(beats) == 3


@on_a_loop
async def test_between_two_requests_that_follow_each_other_nothing_is_given_back() -> None:
    backend = Resting()
    async with engine_of(lambda: backend, rests_after=3600.0) as engine:
        await engine.ready()
        seen = set()
        for place in range(3):
            await ask(engine, request(f"r{place}", 5))
            await asyncio.to_thread(eventually, lambda: engine.beat not in seen, "it is alive")
            seen.add(engine.beat)
        assert not backend.rested.acquire(blocking=False)
    assert backend.rested.acquire(blocking=False)  # at its end


@on_a_loop
async def test_what_memory_is_spent_on_can_be_seen() -> None:
    backend = Resting()
    async with engine_of(lambda: backend) as engine:
        await engine.ready()
        with engine.client.submit(request("a", ENDLESS)) as generation:
            assert isinstance(await anext(generation), Tokens)
            assert isinstance(await anext(generation), Tokens)
            memory = engine.memory
            assert memory is not None
            assert (memory.budget, memory.weights, memory.scratch) == (40_000, 1000, 3000)
            assert memory.lanes in {256 * 12 * 2**k for k in range(4)}
        while backend.rested.acquire(blocking=False):
            continue  # what it rested before is no news
        await asyncio.to_thread(backend.rested.acquire)
        assert engine.memory is not None
        assert engine.memory.lanes == 0
