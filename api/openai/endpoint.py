"""What both generating endpoints do, in order: read, check, let in, make the order, compile its grammar, answer."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic

import anyio
import msgspec
from starlette.types import Receive, Scope, Send

from api.errors import ApiError, invalid
from api.metrics import Refusal
from api.openai.constraint import Asked
from api.openai.prepare import TimeLimit, time_limit
from api.openai.reply import Order, Reply
from api.openai.schema import Body, parse
from api.security import OWNER
from api.service import ServedModel, Service
from api.sse import unless_disconnected
from backends.grammar.base import GrammarError, GrammarUnavailableError
from backends.grammar.vetting import GrammarBusyError

Prepare = Callable[[Body, ServedModel, float], Awaitable[Order]]
"""Makes the order of a body that arrived at a time (`time.perf_counter`); raises ApiError."""


class Arrival(msgspec.Struct, frozen=True):
    """When a request came, by two clocks."""

    counted: float
    """By `time.perf_counter`, as latencies are."""
    monotonic: float
    """By `time.monotonic`, as deadlines are."""


class GenerationEndpoint(Generic[Body]):
    """An ASGI application. Every 4xx is raised before anything is submitted to the engine."""

    def __init__(self, service: Service, kind: type[Body], prepare: Prepare[Body]) -> None:
        self._service = service
        self._kind = kind
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; one whose client leaves before it is submitted gets no answer."""
        arrival = Arrival(time.perf_counter(), time.monotonic())
        service, owner = self._service, scope.get(OWNER, "")
        service.model()
        service.door.check(owner)  # where there is no room for anybody, no body need be held to say so
        raw = await service.bodies.read(scope, receive)
        if raw is None:
            return
        body = parse(raw, self._kind)
        del raw  # it may be large, and nothing but the order is needed while the reply is made
        with service.door.let_in(owner, body.choices, "prompt" if body.choices > (body.n or 1) else "n"):
            order = await self._ordered(body, arrival, receive)
            del body
            if order is None:
                return
            service.model()  # draining may have begun meanwhile
            await Reply(service, order)(scope, receive, send)

    async def _ordered(self, body: Body, arrival: Arrival, receive: Receive) -> Order | None:
        """The whole order, within its time; None if the client left before it was ready. Raises ApiError."""
        limit = time_limit(body, self._service.settings.request_seconds, arrival.monotonic)
        if limit is None:
            return await self._order(body, arrival, None, receive)
        with anyio.move_on_after(limit.deadline - time.monotonic()):
            return await self._order(body, arrival, limit, receive)
        self._service.metrics.refuse(Refusal.DEADLINE)
        raise limit.exceeded()

    async def _order(self, body: Body, arrival: Arrival, limit: TimeLimit | None, receive: Receive) -> Order | None:
        try:
            order = await self._prepare(body, self._service.model_named(body.model), arrival.counted)
        except RecursionError:  # schemas and arguments are written out again, on a deeper stack than they were read
            raise invalid("the body is nested too deeply", None, "invalid_json") from None
        order = msgspec.structs.replace(order, limit=limit)
        return order if order.constraint is None else await self._constrained(order, order.constraint, receive)

    async def _constrained(self, order: Order, asked: Asked, receive: Receive) -> Order | None:
        """The order with its grammar; None if the client left while it was compiled, and nobody waits for it then."""
        try:
            grammar = await unless_disconnected(receive, partial(self._service.compile, asked.spec))
        except GrammarUnavailableError as error:
            code = "grammar_busy" if isinstance(error, GrammarBusyError) else "grammar_unavailable"
            message = f"{asked.field}: {error}"
            raise ApiError(503, message, param=asked.field, code=code, retry_after=1) from error
        except GrammarError as error:
            raise invalid(f"{asked.field}: {error}", asked.field, "invalid_grammar") from error
        if grammar is None:
            return None
        requests = tuple(msgspec.structs.replace(request, constraint=grammar) for request in order.requests)
        return msgspec.structs.replace(order, requests=requests)
