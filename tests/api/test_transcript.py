"""A lane's transcript: the same text and count however the rounds cut its tokens; stop strings end the generation."""

import asyncio
import contextlib
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from api.detokenize import ByteDetokenizer
from api.metrics import RequestMetrics, RequestRecord
from api.transcript import LoggedToken, Transcript, follow
from engine.client import EngineClient
from engine.messages import Cancel, Finish, Message, Submit
from scheduler.events import Event, Finished, TokenLogprob, Tokens
from scheduler.request import FinishReason, Request, Sampling, Timing, Usage

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

    async def deliver(text: str, _logged: Sequence[LoggedToken]) -> None:
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

        async def never(_text: str, _logged: Sequence[LoggedToken]) -> None:
            raise ConnectionError

        with client.submit(REQUEST) as generation:
            client.deliver([Tokens("r", (97,))])
            record = RequestRecord(RequestMetrics(), arrived=0.0)
            with contextlib.suppress(ConnectionError):
                await follow(generation, Transcript(ByteDetokenizer()), record, never)

    asyncio.run(main())
    assert told == [Submit(REQUEST), Cancel("r")]


def logged_pieces(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> tuple[Transcript, list[tuple[str, Sequence[LoggedToken]]]]:
    """What a logged transcript of a text in bytes gives out, round by round, and at its end."""
    tokens = text.encode()
    transcript = Transcript(ByteDetokenizer(), stops, logged=True)
    given_out = [
        transcript.push(given, tuple(TokenLogprob(-float(token), ()) for token in given))
        for given in rounds_of(tokens, cuts)
        if not transcript.stopped
    ]
    return transcript, [*given_out, transcript.close()]


@given(
    st.text(alphabet="aé🦄.", min_size=1, max_size=20),
    st.lists(st.text(alphabet="aé🦄.", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 80)),
)
def test_logged_tokens_are_all_that_were_delivered_each_with_its_text(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """Joined they are the counted tokens, and those given out so far cover exactly the text given out so far."""
    transcript, pieces = logged_pieces(text, tuple(stops), cuts)
    logged = [one for _, some in pieces for one in some]
    assert bytes(one.token for one in logged) == text.encode()[: transcript.tokens]
    assert [one.logprob.logprob for one in logged] == [-float(one.token) for one in logged]
    assert [one.offset for one in logged] == [
        len(text.encode()[:place].decode(errors="ignore")) for place in range(len(logged))
    ]
    shown, covered = "", b""
    for piece, some in pieces[:-1]:
        shown += piece
        covered += bytes(one.token for one in some)
        assert covered.decode() == shown


def test_a_token_without_text_goes_with_the_text_that_follows() -> None:
    transcript = Transcript(ByteDetokenizer(), logged=True)
    nothing = TokenLogprob(0.0, ())
    assert transcript.push((300,), (nothing,)) == ("", [])
    text, logged = transcript.push((97,), (nothing,))
    assert (text, [one.token for one in logged]) == ("a", [300, 97])
    assert transcript.push((300,), (nothing,)) == ("", [])
    text, logged = transcript.close()
    assert (text, [one.token for one in logged]) == ("", [300])


def test_only_the_first_of_several_choices_counts_their_prompt() -> None:
    async def prompt_tokens(choice: int) -> tuple[int, int]:
        request = Request("r", (1,), 9, Sampling(choice=choice))
        client = EngineClient(lambda _message: None)
        metrics = RequestMetrics()

        async def deliver(_text: str, _logged: Sequence[LoggedToken]) -> None:
            pass

        with client.submit(request) as generation:
            usage = Usage(5, 2, cached_tokens=3)
            client.deliver([Finished("r", FinishReason.LENGTH, usage, Timing(0.0, 0.0, 0.0, 1.0))])
            end = await follow(generation, Transcript(ByteDetokenizer()), RequestRecord(metrics, 0.0), deliver)
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (metrics.prompt_tokens, 2)
        return end.usage.prompt_tokens, end.usage.cached_tokens

    assert [asyncio.run(prompt_tokens(choice)) for choice in (0, 1)] == [(5, 3), (0, 0)]
