"""One request being served: its tokens, and how many of them the caches hold. Written by `Scheduler` alone."""

from scheduler.request import DraftCount, Request, Timing, Usage
from scheduler.round import Acceptance, Window
from scheduler.stats import DraftCounter


class Lane:
    """The invariant: `0 <= cached < len(tokens)`, and all work is to bring `cached` up to `len(tokens)`.

    A lane whose `cached` is `len(tokens) - 1` decodes; one with more to feed prefills first.
    """

    __slots__ = ("_admitted", "_drafts", "_first_token", "_submitted", "cached", "emitted", "request", "slot", "tokens")

    def __init__(self, request: Request, slot: int, *, submitted: float, admitted: float) -> None:
        self.request = request
        self.slot = slot
        self.tokens = list(request.prompt)
        self.cached = 0
        self.emitted = 0
        """Generated tokens, delivered ones and a final stop token."""
        self._submitted = submitted
        self._admitted = admitted
        self._first_token: float | None = None
        self._drafts: dict[str, DraftCounter] = {}

    @property
    def decoding(self) -> bool:
        """Whether only its last token is still to be fed."""
        return self.cached == len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """How many tokens it may still emit."""
        return self.request.max_tokens - self.emitted

    def chunk(self, rows: int) -> Window:
        """A prefill chunk of at most `rows` tokens; the last token is left to head a decode window."""
        end = min(self.cached + rows, len(self.tokens) - 1)
        return self._window(tuple(self.tokens[self.cached : end]), samples=False)

    def window(self, budget: int) -> Window:
        """A decode window that may carry a draft of `budget` tokens, and no more than the request can still use."""
        room = min(budget, self.remaining - 1)
        return self._window((self.tokens[-1],), samples=True, budget=room)

    def window_ahead(self) -> Window:
        """The decode window after the one in flight, on the token that is being drawn."""
        start = self.cached + 1
        sampling = self.request.sampling
        return Window(self.slot, self.request.request_id, start, (), True, sampling, start + 2, carried=True)

    def _window(self, tokens: tuple[int, ...], *, samples: bool, budget: int = 0) -> Window:
        reach = len(self.tokens) + 1
        request = self.request
        return Window(self.slot, request.request_id, self.cached, tokens, samples, request.sampling, reach, budget)

    def observe_draft(self, source: str, drafted: int, accepted: int) -> None:
        """Count one draft for the request's own account."""
        self._drafts.setdefault(source, DraftCounter()).observe(drafted, accepted)

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
        return Usage(len(self.request.prompt), completed, 0, drafts)

    def timing(self, now: float) -> Timing:
        """The gates passed, closed at `now`."""
        return Timing(self._submitted, self._admitted, self._first_token, now)
