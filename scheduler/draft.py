"""What a draft source is: something that guesses how lanes go on. Wrong guesses cost rows, never answers."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from scheduler.request import Sampling


class DraftAsk(msgspec.Struct, frozen=True):
    """One lane that may be drafted for, and how many tokens to draft at most."""

    request_id: str
    tokens: Sequence[int]
    """Its prompt and what it has generated so far; to be read only, and only until the call returns."""
    prompt: int
    """How many of them are the prompt."""
    budget: int
    owner: str = ""
    """Whose request it is; nobody's text is ever drafted for another owner."""
    cache_salt: str = ""
    """As the request's."""
    expected: Sequence[int] = ()
    """A text that its client expects the answer to be like."""
    sources: frozenset[str] | None = None
    """Which sources may be asked; None for all."""
    sampling: Sampling = Sampling()
    """How the target draws, for a source that couples its own draws with the target's."""


class Draft(msgspec.Struct, frozen=True):
    """A guess. `marks[i]` is the class of confidence that its source gives `tokens[i]`: a small number of the source's
    own, of which only this much is known to others: guesses with one mark come true equally often.
    """

    tokens: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()

    def cut(self, length: int) -> "Draft":
        """The first `length` tokens of it."""
        return self if length >= len(self.tokens) else Draft(self.tokens[:length], self.marks[:length])


class DraftSource(Protocol):
    """Drafts for all lanes of a round at once, so that a source with a model of its own can batch its steps."""

    @property
    def name(self) -> str:
        """The source's label in metrics and usage."""
        ...

    @property
    def costly(self) -> bool:
        """Whether asking takes time that counts: then it is asked only as deep as pays, and its marks are positions."""
        ...

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask, in order; each at most `budget` long, and empty where the source has no guess."""
        ...

    def forget(self, request_id: str) -> None:
        """The lane left. Idempotent."""
        ...
