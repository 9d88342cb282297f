"""A client that leaves frees its lane: in prefill and in decode, streamed or not; and nobody else notices.

Rounds happen only when the test permits, so "before the next one" is exact.
"""

import json
import socket
from collections.abc import Iterator

import pytest

from engine.config import EngineConfig
from tests.api.servers import Gated, RunningServer, eventually, running


@pytest.fixture
def gated() -> Iterator[tuple[RunningServer, Gated]]:
    backend = Gated()
    with running(backend, engine=EngineConfig(max_lanes=4, round_rows=64, draft_tokens=0)) as server:
        yield server, backend


def leave_later(server: RunningServer, text: str, **fields: object) -> socket.socket:
    """A request under way, over a connection that the test closes."""
    body = json.dumps({"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}).encode()
    peer = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    peer.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    return peer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("text", "rounds"), [("x" * 1000, 0), ("x" * 1000, 2), ("x", 0), ("x", 5)])
def test_a_client_that_leaves_frees_its_lane_before_the_next_round(
    gated: tuple[RunningServer, Gated], stream: bool, text: str, rounds: int
) -> None:
    """With 1,000 bytes of prompt and 64 rows a round it leaves during prefill, else during decode."""
    server, backend = gated
    peer = leave_later(server, text, stream=stream, ignore_eos=True)
    backend.permit(rounds)
    eventually(lambda: backend.forwards == rounds and backend.waiting.is_set(), "the round to leave in")
    before = server.rounds
    peer.close()
    eventually(lambda: server.open_requests == 0, "the server to notice")
    backend.open()
    eventually(lambda: server.service.engine.stats.running == 0, "the lane to be free")
    assert server.rounds - before < 2


def test_the_others_do_not_notice(gated: tuple[RunningServer, Gated]) -> None:
    server, backend = gated
    with server.client() as client:
        alone = leave_later(server, "say [[the whole text]]", stream=True)
        leaving = [leave_later(server, "y" * length, stream=True) for length in (1, 200)]
        eventually(lambda: server.open_requests == 3, "three requests")
        backend.permit(6)
        eventually(lambda: backend.forwards == 6 and backend.waiting.is_set(), "six rounds")
        for peer in leaving:
            peer.close()
        eventually(lambda: server.open_requests == 1, "the server to notice")
        backend.open()
        received = alone.makefile("rb")
        lines = iter(received.readline, b"data: [DONE]\n")
        contents = [
            json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines if line[:6] == b"data: "
        ]
        assert "".join(contents) == "the whole text"
        alone.close()
        received.close()
        metrics = client.get("/metrics").text
        assert 'paceline_request_success_total{finished_reason="cancelled"} 2.0' in metrics
        assert 'paceline_request_success_total{finished_reason="stop"} 1.0' in metrics


def test_headers_and_role_come_before_prefill(gated: tuple[RunningServer, Gated]) -> None:
    server, backend = gated
    with leave_later(server, "x" * 1000, stream=True) as peer, peer.makefile("rb") as received:
        lines = [received.readline() for _ in range(8)]
        assert lines[0] == b"HTTP/1.1 200 OK\r\n"
        role = next(line for line in iter(received.readline, b"") if line.startswith(b"data: "))
        assert b'"role":"assistant"' in role
        assert backend.forwards == 0


def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten(server: RunningServer) -> None:
    rounds = server.rounds
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as peer:
        peer.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b'Content-Length: 1000\r\n\r\n{"messages"'
        )
    with server.client() as client:
        assert client.get("/health").status_code == 200
    assert server.rounds == rounds
