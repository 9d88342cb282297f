"""What one connection may cost, over real sockets: heads and bodies, clients that do not read, crowds."""

import json
import resource
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api.connection import HEAD_BYTES, allow_open_files
from api.metrics import Refusal
from api.service import Settings
from engine.config import EngineConfig
from tests.api.servers import PATIENCE, Gated, Parrot, RunningServer, eventually, running

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
QUICK = Settings(head_seconds=0.1, body_seconds=0.1, write_seconds=0.1, max_body_bytes=64 << 20)


@pytest.fixture(scope="module")
def hasty() -> Iterator[RunningServer]:
    """A server without patience."""
    with running(settings=QUICK) as server:
        yield server


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def request_of(text: str, **fields: Any) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Told:
    """The one answer that a connection ends with."""

    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        self.status = int(first.split()[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    @property
    def error(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.body)["error"]
        return told


def everything(peer: socket.socket) -> bytes:
    """All that comes until the server closes."""
    with peer.makefile("rb") as received:
        return received.read()


def refused(server: RunningServer, reason: Refusal) -> int:
    return server.service.metrics.refused[reason]


# ---- heads and bodies


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n",
        b"G",
        HEAD,
        b"GET / HTTP/1.1\r\nX: " + b"x" * 1000,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET",
    ],
)
def test_a_head_that_does_not_come_is_a_408(hasty: RunningServer, sent: bytes) -> None:
    before = refused(hasty, Refusal.HEAD_TIMEOUT)
    with connect(hasty) as peer:
        peer.sendall(sent)
        raw = everything(peer)
    told = Told(raw[raw.rindex(b"HTTP/1.1 ") :])
    assert (told.status, told.error["code"]) == (408, "head_timeout")
    assert told.headers["x-request-id"]
    assert told.headers["connection"] == "close"
    assert refused(hasty, Refusal.HEAD_TIMEOUT) == before + 1


