"""Who may speak to the server, checked before anything else looks at a request.

Local servers are attacked from web pages: by DNS rebinding (a foreign `Host`), and by requests that a browser sends
without asking (a foreign `Origin`, a body that is not declared as JSON). Pure ASGI; knows no dialect but the one that
errors are told in.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ApiError
from api.openai.errors import error_response

OWNER = "paceline.owner"
"""Where a scope holds whose request it is: a digest of its API key; absent where no keys are in use."""
REQUEST_ID = "paceline.request_id"
"""Where the scope of a request carries its id."""
_OPEN_PATHS = frozenset({"/health"})
_GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_JSON = re.compile(r"application/(json|[a-z0-9.+-]+\+json)\s*(;.*)?", re.IGNORECASE)


def read_api_keys(path: Path) -> tuple[str, ...]:
    """One key per line; `#` begins a comment. Raises ValueError if there is none, or one that no header can carry."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"{path} holds no API key")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ValueError(f"{path}: an API key must be printable ASCII without spaces")
    return keys


def is_loopback(host: str) -> bool:
    """Whether a host's name or address (without brackets and port) means this machine itself, and cannot be rebound."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class RequestId:
    """Gives every response an `x-request-id`: the client's own if it sent a decent one, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lifespan and the like pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _GIVEN_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        scope[REQUEST_ID] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class HostCheck:
    """Refuses requests for another host's name. On a Unix socket, which no browser reaches, any is right."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str], any_address: bool) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """403 for a foreign or absent `Host`."""
        if scope["type"] == "http" and not _is_unix(scope):
            host = Headers(scope=scope).get("host", "")
            if not self._is_ours(_name_of(f"//{host}")):
                error = ApiError(403, f"this server does not answer for the host {host!r}", code="host_not_allowed")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_ours(self, name: str) -> bool:
        return bool(name) and (is_loopback(name) or name in self._allowed or (self._any_address and _is_address(name)))


class OriginCheck:
    """Refuses web pages of other hosts, and tells browsers that pages of this machine may read the answers (CORS)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """403 for a foreign `Origin`; preflights are answered here."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        if not _is_own_page(origin, headers.get("host", "")):
            error = ApiError(403, f"pages of {origin} may not use this server", code="origin_not_allowed")
            await error_response(error)(scope, receive, send)
            return
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await Response(status_code=204, headers=_preflight(origin, headers))(scope, receive, send)
            return

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = MutableHeaders(scope=message)
                told["access-control-allow-origin"] = origin
                told["access-control-expose-headers"] = "x-request-id, retry-after"
                told.add_vary_header("origin")
            await send(message)

        await self._app(scope, receive, send_with_cors)


class KeyCheck:
    """Asks for an API key, as `Authorization: Bearer KEY` or `x-api-key: KEY`, on every path but `/health`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        """Without keys, everything is open."""
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """401 for a wrong or absent key."""
        if scope["type"] == "http" and self._digests and scope["path"] not in _OPEN_PATHS:
            headers = Headers(scope=scope)
            given = _bearer(headers.get("authorization", "")) or headers.get("x-api-key", "")
            if not self._opens(given):
                authenticate = (("www-authenticate", "Bearer"),)
                error = ApiError(401, "a valid API key is required", code="invalid_api_key", headers=authenticate)
                await error_response(error)(scope, receive, send)
                return
            scope[OWNER] = _digest(given.encode("latin-1")).hex()
        await self._app(scope, receive, send)

    def _opens(self, given: str) -> bool:
        """In a time that depends neither on the keys nor on where they differ."""
        digest = _digest(given.encode("latin-1"))
        return sum([hmac.compare_digest(digest, known) for known in self._digests]) > 0


class ContentCheck:
    """Refuses bodies that are not declared as JSON, which a page may send to any host without a preflight."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """415 for a POST of anything but plain JSON."""
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = Headers(scope=scope)
            if not _JSON.fullmatch(headers.get("content-type", "")):
                error = ApiError(415, "the Content-Type must be application/json", code="unsupported_media_type")
                await error_response(error)(scope, receive, send)
                return
            if headers.get("content-encoding", "identity") != "identity":
                error = ApiError(415, "the body must not be compressed", code="unsupported_media_type")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_unix(scope: Scope) -> bool:
    server = scope.get("server")
    return server is not None and server[1] is None


def _name_of(address: str) -> str:
    """The host in `//host:port` or `scheme://host:port`; empty if there is none."""
    try:
        parts = urlsplit(address)
        return "" if parts.username is not None or parts.path else (parts.hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_own_page(origin: str, host: str) -> bool:
    """A page of this machine, or one of the server's own (its `Host` was checked before)."""
    scheme, _, authority = origin.lower().partition("://")
    if scheme not in ("http", "https"):
        return False
    return is_loopback(_name_of(f"//{authority}")) or (authority != "" and authority == host.lower())


def _preflight(origin: str, asked: Headers) -> dict[str, str]:
    told = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": "GET, POST, OPTIONS",
        "access-control-allow-headers": asked.get("access-control-request-headers", "content-type, authorization"),
        "access-control-max-age": "600",
        "vary": "origin, access-control-request-headers",
    }
    if asked.get("access-control-request-private-network") == "true":
        told["access-control-allow-private-network"] = "true"
    return told


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
