"""How the rows that prefill has in a round are shared among the prompts that are being read. Pure.

The shortest rest goes first, so that a short prompt is not stuck behind a long one; but a quarter is always the one's
that was admitted first, so that a long prompt comes to an end however many short ones arrive.
"""

from collections.abc import Sequence

from scheduler.lane import Feed

_ELDEST = 4
"""The eldest has at least one of so many rows."""


def shares(feeds: Sequence[Feed], rows: int) -> list[tuple[Feed, int]]:
    """Who is fed how many of `rows`, in that order; `feeds` in order of admission. Those that get none are left out."""
    if not feeds or rows < 1:
        return []
    eldest = feeds[0]
    kept = min(eldest.rest, max(1, rows // _ELDEST))
    left = rows - kept
    shared: list[tuple[Feed, int]] = []
    for feed in sorted(feeds, key=lambda feed: feed.rest):
        own = kept if feed is eldest else 0
        taken = min(feed.rest, left + own)
        left -= taken - own
        if taken:
            shared.append((feed, taken))
    return shared
