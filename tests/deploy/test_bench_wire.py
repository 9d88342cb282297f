"""The decoder of recorded streams: however the bytes were cut, the same events, each at the right time."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.bench.wire import Arrival, Ends, Piece, count_ends, read_reply, read_transcript, server_sent_events
from tests.deploy.streams import CHUNKED_HEAD, DONE, HEAD, answer, chunked, delta, event, usage

TEXTS = ("Grüße", " 🚴", "\n\ndata: [DONE]\n\n", "東京", " end")


def cut(data: bytes, positions: list[int]) -> list[Arrival]:
    """`data` in pieces; the one that ends at byte k arrives at time k."""
    ends = sorted(({min(position, len(data)) for position in positions} | {len(data)}) - {0})
    starts = [0, *ends[:-1]]
    return [Arrival(float(end), data[start:end]) for start, end in zip(starts, ends, strict=True)]


@given(cuts=st.lists(st.integers(0, 2000)), size=st.integers(1, 200), framed=st.booleans())
def test_any_cut_gives_the_same_text(cuts: list[int], size: int, framed: bool) -> None:
    body = answer(*TEXTS, tokens=9)
    data = CHUNKED_HEAD + chunked(body, size) if framed else HEAD + body
    reply = read_reply(cut(data, cuts))
    transcript = read_transcript(server_sent_events(reply.body))
    assert reply.status == 200
    assert tuple(piece.text for piece in transcript.pieces) == TEXTS
    assert (transcript.completion_tokens, transcript.prompt_tokens) == (9, 7)
    assert (transcript.finish_reason, transcript.error) == ("length", None)


@given(cuts=st.lists(st.integers(0, 2000)))
def test_an_event_is_as_late_as_the_read_that_completed_it(cuts: list[int]) -> None:
    first, second = HEAD + delta("a"), delta("b")
    arrivals = cut(first + second, cuts)
    ends = [arrival.at for arrival in arrivals]
    pieces = read_transcript(server_sent_events(read_reply(arrivals).body)).pieces
    complete = [min(end for end in ends if end >= needed) for needed in (len(first), len(first) + len(second))]
    assert pieces == (Piece(complete[0], "a"), Piece(complete[1], "b"))


def test_comments_carriage_returns_and_data_over_several_lines() -> None:
    stream = b": keep-alive\n\nevent: x\r\ndata: one\r\ndata:two\r\n\r\n:\n\nid: 3\n\ndata: unfinished"
    assert [found.data for found in server_sent_events([Arrival(0.0, stream)])] == [b"one\ntwo"]


def test_text_completions_and_reasoning_are_text_too() -> None:
    stream = event({"choices": [{"text": "a", "finish_reason": None}]})
    stream += event({"choices": [{"delta": {"reasoning_content": "b"}, "finish_reason": "stop"}]})
    transcript = read_transcript(server_sent_events([Arrival(1.0, stream)]))
    assert [piece.text for piece in transcript.pieces] == ["a", "b"]
    assert (transcript.finished_at, transcript.finish_reason) == (1.0, "stop")


def test_nothing_counts_after_the_end() -> None:
    stream = delta("a") + DONE + delta("b") + usage(5)
    transcript = read_transcript(server_sent_events([Arrival(0.0, stream)]))
    assert [piece.text for piece in transcript.pieces] == ["a"]
    assert transcript.completion_tokens is None


@pytest.mark.parametrize("error", [{"message": "out of memory", "code": 500}, "out of memory"])
def test_an_error_in_mid_stream_ends_it(error: object) -> None:
    stream = delta("a") + event({"error": error}) + delta("b")
    transcript = read_transcript(server_sent_events([Arrival(0.0, stream)]))
    assert ([piece.text for piece in transcript.pieces], transcript.error) == (["a"], "out of memory")


def test_a_status_comes_with_its_body() -> None:
    reply = read_reply([Arrival(0.0, b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull")])
    assert (reply.status, b"".join(piece.data for piece in reply.body)) == (429, b"full")


def test_no_head_is_no_status_and_no_http_is_an_error() -> None:
    assert read_reply([Arrival(0.0, b"HTTP/1.1 200 O")]).status is None
    with pytest.raises(h11.RemoteProtocolError):
        read_reply([Arrival(0.0, b"SSH-2.0-hello\r\n\r\n")])


FAILED = event({"error": {"message": "broken"}})


@pytest.mark.parametrize(
    ("stream", "ends"),
    [
        (answer("a", "b", tokens=2), Ends(1, 0, 1, 0)),
        (delta("a") + FAILED, Ends(0, 1, 0, 0)),
        (delta("a"), Ends(0, 0, 0, 0)),
        (delta("", "stop"), Ends(1, 0, 0, 0)),
        (answer("a") + DONE, Ends(1, 0, 2, 1)),
        (answer("a") + delta("b"), Ends(1, 0, 1, 1)),
        (answer("a") + answer("b"), Ends(2, 0, 2, 4)),
        (delta("", "stop") + delta("b") + DONE, Ends(1, 0, 1, 1)),
        (delta("", "stop") + FAILED + FAILED, Ends(1, 2, 0, 1)),
    ],
    ids=[
        "whole",
        "failed",
        "cut",
        "no [DONE]",
        "twice",
        "more text",
        "again",
        "text behind the reason",
        "failed twice",
    ],
)
def test_every_end_of_a_stream_is_counted_and_what_comes_behind(stream: bytes, ends: Ends) -> None:
    assert count_ends(server_sent_events([Arrival(0.0, stream)])) == ends
