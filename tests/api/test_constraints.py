"""Constrained replies over real sockets: what is asked for is what comes, and what cannot be had is a 400."""

import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import pytest

from api.service import Service, Settings
from backends.base import MaskWords
from backends.fake import FakeBackend
from backends.grammar.base import Grammar, GrammarError, GrammarUnavailableError, Matcher
from backends.grammar.cache import CacheStats
from backends.grammar.compile import CompilerStats
from backends.grammar.limits import Limits
from backends.grammar.spec import ConstraintSpec
from backends.grammar.vetting import GrammarBusyError
from engine.config import EngineConfig
from tests.api.servers import PATIENCE, RunningServer, eventually, running

CHAT = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def json_schema(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def reply_to(client: httpx2.Client, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    told: dict[str, Any] = choice
    return told


def text_of(client: httpx2.Client, body: dict[str, Any]) -> str:
    """The text of a whole reply; the same one streamed, deltas joined, must equal it."""
    whole = reply_to(client, body)["message"]["content"]
    stream = client.post(CHAT, json={**body, "stream": True}).text
    frames = [json.loads(event.removeprefix("data: ")) for event in stream.split("\n\n")[:-2]]
    assert "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames) == whole
    return str(whole)


@pytest.mark.parametrize("script", ["no json at all", '{"name": "Zoë", "age": 42}', '{"age": 42}', ""])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.5, "seed": 4}, {"ignore_eos": True}])
def test_a_reply_obeys_its_schema_whatever_the_model_wants_to_say(
    client: httpx2.Client, script: str, settings: dict[str, Any]
) -> None:
    body = ask(f"say [[{script}]]", **json_schema(SCHEMA), **settings)
    jsonschema.validate(json.loads(text_of(client, body)), SCHEMA)


def test_what_the_model_says_is_kept_where_it_is_allowed(client: httpx2.Client) -> None:
    script = '{"name": "Zoë", "age": 42}'
    choice = reply_to(client, ask(f"say [[{script}]]", **json_schema(SCHEMA)))
    assert json.loads(choice["message"]["content"]) == {"name": "Zoë", "age": 42}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, r"[a-c]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no", 'it\'s "maybe"']}, r"yes|no|it's \"maybe\""),
        ({"grammar": 'root ::= "a" [bc] "d"'}, r"a[bc]d"),
        ({"json": json.dumps({"enum": [17]})}, r"17"),
        ({"json": {"const": "x"}}, r'"x"'),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_structured_outputs_obey(client: httpx2.Client, path: str, wanted: dict[str, Any], pattern: str) -> None:
    body = {**ask("say [[zzz]]"), "prompt": "x", "structured_outputs": {**wanted, "disable_any_whitespace": True}}
    (choice,) = client.post(path, json=body).json()["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert re.fullmatch(pattern, text)
    assert choice["finish_reason"] == "stop"


def test_any_object_is_an_object(client: httpx2.Client) -> None:
    body = ask('say [[{"free": [1, "x"]}]]', response_format={"type": "json_object"})
    assert json.loads(text_of(client, body)) == {"free": [1, "x"]}


def test_a_structural_tag_is_followed(client: httpx2.Client) -> None:
    tag = {
        "type": "tag",
        "begin": "<n>",
        "content": {"type": "json_schema", "json_schema": {"enum": [5]}},
        "end": "</n>",
    }
    body = ask("say [[x]]", response_format={"type": "structural_tag", "format": tag})
    assert text_of(client, body) == "<n>5</n>"


def test_a_document_cut_by_its_limit_or_a_stop_string_says_so(client: httpx2.Client) -> None:
    body = ask('say [[{"name": "Zoë", "age": 42}]]', **json_schema(SCHEMA))
    cut = reply_to(client, {**body, "max_tokens": 9})
    assert cut["finish_reason"] == "length"
    stopped = reply_to(client, {**body, "stop": "Zo"})
    assert stopped["finish_reason"] == "stop"
    assert "Zo" not in stopped["message"]["content"]


def test_every_choice_obeys_and_drafts_do_not_show() -> None:
    body = ask("talk", n=4, seed=3, **{**json_schema(SCHEMA), "temperature": 1.3})
    told = []
    for engine in (EngineConfig(), EngineConfig(draft_tokens=4), EngineConfig(draft_tokens=0)):
        with running(engine=engine) as server, server.client() as client:
            choices = client.post(CHAT, json=body).json()["choices"]
            told.append([choice["message"]["content"] for choice in choices])
    assert told[0] == told[1] == told[2]
    assert len(set(told[0])) > 1
    for text in told[0]:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (json_schema({"type": "wizard"}), "response_format"),
        (json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "response_format"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "?"}}}}}
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_cannot_be_enforced_is_a_400_and_never_reaches_the_engine(
    server: RunningServer, client: httpx2.Client, fields: dict[str, Any], field: str
) -> None:
    rounds = server.rounds
    response = client.post(CHAT, json=ask("x", **fields))
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, field, "invalid_grammar")
    assert error["message"].startswith(f"{field}: ")
    assert server.rounds == rounds


