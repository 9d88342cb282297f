"""What a client asks for and what it is told at the end: frozen values that every folder shares.

Knows nothing of lanes, rounds, tensors or HTTP.
"""

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a request ended. When several ends fall into one round, the one named first here wins (contract rule 12)."""

    CANCELLED = "cancelled"
    ERROR = "error"
    STOP = "stop"
    LENGTH = "length"


class Sampling(msgspec.Struct, frozen=True):
    """How a token is drawn from a row of logits.

    The draw at absolute position p depends on `(seed, choice, p)`, the logits and these settings, and on nothing else
    (contract rule 7).
    """

    temperature: float = 1.0
    """Divides the logits before the draw; 0 takes the largest logit (greedy)."""
    seed: int = 0
    """Any integer in [0, 2**64)."""
    choice: int = 0
    """Which of a request's `n` choices this is, in [0, 2**32)."""


class Request(msgspec.Struct, frozen=True):
    """One sequence to be generated. `prompt` holds at least one token and `max_tokens` is at least one."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    """The model's end-of-sequence tokens; never delivered as content unless `ignore_eos`."""
    ignore_eos: bool = False
    """Treat end-of-sequence tokens as ordinary content and go on to `max_tokens`."""


class DraftCount(msgspec.Struct, frozen=True):
    """What one draft source did for one request, by position in the draft (from 0)."""

    source: str
    drafts: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


class Usage(msgspec.Struct, frozen=True):
    """A request's account (contract rule 13).

    `completion_tokens` counts delivered tokens plus a final end-of-sequence token drawn within `max_tokens`; never
    rejected drafts, never tokens behind the one that completed a stop string.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafts: tuple[DraftCount, ...] = ()


class Timing(msgspec.Struct, frozen=True):
    """When a request passed each gate, in seconds of the engine's monotonic clock; None where it never did."""

    submitted: float
    admitted: float | None
    first_token: float | None
    finished: float
