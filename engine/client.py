"""The event loop's side of the engine: submit a request, iterate over its events, leave at any moment.

Owned by the event loop's thread. Knows the mailbox and the events; never a lane, a round or a tensor.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from engine.messages import Cancel, Finish, Message, Submit
from scheduler.events import Event, Finished, Tokens
from scheduler.request import FinishReason, Request, Timing, Usage

_FAIR_SHARE = 16
"""Events that a handler may take in one go while others wait for the event loop."""


class Generation:
    """The events of one request: `with client.submit(request) as generation: async for event in generation: ...`.

    Iteration ends after the one `Finished`. Leaving the `with` block before that sends a `Cancel`, so a handler that is
    itself cancelled, fails or returns early frees its lane within one round. Written by `EngineClient` and by the
    handler that iterates, both on the event loop.
    """

    __slots__ = ("_client", "_events", "_finished", "_unbroken", "_waiter", "request", "told")

    def __init__(self, client: "EngineClient", request: Request) -> None:
        self.request = request
        self._client = client
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._finished = False
        self._unbroken = 0
        """Events handed out since the handler last let others run."""
        self.told = 0
        """Tokens that came from the engine."""

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.leave(self)

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Event:
        self._unbroken += 1
        if self._unbroken > _FAIR_SHARE:
            self._unbroken = 0
            await asyncio.sleep(0)  # a backlog is no reason to keep everybody else waiting
        while not self._events:
            if self._finished:
                raise StopAsyncIteration
            self._unbroken = 0
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()

    def finish(self, kept: int) -> None:
        """A stop string ends with generated token number `kept`: ask the engine to end here. The events that were under
        way still arrive; the `Finished` that closes them says STOP and `completion_tokens == kept`.
        """
        self._client.send(Finish(self.request.request_id, kept))

    def put(self, event: Event) -> None:
        """Append an event (called by `EngineClient` on the event loop)."""
        if isinstance(event, Tokens):
            self.told += len(event.tokens)
        else:
            self._finished = True
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Submits requests to the engine and hands its events to their generations. Lives on one event loop.

    `send` must be callable from the event loop at any time and must not block (the engine's mailbox).
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self.send = send
        self._open: dict[str, Generation] = {}
        self._failure: str | None = None
        """Why the engine answers no more."""
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        """How many requests have not yet seen their `Finished`."""
        return len(self._open)

    def submit(self, request: Request) -> Generation:
        """Put a request in the engine's mailbox; where nobody reads that any more, it has ended at once. Raises
        ValueError if its id is already being served.
        """
        if request.request_id in self._open:
            raise ValueError(f"request id {request.request_id!r} is already being served")
        generation = self._open[request.request_id] = Generation(self, request)
        self._empty.clear()
        if self._failure is None:
            self.send(Submit(request))
        else:
            self.fail_all(self._failure)
        return generation

    def leave(self, generation: Generation) -> None:
        """The handler is done with a generation; cancels it if it has not ended. Idempotent."""
        request_id = generation.request.request_id
        if self._open.get(request_id) is generation:
            self._close(request_id)
            self.send(Cancel(request_id))

    async def emptied(self) -> None:
        """Wait until no request is open."""
        await self._empty.wait()

    def cancel_all(self) -> None:
        """Ask the engine to end every open request; each still gets its `Finished`."""
        for request_id in self._open:
            self.send(Cancel(request_id))

    def fail_all(self, error: str) -> None:
        """The engine can no longer answer: end every open request here, and all that come."""
        self._failure = error
        now = time.monotonic()
        for generation in tuple(self._open.values()):
            usage = Usage(len(generation.request.prompt), generation.told)
            timing = Timing(now, None, None, now)
            self.deliver([Finished(generation.request.request_id, FinishReason.ERROR, usage, timing, error)])

    def deliver(self, events: Sequence[Event]) -> None:
        """Hand one round's events to their generations; events of requests that left are dropped."""
        for event in events:
            generation = self._open.get(event.request_id)
            if generation is None:
                continue
            if not isinstance(event, Tokens):
                self._close(event.request_id)
            generation.put(event)

    def _close(self, request_id: str) -> None:
        del self._open[request_id]
        if not self._open:
            self._empty.set()
