"""The bytes of a request's body, up to a limit."""

from starlette.types import Receive, Scope

from api.errors import ApiError


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """The whole body; None if the client left in the middle of it.

    Raises a 413 as soon as the body says, or turns out, to be longer than `limit` bytes; the rest is not read.
    """
    if _announced(scope) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        length += len(parts[-1])
        if length > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return b"".join(parts)


def _announced(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than the limit of {limit} bytes"
    return ApiError(413, message, code="body_too_large", headers=(("connection", "close"),))
