"""The event loop's side: events reach their generation in order, and leaving says so once."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from engine.client import EngineClient, Generation
from engine.messages import Cancel, Finish, Message, Submit
from scheduler.events import Event, Finished, Tokens
from scheduler.request import FinishReason, Request, Timing, Usage


def request(name: str) -> Request:
    return Request(name, (1, 2, 3), 8)


def finished(name: str, reason: FinishReason = FinishReason.LENGTH) -> Finished:
    return Finished(name, reason, Usage(3, 2), Timing(0.0, 1.0, 2.0, 3.0))


class Desk:
    """A client and what it sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.client = EngineClient(self.sent.append)


async def read_all(generation: Generation) -> list[Event]:
    return [event async for event in generation]


def on_a_loop(test: Callable[[Desk], Awaitable[None]]) -> Callable[[], None]:
    async def run() -> None:
        async with asyncio.timeout(20):
            await test(Desk())

    def synchronous() -> None:
        asyncio.run(run())

    synchronous.__name__ = test.__name__
    return synchronous


@on_a_loop
async def test_events_come_in_order_and_end_with_the_finished(desk: Desk) -> None:
    with desk.client.submit(request("a")) as generation:
        events = [Tokens("a", (1, 2)), Tokens("a", (3,)), finished("a")]
        desk.client.deliver(events[:1])
        desk.client.deliver(events[1:])
        assert await read_all(generation) == events
        assert await read_all(generation) == []
    assert desk.sent == [Submit(request("a"))]
    assert len(desk.client) == 0


@on_a_loop
async def test_a_reader_that_waits_is_woken_by_each_round(desk: Desk) -> None:
    with desk.client.submit(request("a")) as generation:
        reading = asyncio.ensure_future(read_all(generation))
        for events in ([Tokens("a", (1,))], [Tokens("a", (2,)), Tokens("a", (3,))], [finished("a")]):
            await asyncio.sleep(0)
            assert not reading.done()
            desk.client.deliver(events)
        assert await reading == [Tokens("a", (1,)), Tokens("a", (2,)), Tokens("a", (3,)), finished("a")]


@on_a_loop
async def test_events_go_to_their_own_generation(desk: Desk) -> None:
    with desk.client.submit(request("a")) as one, desk.client.submit(request("b")) as two:
        desk.client.deliver([Tokens("b", (5,)), Tokens("a", (6,)), finished("b"), finished("a")])
        assert await read_all(one) == [Tokens("a", (6,)), finished("a")]
        assert await read_all(two) == [Tokens("b", (5,)), finished("b")]


@on_a_loop
async def test_leaving_early_cancels_once(desk: Desk) -> None:
    with desk.client.submit(request("a")) as generation:
        desk.client.deliver([Tokens("a", (1,))])
        assert await anext(generation) == Tokens("a", (1,))
    desk.client.leave(generation)
    assert desk.sent == [Submit(request("a")), Cancel("a")]
    assert len(desk.client) == 0


@on_a_loop
async def test_leaving_by_an_error_cancels_too(desk: Desk) -> None:
    with pytest.raises(ZeroDivisionError), desk.client.submit(request("a")):
        raise ZeroDivisionError
    assert desk.sent == [Submit(request("a")), Cancel("a")]


@on_a_loop
async def test_a_reader_cancelled_while_it_waits_cancels_its_request(desk: Desk) -> None:
    async def handle() -> None:
        with desk.client.submit(request("a")) as generation:
            await read_all(generation)

    handler = asyncio.ensure_future(handle())
    await asyncio.sleep(0)
    handler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handler
    assert desk.sent == [Submit(request("a")), Cancel("a")]
    desk.client.deliver([Tokens("a", (1,)), finished("a", FinishReason.CANCELLED)])


@on_a_loop
async def test_events_of_those_who_left_and_of_strangers_are_dropped(desk: Desk) -> None:
    with desk.client.submit(request("a")):
        pass
    with desk.client.submit(request("b")) as generation:
        desk.client.deliver([Tokens("a", (1,)), Tokens("stranger", (2,)), finished("a"), finished("stranger")])
        desk.client.deliver([finished("b")])
        assert await read_all(generation) == [finished("b")]


@on_a_loop
async def test_a_request_has_ended_once_its_finished_was_delivered(desk: Desk) -> None:
    with desk.client.submit(request("a")):
        assert len(desk.client) == 1
        desk.client.deliver([finished("a")])
        assert len(desk.client) == 0
    assert desk.sent == [Submit(request("a"))], "nothing to cancel"


