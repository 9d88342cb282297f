"""A small HTTP server for the tests of the bench's client: it sends whatever bytes a test tells it to, and when."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from deploy.bench.client import Target

HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def delta(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]})


def usage(completion_tokens: int, prompt_tokens: int = 7) -> bytes:
    return event({"choices": [], "usage": {"completion_tokens": completion_tokens, "prompt_tokens": prompt_tokens}})


def answer(*texts: str, tokens: int | None = None) -> bytes:
    """A whole streamed chat answer, as OpenAI's servers send it."""
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    counted = b"" if tokens is None else usage(tokens)
    return role + b"".join(delta(text) for text in texts) + delta("", "length") + counted + DONE


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@dataclass
class Speaker:
    """What the server saw. `most` is the largest number of requests that were open at one time."""

    target: Target
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    open: int = 0
    most: int = 0


Script = Callable[[int, asyncio.StreamWriter], Awaitable[None]]
"""Given the number of the request, from 0, and where to write. The connection is closed when it returns."""


@asynccontextmanager
async def speaking(script: Script) -> AsyncIterator[Speaker]:
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request_line, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers["content-length"]))
        speaker.requests.append((request_line, headers, body))
        speaker.open += 1
        speaker.most = max(speaker.most, speaker.open)
        try:
            await script(len(speaker.requests) - 1, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            speaker.open -= 1
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    speaker = Speaker(Target("127.0.0.1", server.sockets[0].getsockname()[1], "m"))
    try:
        yield speaker
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # The transports close in the loop's next turns.
