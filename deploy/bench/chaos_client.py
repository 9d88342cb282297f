"""One request of the chaos: asked, perhaps left half-way, and what came of it beside what it says when all is well.

Every token is asked for with its log-probability and that of the second best, so that a text that differs where the two
were as good as equal can be told from a wrong one.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import h11
import msgspec

from deploy.bench.wire import Arrival, read_reply, server_sent_events

NEAR_TIE = 1e-3
"""Two log-probabilities this close may come out either way."""
LOGGED: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
"""What a request's body holds besides."""
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Said:
    """A token of an answer, and by how much it led the second best in log-probability."""

    token: str
    lead: float


@dataclass(frozen=True, slots=True)
class Answer:
    """All that was heard of one request."""

    said: tuple[Said, ...] = ()
    reason: str | None = None
    """Why it ended, if it did."""
    error: str | None = None
    """What it was told instead."""
    ends: int = 0
    """How often it was told one or the other."""
    late: int = 0
    """How many tokens came behind its end."""
    left: bool = False
    """The client did not wait for more."""
    timed_out: bool = False


class Fate(StrEnum):
    """What became of a request. The last four are faults of the server."""

    SAME = "the same text"
    NEAR_TIE = "another text, from a near-tie on"
    ERROR = "ended by an error"
    LEFT = "left by its client"
    KILLED = "cut off by a kill"
    OTHER_TEXT = "another text"
    NO_END = "no end"
    SEVERAL_ENDS = "more than one end, or text behind it"
    TIMED_OUT = "timed out"


WRONG = (Fate.OTHER_TEXT, Fate.NO_END, Fate.SEVERAL_ENDS, Fate.TIMED_OUT)


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client behaves: it leaves after so many reads, with or without a word; None hears all."""

    reads: int | None = None
    abrupt: bool = False


class _Top(msgspec.Struct):
    logprob: float


class _Logged(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Logged] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(_Event)


async def ask(host: str, port: int, request: bytes, manner: Manner, timeout_s: float) -> Answer:
    """Send a request, and hear what comes of it. Raises nothing for what a server does."""
    arrivals: list[Arrival] = []
    left = timed_out = False
    try:
        async with asyncio.timeout(timeout_s):
            left = await _hear(host, port, request, manner, arrivals)
    except TimeoutError:
        timed_out = True
    except OSError:
        pass  # what was heard until then tells
    return answer_of(arrivals, left=left, timed_out=timed_out)


async def _hear(host: str, port: int, request: bytes, manner: Manner, arrivals: list[Arrival]) -> bool:
    """Whether the client left before the server was done."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        await writer.drain()
        while manner.reads is None or len(arrivals) < manner.reads:
            data = await reader.read(_READ_BYTES)
            if not data:
                return False
            arrivals.append(Arrival(time.perf_counter(), data))
        if manner.abrupt:
            writer.transport.abort()
        return True
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def answer_of(arrivals: Sequence[Arrival], *, left: bool = False, timed_out: bool = False) -> Answer:
    """What bytes amount to. What cannot be understood is an end without a reason or an error, which counts as none."""
    try:
        reply = read_reply(arrivals)
        if reply.status in (200, None):
            return _answer(server_sent_events(reply.body), left, timed_out)
    except (h11.RemoteProtocolError, msgspec.DecodeError) as broken:
        return Answer(error=f"not understood: {broken}", left=left, timed_out=timed_out)
    told = b"".join(piece.data for piece in reply.body)[:200].decode(errors="replace")
    return Answer(error=f"HTTP {reply.status}: {told}", ends=1, left=left, timed_out=timed_out)


def _answer(events: Iterable[Arrival], left: bool, timed_out: bool) -> Answer:
    said: list[Said] = []
    reason = error = None
    ends = late = 0
    for event in events:
        if event.data == b"[DONE]":
            continue
        decoded = _DECODER.decode(event.data)
        fresh = [one for choice in decoded.choices for one in _said(choice)]
        said += fresh
        late += len(fresh) if ends else 0
        reasons = [choice.finish_reason for choice in decoded.choices if choice.finish_reason is not None]
        if decoded.error is not None:
            error = str(decoded.error.get("message", decoded.error))
        reason = next(iter(reasons), reason)
        ends += len(reasons) + (decoded.error is not None)
    return Answer(tuple(said), reason, error, ends, late, left, timed_out)


def _said(choice: _Choice) -> list[Said]:
    logged = choice.logprobs.content if choice.logprobs is not None else None
    return [Said(one.token, _lead(one)) for one in logged or ()]


def _lead(one: _Logged) -> float:
    tops = sorted((top.logprob for top in one.top_logprobs), reverse=True)
    return tops[0] - tops[1] if len(tops) > 1 else float("inf")


def fate(answer: Answer, alone: Answer, *, killed: bool) -> Fate:
    """What became of a request that says `alone` where nothing else happens. `killed`: the server was, meanwhile.

    What was said before an error, or before the client left, must have been right too.
    """
    if answer.ends > 1 or answer.late:
        return Fate.SEVERAL_ENDS
    wrong = _difference(answer, alone)
    if answer.ends == 1 and answer.error is None:
        return wrong or Fate.SAME
    if wrong is Fate.OTHER_TEXT:
        return wrong
    return Fate.ERROR if answer.ends else _unended(answer, killed)


def _unended(answer: Answer, killed: bool) -> Fate:
    if answer.left:
        return Fate.LEFT
    if killed:
        return Fate.KILLED
    return Fate.TIMED_OUT if answer.timed_out else Fate.NO_END


def _difference(answer: Answer, alone: Answer) -> Fate | None:
    """The first token that differs decides: what comes behind it had another text before. None if all is the same, as
    far as it goes.
    """
    for our, their in zip(answer.said, alone.said, strict=False):
        if our.token != their.token:
            return Fate.NEAR_TIE if their.lead <= NEAR_TIE else Fate.OTHER_TEXT
    longer = len(answer.said) > len(alone.said)
    other_end = answer.reason is not None and (len(answer.said), answer.reason) != (len(alone.said), alone.reason)
    return Fate.OTHER_TEXT if longer or other_end else None
