"""What one connection may cost: how large and how slow a request may come, how long an answer may lie unread.

uvicorn's protocol parses requests and writes answers, and limits neither. Knows requests as bytes and moments; what
is refused here is told in the dialect of `api.openai.errors`, as the path is often not known yet.
"""

import asyncio
import logging
import resource
import secrets
import select
import socket
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.errors import ApiError
from api.metrics import Refusal
from api.openai.errors import error_response
from api.service import Settings

HEAD_BYTES = 64 * 1024
"""A request line and its headers."""
_SLOWEST = 64 * 1024
"""Bytes of a body that a slow line must bring in a second."""
_OTHER_FILES = 512
"""Files that are open besides connections, generously."""
_LINGER_SECONDS = 1.0
"""How long a refused client has to read why. Closing at once would reset the connection while it still sends, and take
the answer with it.
"""
_LOOK_SECONDS = 0.25
"""How often a client that has closed its sending half is looked after."""

_log = logging.getLogger("paceline.connection")


class Part(Enum):
    """What of a request is coming."""

    NONE = 0
    HEAD = 1
    BODY = 2


def connections(settings: Settings, refused: Callable[[Refusal], None]) -> type[asyncio.Protocol]:
    """What uvicorn makes a connection with (`uvicorn.Config(http=...)`); it calls it as it would the class."""
    return cast("type[asyncio.Protocol]", partial(BoundedConnection, settings, refused))


def allow_open_files(connections: int) -> None:
    """Let the process open as many files as so many connections and all else need. With the usual limit of 1,024 a
    crowd of clients would keep the prefix cache from its files.
    """
    needed = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):
        most = soft
    if most < needed:
        _log.warning("%d connections need %d open files, of which the system allows %d", connections, needed, most)


