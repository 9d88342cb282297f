"""What a draft source is: something that guesses how lanes go on. Wrong guesses cost rows, never answers."""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class DraftAsk(msgspec.Struct, frozen=True):
    """One lane that may be drafted for: its tokens so far (to be read only) and how many tokens to draft at most."""

    request_id: str
    tokens: Sequence[int]
    budget: int


class DraftSource(Protocol):
    """Drafts for all lanes of a round at once, so that a source with a model of its own can batch its steps."""

    @property
    def name(self) -> str:
        """The source's label in metrics and usage."""
        ...

    def propose(self, asks: Sequence[DraftAsk]) -> list[tuple[int, ...]]:
        """One draft per ask, in order; each at most `budget` long, and empty where the source has no guess."""
        ...

    def forget(self, request_id: str) -> None:
        """The lane left. Idempotent."""
        ...
