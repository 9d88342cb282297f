"""What `soak` holds against the server: how every request ended, and whether memory grows. Pure.

A request has one end: a finish reason and `[DONE]`, or one error; nothing comes behind it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import h11
import msgspec

from deploy.bench.client import Exchange
from deploy.bench.report import Spread
from deploy.bench.soak_requests import Ask, Kind
from deploy.bench.wire import Ends, Reply, count_ends, read_reply, server_sent_events

FLAT = 1.02
"""The most that memory may be at the end over what it was when the caches had filled."""
_WINDOW = 0.15
"""The share of the run that each of the two is the most of."""
_SETTLED = 1 / 3
"""The share of the run after which caches count as full."""
_FULL = 0.9
"""Of what the prefix cache may hold: the next block might not fit."""


class End(StrEnum):
    """How a request ended for its client."""

    FINISHED = "finished"
    REFUSED = "refused"
    """There was no room: 429, or 503."""
    REJECTED = "rejected"
    """A bad one got its 4xx."""
    LEFT = "left"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`complaint` is what must not be; None unless the end is a fault."""

    kind: Kind
    end: End
    complaint: str | None = None


class _Error(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Error


class _Choice(msgspec.Struct):
    finish_reason: str


class _Whole(msgspec.Struct):
    choices: list[_Choice]
    usage: dict[str, Any]


def judge(ask: Ask, exchange: Exchange) -> Outcome:
    """What became of one request."""
    if ask.kind in (Kind.LEAVING, Kind.UNREAD):  # the server's account has to show that nothing of them is left
        return Outcome(ask.kind, End.LEFT)
    if exchange.failure is not None:
        return _fault(ask, exchange.failure)
    try:
        return _judge_reply(ask, read_reply(exchange.arrivals))
    except (h11.RemoteProtocolError, msgspec.DecodeError) as broken:
        return _fault(ask, f"not understood: {broken}")


def _judge_reply(ask: Ask, reply: Reply) -> Outcome:
    body = b"".join(piece.data for piece in reply.body)
    if reply.status is None:
        return _fault(ask, "the server hung up without an answer")
    if reply.status != 200:
        message = msgspec.json.decode(body, type=_ErrorBody).error.message
        return _judge_error(ask, reply.status, message)
    if ask.kind is Kind.BAD:
        return _fault(ask, "was served")
    if not ask.streams:
        choices = msgspec.json.decode(body, type=_Whole).choices
        return Outcome(ask.kind, End.FINISHED) if choices else _fault(ask, "an answer without a choice")
    complaint = complaint_of(count_ends(server_sent_events(reply.body)), may_fail=ask.kind is Kind.DEADLINE)
    return Outcome(ask.kind, End.FINISHED) if complaint is None else _fault(ask, complaint)


def _judge_error(ask: Ask, status: int, message: str) -> Outcome:
    if ask.kind is Kind.BAD and 400 <= status < 500 and status != 429:
        return Outcome(ask.kind, End.REJECTED)
    if status in (429, 503):
        return Outcome(ask.kind, End.REFUSED)
    if ask.kind is Kind.DEADLINE and status == 504:
        return Outcome(ask.kind, End.FINISHED)
    return _fault(ask, f"HTTP {status}: {message}")


def _fault(ask: Ask, complaint: str) -> Outcome:
    return Outcome(ask.kind, End.FAULT, f"{ask.name}: {complaint}")


def complaint_of(ends: Ends, *, may_fail: bool) -> str | None:
    """What is wrong with how a stream ended; None if it ended once. `may_fail`: an error is an end as good as any."""
    whole, failed = Ends(1, 0, 1, 0), Ends(0, 1, 0, 0)
    if ends == whole or (may_fail and ends == failed):
        return None
    if ends == failed:
        return "the stream ended with an error"
    return (
        f"{ends.finish_reasons} finish reasons, {ends.errors} errors, {ends.dones} [DONE], and {ends.behind} events "
        "behind the end"
    )


def tally(outcomes: Iterable[Outcome]) -> Counter[tuple[Kind, End]]:
    """How many of each kind ended how."""
    return Counter((outcome.kind, outcome.end) for outcome in outcomes)


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment, so many seconds after the run began. Sizes in bytes."""

    at: float
    resident: int
    prefix_ram: float
    prefix_ssd: float
    running: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory at the end of a run over what it was when the caches had filled."""

    ratio: Spread
    """Of the last window's largest sample, and of its smallest, over the first one's largest: an engine that rests
    gives memory back, so that what must not grow is the most that it has.
    """
    filled_at: float | None
    """When the prefix cache's part of memory was full; None if it never was."""
    begin: float
    """When the first window begins."""


def memory_of(samples: Sequence[Sample], seconds: float, most_prefix: float) -> Memory:
    """Caches count as full after a third of the run, or when the prefix cache is if that is later, and the last window
    leaves room for it. Raises ValueError if there are no samples to compare.
    """
    filled_at = next((sample.at for sample in samples if sample.prefix_ram >= _FULL * most_prefix), None)
    latest = seconds * (1 - 2 * _WINDOW)
    begin = min(max(seconds * _SETTLED, filled_at or 0.0), latest)
    first = [sample.resident for sample in samples if begin <= sample.at < begin + _WINDOW * seconds]
    last = [sample.resident for sample in samples if seconds * (1 - _WINDOW) <= sample.at <= seconds]
    if not first or not last:
        raise ValueError(f"{len(samples)} samples of memory are too few to compare")
    base, most = max(first), max(last)
    return Memory(Spread(most / base, min(last) / base, most / base), filled_at, begin)


def spread_over(samples: Sequence[Sample], count: int) -> list[Sample]:
    """So many of them, from the first to the last."""
    if len(samples) <= count:
        return list(samples)
    return [samples[round(place * (len(samples) - 1) / (count - 1))] for place in range(count)]