class BoundedConnection(HttpToolsProtocol):
    """One connection and its limits. Written by its transport's callbacks, on the event loop."""

    def __init__(self, settings: Settings, refused: Callable[[Refusal], None], **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._settings = settings
        self._count_refusal = refused
        self._part = Part.NONE
        self._began = 0.0
        """When that part began, by the event loop's clock."""
        self._head_bytes = 0
        self._body_bytes = 0
        self._reading: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        """Runs while something is written that the client does not take."""
        self._leaving: asyncio.TimerHandle | None = None
        """Runs after a refusal, and while a half-closed client waits for its answer."""
        self._refused = False
        self._cycles: deque[RequestResponseCycle] = deque()
        """Requests that have no whole answer yet, in order."""

    # ---- it comes and goes ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """One too many is told so. One that says nothing is closed as one that waits between two requests is."""
        super().connection_made(transport)
        # Every write that the socket's own buffer does not take at once makes the next one wait: so what lies here is
        # one write's, and `pause_writing` knows whether the client reads.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self._settings.max_connections:
            self.connections.discard(self)
            message = f"{self._settings.max_connections} connections are open; try again later"
            self._refuse(ApiError(503, message, code="too_many_connections", retry_after=5), Refusal.CONNECTIONS)
            return
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks, and tell all handlers; uvicorn tells that of the newest request alone."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for timer in (self._reading, self._unread, self._leaving):
            if timer is not None:
                timer.cancel()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open for an answer. It does for a client on a Unix socket that has only closed
        its sending half. Over TCP that looks the same as one that left, and a lane is not kept for those.
        """
        if self._refused or self._part is not Part.NONE or not self._answering or not self._half_closed():
            return False
        self.cycle.keep_alive = False
        self._look_after()
        return True

    def _look_after(self) -> None:
        """Nothing is read any more, so nothing but this tells when the client closes the other half."""
        if self._half_closed():
            self._leaving = self.loop.call_later(_LOOK_SECONDS, self._look_after)
        else:
            self.transport.abort()

    def _half_closed(self) -> bool:
        """On a socket where a client that has closed both halves shows as hung up."""
        own = self.transport.get_extra_info("socket")
        if own is None or own.family != socket.AF_UNIX:
            return False
        look = select.poll()
        look.register(own.fileno(), 0)
        return not look.poll(0)

    # ---- a request comes ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Read in slices, so that no head can come whole that is too long."""
        for begin in range(0, len(data), HEAD_BYTES):
            if self._refused or self.transport.is_closing():
                return
            self._take(data[begin : begin + HEAD_BYTES])

    def _take(self, data: bytes) -> None:
        if self._part is Part.NONE:
            self._begin(Part.HEAD)
        clock = self._reading
        super().data_received(data)
        if self._part is Part.HEAD and self._reading is clock:  # all of it belongs to this head, and more is to come
            self._head_bytes += len(data)
            if self._head_bytes >= HEAD_BYTES:
                message = f"the head of the request is larger than {HEAD_BYTES} bytes"
                self._refuse(ApiError(431, message, code="head_too_large"), Refusal.HEAD_SIZE)

    def on_message_begin(self) -> None:
        """A head begins, perhaps right behind another request's body."""
        super().on_message_begin()
        if self._part is not Part.HEAD:
            self._begin(Part.HEAD)

    def on_headers_complete(self) -> None:
        """The body's time begins."""
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        self._begin(Part.BODY)

    def on_body(self, body: bytes) -> None:
        """Counted for its time."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there."""
        super().on_message_complete()
        self._begin(Part.NONE)

    def _begin(self, part: Part) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._part, self._began = part, self.loop.time()
        self._head_bytes = self._body_bytes = 0
        self._reading = None if part is Part.NONE else self.loop.call_later(self._time_left(), self._look_at_clock)

    def _time_left(self) -> float:
        if self._part is Part.HEAD:
            allowed = self._settings.head_seconds
        else:
            allowed = self._settings.body_seconds + self._body_bytes / _SLOWEST
        return allowed - (self.loop.time() - self._began)

    def _look_at_clock(self) -> None:
        """Refuse what did not come in time. What nobody reads, as an answer before it is under way, is not late."""
        left = self._time_left()
        if self.flow.read_paused or (self._part is Part.HEAD and self._answering):
            self._began = self.loop.time()
            left = self._time_left()
        if left > 0:
            self._reading = self.loop.call_later(left, self._look_at_clock)
        elif self._part is Part.HEAD:
            message = f"the head of the request did not come within {self._settings.head_seconds:g} s"
            self._refuse(ApiError(408, message, code="head_timeout"), Refusal.HEAD_TIMEOUT)
        else:
            self._refuse(
                ApiError(408, "the body of the request comes too slowly", code="body_timeout"), Refusal.BODY_TIMEOUT
            )

    # ---- an answer goes -------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """The oldest request is answered."""
        self._cycles.popleft()
        super().on_response_complete()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def pause_writing(self) -> None:
        """The client does not read as fast as is written: from now on it has so long."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self._settings.write_seconds, self._give_up)

    def resume_writing(self) -> None:
        """It has read all."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _give_up(self) -> None:
        """Ends the handler too: it learns that its client is gone, and its lanes are freed."""
        _log.info("a client left its answer unread for %g s", self._settings.write_seconds)
        self._count_refusal(Refusal.WRITE_TIMEOUT)
        self.transport.abort()

    # ---- refusals -------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for bytes that are no HTTP."""
        self._refuse(ApiError(400, msg, code="invalid_http"), None)

    def _refuse(self, error: ApiError, reason: Refusal | None) -> None:
        """Tell the client, unless it is being told something else, and close."""
        if self.transport.is_closing():
            return
        if reason is not None:
            self._count_refusal(reason)
        self._refused = True
        coming = self._part is Part.BODY and not self.pipeline
        if self._answering and not (coming and not self.cycle.response_started):
            self.transport.close()
            return
        self._unset_keepalive_if_required()
        if self._answering:  # its handler waits for the body: for it, the client is gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not (coming and self.cycle.response_complete):
            self.transport.write(_raw(error))
        self.flow.resume_reading()
        self.transport.write_eof()
        self._leaving = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)


def _raw(error: ApiError) -> bytes:
    """A whole response, for a connection that ends with it."""
    response = error_response(error)
    lines = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
    lines += [name + b": " + value for name, value in response.raw_headers]
    lines += [b"x-request-id: req_" + secrets.token_hex(16).encode(), b"connection: close", b"", b""]
    return b"\r\n".join(lines) + bytes(response.body)
