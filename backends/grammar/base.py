"""The narrow interface of a grammar engine: what the round needs of a grammar, whoever compiled it."""

from typing import Protocol

from backends.base import MaskWords
from scheduler.request import Constraint


class GrammarError(ValueError):
    """A constraint that cannot be enforced exactly; the message says why, for the client to read."""


class GrammarUnavailableError(GrammarError):
    """The server could not find out about a constraint. Nothing is known against it; it may be sent again."""


class Matcher(Protocol):
    """One lane's place in its grammar. Belongs to one thread at a time; never to two at once."""

    def accept(self, token: int) -> bool:
        """Go on by one token; False, and nothing moved, if the grammar does not allow it here."""
        ...

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        ...

    def fill(self, words: MaskWords) -> None:
        """Write the tokens that may come next into one row `[words]`; stop tokens are among them where the text may
        end. Releases the GIL.
        """
        ...

    @property
    def finished(self) -> bool:
        """The text is complete and can only end: nothing but a stop token may come next, or one was accepted."""
        ...

    def forced(self, limit: int) -> tuple[int, ...]:
        """The text that must come next whatever is drawn, split as the model's own tokenizer would go on, `limit`
        tokens at most; empty where there is a choice. A guess: the tokens are allowed, but others may be as well. Moves
        nothing.
        """
        ...


class Grammar(Constraint, Protocol):
    """A compiled grammar; any number of lanes may hold it."""

    def matcher(self) -> Matcher:
        """A new matcher at the beginning of the text."""
        ...
