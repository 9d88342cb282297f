"""The checks in front of a real server, in their order."""

import socket

import pytest

from api.service import Settings
from tests.api.servers import running

BODY = {"messages": [{"role": "user", "content": "[[in]]"}], "temperature": 0}
KEY = {"authorization": "Bearer sesame"}


def test_a_key_guards_everything_but_health_and_a_fault_carries_an_id() -> None:
    with running(settings=Settings(api_keys=("sesame",))) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/nowhere"):
            assert client.get(path).status_code == 401
        assert client.post("/v1/chat/completions", json=BODY).status_code == 401
        assert server.rounds == 0
        answer = client.post("/v1/chat/completions", json=BODY, headers=KEY)
        assert answer.json()["choices"][0]["message"]["content"] == "in"
        assert client.get("/metrics", headers=KEY).status_code == 200
        rebound = client.get("/health", headers={"host": "evil.example"})
        foreign = client.get("/health", headers={"origin": "https://evil.example"})
        form = client.post("/v1/chat/completions", content=b"{}", headers={**KEY, "content-type": "text/plain"})
        assert [one.status_code for one in (rebound, foreign, form)] == [403, 403, 415]
        for one in (rebound, foreign, form):
            assert one.headers["x-request-id"]
            assert one.json()["error"]["message"]


@pytest.mark.parametrize("closes", [{}, {"connection": "close"}], ids=["kept", "closed"])
@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/chat/completions", {"authorization": "Bearer wrong"}, 401),
        ("/v1/chat/completions", {**KEY, "host": "evil.example"}, 403),
        ("/v1/chat/completions", {**KEY, "origin": "https://evil.example"}, 403),
        ("/v1/chat/completions", {**KEY, "content-type": "text/plain"}, 415),
        ("/nowhere", KEY, 404),
        ("/v1/models", KEY, 405),
        ("/v1/chat/completions", KEY, 413),
    ],
)
def test_whoever_is_refused_while_it_still_sends_hears_why(
    path: str, headers: dict[str, str], status: int, closes: dict[str, str]
) -> None:
    """It listens only when it has sent all. Were its body left unread, the connection would be reset before that."""
    content = b" " * (16 << 20)
    sent = {"host": "localhost", "content-type": "application/json", "content-length": str(len(content))}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in {**sent, **headers, **closes}.items())]
    settings = Settings(api_keys=("sesame",), max_body_bytes=1 << 20)
    with running(settings=settings) as server, socket.create_connection(("127.0.0.1", server.port), 30) as peer:
        peer.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        assert peer.recv(12) == b"HTTP/1.1 %d" % status


def test_a_fault_of_ours_is_a_500_with_an_error_object_and_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that no check foresees: the counters cannot be read."""
    with running() as server, server.client() as client:
        monkeypatch.setattr(server.service, "registry", None)
        response = client.get("/metrics")
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert response.headers["x-request-id"]
        assert client.get("/health").status_code == 200
