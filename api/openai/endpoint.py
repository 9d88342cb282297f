"""What both generating endpoints do, in order: read, check, make the order, compile its grammar, answer."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic

import msgspec
from starlette.types import Receive, Scope, Send

from api.body import read_body
from api.errors import ApiError, invalid
from api.openai.constraint import Asked
from api.openai.reply import Order, Reply
from api.openai.schema import Body, parse
from api.service import ServedModel, Service
from api.sse import unless_disconnected
from backends.grammar.base import GrammarError, GrammarUnavailableError
from backends.grammar.vetting import GrammarBusyError

Prepare = Callable[[Body, ServedModel, float], Awaitable[Order]]
"""Makes the order of a body that arrived at a time (`time.perf_counter`); raises ApiError."""


class GenerationEndpoint(Generic[Body]):
    """An ASGI application. Every 4xx is raised before anything is submitted to the engine."""

    def __init__(self, service: Service, kind: type[Body], prepare: Prepare[Body]) -> None:
        self._service = service
        self._kind = kind
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; one whose client leaves before it is submitted gets no answer."""
        arrived = time.perf_counter()
        self._service.model()
        raw = await read_body(scope, receive, self._service.settings.max_body_bytes)
        if raw is None:
            return
        body = parse(raw, self._kind)
        try:
            order: Order | None = await self._prepare(body, self._service.model_named(body.model), arrived)
        except RecursionError:  # schemas and arguments are written out again, on a deeper stack than they were read
            raise invalid("the body is nested too deeply", None, "invalid_json") from None
        if order is not None and order.constraint is not None:
            order = await self._constrained(order, order.constraint, receive)
        if order is None:
            return
        self._service.model()  # draining may have begun meanwhile
        await Reply(self._service, order)(scope, receive, send)

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
