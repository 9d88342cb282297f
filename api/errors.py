"""A request that is refused or fails, before any dialect words it.

Raised anywhere under `api/` while a request is being read; the dialect of the path turns it into a body.
"""

from starlette.exceptions import HTTPException


class ApiError(Exception):
    """An error that the client is told.

    `message` is for people, `param` names the field at fault, `code` is for programs. A `retry_after` (seconds) says
    that the same request may succeed later.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers)
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def unavailable(status: str) -> ApiError:
    """A 503: the server cannot serve now, and `status` is why."""
    return ApiError(503, f"the server is {status}; try again later", code=status, retry_after=5)


def from_starlette(error: HTTPException) -> ApiError:
    """What routing refuses: no such path, or another method."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, error.detail, code=code, headers=tuple((error.headers or {}).items()))
