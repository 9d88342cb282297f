"""Requests as a client and an attentive observer see them: the model that the scheduler's state machine keeps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.events import Finished
from scheduler.request import DraftCount, Request


@dataclass(eq=False)
class Tale:
    """One request."""

    request: Request
    submitted: float
    admitted: float | None = None
    turn: int = 0
    """How many were admitted before it."""
    first_token: float | None = None
    slot: int | None = None
    """None also while it has had no window since it was admitted."""
    cached: int = 0
    donor: "tuple[Tale, int] | None" = None
    """Whom it copies its beginning from, and how much, until it has done so."""
    given: int = 0
    """How much of what its caches hold it copied, as long as it has said nothing."""
    fed_from: int | None = None
    """The first place of its prompt that was ever computed for it."""
    generated: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    """What the events delivered."""
    eos_drawn: bool = False
    drafts: list[tuple[str, int, int]] = field(default_factory=list)
    """Source, drafted, accepted."""
    end: Finished | None = None

    @property
    def text(self) -> list[int]:
        return [*self.request.prompt, *self.generated]

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - len(self.generated)

    @property
    def stop_tokens(self) -> frozenset[int]:
        ignores = self.request.ignore_eos and self.request.constraint is None
        return frozenset() if ignores else self.request.stop_tokens

    @property
    def reused(self) -> int:
        """How much of its prompt it did not have to compute: what it was given, but for what it once had itself."""
        return self.given if self.fed_from is None else min(self.given, self.fed_from)

    def begin_again(self) -> None:
        """Its caches are lost."""
        self.cached, self.donor = 0, None
        if not self.generated:
            self.given = 0

    def is_late(self, now: float) -> bool:
        return self.request.deadline is not None and self.request.deadline <= now


def by_position(drafts: Sequence[tuple[str, int, int]]) -> dict[str, DraftCount]:
    """What was drafted and accepted, by source."""
    counts = {}
    for source in {source for source, _, _ in drafts}:
        mine = [(drafted, accepted) for name, drafted, accepted in drafts if name == source]
        places = range(max(drafted for drafted, _ in mine))
        counts[source] = DraftCount(
            source,
            len(mine),
            tuple(sum(drafted > place for drafted, _ in mine) for place in places),
            tuple(sum(accepted > place for _, accepted in mine) for place in places),
        )
    return counts
