"""What came over a connection, decoded: bytes with their arrival times in, timed stream events out.

Pure and lazy on purpose. While a run is measured the client only notes what arrived when (see `client`); this module
parses it afterwards, so that a benchmark which shares its processors with the server hardly uses them. It knows
HTTP/1.x (h11), server-sent events and the OpenAI stream shapes, and no sockets.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import h11
import msgspec


@dataclass(frozen=True, slots=True)
class Arrival:
    """Bytes that one read returned, and when, in seconds of `time.perf_counter`."""

    at: float
    data: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP response: its status (None if the head never came) and its body in pieces."""

    status: int | None
    body: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stream event that carried text, and the moment it was complete."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """All that a stream said. `finished_at` is when the finish reason came; None if it never did."""

    pieces: tuple[Piece, ...]
    finished_at: float | None
    finish_reason: str | None
    completion_tokens: int | None
    prompt_tokens: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Ends:
    """How often a stream says that it ends, and how many events come behind the first word of that but usage."""

    finish_reasons: int
    errors: int
    dones: int
    behind: int


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | str | None = None


_DECODER = msgspec.json.Decoder(_Event)


def read_reply(arrivals: Iterable[Arrival]) -> Reply:
    """Parse the head and undo the framing of the body; each piece keeps the time of the read that completed it.

    Raises h11.RemoteProtocolError when the bytes are not HTTP. A body that was cut off is returned as far as it came.
    """
    connection = h11.Connection(our_role=h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "-"), ("Content-Length", "0")]))
    connection.send(h11.EndOfMessage())
    status: int | None = None
    body: list[Arrival] = []
    for arrival in arrivals:
        connection.receive_data(arrival.data)
        while isinstance(event := connection.next_event(), h11.Event):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body.append(Arrival(arrival.at, bytes(event.data)))
            elif isinstance(event, h11.EndOfMessage):
                return Reply(status, tuple(body))
    return Reply(status, tuple(body))


def server_sent_events(body: Iterable[Arrival]) -> Iterator[Arrival]:
    """The data of each server-sent event, at the time of the read that brought its closing blank line."""
    buffer = b""
    data: list[bytes] = []
    for arrival in body:
        *lines, buffer = (buffer + arrival.data).split(b"\n")
        for line in lines:
            field = line.rstrip(b"\r")
            if field.startswith(b"data:"):
                data.append(field[5:].removeprefix(b" "))
            elif not field and data:
                yield Arrival(arrival.at, b"\n".join(data))
                data = []


def read_transcript(events: Iterable[Arrival]) -> Transcript:
    """Read the events of a streamed chat or text completion up to `[DONE]` or an error event.

    Raises msgspec.DecodeError when an event is not the JSON that an OpenAI stream carries.
    """
    pieces: list[Piece] = []
    finished_at: float | None = None
    finish_reason: str | None = None
    usage: _Usage | None = None
    error: str | None = None
    for event in events:
        if event.data == b"[DONE]":
            break
        decoded = _DECODER.decode(event.data)
        usage = decoded.usage or usage
        if decoded.error is not None:
            error = _message(decoded.error)
            break
        for choice in decoded.choices:
            if text := _text(choice):
                pieces.append(Piece(event.at, text))
            if choice.finish_reason is not None:
                finished_at, finish_reason = event.at, choice.finish_reason
    return Transcript(
        tuple(pieces),
        finished_at,
        finish_reason,
        usage.completion_tokens if usage else None,
        usage.prompt_tokens if usage else None,
        error,
    )


def count_ends(events: Iterable[Arrival]) -> Ends:
    """Over all events of a stream of one choice, also those that come when it should be over.

    Raises msgspec.DecodeError as `read_transcript` does.
    """
    reasons = errors = dones = behind = 0
    for event in events:
        over = dones or errors
        if event.data == b"[DONE]":
            behind += bool(over)
            dones += 1
            continue
        decoded = _DECODER.decode(event.data)
        behind += bool(over or (reasons and decoded.choices))
        reasons += sum(choice.finish_reason is not None for choice in decoded.choices)
        errors += decoded.error is not None
    return Ends(reasons, errors, dones, behind)


def _text(choice: _Choice) -> str:
    if choice.delta is None:
        return choice.text or ""
    return (choice.delta.reasoning_content or "") + (choice.delta.content or "")


def _message(error: dict[str, Any] | str) -> str:
    return error if isinstance(error, str) else str(error.get("message", error))
