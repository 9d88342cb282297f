"""The bytes of bodies: a request's, up to a limit of its own and one of all together; a response's, piece by piece."""

from collections.abc import Callable

import anyio
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ApiError
from api.metrics import Refusal

_LINGER_SECONDS = 2.0
"""How long a refused client may go on sending before its connection ends."""
_PIECE = 64 * 1024
"""So much of a response is handed over at once. A slow client has the time of one write for each."""


class Bodies:
    """The bodies of requests that are being read. Lives on the event loop."""

    def __init__(self, most: int, together: int, refused: Callable[[Refusal], None]) -> None:
        """One takes `most` bytes at most, and all of them `together`. `refused` counts those that do not fit."""
        self._most = most
        self._together = together
        self._refused = refused
        self.held = 0
        """Bytes of bodies whose end has not come yet."""

    async def read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the client left in the middle of it. To be parsed before anything is awaited: then no
        other body grows beside it.

        Raises a 413 as soon as the body says, or turns out, to be longer than it may be, and a 503 where all of them
        are; the rest is not read.
        """
        if _announced(scope) > self._most:
            raise _too_large(self._most)
        body = bytearray()
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                more = message.get("body", b"")
                body += more
                self.held += len(more)
                self._check(len(body))
                if not message.get("more_body", False):
                    return bytes(body)
        finally:
            self.held -= len(body)

    def _check(self, length: int) -> None:
        if length > self._most:
            raise _too_large(self._most)
        if self.held > self._together:
            self._refused(Refusal.BODY)
            message = "too many large bodies are being read; try again later"
            raise ApiError(503, message, code="too_many_bodies", retry_after=1, headers=_CLOSE)


class ReadToTheEnd:
    """Whoever is answered before its body was read, as every refusal is, hears the answer at once; but the response
    only ends when the client has sent its body, of which nothing is kept, or has had its time. A connection that is
    closed on a client that still sends is reset, and takes the answer with it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Requests without a body pass through."""
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        ended = False

        async def receive_and_note() -> Message:
            nonlocal ended
            message = await receive()
            ended = message["type"] == "http.disconnect" or not message.get("more_body", False)
            return message

        async def send_and_read(message: Message) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not last or ended:
                await send(message)
                return
            await send({**message, "more_body": True})
            with anyio.move_on_after(_LINGER_SECONDS):
                while not ended:
                    await receive_and_note()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(scope, receive_and_note, send_and_read)


async def send_whole(response: Response, send: Send) -> None:
    """Send a response whose body is complete, in pieces: each waits until those before it were taken."""
    body = bytes(response.body)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    for begin in range(0, max(1, len(body)), _PIECE):
        more = begin + _PIECE < len(body)
        await send({"type": "http.response.body", "body": body[begin : begin + _PIECE], "more_body": more})


_CLOSE = (("connection", "close"),)


def _has_body(scope: Scope) -> bool:
    return _announced(scope) > 0 or any(name == b"transfer-encoding" for name, _ in scope["headers"])


def _announced(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than the limit of {limit} bytes", code="body_too_large", headers=_CLOSE)
