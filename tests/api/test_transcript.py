"""A lane's transcript: the same text and count however the rounds cut its tokens; stop strings end the generation."""

import asyncio
import contextlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from api.detokenize import ByteDetokenizer
from api.metrics import RequestMetrics, RequestRecord
from api.transcript import Transcript, follow
from engine.client import EngineClient
from engine.messages import Cancel, Finish, Message, Submit
from scheduler.events import Event, Finished, Tokens
from scheduler.request import FinishReason, Request, Timing, Usage

REQUEST = Request("r", prompt=(1,), max_tokens=100)


def rounds_of(tokens: bytes, cuts: list[int]) -> list[tuple[int, ...]]:
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    return [tuple(tokens[start:end]) for start, end in pairwise(edges)]


def ended(reason: FinishReason, completion: int, error: str | None = None) -> Finished:
    return Finished("r", reason, Usage(1, completion), Timing(0.0, 0.0, 0.0, 1.0), error)


def followed(events: list[Event], stops: tuple[str, ...]) -> tuple[str, Finished, list[Message], RequestMetrics]:
    """What is delivered, the end, what the engine was told, and the counters."""
    told: list[Message] = []
    shown: list[str] = []
    metrics = RequestMetrics()

    async def deliver(text: str) -> None:
        shown.append(text)

    async def main() -> Finished:
        client = EngineClient(told.append)
        with client.submit(REQUEST) as generation:
            client.deliver(events)
            record = RequestRecord(metrics, arrived=0.0)
            return await follow(generation, Transcript(ByteDetokenizer(), stops), record, deliver)

    end = asyncio.run(main())
    assert "" not in shown
    return "".join(shown), end, told, metrics


@given(
    st.text(alphabet="aé🦄.", min_size=1, max_size=20),
    st.lists(st.text(alphabet="aé🦄.", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 80)),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_rounds_do_not_show(text: str, stops: list[str], cuts: list[int], reason: FinishReason) -> None:
    tokens = text.encode()
    final = reason is FinishReason.STOP
    events: list[Event] = [Tokens("r", tokens) for tokens in rounds_of(tokens, cuts)]
    shown, end, told, metrics = followed([*events, ended(reason, len(tokens) + final)], tuple(stops))
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if found:
        stop_end, length = min(found)
        kept = len(text[:stop_end].encode())
        assert (shown, end.reason, end.usage.completion_tokens) == (text[: stop_end + length], FinishReason.STOP, kept)
        assert told == [Submit(REQUEST), Finish("r", kept)]
    else:
        assert (shown, end.reason, end.usage.completion_tokens) == (text, reason, len(tokens) + final)
        assert told == [Submit(REQUEST)]
    assert metrics.generation_tokens == end.usage.completion_tokens
    assert metrics.finished[end.reason] == 1


def test_a_stop_string_outranks_whatever_the_engine_finds_after_it() -> None:
    events: list[Event] = [Tokens("r", tuple(b"a.bc")), ended(FinishReason.ERROR, 4, "late")]
    shown, end, _, _ = followed(events, (".",))
    assert (shown, end.reason, end.error, end.usage.completion_tokens) == ("a", FinishReason.STOP, None, 2)


def test_tokens_under_way_behind_a_stop_string_are_dropped_and_told_once() -> None:
    events: list[Event] = [Tokens("r", tuple(b"a.")), Tokens("r", tuple(b".b")), ended(FinishReason.STOP, 2)]
    shown, end, told, metrics = followed(events, (".",))
    assert (shown, end.usage.completion_tokens, metrics.generation_tokens) == ("a", 2, 2)
    assert told == [Submit(REQUEST), Finish("r", 2)]


def test_held_text_is_delivered_also_when_the_lane_fails() -> None:
    shown, end, _, _ = followed([Tokens("r", tuple(b"aST")), ended(FinishReason.ERROR, 3, "boom")], ("STOP",))
    assert (shown, end.reason, end.error) == ("aST", FinishReason.ERROR, "boom")


def test_leaving_in_the_middle_cancels_once() -> None:
    told: list[Message] = []

    async def main() -> None:
        client = EngineClient(told.append)

        async def never(_text: str) -> None:
            raise ConnectionError

        with client.submit(REQUEST) as generation:
            client.deliver([Tokens("r", (97,))])
            record = RequestRecord(RequestMetrics(), arrived=0.0)
            with contextlib.suppress(ConnectionError):
                await follow(generation, Transcript(ByteDetokenizer()), record, never)

    asyncio.run(main())
    assert told == [Submit(REQUEST), Cancel("r")]
