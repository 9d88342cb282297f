"""Who was aboard when a forward failed: tried again in halves, until the one that fails alone is found. Pure.

Only the lanes of one group are fed at a time; the others pause. A lane is cleared when it is past the point where it
failed. A group that fails again is halved again; one that fails alone is guilty. Where everybody is cleared, the
failure was nobody's own: if that happens again soon, the lanes are too many at once.
"""

from collections.abc import Mapping

_AGAIN = 64
"""Two failures that are nobody's own, so many rounds apart or less, are one too many lanes' doing."""
_CALM = 64 * _AGAIN
"""After so many good rounds at the most, one lane more is tried again."""


class Suspects:
    """Written by `Scheduler`."""

    def __init__(self, most: int) -> None:
        """`most`: how many lanes there may be at once."""
        self._groups: list[dict[str, int]] = []
        """By request, how much of it must be cached before it is cleared; the last group is tried now."""
        self._blamed = 0
        """How many were aboard when it began."""
        self._solved = True
        self._most = most
        self._widest = most
        self._calm = _AGAIN
        """After how many good rounds one lane more is tried: twice as many each time that there were too many, for it
        costs everybody all that was cached.
        """
        self._since = _AGAIN
        """Rounds since the last failure that was nobody's own."""

    @property
    def most(self) -> int:
        """How many lanes there may be at once now."""
        return self._most

    @property
    def trying(self) -> bool:
        """Whether somebody is tried."""
        return bool(self._groups)

    def pauses(self, request_id: str) -> bool:
        """Whether a lane is not to be fed now."""
        return self.trying and request_id not in self._groups[-1]

    def failed(self, aboard: Mapping[str, int], *, alone: bool) -> str | None:
        """A forward failed that was to bring these lanes to so many tokens cached. Those that have left since are not
        named, but nobody was `alone` beside them. Who is guilty of it, if that is known now.
        """
        group: dict[str, int] = {}
        if not self._groups:
            self._blamed, self._solved = len(aboard), False
        elif not aboard.keys().isdisjoint(self._groups[-1]):
            group = self._groups.pop()
        rest = {name: end for name, end in group.items() if name not in aboard}
        if alone and group:
            self._solved = True
            self._groups.append(rest)
            self._settle()
            return next(iter(aboard))
        self._halve({name: max(end, group.get(name, 0)) for name, end in aboard.items()} | rest)
        return None

    def passed(self, request_id: str, cached: int) -> None:
        """A lane's round went well, and so many of its tokens are cached now."""
        if self._groups and cached >= self._groups[-1].get(request_id, cached + 1):
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """A lane is cleared, or it left."""
        for group in self._groups:
            group.pop(request_id, None)
        self._settle()

    def survived(self) -> None:
        """A round went well, of whomever; those that only try somebody say nothing of how many there may be."""
        if self.trying:
            return
        self._since += 1
        if self._most < self._widest and self._since % self._calm == 0:
            self._most += 1

    def _halve(self, group: Mapping[str, int]) -> None:
        names = list(group)
        half = (len(names) + 1) // 2
        for part in (names[half:], names[:half]):
            if part:
                self._groups.append({name: group[name] for name in part})

    def _settle(self) -> None:
        trying = bool(self._groups)
        self._groups = [group for group in self._groups if group]
        if trying and not self._groups and not self._solved:
            if self._since < _AGAIN and self._blamed > 1:
                self._most = max(1, min(self._most, self._blamed) // 2)
                self._calm = min(2 * self._calm, _CALM)
            self._since = 0
            self._solved = True
