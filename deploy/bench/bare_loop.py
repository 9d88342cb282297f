"""A child of the `loop` benchmark: the engine's loop on the same prompts, without threads, sockets or text.

Reads one JSON order a line from standard input, answers each with one JSON line. Keeps `clients` requests under way, as
so many clients would who each send their next request when the last one is answered.
"""

import sys
import time
from collections import deque
from pathlib import Path

import msgspec

from backends.mlx.runtime import load_blas
from engine.config import EngineConfig
from engine.loop import Loop
from engine.messages import Message, Submit
from scheduler.events import Finished
from scheduler.request import Request, Sampling


class Order(msgspec.Struct, frozen=True):
    """Chats to answer greedily, `clients` at a time."""

    chats: tuple[tuple[dict[str, str], ...], ...]
    clients: int
    max_tokens: int


class Outcome(msgspec.Struct, frozen=True):
    """Tokens drawn and the seconds from the first submission to the last end."""

    tokens: int
    seconds: float


def main(folder: str) -> None:
    """Load the model, say so, and serve orders until the input ends."""
    load_blas()
    from api.text import load_tokenizer
    from backends.mlx.build import load_backend

    backend = load_backend(folder, Path(), "auto", lambda _stage, _done, _total: None, "bench")
    tokenizer = load_tokenizer(backend.info)
    mail: deque[Message] = deque()
    loop = Loop(
        backend,
        EngineConfig(draft_tokens=0),
        sources=(),
        mailbox=lambda: [mail.popleft() for _ in range(len(mail))],
        clock=time.monotonic,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        texts = [tokenizer.render(chat, {}) for chat in order.chats]
        prompts = [tuple(tokenizer.encode(text, special=False)) for text in texts]
        requests = [
            Request(str(index), prompt, order.max_tokens, Sampling(0.0), backend.info.eos_tokens)
            for index, prompt in enumerate(prompts)
        ]
        print(msgspec.json.encode(_run(loop, mail, deque(requests), order.clients)).decode(), flush=True)


def _run(loop: Loop, mail: deque[Message], waiting: deque[Request], clients: int) -> Outcome:
    start = time.perf_counter()
    tokens = 0
    for _ in range(min(clients, len(waiting))):
        mail.append(Submit(waiting.popleft()))
    while mail or not loop.idle:
        for event in loop.step():
            if isinstance(event, Finished):
                tokens += event.usage.completion_tokens
                if waiting:
                    mail.append(Submit(waiting.popleft()))
    return Outcome(tokens, time.perf_counter() - start)


if __name__ == "__main__":
    main(sys.argv[1])
