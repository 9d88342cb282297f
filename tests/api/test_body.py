"""Bodies by themselves: what is counted while they come, what does not fit, and responses in pieces."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.types import Message

from api.body import Bodies, send_whole
from api.errors import ApiError
from api.metrics import Refusal

SCOPE: dict[str, Any] = {"headers": []}


class Pieces:
    """A body as its connection hands it over; None stands for a client that left."""

    def __init__(self, *pieces: bytes | None) -> None:
        self._pieces: Iterator[bytes | None] = iter(pieces)
        self._left = len(pieces)

    async def receive(self) -> Message:
        await asyncio.sleep(0)
        piece, self._left = next(self._pieces), self._left - 1
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": self._left > 0}


async def read(bodies: Bodies, *pieces: bytes | None) -> bytes | str | None:
    """The body, or the code of what was told instead."""
    try:
        return await bodies.read(SCOPE, Pieces(*pieces).receive)
    except ApiError as error:
        return error.code


@given(st.lists(st.lists(st.binary(max_size=12) | st.none(), min_size=1, max_size=4), max_size=6))
def test_however_they_come_none_is_held_when_all_have_ended(sent: list[list[bytes | None]]) -> None:
    """And while they come, no more than may be."""

    async def main() -> None:
        bodies, held = Bodies(20, 30, refusals.append), []

        async def watched(pieces: list[bytes | None]) -> bytes | str | None:
            held.append(bodies.held)
            return await read(bodies, *pieces)

        answers = await asyncio.gather(*[watched(pieces) for pieces in sent])
        assert bodies.held == 0
        for pieces, answer in zip(sent, answers, strict=True):
            if isinstance(answer, bytes):
                assert answer == b"".join(piece for piece in pieces if piece is not None)
        assert refusals.count(Refusal.BODY) == len(refusals) == answers.count("too_many_bodies")

    refusals: list[Refusal] = []
    asyncio.run(main())


def test_one_too_large_and_many_too_large_are_told_apart() -> None:
    async def main() -> list[bytes | str | None]:
        bodies = Bodies(10, 15, lambda _reason: None)
        begun, never = asyncio.Event(), asyncio.Event()

        async def slow() -> Message:
            if bodies.held:
                begun.set()
                await never.wait()
            return {"type": "http.request", "body": b"x" * 10, "more_body": True}

        other = asyncio.create_task(bodies.read(SCOPE, slow))
        await begun.wait()
        told = [await read(bodies, b"x" * 5), await read(bodies, b"x" * 6), await read(bodies, b"x" * 11)]
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        return [*told, await read(bodies, b"x" * 6)]

    assert asyncio.run(main()) == [b"xxxxx", "too_many_bodies", "body_too_large", b"xxxxxx"]


@pytest.mark.parametrize("length", [0, 1, 65536, 65537, 300_000])
def test_a_response_goes_in_pieces_that_are_all_of_it(length: int) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    body = bytes(range(256)) * (length // 256) + b"x" * (length % 256)
    asyncio.run(send_whole(Response(body, 418, {"x-a": "b"}), send))
    start, *pieces = sent
    assert (start["type"], start["status"]) == ("http.response.start", 418)
    assert {(b"x-a", b"b"), (b"content-length", str(length).encode())} <= set(start["headers"])
    assert b"".join(piece["body"] for piece in pieces) == body
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert max(len(piece["body"]) for piece in pieces) <= 65536
