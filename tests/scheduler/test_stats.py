"""Counters against naive counting, and snapshots that stay as they were taken."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.pace import Pace
from scheduler.request import Request
from scheduler.round import Drawn, LaneResult
from scheduler.scheduler import Limits, Scheduler
from scheduler.stats import LANE_BUCKETS, ROW_BUCKETS, DraftCounter, Histogram


@given(
    values=st.lists(st.integers(0, 40)), bounds=st.sets(st.integers(0, 30), min_size=1).map(lambda s: tuple(sorted(s)))
)
def test_a_histogram_counts_each_value_under_its_smallest_bound(values: list[int], bounds: tuple[int, ...]) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    snapshot = histogram.snapshot()
    assert snapshot.bounds == bounds
    assert snapshot.total == sum(values)
    assert sum(snapshot.counts) == len(values)
    for place, bound in enumerate(bounds):
        assert sum(snapshot.counts[: place + 1]) == sum(value <= bound for value in values)


@given(drafts=st.lists(st.integers(1, 6).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size)))))
def test_a_draft_counter_counts_by_position(drafts: list[tuple[int, int]]) -> None:
    counter = DraftCounter()
    for drafted, accepted in drafts:
        counter.observe(drafted, accepted)
    longest = max((drafted for drafted, _ in drafts), default=0)
    assert counter.drafts == len(drafts)
    assert counter.drafted == [sum(drafted > place for drafted, _ in drafts) for place in range(longest)]
    assert counter.accepted == [sum(accepted > place for _, accepted in drafts) for place in range(longest)]


def test_the_buckets_rise() -> None:
    for bounds in (LANE_BUCKETS, ROW_BUCKETS):
        assert list(bounds) == sorted(set(bounds))


def test_a_snapshot_does_not_change_behind_its_readers_back() -> None:
    scheduler = Scheduler(Limits(2, 8, 2), Pace())
    scheduler.submit(Request("a", (1,), 5), 0.0)
    empty = scheduler.stats()
    for now in (1.0, 2.0):
        planned = scheduler.plan(now)
        assert planned is not None
        (window,) = planned.windows
        walk = scheduler.accept(window, Drawn((3,)))
        scheduler.commit([LaneResult(window, walk, window.end)], now)
    after = scheduler.stats()
    assert (empty.waiting, empty.running, empty.rounds["decode"], sum(empty.lanes_per_round.counts)) == (1, 0, 0, 0)
    assert (after.waiting, after.running, after.rounds["decode"], sum(after.lanes_per_round.counts)) == (0, 1, 2, 2)
    assert (empty.rows_per_round.total, after.rows_per_round.total) == (0, 2)
