"""The prefix cache as its operator sees it: what it holds, and to write, check or empty it. On the Unix socket only,
which is its owner's alone.
"""

import time
from typing import Any

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.errors import ApiError
from api.service import Service

_FLUSH_SECONDS = 60.0
"""How long a flush may take."""


class CacheAdmin:
    """Implements `GET /admin/cache` and `POST /admin/cache/{flush,verify,clear}`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def ls(self, request: Request) -> Response:
        """Both tiers' accounts."""
        self._only_here(request)
        stats = self._service.engine.prefix_stats
        if stats is None:
            raise _no_cache()
        return _told(msgspec.to_builtins(stats))

    async def flush(self, request: Request) -> Response:
        """Write to files what is in memory alone; whether all of it was."""
        self._only_here(request)
        deadline = time.monotonic() + _FLUSH_SECONDS
        whole = False
        while not whole and time.monotonic() < deadline:
            spill, left = await self._ask(lambda prefix: (prefix.spill, prefix.write_behind()))
            if spill is None:
                raise ApiError(409, "there are no files: --prefix-ssd is 0", code="no_prefix_files")
            if not spill.stats.writable:
                raise ApiError(409, "files are not being written; the log says why", code="prefix_files_not_writable")
            whole = await anyio.to_thread.run_sync(spill.flush, deadline - time.monotonic()) and not left
        return _told({"flushed": whole})

    async def verify(self, request: Request) -> Response:
        """Check every file against its checksum; damaged ones are removed."""
        self._only_here(request)
        spill = await self._ask(lambda prefix: prefix.spill)
        if spill is None:
            raise ApiError(409, "there are no files: --prefix-ssd is 0", code="no_prefix_files")
        good, damaged = await anyio.to_thread.run_sync(spill.verify)
        await self._ask(lambda prefix: prefix.damaged(damaged))
        return _told({"good": good, "damaged": len(damaged)})

    async def clear(self, request: Request) -> Response:
        """Forget all that is not in use; how many pieces."""
        self._only_here(request)
        return _told({"cleared": await self._ask(lambda prefix: prefix.clear())})

    async def _ask(self, call: Any) -> Any:
        try:
            return await self._service.engine.ask_prefix(call)
        except LookupError:
            raise _no_cache() from None

    def _only_here(self, request: Request) -> None:
        """Over TCP there is no such path."""
        server = request.scope.get("server")
        if server is None or server[1] is not None:
            raise ApiError(404, "Not Found", code="not_found")


def _no_cache() -> ApiError:
    return ApiError(
        409, "there is no prefix cache: --prefix-ram is 0, or the model is not loaded", code="no_prefix_cache"
    )


def _told(answer: Any) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
