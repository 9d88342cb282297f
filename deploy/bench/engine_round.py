"""What scheduler and executor cost a round: the engine's loop over the fake model, in process, without a server."""

import time
from collections import deque

from backends.fake import FakeBackend
from engine.config import EngineConfig
from engine.loop import Loop
from engine.messages import Message, Submit
from scheduler.request import Request, Sampling

LANES = 32
CEILING_MS = 1.0
"""Milliseconds that a round of `LANES` lanes may take, the fake model's own work included."""


def round_ms(tokens: int = 300) -> float:
    """Mean milliseconds of the rounds in which `LANES` greedy lanes write `tokens` tokens each."""
    requests = [Request(str(lane), (lane, 7, 9), tokens, Sampling(0.0), ignore_eos=True) for lane in range(LANES)]
    mail: deque[Message] = deque(Submit(request) for request in requests)
    loop = Loop(
        FakeBackend(),
        EngineConfig(max_lanes=LANES),
        sources=(),
        mailbox=lambda: [mail.popleft() for _ in range(len(mail))],
        clock=time.monotonic,
    )
    start = time.perf_counter()
    while mail or not loop.idle:
        loop.step()
    return (time.perf_counter() - start) * 1e3 / sum(loop.stats().rounds.values())
