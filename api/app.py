"""The HTTP application: which path is whose, and what stands in front of all of them.

Knows every endpoint and no dialect's details. Made for one `Service`; starts and stops nothing.
"""

import logging

import msgspec
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from api.body import ReadToTheEnd
from api.cache import CacheAdmin
from api.errors import ApiError, from_starlette
from api.openai.chat import prepare_chat
from api.openai.completions import prepare_completion
from api.openai.endpoint import GenerationEndpoint
from api.openai.errors import error_response
from api.openai.models import Models
from api.openai.schema import ChatBody, CompletionBody
from api.security import ContentCheck, HostCheck, KeyCheck, OriginCheck, RequestId
from api.service import Service

_log = logging.getLogger("paceline.api")


def create_app(service: Service) -> ASGIApp:
    """Routes behind the checks; a response of any of them carries an `x-request-id`."""
    settings = service.settings
    app: ASGIApp = _routes(service)
    app = ContentCheck(app)
    app = KeyCheck(app, settings.api_keys)
    app = OriginCheck(app)
    app = HostCheck(app, settings.allowed_hosts, settings.any_address)
    return ReadToTheEnd(RequestId(app))


def _routes(service: Service) -> Starlette:
    operations = Operations(service)
    models = Models(service)
    cache = CacheAdmin(service)
    chat = GenerationEndpoint(service, ChatBody, prepare_chat)
    completions = GenerationEndpoint(service, CompletionBody, prepare_completion)
    return Starlette(
        routes=[
            Route("/health", operations.health),
            Route("/metrics", operations.metrics),
            Route("/admin/cache", cache.ls),
            Route("/admin/cache/flush", cache.flush, methods=["POST"]),
            Route("/admin/cache/verify", cache.verify, methods=["POST"]),
            Route("/admin/cache/clear", cache.clear, methods=["POST"]),
            Route("/v1/models", models.every),
            Route("/v1/models/{model:path}", models.one),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
        ],
        exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_fault},
    )


class Operations:
    """What operators ask for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, _request: Request) -> Response:
        """200 only if a request could be served now."""
        status = self._service.status
        ready = status == "ready"
        body = msgspec.json.encode({"status": status})
        headers = {} if ready else {"retry-after": "5"}
        return Response(body, 200 if ready else 503, headers, media_type="application/json")

    async def metrics(self, _request: Request) -> Response:
        """Prometheus' text format."""
        return Response(generate_latest(self._service.registry), headers={"content-type": CONTENT_TYPE_LATEST})


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(from_starlette(error))


async def _on_fault(_request: Request, _error: Exception) -> Response:
    """A fault of ours; the server logs it with its traceback."""
    headers = (("connection", "close"),)  # the server closes it after a fault
    return error_response(ApiError(500, "internal error", code="internal_error", headers=headers))
