"""Server-sent events, written straight to ASGI: one `send` per event, comments while nothing happens, and an ear for a
client that leaves.

Owns a streamed response from its headers to its end. Knows no dialect: frames arrive as bytes.
"""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from starlette.types import Receive, Send

KEEPALIVE = b":\n\n"
"""A comment: clients skip it, proxies count it as traffic."""
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

T = TypeVar("T")


def frame(data: bytes) -> bytes:
    """One event; `data` holds no line break."""
    return b"data: " + data + b"\n\n"


class EventStream:
    """Writes the frames of one response. Written by the task that produces them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._written = time.monotonic()

    async def open(self) -> None:
        """Send the headers, before there is anything to say."""
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})

    async def write(self, frames: bytes) -> None:
        """Send one or more whole frames now."""
        self._written = time.monotonic()
        await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def close(self) -> None:
        """End the response."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep_alive(self, seconds: float) -> None:
        """Write a comment whenever nothing was written for so long. Runs until it is cancelled."""
        while True:
            silent = time.monotonic() - self._written
            if silent >= seconds:
                await self.write(KEEPALIVE)
                silent = 0.0
            await anyio.sleep(seconds - silent)


async def serve_events(
    receive: Receive, send: Send, produce: Callable[[EventStream], Awaitable[None]], keepalive_seconds: float
) -> None:
    """Answer with the frames that `produce` writes. When the client leaves, `produce` is cancelled where it stands."""
    stream = EventStream(send)
    await stream.open()
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_on_disconnect, receive, group.cancel_scope)
        group.start_soon(stream.keep_alive, keepalive_seconds)
        await produce(stream)
        await stream.close()
        group.cancel_scope.cancel()


async def unless_disconnected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T | None:
    """What `work` returns or raises; None if the client left first, and then `work` was cancelled where it stood."""
    done: T | None = None
    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_on_disconnect, receive, group.cancel_scope)
        try:
            done = await work()
        except Exception as error:  # raised again below: out of the group it would come as one of a group
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return done


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
