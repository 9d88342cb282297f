"""What both generating endpoints do, in order: read, check, make the order, answer."""

import time
from collections.abc import Awaitable, Callable
from typing import Generic

from starlette.types import Receive, Scope, Send

from api.body import read_body
from api.openai.reply import Order, Reply
from api.openai.schema import Body, parse
from api.service import ServedModel, Service

Prepare = Callable[[Body, ServedModel, float], Awaitable[Order]]
"""Makes the order of a body that arrived at a time (`time.perf_counter`); raises ApiError."""


class GenerationEndpoint(Generic[Body]):
    """An ASGI application. Every 4xx is raised before anything is submitted to the engine."""

    def __init__(self, service: Service, kind: type[Body], prepare: Prepare[Body]) -> None:
        self._service = service
        self._kind = kind
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; one whose body never came whole gets no answer."""
        arrived = time.perf_counter()
        self._service.model()
        raw = await read_body(scope, receive, self._service.settings.max_body_bytes)
        if raw is None:
            return
        body = parse(raw, self._kind)
        order = await self._prepare(body, self._service.model_named(body.model), arrived)
        self._service.model()  # draining may have begun meanwhile
        await Reply(self._service, order)(scope, receive, send)
