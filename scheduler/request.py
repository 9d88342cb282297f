"""What a client asks for and what it is told at the end: frozen values that every folder shares.

Knows nothing of lanes, rounds, tensors or HTTP.
"""

from enum import StrEnum
from typing import Protocol

import msgspec


class FinishReason(StrEnum):
    """Why a request ended. When several ends fall into one round, the one named first here wins (contract rule 12)."""

    CANCELLED = "cancelled"
    ERROR = "error"
    DEADLINE = "deadline"
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
    top_k: int = 0
    """Draw among the k largest logits (and those equal to the k-th); 0 among all."""
    top_p: float = 1.0
    """Draw among the smallest set of likeliest tokens whose probabilities reach this sum: those above which less than
    `top_p` lies. 1 draws among all, 0 takes the likeliest.
    """
    min_p: float = 0.0
    """Draw among the tokens at least this times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of all tokens of the prompt and of what was generated."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as many times as it was generated."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits: pairs of token and bias, each token once."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report with each token's log-probability; None reports nothing."""

    @property
    def counts(self) -> bool:
        """Whether the logits depend on which tokens stand before."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def truncates(self) -> bool:
        """Whether tokens are left out of the draw."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class Constraint(Protocol):
    """A compiled grammar that every generated token obeys. Made and read by `backends`; only carried here."""

    @property
    def summary(self) -> str:
        """Its kind and size, for the log; never its text."""
        ...


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
    constraint: Constraint | None = None
    """What the generated text must be."""
    owner: str = ""
    """Whose request it is; nothing of what is said in it is drafted for another owner or spares another one work."""
    cache_salt: str = ""
    """Its prompt's beginning is only shared with requests of the same salt."""
    expected: tuple[int, ...] = ()
    """A text that the client expects the answer to be like; drafted from, never shown to the model."""
    draft_tokens: int | None = None
    """The most tokens to draft for it in a round; None for as many as the server allows, 0 for none."""
    draft_sources: frozenset[str] | None = None
    """Names of the sources to draft from; None for all."""
    priority: int = 0
    """Among its owner's requests that wait, those with a lower number go first."""
    deadline: float | None = None
    """When it ends in any case, in seconds of the engine's monotonic clock; None for never."""


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
    """Prompt tokens that were not computed: they came from the prefix cache, or from a lane with the same beginning."""
    drafts: tuple[DraftCount, ...] = ()


class Timing(msgspec.Struct, frozen=True):
    """When a request passed each gate, in seconds of the engine's monotonic clock; None where it never did."""

    submitted: float
    admitted: float | None
    first_token: float | None
    finished: float
