"""Errors in OpenAI's dialect: `{"error": {"message", "type", "param", "code"}}`."""

import msgspec
from starlette.responses import Response

from api.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> bytes:
    """The JSON of an error; also what a stream sends in its `data:` when it fails half-way."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    told = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": told})


def error_response(error: ApiError) -> Response:
    """The whole response."""
    return Response(error_body(error), error.status, error.headers, media_type="application/json")
