"""Deadlines: whose they are, what the client is told when one passes, and that nothing is left behind."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from api.metrics import Refusal
from api.openai.prepare import time_limit
from api.openai.schema import ChatBody
from api.service import Settings
from engine.client import EngineClient, Generation
from engine.config import EngineConfig
from scheduler.request import Request
from tests.api.servers import Gated, RunningServer, eventually, running

CHAT = "/v1/chat/completions"
SECONDS = 1.0


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


@pytest.mark.parametrize(
    ("told", "allowed", "seconds"),
    [(None, 0.0, None), (5.0, 0.0, 5.0), (None, 7.0, 7.0), (5.0, 7.0, 5.0), (9.0, 7.0, 7.0)],
)
def test_the_smaller_of_what_is_asked_and_what_is_allowed_counts(
    told: float | None, allowed: float, seconds: float | None
) -> None:
    limit = time_limit(ChatBody(messages=[], timeout=told), allowed, arrived=100.0)
    assert (limit and (limit.seconds, limit.deadline)) == (seconds and (seconds, 100 + seconds))


def test_deadline_and_priority_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Request] = []
    submit = EngineClient.submit

    def noted(self: EngineClient, request: Request) -> Generation:
        requests.append(request)
        return submit(self, request)

    monkeypatch.setattr(EngineClient, "submit", noted)
    with running() as server, server.client() as client:
        before = time.monotonic()
        for fields in ({}, {"priority": -7, "timeout": 100, "n": 2}):
            assert client.post(CHAT, json=ask("[[x]]", **fields)).status_code == 200
        after = time.monotonic()
    plain, *timed = requests
    assert (plain.priority, plain.deadline) == (0, None)
    assert len(timed) == 2
    for request in timed:
        assert request.priority == -7
        assert request.deadline is not None
        assert before + 100 <= request.deadline <= after + 100


@contextmanager
def expired(
    forwards: int, settings: Settings | None = None, **fields: Any
) -> Iterator[tuple[RunningServer, httpx2.Response]]:
    """The answer to a request whose time ran out after so many forwards."""
    backend, answers = Gated(), []
    with running(backend, settings=settings or Settings(), engine=EngineConfig(draft_tokens=0)) as server:

        def post() -> None:
            with server.client() as client:
                answers.append(client.post(CHAT, json=ask("say [[abcdefgh]]", **fields)))

        backend.permit(forwards)
        asking = threading.Thread(target=post)
        asking.start()
        eventually(lambda: backend.forwards == forwards and backend.waiting.is_set(), "the forward to hang in")
        begun = time.monotonic()
        eventually(lambda: time.monotonic() > begun + SECONDS, "the deadline to pass")
        backend.open()
        asking.join(20)
        eventually(lambda: server.open_requests == len(server.service.door) == 0, "everything to be given back")
        yield server, answers[0]


def last_frame(answer: httpx2.Response) -> dict[str, Any]:
    frames = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return dict(frames[-1])


@pytest.mark.parametrize("settings", [None, Settings(request_seconds=SECONDS)])
def test_without_any_text_it_is_a_504_that_says_how_long(settings: Settings | None) -> None:
    fields = {"timeout": SECONDS} if settings is None else {}
    with expired(0, settings, **fields) as (server, answer):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (504, "deadline_exceeded", "timeout_error")
        assert "within 1 s" in error["message"]
        with server.client() as client:
            assert 'paceline_request_success_total{finished_reason="deadline"} 1.0' in client.get("/metrics").text


def test_in_a_stream_that_has_begun_it_is_an_error_event() -> None:
    with expired(0, timeout=SECONDS, stream=True, n=2) as (_, answer):
        assert answer.status_code == 200
        assert last_frame(answer)["error"]["code"] == "deadline_exceeded"
        assert 'finish_reason":"' not in answer.text
        assert "[DONE]" not in answer.text


@pytest.mark.parametrize("n", [1, 2])
def test_a_text_that_it_cuts_is_told_as_one_that_its_length_cut(n: int) -> None:
    with expired(4, timeout=SECONDS, n=n) as (_, answer):
        assert answer.status_code == 200
        for choice in answer.json()["choices"]:
            assert choice["finish_reason"] == "length"
            assert "abcdefgh".startswith(choice["message"]["content"])
            assert 0 < len(choice["message"]["content"]) < 8


@pytest.mark.parametrize("n", [1, 2])
def test_so_it_is_in_a_stream_and_every_choice_is_closed(n: int) -> None:
    with expired(4, timeout=SECONDS, n=n, stream=True) as (_, answer):
        frames = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        reasons = [(c["index"], c["finish_reason"]) for f in frames for c in f["choices"] if c["finish_reason"]]
        assert reasons == [(index, "length") for index in range(n)]
        assert answer.text.rstrip().endswith("[DONE]")


def test_a_request_in_time_is_served_as_without() -> None:
    with running() as server, server.client() as client:
        for path, body in (
            (CHAT, ask("[[in time]]")),
            ("/v1/completions", {"prompt": "[[in time]]assistant: ", "temperature": 0}),
        ):
            answers = [
                client.post(path, json={**body, **fields}).json()["choices"] for fields in ({}, {"timeout": 1000})
            ]
            assert answers[0] == answers[1]


@pytest.mark.parametrize("stream", [True, False])
def test_it_covers_the_time_before_the_engine_hears_of_it(stream: bool) -> None:
    """All compilers are at work, so the request waits for its grammar."""
    with running() as server, server.client() as client:
        compilers = server.service._compilers
        taken = server.service.settings.grammars.processes
        on(server, lambda: asyncio.gather(*[compilers.acquire() for _ in range(taken)]))
        body = ask("x", response_format={"type": "json_object"}, timeout=0.1, stream=stream)
        answer = client.post(CHAT, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert server.service.metrics.refused[Refusal.DEADLINE] == 1
        assert (server.service._waiting, len(server.service.door), server.rounds) == (0, 0, 0)
        for _ in range(taken):
            server.loop.call_soon_threadsafe(compilers.release)
        assert client.post(CHAT, json={**body, "timeout": 1000, "stream": False}).status_code == 200


def on(server: RunningServer, work: Callable[[], Any]) -> Any:
    """Await something on the server's event loop."""

    async def main() -> Any:
        return await work()

    return asyncio.run_coroutine_threadsafe(main(), server.loop).result(20)
