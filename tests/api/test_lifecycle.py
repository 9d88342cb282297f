"""From loading to the end: what `/health` says and what requests get in each state."""

import asyncio
import json
import threading
from collections.abc import MutableMapping
from typing import Any

import httpx2
import pytest

from api.detokenize import ByteDetokenizer, Detokenizer
from api.openai.chat import prepare_chat
from api.openai.endpoint import GenerationEndpoint
from api.openai.schema import ChatBody
from api.service import Settings
from api.text import ByteTokenizer
from backends.base import Backend
from engine.config import EngineConfig
from tests.api.servers import Gated, Parrot, Raising, RunningServer, eventually, running

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "say [[to the end]]"}], "temperature": 0}


def refused(client: httpx2.Client, status: str) -> None:
    """Every door is closed for now, and says when to come back."""
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, status)
    for response in (
        client.post("/v1/chat/completions", json=BODY),
        client.post("/v1/completions", json={"prompt": "x"}),
        client.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"}),
        client.get("/v1/models"),
    ):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["code"] == status


def test_while_loading_the_server_answers_and_serves_nothing() -> None:
    loaded = threading.Event()

    def slow() -> Backend:
        assert loaded.wait(20)
        return Parrot()

    with RunningServer(slow) as server, server.client() as client:
        refused(client, "loading")
        assert "paceline_rounds_total" in client.get("/metrics").text
        loaded.set()
        server.ready()
        assert client.get("/health").json() == {"status": "ready"}
        assert client.post("/v1/chat/completions", json=BODY).status_code == 200


def test_a_model_that_cannot_be_loaded_ends_the_process_with_the_reason() -> None:
    def missing() -> Backend:
        raise FileNotFoundError("no such model")

    with RunningServer(missing) as server:
        server.join()
        assert server.status == 1


def test_draining_refuses_new_requests_and_finishes_the_old_ones() -> None:
    backend = Gated()
    replies: list[str] = []
    with running(backend, drain_seconds=30) as server, server.client() as client:
        backend.permit(3)

        def ask() -> None:
            with server.client() as own:
                replies.append(own.post("/v1/chat/completions", json=BODY).json()["choices"][0]["message"]["content"])

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: backend.forwards == 3, "a request under way")
        server.terminate()
        eventually(lambda: client.get("/health").status_code == 503, "draining")
        refused(client, "draining")
        backend.open()
        asking.join(20)
        server.join()
    assert replies == ["to the end"]
    assert server.status == 0


@pytest.mark.parametrize("stream", [True, False])
def test_what_has_not_ended_at_the_deadline_is_told_so(stream: bool) -> None:
    backend = Gated()
    answers: list[httpx2.Response] = []
    with running(backend, drain_seconds=0) as server:
        backend.permit(3)

        def ask() -> None:
            with server.client() as own:
                answers.append(own.post("/v1/chat/completions", json={**BODY, "stream": stream}))

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: backend.forwards == 3 and backend.waiting.is_set(), "a request under way")
        server.terminate()
        eventually(lambda: server.service.status == "draining", "the deadline")
        backend.open()
        asking.join(20)
        server.join()
    (answer,) = answers
    if stream:
        last = answer.text.strip().rpartition("\n\n")[2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert server.status == 0


def test_a_failed_forward_is_a_500_before_the_first_byte_and_an_error_frame_after_it() -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "BOOM"}]}
    with running(Raising) as server, server.client() as client:
        whole = client.post("/v1/chat/completions", json=body)
        assert whole.status_code == 500
        assert whole.json()["error"]["type"] == "server_error"
        stream = client.post("/v1/chat/completions", json={**body, "stream": True})
        *_, last, rest = stream.text.split("\n\n")
        assert (stream.status_code, rest) == (200, "")
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert client.post("/v1/chat/completions", json=BODY).status_code == 200
        assert 'finished_reason="error"} 2.0' in client.get("/metrics").text


@pytest.mark.parametrize("stream", [True, False])
def test_a_fault_while_text_is_made_ends_that_reply_alone(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    class Stumbling(ByteTokenizer):
        def detokenizer(self) -> Detokenizer:
            raise_on_z = ByteDetokenizer()
            push = raise_on_z.push
            monkeypatch.setattr(raise_on_z, "push", lambda token: push(token) if token != ord("z") else 1 // 0)
            return raise_on_z

    monkeypatch.setattr("api.service.load_tokenizer", lambda _info: Stumbling())
    body = {**BODY, "messages": [{"role": "user", "content": "say [[abz]]"}], "stream": stream}
    with running() as server, server.client() as client:
        response = client.post("/v1/chat/completions", json=body)
        last = response.text.strip().rpartition("\n\n")[2].removeprefix("data: ")
        assert json.loads(last)["error"]["code"] == "internal_error"
        assert response.status_code == (200 if stream else 500)
        assert server.open_requests == 0
        assert client.post("/v1/chat/completions", json=BODY).status_code == 200


def test_models_tell_the_context_and_the_public_id() -> None:
    with running(settings=Settings(served_name="org/public")) as server, server.client() as client:
        listed = client.get("/v1/models").json()
        (model,) = listed["data"]
        assert listed["object"] == "list"
        assert (model["id"], model["object"], model["owned_by"]) == ("org/public", "model", "paceline")
        assert isinstance(model["created"], int)
        assert model["max_model_len"] == model["meta"]["n_ctx"] == 8192
        assert client.get("/v1/models/org/public").json() == model
        assert client.get("/v1/models/fake").json()["error"]["code"] == "model_not_found"
        assert client.post("/v1/chat/completions", json={**BODY, "model": "fake"}).status_code == 404
        answer = client.post("/v1/chat/completions", json={**BODY, "model": "org/public"}).json()
        assert answer["model"] == "org/public"


def test_a_model_may_set_its_own_temperature() -> None:
    class Greedy(Parrot):
        def __init__(self) -> None:
            super().__init__()
            self.info = type(self.info)(
                **{
                    **{name: getattr(self.info, name) for name in self.info.__struct_fields__},
                    "defaults": {"temperature": 0.0},
                }
            )

    body = {"messages": BODY["messages"]}
    with running(Greedy) as server, server.client() as client:
        assert client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == "to the end"


def test_silence_is_filled_with_comments() -> None:
    backend = Gated()
    settings = Settings(keepalive_seconds=0.05)
    with running(backend, settings=settings, engine=EngineConfig(max_lanes=1)) as server, server.client() as client:
        with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
            lines = response.iter_lines()
            comments = 0
            while comments < 3:
                comments += next(lines) == ":"
            backend.open()
            rest = "\n".join(lines)
        assert rest.endswith("data: [DONE]\n")
        assert "to the end"[0] in rest


def test_a_streamed_request_is_the_engines_before_its_head_is_sent() -> None:
    """So a drain that begins right after the head waits for it. Once, the process could end between the two."""
    backend = Gated()
    open_at: dict[str, int] = {}
    body = json.dumps({**BODY, "stream": True}).encode()

    with running(backend) as server:

        async def receive() -> dict[str, Any]:
            if not open_at:
                return {"type": "http.request", "body": body}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: MutableMapping[str, Any]) -> None:
            open_at.setdefault(message["type"], server.open_requests)
            backend.open()

        endpoint = GenerationEndpoint(server.service, ChatBody, prepare_chat)
        answering = endpoint({"type": "http", "headers": []}, receive, send)
        asyncio.run_coroutine_threadsafe(answering, server.loop).result(20)
    assert open_at["http.response.start"] == 1