def test_whatever_the_depth_of_a_schema_it_is_a_400(client: httpx2.Client) -> None:
    """Near the depth at which a body can just be read, writing its schema out again goes too deep."""
    opening = b'{"messages": [{"role": "user", "content": "x"}], '
    for levels in (100, 450, *range(940, 1000)):
        schema = b'{"type": "array", "items": ' * levels + b"{}" + b"}" * levels
        for rest in (
            b'"response_format": {"type": "json_schema", "json_schema": {"schema": %s}}}',
            b'"tool_choice": "required", "tools": '
            b'[{"type": "function", "function": {"name": "f", "parameters": {"properties": %s}}}]}',
        ):
            response = client.post(CHAT, content=opening + rest % schema, headers={"content-type": "application/json"})
            assert response.status_code == 400, (levels, response.text)


# ---- compiling takes its time


class Unmatched:
    """A grammar that the engine never hears of."""

    summary = "none"

    def matcher(self) -> Matcher:
        raise AssertionError("it was submitted")


class SlowCompiler:
    """Compiles when a test lets it."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.kept: dict[str, Grammar] = {}
        self.may_end = threading.Event()
        self.compiled = 0
        self.failure: GrammarError | None = GrammarError("never mind")
        self.closed = False
        self.stats = CompilerStats(CacheStats(0, 0, 0, 0, 0), refused=0, killed=0)

    def cached(self, spec: ConstraintSpec) -> Grammar | None:
        return self.kept.get(spec.text)

    def compile(self, _spec: ConstraintSpec, _deadline: float) -> Grammar:
        self.began.release()
        assert self.may_end.wait(PATIENCE)
        self.compiled += 1
        if self.failure is not None:
            raise self.failure
        return Unmatched()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowCompiler]:
    compiler = SlowCompiler()
    monkeypatch.setattr("api.service.GrammarCompiler", lambda *_: compiler)
    yield compiler
    compiler.may_end.set()


def send(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """A request under way, over a connection that the test closes."""
    raw = json.dumps(body).encode()
    peer = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
    peer.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)
    return peer


def waiting(server: RunningServer) -> int:
    """How many requests the server is answering."""
    return len(server.process._server.server_state.tasks)


COMPILERS = Limits().processes


def test_while_grammars_are_compiled_others_are_served_and_who_leaves_is_not_waited_for(slow: SlowCompiler) -> None:
    with running() as server, server.client() as client:
        peers = [send(server, ask("x", **json_schema(SCHEMA))) for _ in range(9)]
        for _ in range(COMPILERS):
            assert slow.began.acquire(timeout=PATIENCE)
        assert reply_to(client, ask("[[others]]"))["message"]["content"] == "others"
        eventually(lambda: waiting(server) == 9, "nine requests that wait for a grammar")
        assert not slow.began.acquire(blocking=False)
        for peer in peers:
            peer.close()
        eventually(lambda: waiting(server) == 0, "nobody is waited for")
        slow.may_end.set()
        last = client.post(CHAT, json=ask("x", **json_schema(SCHEMA)))
        assert last.json()["error"]["message"] == "response_format: never mind"
        assert slow.compiled == COMPILERS + 1  # what had not begun when its client left never did
    assert slow.closed


class Free:
    """A grammar that allows everything, and ends with the model's text."""

    summary = "free"

    def matcher(self) -> Matcher:
        return FreeMatcher()


class FreeMatcher:
    finished = False

    def accept(self, _token: int) -> bool:
        return True

    def rollback(self, count: int) -> None:
        pass

    def fill(self, words: MaskWords) -> None:
        words[:] = -1

    def forced(self, _limit: int) -> tuple[int, ...]:
        return ()


def test_what_is_kept_waits_for_no_compiler(slow: SlowCompiler) -> None:
    slow.kept["[0-9]"] = Free()
    with running() as server, server.client() as client:
        peers = [send(server, ask("x", **json_schema(SCHEMA))) for _ in range(9)]
        for _ in range(COMPILERS):
            assert slow.began.acquire(timeout=PATIENCE)
        kept = reply_to(client, ask("say [[at once]]", structured_outputs={"regex": "[0-9]"}))
        assert kept["message"]["content"] == "at once"
        assert slow.compiled == 0
        for peer in peers:
            peer.close()