@on_a_loop
async def test_nothing_comes_after_the_finished(desk: Desk) -> None:
    with desk.client.submit(request("a")) as generation:
        desk.client.deliver([finished("a"), Tokens("a", (1,)), finished("a")])
        assert await read_all(generation) == [finished("a")]


@on_a_loop
async def test_a_stop_string_is_told_and_is_not_the_end(desk: Desk) -> None:
    with desk.client.submit(request("a")) as generation:
        generation.finish(5)
        assert desk.sent[1:] == [Finish("a", 5)]
        desk.client.deliver([Tokens("a", (1,)), finished("a", FinishReason.STOP)])
        assert await read_all(generation) == [Tokens("a", (1,)), finished("a", FinishReason.STOP)]
    assert desk.sent[1:] == [Finish("a", 5)]


@on_a_loop
async def test_an_id_is_served_once_at_a_time(desk: Desk) -> None:
    with desk.client.submit(request("a")):
        with pytest.raises(ValueError, match="'a' is already being served"):
            desk.client.submit(request("a"))
        assert desk.sent == [Submit(request("a"))]
        desk.client.deliver([finished("a")])
        desk.client.submit(request("a"))
    assert len(desk.sent) == 2


@on_a_loop
async def test_leaving_an_ended_generation_spares_a_newcomer_of_the_same_id(desk: Desk) -> None:
    with desk.client.submit(request("a")):
        desk.client.deliver([finished("a")])
        newcomer = desk.client.submit(request("a"))
    assert len(desk.client) == 1
    desk.client.deliver([finished("a")])
    assert await read_all(newcomer) == [finished("a")]
    assert Cancel("a") not in desk.sent


@on_a_loop
async def test_it_is_empty_when_the_last_one_ended_or_left(desk: Desk) -> None:
    await desk.client.emptied()
    one, two = desk.client.submit(request("a")), desk.client.submit(request("b"))
    waiting = asyncio.ensure_future(desk.client.emptied())
    desk.client.deliver([finished("a")])
    desk.client.leave(one)
    await asyncio.sleep(0)
    assert not waiting.done()
    desk.client.leave(two)
    await waiting
    desk.client.submit(request("c"))
    again = asyncio.ensure_future(desk.client.emptied())
    await asyncio.sleep(0)
    assert not again.done()
    desk.client.fail_all("over")
    await again


@on_a_loop
async def test_cancel_all_asks_and_each_still_gets_its_end(desk: Desk) -> None:
    generations = [desk.client.submit(request(name)) for name in "abc"]
    desk.client.deliver([finished("b")])
    desk.client.cancel_all()
    assert desk.sent[3:] == [Cancel("a"), Cancel("c")]
    desk.client.deliver([finished(name, FinishReason.CANCELLED) for name in "ac"])
    ends = [(await read_all(generation))[-1] for generation in generations]
    assert [end.reason for end in ends if isinstance(end, Finished)] == ["cancelled", "length", "cancelled"]


@on_a_loop
async def test_fail_all_ends_every_open_request_here(desk: Desk) -> None:
    generations = [desk.client.submit(request(name)) for name in "abc"]
    desk.client.deliver([Tokens("a", (1,)), finished("b")])
    desk.client.fail_all("the engine died")
    desk.client.fail_all("twice")
    told = [await read_all(generation) for generation in generations]
    assert [len(events) for events in told] == [2, 1, 1]
    for events in (told[0], told[2]):
        end = events[-1]
        assert isinstance(end, Finished)
        assert (end.reason, end.error, end.usage) == (FinishReason.ERROR, "the engine died", Usage(3, len(events) - 1))
    assert len(desk.client) == 0
    assert not [message for message in desk.sent if isinstance(message, Cancel)]


@on_a_loop
async def test_what_comes_after_fail_all_has_ended_at_once(desk: Desk) -> None:
    desk.client.fail_all("the engine died")
    with desk.client.submit(request("a")) as generation:
        (end,) = await read_all(generation)
    assert isinstance(end, Finished)
    assert (end.reason, end.error, end.usage) == (FinishReason.ERROR, "the engine died", Usage(3, 0))
    assert (desk.sent, len(desk.client)) == ([], 0)
    await desk.client.emptied()


async def a_backlog_is_handed_out_in_shares() -> None:
    client = EngineClient(lambda _message: None)
    generation = client.submit(Request("r", (1,), 1000))
    client.deliver([Tokens("r", (token,)) for token in range(200)])
    others = 0

    async def other() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    for _ in range(200):
        await anext(generation)
    task.cancel()
    assert others >= 5


def test_a_backlog_does_not_keep_the_event_loop_from_others() -> None:
    asyncio.run(a_backlog_is_handed_out_in_shares())
