"""The load generator, over real sockets: what it sends, what it records, and that nothing keeps it waiting."""

import asyncio
import time
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any, TypeVar

import msgspec
import pytest
import uvloop

from deploy.bench.client import Endpoint, Exchange, Load, Record, Run, Target, drive, drive_now, exchange, http_bytes
from deploy.bench.prompts import Message, Prompt
from deploy.bench.servers import free_port
from tests.deploy.streams import CHUNKED_HEAD, DONE, HEAD, Script, Speaker, answer, chunked, delta, event, speaking

PROMPT = Prompt("p", (Message("system", "Be brief."), Message("user", "Hé!")))

T = TypeVar("T")


def run_on_uvloop(work: Coroutine[Any, Any, T]) -> T:
    """The loop that the bench itself uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def drive_script(script: Script, load: Load, count: int = 1, target: Target | None = None) -> tuple[Run, Speaker]:
    """Serve `script` and drive it, in one event loop."""

    async def both() -> tuple[Run, Speaker]:
        async with speaking(script) as speaker:
            return await drive(target or speaker.target, [PROMPT] * count, load), speaker

    return run_on_uvloop(both())


def say(*parts: bytes, pause_s: float = 0.0) -> Script:
    async def script(number: int, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return script


def only(run: Run) -> Record:
    (record,) = run.records
    return record


def test_a_streamed_chat_is_recorded() -> None:
    parts = (HEAD, delta("Hel"), delta("lo"), delta(" there"), answer(tokens=5))
    run, _ = drive_script(say(*parts, pause_s=0.03), Load(1, 5))
    record = only(run)
    assert (record.text, record.tokens, record.events, record.prompt_tokens) == ("Hello there", 5, 3, 7)
    assert (record.error, record.finish_reason) == (None, "length")
    assert record.first_at is not None
    assert record.last_at is not None
    assert record.started_at < record.first_at < record.last_at <= record.ended_at
    assert record.ttft_s is not None
    assert 0.02 < record.ttft_s < 1.0
    assert len(record.gaps_s) == 2
    assert all(0.02 < gap < 1.0 for gap in record.gaps_s)
    assert record.last_at - record.first_at > sum(record.gaps_s) + 0.02, "the finish reason closes the last token"
    assert record.decoded == pytest.approx(5 * 8 / 11)


def test_what_is_asked_for() -> None:
    target = Target("127.0.0.1", 0, "m", key="secret")

    async def ask(load: Load) -> tuple[str, dict[str, str], dict[str, object]]:
        async with speaking(say(HEAD, answer("x"))) as speaker:
            await drive(Target("127.0.0.1", speaker.target.port, "m", key=target.key), [PROMPT], load)
            line, headers, body = speaker.requests[0]
            return line, headers, msgspec.json.decode(body)

    line, headers, body = run_on_uvloop(ask(Load(1, 5)))
    assert line == "POST /v1/chat/completions HTTP/1.1"
    assert headers["authorization"] == "Bearer secret"
    assert headers["connection"] == "close"
    assert body == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé!"}],
    }
    line, _, body = run_on_uvloop(ask(Load(1, 5, endpoint=Endpoint.COMPLETIONS, ignore_eos=True)))
    assert line == "POST /v1/completions HTTP/1.1"
    assert (body["prompt"], body["ignore_eos"]) == ("Be brief.\n\nHé!", True)
    assert "messages" not in body


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_chunks_cut_anywhere_even_inside_a_character(size: int) -> None:
    """Every write is a read of its own on the other side, or not: the text is the same."""
    data = CHUNKED_HEAD + chunked(answer("Grüße", " 🚴", " 東京", tokens=3), 11)
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    record = only(drive_script(say(*parts), Load(1, 5))[0])
    assert (record.text, record.tokens, record.error) == ("Grüße 🚴 東京", 3, None)


def test_events_are_counted_where_the_server_sends_no_usage() -> None:
    record = only(drive_script(say(HEAD, answer("a", "b", "", "c")), Load(1, 5))[0])
    assert (record.tokens, record.events) == (3, 3)


def test_a_server_that_never_hangs_up_ends_at_done() -> None:
    async def script(number: int, writer: asyncio.StreamWriter) -> None:
        body = answer("a", tokens=1)
        writer.write(CHUNKED_HEAD + chunked(body, len(body) - 5)[:-8])
        await asyncio.sleep(0.05)
        writer.write(chunked(body, len(body) - 5)[-8:])
        await asyncio.sleep(30)

    started = time.perf_counter()
    record = only(drive_script(script, Load(1, 5))[0])
    assert (record.text, record.error) == ("a", None)
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        ((b"HTTP/1.1 503 Busy\r\nContent-Length: 7\r\n\r\nloading",), "HTTP 503: loading", ""),
        ((HEAD, delta("a"), event({"error": {"message": "broken"}}), DONE), "broken", "a"),
        ((HEAD, delta("a")), "without a finish reason", "a"),
        ((b"nonsense\r\n\r\n",), "not understood", ""),
        ((HEAD, b"data: {not json}\n\n"), "not understood", ""),
        ((), "without a finish reason", ""),
    ],
    ids=["status", "mid-stream", "cut off", "no http", "no json", "nothing"],
)
def test_what_goes_wrong_is_an_error_of_that_request(parts: tuple[bytes, ...], error: str, text: str) -> None:
    async def script(number: int, writer: asyncio.StreamWriter) -> None:
        await say(*(parts if number == 1 else (HEAD, answer("fine"))))(number, writer)

    run, _ = drive_script(script, Load(1, 5), count=3)
    assert [record.error is None for record in run.records] == [True, False, True]
    assert error in str(run.records[1].error)
    assert run.records[1].text == text


def test_nobody_listening_is_an_error_too() -> None:
    run = drive_now(Target("127.0.0.1", free_port(), "m"), [PROMPT], Load(1, 5))
    assert "cannot connect" in str(only(run).error)


def test_a_request_is_given_up_after_its_timeout_and_what_came_is_kept() -> None:
    run, _ = drive_script(say(HEAD, delta("a"), b": alive\n\n", pause_s=10.0), Load(1, 5, timeout_s=0.2))
    record = only(run)
    assert "timed out after 0.2 s" in str(record.error)
    assert record.ended_at - record.started_at < 2


def test_the_run_ends_at_its_limit_however_many_requests_wait() -> None:
    started = time.perf_counter()
    run, speaker = drive_script(say(HEAD, pause_s=10.0), Load(2, 5, timeout_s=0.3, limit_s=0.5), count=50)
    assert time.perf_counter() - started < 3
    assert len(speaker.requests) == 4
    assert all("timed out" in str(record.error) for record in run.records[:4])
    assert all("not sent" in str(record.error) for record in run.records[4:])
    assert len(run.records) == 50


def test_as_many_clients_as_asked_for_and_records_in_the_order_of_the_prompts() -> None:
    async def script(number: int, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05 if number % 2 else 0.01)
        writer.write(HEAD + answer("x"))

    async def both() -> tuple[Run, Speaker]:
        prompts = [Prompt(str(number), PROMPT.messages) for number in range(12)]
        async with speaking(script) as speaker:
            return await drive(speaker.target, prompts, Load(3, 5)), speaker

    run, speaker = run_on_uvloop(both())
    assert [record.prompt for record in run.records] == [str(number) for number in range(12)]
    assert [record.error for record in run.records] == [None] * 12
    assert speaker.most == 3
    starts = [record.started_at for record in run.records]
    assert all(earlier <= later for earlier, later in pairwise(starts))


@pytest.mark.parametrize(
    ("url", "port", "base"),
    [
        ("http://localhost:8321", 8321, "/v1"),
        ("http://localhost:8321/", 8321, "/v1"),
        ("http://localhost/openai/v1/", 80, "/openai/v1"),
    ],
)
def test_an_address_may_carry_a_path(url: str, port: int, base: str) -> None:
    target = Target.of_url(url, "m")
    assert (target.host, target.port, target.base) == ("localhost", port, base)


@pytest.mark.parametrize("url", ["localhost:8321", "https://localhost", "http://"])
def test_an_address_that_cannot_be_driven_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="want http"):
        Target.of_url(url, "m")


def exchange_script(script: Script, give_up_s: float = 10.0, **how: Any) -> Exchange:
    async def both() -> Exchange:
        async with speaking(script) as speaker:
            request = http_bytes(speaker.target, "POST /x", b"{}")
            return await exchange(speaker.target, request, time.perf_counter() + give_up_s, **how)

    return run_on_uvloop(both())


def test_a_client_that_listens_to_the_end_hears_what_comes_behind_it() -> None:
    parts = (HEAD, answer("a"), delta("behind"))
    heard, whole = (exchange_script(say(*parts, pause_s=0.02), to_the_end=to_the_end) for to_the_end in (False, True))
    assert [b"behind" in b"".join(each.data for each in ended.arrivals) for ended in (heard, whole)] == [False, True]
    assert heard.failure is whole.failure is None


def test_a_client_may_hang_up_after_some_reads() -> None:
    ended = exchange_script(say(HEAD, *[delta("a")] * 50, pause_s=0.01), most_reads=3, to_the_end=True)
    assert len(ended.arrivals) == 3
    assert ended.failure is None


def test_any_request_can_be_made() -> None:
    target = Target("127.0.0.1", 80, "m", key="secret")
    lines = http_bytes(target, "PUT /where", b"what", "text/plain").decode().split("\r\n")
    assert (lines[0], lines[-1]) == ("PUT /where HTTP/1.1", "what")
    assert {"Content-Type: text/plain", "Content-Length: 4", "Authorization: Bearer secret"} < set(lines)
