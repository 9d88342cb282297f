"""A full server says so at once, in the dialect, and is as it was when the storm is over."""

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx2
import pytest

from api.metrics import Refusal
from api.service import Settings
from api.text import ByteTokenizer
from engine.config import EngineConfig
from tests.api.servers import Gated, RunningServer, eventually, running

CHAT = "/v1/chat/completions"
ENGINE = EngineConfig(max_lanes=2, draft_tokens=0)


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


class Held:
    """Requests in the background that wait for their server's gate."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._threads: list[threading.Thread] = []
        self.answers: list[httpx2.Response] = []

    def ask(self, headers: dict[str, str] | None = None, **fields: Any) -> None:
        """Under way when this returns."""
        before = len(self._server.service.door)

        def post() -> None:
            with self._server.client(headers=headers) as client:
                self.answers.append(client.post(CHAT, json=ask("[[held]]", **fields)))

        self._threads.append(threading.Thread(target=post))
        self._threads[-1].start()
        eventually(lambda: len(self._server.service.door) > before, "to be let in")

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)
        assert {answer.status_code for answer in self.answers} == {200}


@pytest.fixture
def full() -> Iterator[tuple[RunningServer, Gated, Held]]:
    """Four places, all of them taken."""
    backend = Gated()
    with running(backend, settings=Settings(max_open=4), engine=ENGINE) as server:
        held = Held(server)
        for n in (1, 1, 2):
            held.ask(n=n)
        yield server, backend, held


def test_one_too_many_is_a_429_before_anything_is_read(
    full: tuple[RunningServer, Gated, Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, backend, held = full
    read: list[str] = []

    def noted(_self: ByteTokenizer, text: str, *, special: bool) -> list[int]:
        read.append(text)
        return [1]

    monkeypatch.setattr(ByteTokenizer, "encode", noted)
    with server.client() as client:
        for body in (ask("x"), ask("x", stream=True), ask("x", n=4)):
            answer = client.post(CHAT, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.headers["x-request-id"]
        assert [text for text in read if "[[held]]" not in text] == []
        assert server.service.metrics.refused[Refusal.QUEUE_FULL] == 3
        assert 'paceline_requests_refused_total{reason="queue_full"} 3.0' in client.get("/metrics").text
        assert "paceline_ready 1.0" in client.get("/metrics").text
        monkeypatch.undo()
        backend.open()
        held.join()
        assert client.post(CHAT, json=ask("[[again]]")).json()["choices"][0]["message"]["content"] == "again"
    assert len(server.service.door) == 0


def test_a_full_server_does_not_wait_for_the_body(full: tuple[RunningServer, Gated, Held]) -> None:
    server, backend, held = full
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as peer:
        peer.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000\r\n\r\n"
        )
        assert peer.recv(12) == b"HTTP/1.1 429"
    backend.open()
    held.join()


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (CHAT, {"messages": [], "n": 5}, "n"),
        ("/v1/completions", {"prompt": ["x"] * 5}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "y"], "n": 3}, "prompt"),
    ],
)
def test_what_there_would_never_be_room_for_is_a_400(path: str, fields: dict[str, Any], field: str) -> None:
    with running(settings=Settings(max_open=4)) as server, server.client() as client:
        answer = client.post(path, json=fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert len(server.service.door) == 0


def test_a_key_has_its_own_limit_and_cannot_take_the_others_places() -> None:
    backend = Gated()
    keys = {name: {"authorization": f"Bearer {name}"} for name in ("ann", "ben")}
    settings = Settings(max_open=8, api_keys=tuple(keys), max_requests_per_key=5)
    with running(backend, settings=settings, engine=ENGINE) as server, server.client() as client:
        held = Held(server)
        for _ in range(5):
            held.ask(keys["ann"])
        refused = client.post(CHAT, json=ask("x"), headers=keys["ann"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_limit")
        held.ask(keys["ben"], n=3)
        refused = client.post(CHAT, json=ask("x"), headers=keys["ben"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        backend.open()
        held.join()
    assert len(server.service.door) == 0


def test_bodies_that_take_too_much_together_are_a_503_and_the_others_come_through() -> None:
    with running(settings=Settings(max_body_bytes=100_000)) as server, server.client() as client:
        body = json.dumps(ask("[[whole]]", user="x" * 90_000)).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        peers = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(8)]
        for peer in peers:
            peer.sendall(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:-1])
        eventually(lambda: server.service.bodies.held == 8 * (len(body) - 1), "all of them to be read")
        answer = client.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_bodies")
        assert int(answer.headers["retry-after"]) > 0
        for peer in peers:
            peer.sendall(body[-1:])
            with peer, peer.makefile("rb") as received:
                assert b'"whole"' in received.read()
        assert server.service.bodies.held == len(server.service.door) == 0


STORM = 120


@pytest.mark.parametrize("seed", [1, 2])
def test_when_the_storm_is_over_nobody_is_inside(seed: int) -> None:
    """Refused, cancelled, reset, half sent, bad, too late and served, all at once."""
    settings = Settings(max_open=6, max_connections=40, request_seconds=20.0, body_seconds=0.2)
    with running(settings=settings, engine=EngineConfig(max_lanes=3, round_rows=32)) as server:
        before = tasks_of(server)
        told = asyncio.run(storm(server, Random(seed)))
        assert {b"200", b"400", b"408", b"429"} <= told
        eventually(lambda: server.open_requests == len(server.service.door) == 0, "everybody to leave")
        eventually(lambda: tasks_of(server) == before, "all tasks to end")
        assert server.service.bodies.held == 0
        with server.client() as client:
            assert client.post(CHAT, json=ask("[[calm]]")).json()["choices"][0]["message"]["content"] == "calm"


def tasks_of(server: RunningServer) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    return asyncio.run_coroutine_threadsafe(count(), server.loop).result(20)


async def storm(server: RunningServer, random: Random) -> set[bytes]:
    """The statuses that were told."""
    bodies = [
        ask("go on", max_tokens=300, ignore_eos=True, stream=True),
        ask("go on", max_tokens=300, ignore_eos=True, n=3),
        ask("x" * 3000, max_tokens=5),
        ask("too late", max_tokens=3000, ignore_eos=True, timeout=0.01),
        ask("bad", n=17),
        ask("large", n=7),
        ask("bad", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}),
    ]
    async with asyncio.TaskGroup() as group:
        visits = [
            group.create_task(visit(server, json.dumps(random.choice(bodies)).encode(), random)) for _ in range(STORM)
        ]
    return {status for one in visits if (status := one.result())}


async def visit(server: RunningServer, body: bytes, random: Random) -> bytes:
    """One client, which stays to the end or leaves somewhere, politely or not; the status it was told."""
    length, stays = len(body), random.random() < 0.4
    if random.random() < 0.1:
        body = body[: length // 2]
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        writer.write(b"Connection: close\r\nContent-Length: %d\r\n\r\n" % length + body)
        told = await (reader.read() if stays else reader.read(random.choice([1, 100, 1000])))
        if random.random() < 0.5:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
    except ConnectionError:
        return b""
    return told[9:12]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_a_large_body_hears_that_the_queue_is_full(
    full: tuple[RunningServer, Gated, Held], stream: bool
) -> None:
    """Were its body left unread, the connection would be reset while it sends."""
    server, backend, held = full
    with server.client() as client:
        answer = client.post(CHAT, json=ask("x" * (8 << 20), stream=stream))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    backend.open()
    held.join()
