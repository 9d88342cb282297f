"""Streamed responses by themselves: frames, silence, and clients that leave."""

import anyio
import pytest
from starlette.types import Message

from api.sse import KEEPALIVE, EventStream, frame, serve_events, unless_disconnected


class Peer:
    """A client without a socket."""

    def __init__(self) -> None:
        self.received: list[Message] = []
        self.left = anyio.Event()
        self.commented = anyio.Event()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.received.append(message)
        if message.get("body") == KEEPALIVE:
            self.commented.set()

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.received if message["type"] == "http.response.body"]


def test_a_frame_is_one_event() -> None:
    assert frame(b'{"a":1}') == b'data: {"a":1}\n\n'


def test_headers_come_first_then_each_frame_by_itself_then_the_end() -> None:
    async def main() -> Peer:
        peer = Peer()

        async def produce(stream: EventStream) -> None:
            assert peer.received[0]["type"] == "http.response.start"
            await stream.write(frame(b"1"))
            await stream.write(frame(b"2"))

        await serve_events(peer.receive, peer.send, produce, 10)
        return peer

    peer = anyio.run(main)
    assert (b"content-type", b"text/event-stream; charset=utf-8") in peer.received[0]["headers"]
    assert peer.bodies == [frame(b"1"), frame(b"2"), b""]
    assert [message["more_body"] for message in peer.received[1:]] == [True, True, False]


def test_comments_come_only_in_silence() -> None:
    async def main() -> list[bytes]:
        peer = Peer()

        async def produce(stream: EventStream) -> None:
            await peer.commented.wait()
            before = len(peer.bodies)
            for _ in range(20):
                await stream.write(frame(b"x"))
            assert len(peer.bodies) == before + 20

        await serve_events(peer.receive, peer.send, produce, 0.02)
        return peer.bodies

    bodies = anyio.run(main)
    assert bodies[0] == KEEPALIVE


def test_a_client_that_leaves_stops_the_producer_where_it_stands() -> None:
    async def main() -> tuple[Peer, list[str]]:
        peer, passed = Peer(), []

        async def produce(stream: EventStream) -> None:
            await stream.write(frame(b"1"))
            peer.left.set()
            try:
                await anyio.sleep_forever()
            finally:
                passed.append("cleaned up")
            passed.append("went on")

        await serve_events(peer.receive, peer.send, produce, 10)
        return peer, passed

    peer, passed = anyio.run(main)
    assert passed == ["cleaned up"]
    assert peer.bodies == [frame(b"1")]


def test_a_producer_that_fails_is_heard_of() -> None:
    async def main() -> None:
        peer = Peer()

        async def produce(stream: EventStream) -> None:
            raise ZeroDivisionError

        await serve_events(peer.receive, peer.send, produce, 10)

    with pytest.raises(BaseExceptionGroup) as caught:
        anyio.run(main)
    assert caught.group_contains(ZeroDivisionError)


def test_work_is_done_unless_the_client_leaves_first() -> None:
    async def main() -> tuple[str | None, str | None]:
        staying, leaving = Peer(), Peer()

        async def quick() -> str:
            return "done"

        async def slow() -> str:
            leaving.left.set()
            await anyio.sleep_forever()
            return "never"

        return await unless_disconnected(staying.receive, quick), await unless_disconnected(leaving.receive, slow)

    assert anyio.run(main) == ("done", None)


def test_work_that_fails_raises_its_own_error() -> None:
    async def main() -> None:
        async def fail() -> None:
            raise ValueError("mine")

        await unless_disconnected(Peer().receive, fail)

    with pytest.raises(ValueError, match="mine"):
        anyio.run(main)
