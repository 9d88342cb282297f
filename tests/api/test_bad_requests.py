"""Bad input over real sockets: an error object that names the field, an engine that never hears of it."""

import socket

import httpx2
import pytest

from api.service import Settings
from api.text import ByteTokenizer
from tests.api.servers import RunningServer, running

JSON = {"content-type": "application/json"}
FINE = {"messages": [{"role": "user", "content": "[[fine]]"}], "temperature": 0}


def test_an_error_is_an_object_in_the_clients_dialect(client: httpx2.Client) -> None:
    response = client.post("/v1/chat/completions", content=b'{"messages": 5}', headers=JSON)
    assert response.status_code == 400
    assert response.json() == {
        "error": {
            "message": "messages: expected `array`, got `int`",
            "type": "invalid_request_error",
            "param": "messages",
            "code": None,
        }
    }


def test_bad_bodies_do_not_touch_the_engine_nor_other_clients(server: RunningServer, client: httpx2.Client) -> None:
    rounds = server.rounds
    for raw in (b"", b"{", b"[" * 100_000, b'{"messages": []}', b'{"messages": [{"role": "x", "content": ""}]}'):
        for path in ("/v1/chat/completions", "/v1/completions"):
            assert client.post(path, content=raw, headers=JSON).status_code == 400
    assert server.rounds == rounds
    assert client.post("/v1/chat/completions", json=FINE).json()["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_another_model_is_a_404_model_not_found(client: httpx2.Client, path: str) -> None:
    response = client.post(path, json={**FINE, "prompt": "p", "model": "gpt-5"})
    assert response.status_code == 404
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/docs"])
def test_an_unknown_path_is_a_404_with_an_error_object(client: httpx2.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["message"]
    assert response.headers["x-request-id"]


def test_another_method_is_a_405_with_an_error_object(client: httpx2.Client) -> None:
    response = client.get("/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["message"]


def test_a_body_over_the_limit_is_a_413_announced_or_not() -> None:
    with running(settings=Settings(max_body_bytes=1000)) as server, server.client() as client:
        large = b'{"messages": "' + b"x" * 100_000 + b'"}'
        announced = client.post("/v1/chat/completions", content=large, headers=JSON)
        streamed = client.post(
            "/v1/chat/completions", content=(large[i : i + 99] for i in range(0, 9999, 99)), headers=JSON
        )
        for response in (announced, streamed):
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
        assert client.post("/v1/chat/completions", json=FINE).status_code == 200
        assert server.rounds > 0


def test_an_announced_length_over_the_limit_is_refused_before_the_body_comes() -> None:
    with (
        running(settings=Settings(max_body_bytes=1000)) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as peer,
    ):
        peer.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1001\r\n\r\n"
        )
        assert peer.makefile("rb").read().startswith(b"HTTP/1.1 413 ")


def test_bytes_that_are_no_http_are_refused(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as peer:
        peer.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert peer.recv(4096).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "long " * 100_000}]}),
        ("/v1/completions", {"prompt": "long " * 100_000}),
        ("/v1/completions", {"prompt": ["short", "long " * 100_000]}),
    ],
)
def test_a_text_that_cannot_fit_is_refused_without_being_read(
    client: httpx2.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object]
) -> None:
    read: list[int] = []
    encode = ByteTokenizer.encode

    def noted(self: ByteTokenizer, text: str, *, special: bool) -> list[int]:
        read.append(len(text))
        return encode(self, text, special=special)

    monkeypatch.setattr(ByteTokenizer, "encode", noted)
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert max(read, default=0) < 1000


def test_a_stop_string_without_end_is_refused(client: httpx2.Client) -> None:
    assert client.post("/v1/completions", json={"prompt": "p", "max_tokens": 2, "stop": "x" * 4096}).status_code == 200
    response = client.post("/v1/completions", json={"prompt": "p", "stop": ["x", "x" * 4097]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop"