def test_the_queue_has_an_end_and_places_for_those_who_come_after_others_left(slow: SlowCompiler) -> None:
    wanted = ask("x", **json_schema(SCHEMA))
    with running(settings=Settings(grammars=Limits(waiting=2))) as server, server.client() as client:
        peers = [send(server, wanted) for _ in range(COMPILERS + 2)]
        eventually(lambda: waiting(server) == COMPILERS + 2, "all of them wait")
        for _ in range(COMPILERS):
            assert slow.began.acquire(timeout=PATIENCE)
        response = client.post(CHAT, json=wanted)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (503, "grammar_busy", "response_format")
        assert "wait to be compiled" in error["message"]
        assert response.headers["retry-after"] == "1"
        for peer in peers:
            peer.close()
        eventually(lambda: waiting(server) == 0, "all of them left")
        answers: list[httpx2.Response] = []
        asking = threading.Thread(target=lambda: answers.append(client.post(CHAT, json=wanted)))
        asking.start()
        eventually(lambda: waiting(server) == 1, "one has a place again")
        slow.may_end.set()
        asking.join(PATIENCE)
        (answer,) = answers
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_grammar")


def test_time_in_the_queue_is_bounded(slow: SlowCompiler) -> None:
    wanted = ask("x", **json_schema(SCHEMA))
    with running(settings=Settings(grammars=Limits(seconds=0.3))) as server, server.client() as client:
        peers = [send(server, wanted) for _ in range(COMPILERS)]
        for _ in range(COMPILERS):
            assert slow.began.acquire(timeout=PATIENCE)
        response = client.post(CHAT, json=wanted)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "grammar_busy")
        assert slow.compiled == 0
        for peer in peers:
            peer.close()


def test_a_drain_that_begins_while_a_grammar_is_compiled_refuses_its_request(slow: SlowCompiler) -> None:
    slow.failure = None
    answers: list[httpx2.Response] = []
    with running(drain_seconds=30) as server:

        def post() -> None:
            with server.client() as client:
                answers.append(client.post(CHAT, json=ask("x", **json_schema(SCHEMA))))

        asking = threading.Thread(target=post)
        asking.start()
        assert slow.began.acquire(timeout=PATIENCE)
        server.terminate()
        eventually(lambda: server.service.status == "draining", "draining")
        slow.may_end.set()
        asking.join(PATIENCE)
        server.join()
        assert server.rounds == 0
    (answer,) = answers
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert server.status == 0


def test_a_plain_request_never_meets_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "compile", lambda *_: 1 // 0)
    with running(FakeBackend) as server, server.client() as client:
        assert client.post(CHAT, json=ask("x", max_tokens=2, ignore_eos=True)).status_code == 200


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (GrammarBusyError("too many"), "grammar_busy"),
        (GrammarUnavailableError("no process starts"), "grammar_unavailable"),
    ],
)
def test_a_compiler_that_cannot_say_asks_to_come_again(slow: SlowCompiler, failure: GrammarError, code: str) -> None:
    slow.failure = failure
    slow.may_end.set()
    with running() as server, server.client() as client:
        response = client.post(CHAT, json=ask("x", **json_schema(SCHEMA)))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (503, code, "response_format")
    assert error["message"] == f"response_format: {failure}"
    assert response.headers["retry-after"] == "1"


def test_a_server_that_cannot_start_a_process_does_not_blame_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with running() as server, server.client() as client:
        response = client.post(CHAT, json=ask("x", **json_schema(SCHEMA)))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "grammar_unavailable")
        assert reply_to(client, ask("[[free]]"))["message"]["content"] == "free"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json": r'{"enum": ["\ud83d"]}'}, "half a surrogate pair"),
        ({"regex": r"\ud83d"}, "no text matches"),
        ({"grammar": 'root ::= x "c"\nx ::= "a" (= "b")'}, "look-ahead"),
        ({"json": '{"minLength": 1e999999}'}, "more than 400 digits"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "const_string"}}}, "must have a value field"),
    ],
)
def test_the_client_is_told_why(client: httpx2.Client, fields: dict[str, Any], reason: str) -> None:
    error = client.post(CHAT, json=ask("x", structured_outputs=fields)).json()["error"]
    assert (error["param"], error["code"]) == ("structured_outputs", "invalid_grammar")
    assert reason in error["message"]
    assert "Check failed" not in error["message"]


def test_limits_and_counters_are_the_servers() -> None:
    settings = Settings(grammars=Limits(text_bytes=100))
    with running(settings=settings) as server, server.client() as client:
        small, large = json_schema({"enum": [1]}), json_schema({"enum": ["x" * 100]})
        statuses = [client.post(CHAT, json=ask("x", **fields)).status_code for fields in (small, large, small, small)]
        metrics = client.get("/metrics").text
    assert statuses == [200, 400, 200, 200]
    for name, value in (("cache_hits", 2), ("cache_misses", 1), ("cache_evictions", 0), ("refused", 1), ("killed", 0)):
        assert f"paceline_grammar_{name}_total {value}.0\n" in metrics
    assert "paceline_grammar_cache_bytes" in metrics
