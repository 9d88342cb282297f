"""`GET /v1/models` and `GET /v1/models/{id}`."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.service import ServedModel, Service


class Models:
    """The endpoints; there is one model."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def every(self, _request: Request) -> Response:
        """All of them."""
        served = model_object(self._service.model())
        return _json({"object": "list", "data": [served]})

    async def one(self, request: Request) -> Response:
        """The one with this id, or a 404."""
        return _json(model_object(self._service.model_named(request.path_params["model"])))


def model_object(model: ServedModel) -> dict[str, Any]:
    """The standard fields, vLLM's `max_model_len`, and llama-server's `meta`."""
    info = model.info
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "paceline",
        "root": info.name,
        "parent": None,
        "max_model_len": info.context_length,
        "meta": {"n_ctx": info.context_length, "n_vocab": info.vocab_size, "size": info.parameter_bytes},
    }


def _json(told: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(told), media_type="application/json")
