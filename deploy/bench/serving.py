"""What benches of a crowd share: a server over a model or over the pseudo-model, and clients that go on for a while."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from deploy.bench.prefix_asking import random_tokens
from deploy.bench.servers import Server, paceline, running

T = TypeVar("T")

UNBOUNDED = "over the pseudo-model bounds are not held: HTTP and the interpreter are what is measured"
_NAME = "bench"
"""What the model is served as."""
_FIRST_LETTER, _LETTERS = 32, 95
"""Printable bytes: the pseudo-model's tokens are bytes."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is served. `model` None is the pseudo-model."""

    model: Path | None
    program: Path
    arguments: tuple[str, ...] = ()

    @classmethod
    def told(
        cls, model: Path | None, backend: Literal["mlx", "fake"], program: Path, arguments: list[str] | None
    ) -> "Subject":
        """By flags. Raises ValueError where they name no model, or one for a backend that has none."""
        if (model is None) is (backend == "mlx"):
            raise ValueError("want a folder with a model, or --backend fake, and not both")
        return cls(model, program, tuple(arguments or ()))

    @contextmanager
    def daemon(self, *words: str) -> Iterator[Server]:
        """A server with these flags, ready; stopped by SIGTERM at the end."""
        model = None if self.model is None else str(self.model.resolve())
        backend = ("--backend", "fake") if model is None else ()
        named = ("--served-name", _NAME)  # with API keys it could not be asked for its model's name
        command = paceline(str(self.program), model, (*backend, *named, *words, *self.arguments))
        with running(replace(command, model=_NAME)) as server:
            yield server

    def tokens(self, count: int, seed: int) -> tuple[int, ...]:
        """A prompt that no other seed begins alike, in tokens that the model has."""
        drawn = random_tokens(count, seed)
        return drawn if self.model is not None else tuple(_FIRST_LETTER + token % _LETTERS for token in drawn)


async def keep_asking(clients: int, until: float, ask: Callable[[int, int], Awaitable[T]]) -> list[T]:
    """A closed loop: each client asks anew (`ask(client, turn)`) when its last request has ended, until that time of
    `time.perf_counter`; those under way then are waited for. In the order in which they ended.
    """
    ended: list[T] = []

    async def client(number: int) -> None:
        turn = 0
        while time.perf_counter() < until:
            ended.append(await ask(number, turn))
            turn += 1

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
    return ended
