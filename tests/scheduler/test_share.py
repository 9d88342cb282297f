"""How prefill's rows are shared out, whoever reads how much: all of them, the shortest first, the eldest a quarter."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.lane import Feed, Lane
from scheduler.request import Request
from scheduler.share import shares


def feeds_of(rests: list[int]) -> list[Feed]:
    """Prompts of which so much is still to be read."""
    return [Feed(Lane(Request(str(place), (0,) * (rest + 1), 1), submitted=0.0), 0) for place, rest in enumerate(rests)]


@given(rests=st.lists(st.integers(1, 100), max_size=8), rows=st.integers(-2, 200))
def test_whoever_reads_how_much(rests: list[int], rows: int) -> None:
    feeds = feeds_of(rests)
    shared = shares(feeds, rows)
    given_to = {feed.lane.request.request_id: taken for feed, taken in shared}
    taken = [given_to.get(str(place), 0) for place in range(len(rests))]
    assert len(given_to) == len(shared)
    assert all(given_to.values())
    assert all(have <= rest for have, rest in zip(taken, rests, strict=True))
    assert sum(taken) == min(max(rows, 0), sum(rests)), "no row is left while somebody has use for it"
    if not rests or rows < 1:
        return
    assert taken[0] >= min(rests[0], max(1, rows // 4)), "the eldest's quarter"
    for shorter, have in zip(rests, taken, strict=True):
        longer = [more for rest, more in zip(rests[1:], taken[1:], strict=True) if rest > shorter]
        assert have == shorter or not any(longer), "the shortest first"


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    eldest, short, long = feeds_of([1000, 10, 500])
    assert shares([eldest, short, long], 64) == [(short, 10), (long, 38), (eldest, 16)]


def test_a_long_prompt_comes_to_an_end_however_many_short_ones_arrive() -> None:
    rest, rounds = 1000, 0
    while rest:
        eldest = feeds_of([rest])[0]
        rest -= sum(rows for feed, rows in shares([eldest, *feeds_of([15] * 9)], 64) if feed is eldest)
        rounds += 1
    assert rounds <= 1000 // 16 + 1


def test_the_eldest_that_is_the_shortest_has_what_it_needs() -> None:
    eldest, other = feeds_of([3, 500])
    assert shares([eldest, other], 8) == [(eldest, 3), (other, 5)]
