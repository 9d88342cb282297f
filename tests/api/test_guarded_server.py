"""The checks in front of a real server, in their order."""

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


def test_a_fault_of_ours_is_a_500_with_an_error_object_and_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that no check foresees: the counters cannot be read."""
    with running() as server, server.client() as client:
        monkeypatch.setattr(server.service, "registry", None)
        response = client.get("/metrics")
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert response.headers["x-request-id"]
        assert client.get("/health").status_code == 200
