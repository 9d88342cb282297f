"""A reply in OpenAI's dialect, streamed or whole: submits its generations, follows them, and accounts for them.

Owns a request from its submission to its log line. However the handler is left, its lanes are freed.
"""

import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import anyio
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.body import send_whole
from api.errors import ApiError
from api.metrics import RequestRecord
from api.openai.constraint import Asked
from api.openai.errors import error_body, error_response
from api.openai.prepare import Seed, TimeLimit
from api.openai.shapes import DONE, Choice, ReplyShape
from api.security import OWNER, REQUEST_ID
from api.service import ServedModel, Service
from api.sse import EventStream, frame, serve_events, unless_disconnected
from api.transcript import LoggedToken, Transcript, follow
from engine.client import Generation
from scheduler.events import Finished
from scheduler.request import FinishReason, Request, Usage

_log = logging.getLogger("paceline.request")


class Order(msgspec.Struct, frozen=True):
    """What was asked for, ready to be submitted."""

    reply_id: str
    model: ServedModel
    shape: ReplyShape
    requests: tuple[Request, ...]
    """One per choice, in order."""
    stops: tuple[str, ...]
    seed: Seed
    stream: bool
    include_usage: bool
    arrived: float
    """When the request came, by `time.perf_counter`."""
    constraint: Asked | None = None
    """What its text must be; to be compiled into `requests`."""
    limit: TimeLimit | None = None
    """When it ends in any case."""


class Reply:
    """Serves one order. Written by its handler's tasks, one per choice."""

    def __init__(self, service: Service, order: Order) -> None:
        self._service = service
        self._order = order
        choices = range(len(order.requests))
        self._transcripts = [
            Transcript(order.model.tokenizer.detokenizer(), order.stops, logged=request.sampling.logprobs is not None)
            for request in order.requests
        ]
        self._records = [RequestRecord(service.metrics, order.arrived) for _ in choices]
        self._texts: list[list[str]] = [[] for _ in choices]
        self._logged: list[list[LoggedToken]] = [[] for _ in choices]
        self._spoke = False
        """Whether any choice has given text."""
        self._request_id = "-"
        self._unfinished = FinishReason.CANCELLED
        """How choices end that are left before their end: the client went away."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; returns early when the client leaves.

        Submits before anything is awaited: a drain that begins now waits for this reply.
        """
        self._request_id = scope.get(REQUEST_ID, "-")
        try:
            with self._submitted(scope.get(OWNER, "")) as generations:
                if self._order.stream:
                    produce = partial(self._stream, generations)
                    await serve_events(receive, send, produce, self._service.settings.keepalive_seconds)
                    return
                response = await unless_disconnected(receive, partial(self._whole, generations))
            if response is not None:
                await send_whole(response, send)
        finally:
            self._account()

    async def _stream(self, generations: Sequence[Generation], stream: EventStream) -> None:
        failed = await self._run(generations, partial(self._stream_choice, stream))
        if failed is not None:
            await stream.write(frame(error_body(failed)))
            return
        for index, ended in enumerate(self._ended()):
            if ended.reason is FinishReason.DEADLINE:
                await stream.write(self._order.shape.closing(index, ended.reason))
        totals = self._order.shape.totals(self._usages()) if self._order.include_usage else b""
        await stream.write(totals + DONE)

    async def _whole(self, generations: Sequence[Generation]) -> Response:
        failed = await self._run(generations, self._gather_choice)
        if failed is not None:
            return error_response(failed)
        choices = [
            Choice(index, "".join(self._texts[index]), ended.reason, self._logged[index])
            for index, ended in enumerate(self._ended())
        ]
        return Response(self._order.shape.whole(choices, self._usages()), media_type="application/json")

    async def _run(
        self, generations: Sequence[Generation], follow_choice: Callable[[int, Generation], Coroutine[Any, Any, None]]
    ) -> ApiError | None:
        """Follow every choice to its end; what the client must be told instead of an answer."""
        try:
            async with anyio.create_task_group() as group:
                for index, generation in enumerate(generations):
                    group.start_soon(follow_choice, index, generation)
        except Exception:  # the named boundary of one reply: a fault in making its text is its own
            _log.exception("%s failed", self._order.reply_id)
            self._unfinished = FinishReason.ERROR
            for generation in generations:  # before the client is told, however slowly it listens
                self._service.engine.client.leave(generation)
            return ApiError(500, "internal error", code="internal_error")
        return next((failed for ended in self._ended() if (failed := self._failure_of(ended))), None)

    async def _stream_choice(self, stream: EventStream, index: int, generation: Generation) -> None:
        shape = self._order.shape

        async def deliver(text: str, logged: Sequence[LoggedToken]) -> None:
            self._spoke = True
            frames = shape.delta(index, text, logged)
            if frames:
                await stream.write(frames)

        opening = shape.opening(index)
        if opening:
            await stream.write(opening)
        ended = await follow(generation, self._transcripts[index], self._records[index], deliver)
        # What a deadline ended is closed when all have ended: whether it failed depends on what the others gave.
        if ended.reason is not FinishReason.DEADLINE and self._failure_of(ended) is None:
            await stream.write(shape.closing(index, ended.reason))

    async def _gather_choice(self, index: int, generation: Generation) -> None:
        async def deliver(text: str, logged: Sequence[LoggedToken]) -> None:
            self._spoke = True
            self._texts[index].append(text)
            self._logged[index] += logged

        await follow(generation, self._transcripts[index], self._records[index], deliver)

    @contextmanager
    def _submitted(self, owner: str) -> Iterator[list[Generation]]:
        """All of the order's generations; those that have not ended are cancelled on the way out."""
        with ExitStack() as stack:
            client = self._service.engine.client
            limit = self._order.limit
            deadline = None if limit is None else limit.deadline
            requests = [
                msgspec.structs.replace(request, owner=owner, deadline=deadline) for request in self._order.requests
            ]
            yield [stack.enter_context(client.submit(request)) for request in requests]

    def _ended(self) -> list[Finished]:
        return [record.finished for record in self._records if record.finished is not None]

    def _usages(self) -> list[Usage]:
        return [ended.usage for ended in self._ended()]

    def _failure_of(self, ended: Finished) -> ApiError | None:
        """What the client is told of an end that is none of its own. A text that a deadline cut is told as one."""
        if ended.reason is FinishReason.ERROR:
            return ApiError(500, ended.error or "the engine failed", code="engine_error")
        if ended.reason is FinishReason.CANCELLED:
            return ApiError(503, "the server is shutting down", code="draining", retry_after=5)
        if ended.reason is FinishReason.DEADLINE and self._order.limit is not None and not self._spoke:
            return self._order.limit.exceeded()
        return None

    def _account(self) -> None:
        """One line per request; never a prompt."""
        order, records = self._order, self._records
        for record in records:
            record.abandon(self._unfinished)
        reasons = [str(record.finished.reason) if record.finished else str(self._unfinished) for record in records]
        first = min((record.first for record in records if record.first is not None), default=None)
        _log.info(
            "%s request=%s model=%s prompt=%d completion=%d reason=%s%s ttft=%s total=%.3fs",
            order.reply_id,
            self._request_id,
            order.model.name,
            sum(len(request.prompt) for request in order.requests if request.sampling.choice == 0),
            sum(usage.completion_tokens for usage in self._usages())
            + sum(record.tokens for record in records if record.finished is None),
            ",".join(dict.fromkeys(reasons)),
            f" seed={order.seed.value}" if order.seed.drawn else "",
            "-" if first is None else f"{first - order.arrived:.3f}s",
            time.perf_counter() - order.arrived,
        )
