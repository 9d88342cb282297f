"""What a round tells each request: its new tokens, and once, last, how it ended (contract rule 9)."""

import msgspec

from scheduler.request import FinishReason, Timing, Usage


class TokenLogprob(msgspec.Struct, frozen=True):
    """What the target thought of one token: log-softmax of its raw logits, before penalties, masks and temperature."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens there and their log-probabilities, likeliest first; as many as were asked for."""


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """The tokens that one lane emitted in one round, in order; never empty."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token if they were asked for, else none."""


class Finished(msgspec.Struct, frozen=True):
    """The one terminal event of a request, after its last `Tokens`. `error` is set if and only if `reason` is ERROR."""

    request_id: str
    reason: FinishReason
    usage: Usage
    timing: Timing
    error: str | None = None


Event = Tokens | Finished