@pytest.mark.parametrize("framing", [b"Content-Length: 1000\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"])
def test_a_body_that_does_not_come_is_a_408_and_leaves_nothing(
    hasty: RunningServer, framing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the connection, which is its client's to close."""
    monkeypatch.setattr("api.connection._LINGER_SECONDS", 1000.0)
    rounds = hasty.rounds
    with connect(hasty) as peer:
        peer.sendall(HEAD + framing)
        told = Told(everything(peer))
        eventually(lambda: hasty.service.bodies.held == 0, "its handler to end")
    assert (told.status, told.error["code"], told.error["type"]) == (408, "body_timeout", "timeout_error")
    assert hasty.rounds == rounds


def test_a_large_body_has_the_time_of_its_length() -> None:
    """Its last byte comes long after a small body would have been given up."""
    settings = Settings(body_seconds=0.05, max_body_bytes=64 << 20)
    with running(settings=settings) as server, connect(server) as peer:
        raw = request_of("[[read]]", user="x" * (1 << 20))
        peer.sendall(raw[:-1])
        eventually(lambda: server.service.bodies.held > 1 << 20, "the body to be read")
        passed = server.loop.time()
        eventually(lambda: server.loop.time() > passed + 0.2, "more time to pass than a small body has")
        peer.sendall(raw[-1:])
        assert b"HTTP/1.1 200 " in peer.recv(1 << 16)


def test_a_client_that_says_nothing_else_between_requests_may(hasty: RunningServer) -> None:
    """The head's time begins with its first byte."""
    before = refused(hasty, Refusal.HEAD_TIMEOUT)
    with hasty.client() as client:
        assert client.get("/health").status_code == 200
        passed = hasty.loop.time()
        eventually(lambda: hasty.loop.time() > passed + 0.2, "more time to pass than a head has")
        assert client.get("/health").status_code == 200
    assert refused(hasty, Refusal.HEAD_TIMEOUT) == before


@pytest.mark.parametrize("pieces", [1, 100])
@pytest.mark.parametrize("line", ["url", "value", "headers"])
def test_a_head_that_is_too_large_is_a_431(server: RunningServer, line: str, pieces: int) -> None:
    filler = b"x" * HEAD_BYTES
    head = {
        "url": b"GET /" + filler,
        "value": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + filler,
        "headers": b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * (HEAD_BYTES // 6),
    }[line]
    with connect(server) as peer:
        for piece in range(pieces):
            peer.sendall(head[len(head) * piece // pieces : len(head) * (piece + 1) // pieces])
        told = Told(everything(peer))
    assert (told.status, told.error["code"]) == (431, "head_too_large")


def test_a_head_just_below_that_is_read(server: RunningServer) -> None:
    with connect(server) as peer:
        start, end = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: ", b"\r\n\r\n"
        peer.sendall(start + b"x" * (HEAD_BYTES - 1 - len(start) - len(end)) + end)
        assert Told(everything(peer)).status == 200


def test_a_head_behind_a_large_body_is_no_larger_for_it(server: RunningServer) -> None:
    """Heads of three quarters of what may be, behind bodies of as much, wherever the slices fall."""
    filler = "x" * (HEAD_BYTES * 3 // 4)
    one = request_of("[[one]]", user=filler).replace(b"\r\n\r\n", b"\r\nX: " + filler.encode() + b"\r\n\r\n", 1)
    with connect(server) as peer:
        peer.sendall(one * 5 + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert everything(peer).count(b"HTTP/1.1 200 OK") == 6


def test_a_client_that_has_sent_two_requests_and_leaves_frees_its_lane(caplog: pytest.LogCaptureFixture) -> None:
    """The one that is being answered, too, of which uvicorn tells its handler nothing."""
    backend = Gated()
    with running(backend) as server:
        with connect(server) as peer:
            peer.sendall(request_of("x", stream=True, ignore_eos=True) + request_of("y"))
            eventually(backend.waiting.is_set, "a request under way")
        # Nothing is read behind the second: only what is written finds the client gone.
        while server.open_requests and backend.forwards < 200:
            backend.permit(1)
            eventually(lambda: backend.waiting.is_set() or not server.open_requests, "the round to end")
        assert server.open_requests == 0
    assert "Exception in ASGI application" not in caplog.text


def test_no_http_at_all_is_a_400_in_the_dialect(server: RunningServer) -> None:
    with connect(server) as peer:
        peer.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        told = Told(everything(peer))
    assert (told.status, told.error["code"]) == (400, "invalid_http")


def test_what_is_sent_behind_a_refusal_does_not_take_it_away(server: RunningServer) -> None:
    """Closed at once with data unread, a connection is reset, and the client may never see why."""
    with connect(server) as peer:
        peer.sendall(b"nonsense\r\n\r\n")
        first = peer.recv(1)
        peer.sendall(b"more " * 1000)
        assert Told(first + everything(peer)).status == 400


# ---- clients that do not read


class Chatty(Parrot):
    """Says the same for ever, so that no buffer on the way is large enough."""

    def greedy(self, tokens: Any, state: int) -> int:
        return ord("x")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_loses_its_lane(stream: bool) -> None:
    """Streamed, in the middle; else the whole answer, which no socket's own buffer holds."""
    fields = {"logprobs": True, "top_logprobs": 20, "ignore_eos": True, "stream": stream}
    engine = EngineConfig(draft_tokens=8, round_rows=64)
    with running(lambda: Chatty(8192), settings=QUICK, engine=engine) as server, connect(server) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.sendall(request_of("go on", **fields))
        eventually(lambda: refused(server, Refusal.WRITE_TIMEOUT) == 1, "patience to end")
        eventually(lambda: server.open_requests == len(server.service.door) == 0, "its lane to be free")
        with server.client() as client:
            assert client.get("/health").status_code == 200


LONG = request_of("[[forty tokens of it, and a little more..]]", logprobs=True, top_logprobs=20)
"""Has a longer answer than the buffers of these two hold."""


@contextmanager
def narrow(settings: Settings) -> Iterator[tuple[RunningServer, socket.socket]]:
    """A server and a client between whom little fits."""
    server = RunningServer(settings=settings)
    server.listeners.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with server, socket.socket() as peer:
        server.ready()
        peer.settimeout(PATIENCE)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", server.port))
        yield server, peer


def test_little_is_enough_to_be_noticed() -> None:
    """A few kilobytes that are left of a whole answer, on a connection whose handler ended long ago."""
    with narrow(QUICK) as (server, peer):
        peer.sendall(LONG)
        eventually(lambda: refused(server, Refusal.WRITE_TIMEOUT) == 1, "patience to end")
        eventually(lambda: not connections_of(server), "the connection to end")


def test_who_reads_late_but_in_time_is_not_given_up_later() -> None:
    with narrow(Settings(write_seconds=1.0)) as (server, peer):
        peer.sendall(LONG)
        eventually(lambda: any(one.flow.write_paused for one in connections_of(server)), "more than fits")
        peer.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        raw = b""
        while raw.count(b"HTTP/1.1 200 OK") < 2:
            raw += peer.recv(4096)
        passed = server.loop.time()
        eventually(lambda: server.loop.time() > passed + 1.1, "more time to pass than a write has")
        assert refused(server, Refusal.WRITE_TIMEOUT) == 0
        assert len(connections_of(server)) == 1


def test_whoever_reads_gets_all_of_a_long_answer(hasty: RunningServer) -> None:
    with hasty.client() as client:
        body = {"prompt": "[[" + "long " * 800 + "]]assistant: ", "temperature": 0, "logprobs": 20}
        answer = client.post("/v1/completions", json=body)
    assert len(answer.content) > 1 << 20
    assert answer.json()["choices"][0]["text"] == "long " * 800


# ---- crowds


def test_one_connection_too_many_is_told_so_and_the_next_one_is_served() -> None:
    with running(settings=Settings(max_connections=3)) as server:
        with ExitStack() as crowd:
            for _ in range(3):
                crowd.enter_context(connect(server))
            eventually(lambda: len(connections_of(server)) == 3, "three connections")
            with connect(server) as peer:
                peer.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                told = Told(everything(peer))
            assert (told.status, told.error["code"]) == (503, "too_many_connections")
            assert int(told.headers["retry-after"]) > 0
            assert told.headers["x-request-id"]
            assert refused(server, Refusal.CONNECTIONS) == 1
        eventually(lambda: not connections_of(server), "the crowd to leave")
        with server.client() as client:
            assert client.get("/health").status_code == 200


def connections_of(server: RunningServer) -> set[Any]:
    return server.process._server.server_state.connections


@pytest.mark.parametrize(("hard", "allowed"), [(4096, 1536), (1200, 1200), (100, 100)])
def test_a_crowd_leaves_files_for_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hard: int, allowed: int
) -> None:
    limits = [(100, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, told: limits.append(told))
    allow_open_files(1024)
    assert limits[-1] == (allowed, hard)
    assert bool(caplog.records) == (allowed < 1536)
    told = len(limits)
    allow_open_files(allowed - 512)
    assert len(limits) == told, "what is enough is left alone"


# ---- half-closed clients


@pytest.fixture
def gated() -> Iterator[tuple[RunningServer, Gated]]:
    backend = Gated()
    with (
        tempfile.TemporaryDirectory(prefix="pl") as folder,
        running(backend, uds=Path(folder) / "s", engine=EngineConfig(draft_tokens=0)) as server,
    ):
        yield server, backend


def half_closed(server: RunningServer, stream: bool) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(PATIENCE)
    peer.connect(str(server.uds))
    peer.sendall(request_of("say [[all of it]]", stream=stream))
    peer.shutdown(socket.SHUT_WR)
    return peer


@pytest.mark.parametrize("stream", [True, False])
def test_a_half_closed_client_on_the_unix_socket_gets_its_answer(
    gated: tuple[RunningServer, Gated], stream: bool
) -> None:
    server, backend = gated
    with half_closed(server, stream) as peer:
        eventually(backend.waiting.is_set, "a request under way")
        backend.open()
        raw = everything(peer)
    assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if stream else b"all of it" in raw


@pytest.mark.parametrize("stream", [True, False])
def test_one_that_leaves_later_frees_its_lane(gated: tuple[RunningServer, Gated], stream: bool) -> None:
    server, backend = gated
    with half_closed(server, stream):
        eventually(backend.waiting.is_set, "a request under way")
    eventually(lambda: server.open_requests == len(server.service.door) == 0, "the server to notice")


def test_a_half_closed_client_with_half_a_request_is_gone(server: RunningServer) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(PATIENCE)
        peer.connect(str(server.uds))
        peer.sendall(request_of("never")[:-5])
        peer.shutdown(socket.SHUT_WR)
        assert everything(peer) == b""


def test_the_checks_do_not_slow_a_client_that_behaves(client: httpx2.Client) -> None:
    """Many requests over one connection: nothing of one is left for the next."""
    for number in range(20):
        answer = client.post("/v1/completions", json={"prompt": f"[[{number}]]assistant: ", "temperature": 0})
        assert answer.json()["choices"][0]["text"] == str(number)
