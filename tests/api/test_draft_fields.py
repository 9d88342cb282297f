"""`prediction` and `draft`, and whose request it is: what reaches the engine, and what never changes an answer."""

from collections.abc import Iterator
from typing import Any

import pytest

from api.openai.shapes import usage_object
from api.service import Settings
from engine.client import EngineClient, Generation
from scheduler.request import DraftCount, Request, Usage
from tests.api.servers import RunningServer, running

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "say [[a text]]"}], "temperature": 0}


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the engine was asked, in order."""
    requests: list[Request] = []
    submit = EngineClient.submit

    def noted(self: EngineClient, request: Request) -> Generation:
        requests.append(request)
        return submit(self, request)

    monkeypatch.setattr(EngineClient, "submit", noted)
    return requests


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as served:
        yield served


def content(server: RunningServer, **fields: Any) -> str:
    with server.client() as client:
        response = client.post("/v1/chat/completions", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("expected", "tokens"),
    [
        ("a text", b"a text"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], b"one\ntwo"),
        ("é", "é".encode()),
        ("x" * 10_000, b"x" * 8192),
        ("", b""),
    ],
    ids=["text", "parts", "bytes", "longer than the context", "empty"],
)
def test_a_prediction_is_drafted_from_and_changes_nothing(
    server: RunningServer, submitted: list[Request], expected: Any, tokens: bytes
) -> None:
    assert content(server, prediction={"type": "content", "content": expected}) == content(server) == "a text"
    assert [request.expected for request in submitted] == [tuple(tokens), ()]
    assert submitted[0].prompt == submitted[1].prompt, "the model never sees it"


@pytest.mark.parametrize(
    ("fields", "limit", "sources"),
    [
        ({}, None, None),
        ({"draft": {}}, None, None),
        ({"draft": {"max": 0}}, 0, None),
        ({"draft": {"max": 3, "sources": ["suffix", "grammar"]}}, 3, frozenset({"suffix", "grammar"})),
        ({"draft": {"sources": []}}, None, frozenset()),
    ],
)
def test_a_request_says_how_it_may_be_drafted_for(
    server: RunningServer, submitted: list[Request], fields: dict[str, Any], limit: int | None, sources: Any
) -> None:
    assert content(server, **fields) == "a text"
    assert (submitted[0].draft_tokens, submitted[0].draft_sources) == (limit, sources)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prediction": "a text"}, "prediction"),
        ({"prediction": {"type": "image", "content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction.content[0].type"),
        ({"prediction": {"type": "content", "content": [{"type": "text"}]}}, "prediction.content[0].text"),
        ({"draft": 5}, "draft"),
        ({"draft": {"max": -1}}, "draft.max"),
        ({"draft": {"max": 1.5}}, "draft.max"),
        ({"draft": {"sources": ["crystal ball"]}}, "draft.sources[0]"),
    ],
)
def test_bad_values_are_a_400_that_names_the_field(server: RunningServer, fields: dict[str, Any], named: str) -> None:
    with server.client() as client:
        response = client.post("/v1/chat/completions", json={**BODY, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, named)


def test_each_key_is_an_owner_and_nobody_is_one_without_keys(server: RunningServer, submitted: list[Request]) -> None:
    content(server)
    with running(settings=Settings(api_keys=("first", "second"))) as guarded, guarded.client() as client:
        for key in ("first", "second", "first"):
            bearer = {"Authorization": f"Bearer {key}"}
            assert client.post("/v1/chat/completions", json=BODY, headers=bearer).status_code == 200
        assert client.post("/v1/chat/completions", json=BODY, headers={"x-api-key": "second"}).status_code == 200
    nobody, first, second, again, other = [request.owner for request in submitted]
    assert nobody == ""
    assert (first, second) == (again, other)
    assert first != second
    assert not {"first", "second"} & {first, second}, "a digest, not the key"


def test_usage_tells_what_came_of_a_prediction() -> None:
    usage = Usage(5, 9, 0, (DraftCount("suffix", 1, (1,), (1,)), DraftCount("prediction", 2, (2, 2, 1), (2, 1, 0))))
    details = usage_object([usage])["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 3
    assert details["rejected_prediction_tokens"] == 2


@pytest.mark.parametrize(
    ("draft", "read"),
    [({"max": 0}, False), ({"sources": ["suffix"]}, False), ({"sources": ["prediction"]}, True), ({"max": 2}, True)],
    ids=str,
)
def test_a_prediction_that_may_not_be_drafted_from_is_not_read(
    server: RunningServer, submitted: list[Request], draft: dict[str, Any], read: bool
) -> None:
    content(server, prediction={"type": "content", "content": "a text"}, draft=draft)
    assert bool(submitted[0].expected) == read
