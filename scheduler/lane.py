"""One request being served: its tokens, and how many of them the caches hold. Written by `Scheduler` alone."""

import msgspec

from scheduler.request import DraftCount, Request, Timing, Usage
from scheduler.round import Acceptance, History, Window
from scheduler.stats import DraftCounter


class Donor(msgspec.Struct, frozen=True):
    """A lane with the same beginning."""

    request_id: str
    length: int
    """How many tokens both have in common."""


class Lane:
    """The invariant: `0 <= cached < len(tokens)`, and all work is to bring `cached` up to `len(tokens)`.

    A lane whose `cached` is `len(tokens) - 1` decodes; one with more to feed prefills first.
    """

    __slots__ = (
        "_admitted",
        "_drafts",
        "_first_token",
        "_submitted",
        "cached",
        "donor",
        "emitted",
        "request",
        "reused",
        "slot",
        "sparable",
        "stops",
        "tokens",
        "turn",
    )

    slot: int
    """Its number while it is served; there is none while it waits."""
    turn: int
    """How many were admitted before it, the first time that it was; there is none before."""

    def __init__(self, request: Request, *, submitted: float) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.cached = 0
        self.donor: Donor | None = None
        """Whose caches its beginning is copied from, once they hold it."""
        self.reused = 0
        """How much of its prompt was not computed for it."""
        self.sparable = len(request.prompt)
        """How much of it may still count as that: what it once computed itself is no gift when it is given it back."""
        self.stops: set[int] = set()
        """Lengths at which its prefill halts, so that its caches can be had as they are there."""
        self.emitted = 0
        """Generated tokens, delivered ones and a final stop token."""
        self._submitted = submitted
        self._admitted: float | None = None
        self._first_token: float | None = None
        self._drafts: dict[str, DraftCounter] = {}

    def seat(self, slot: int, turn: int, now: float) -> None:
        """It is served from now on, for the first time or again."""
        self.slot = slot
        if self._admitted is None:
            self._admitted, self.turn = now, turn

    @property
    def served(self) -> bool:
        """Whether it ever had a slot."""
        return self._admitted is not None

    def begin_again(self) -> None:
        """Its caches are lost, or given up: all of its tokens are to be fed again."""
        if not self.emitted:
            if self.cached > self.reused:
                self.sparable = min(self.sparable, self.reused)
            self.reused = 0
        self.cached = 0
        self.donor = None
        self.stops.clear()

    def reuse(self, length: int) -> None:
        """The first tokens need not be computed. A lane that goes on after a pause is spared nothing by that."""
        self.cached = length
        if not self.emitted:
            self.reused = min(length, self.sparable)

    def expired(self, now: float) -> bool:
        """Whether its time is over."""
        return self.request.deadline is not None and now >= self.request.deadline

    @property
    def remaining(self) -> int:
        """How many tokens it may still emit."""
        return self.request.max_tokens - self.emitted

    @property
    def decoding(self) -> bool:
        """Whether only its last token is still to be fed."""
        return self.cached == len(self.tokens) - 1

    @property
    def needs_host(self) -> bool:
        """Whether its next window cannot be drawn before the host has seen the last draw."""
        sampling = self.request.sampling
        constrained = self.request.constraint is not None
        return constrained or sampling.counts or sampling.truncates or sampling.logprobs is not None

    def window_ahead(self, start: int) -> Window:
        """The decode window after the one in flight, on the token that is being drawn."""
        sampling = self.request.sampling
        return Window(self.slot, self.request.request_id, start, (), True, sampling, start + 2, carried=True)

    def observe_draft(self, source: str, drafted: int, accepted: int) -> None:
        """Count one draft for the request's own account."""
        self._drafts.setdefault(source, DraftCounter()).observe(drafted, accepted)

    def cut(self, kept: int) -> None:
        """A stop string ended with generated token number `kept`: what is behind it was never said."""
        del self.tokens[len(self.request.prompt) + kept :]
        self.cached = min(self.cached, len(self.tokens))

    def extend(self, acceptance: Acceptance, now: float) -> None:
        """Take over what a walk emitted; `now` in seconds."""
        if self._first_token is None:
            self._first_token = now
        self.tokens.extend(acceptance.emitted)
        self.emitted += len(acceptance.emitted) + acceptance.ended_by_token

    def usage(self, completion_tokens: int | None = None) -> Usage:
        """The account so far, or with the completion cut to a stop string's last token."""
        drafts = tuple(
            DraftCount(source, counter.drafts, tuple(counter.drafted), tuple(counter.accepted))
            for source, counter in self._drafts.items()
        )
        completed = self.emitted if completion_tokens is None else min(completion_tokens, self.emitted)
        return Usage(len(self.request.prompt), completed, self.reused, drafts)

    def timing(self, now: float) -> Timing:
        """The gates passed, closed at `now`."""
        return Timing(self._submitted, self._admitted, self._first_token, now)


class Feed(msgspec.Struct, frozen=True):
    """What a lane can be fed next: its tokens from `start` on. `copies` is a slot to copy the first `start` from."""

    lane: Lane
    start: int
    copies: int | None = None

    @property
    def rest(self) -> int:
        """How many tokens can be fed before the one that heads a decode window, or up to where the lane is to halt."""
        halts = [stop for stop in self.lane.stops if stop > self.start]
        return min([len(self.lane.tokens) - 1, *halts]) - self.start

    @property
    def decoding(self) -> bool:
        """Whether only the lane's last token is still to be fed."""
        return self.start == len(self.lane.tokens) - 1

    def chunk(self, rows: int) -> Window:
        """A prefill chunk of at most `rows` tokens, or up to where the lane is to halt; the last token is left to head
        a decode window.
        """
        end = self.start + min(rows, self.rest)
        return self._window(tuple(self.lane.tokens[self.start : end]), samples=False)

    def window(self, budget: int) -> Window:
        """A decode window that may carry a draft of `budget` tokens, and no more than the request can still use."""
        room = min(budget, self.lane.remaining - 1)
        return self._window((self.lane.tokens[-1],), samples=True, budget=room)

    def _window(self, tokens: tuple[int, ...], *, samples: bool, budget: int = 0) -> Window:
        lane, request = self.lane, self.lane.request
        return Window(
            slot=lane.slot,
            request_id=request.request_id,
            start=self.start,
            tokens=tokens,
            samples=samples,
            sampling=request.sampling,
            reach=len(lane.tokens) + 1,
            budget=budget,
            history=History(lane.tokens, len(request.prompt)) if samples and request.sampling.counts else None,
            constraint=request.constraint if samples else None,
            copies=self.copies,
        )
