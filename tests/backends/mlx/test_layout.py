"""Layouts of random rounds, read naively: every row is stored where its lane sits and sees its lane's past, no more."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.groups import LaneGroups
from backends.mlx.caches.buffers import SliceWrite
from backends.mlx.caches.sight import HEADROOM, Sight, held
from backends.mlx.layout import WIDEST_SHARED, packed_layout, width_class
from backends.mlx.rectangle import padded_layout
from tests.backends.mlx.interpreted import Placed, packed_memory, packed_rows, see_packed, see_padded
from tests.backends.mlx.windows import window_of

ROWS = st.one_of(st.integers(1, 9), st.sampled_from([1, 1, 1, 8, 9, 16, 17, 31, 32, 33, 40, 70]))
STARTS = st.one_of(st.integers(0, 40), st.sampled_from([0, 0, 200, 223, 247, 255, 256, 300, 511]))


@st.composite
def rounds(draw: Any, *, together: bool) -> Placed:
    """Lanes joined in any order, some of them left again, some without a window in this round."""
    slots = draw(st.permutations(range(12)))[: draw(st.integers(1, 9))]
    lanes = {slot: (draw(STARTS), draw(ROWS)) for slot in slots}
    if draw(st.booleans()):  # all alike, as in a plain decode round of one age
        lanes = dict.fromkeys(lanes, next(iter(lanes.values())))
    groups = LaneGroups(together=together)
    widest = max(rows for _, rows in lanes.values()) if together else 0
    for slot, (start, rows) in lanes.items():
        groups.place({slot: (start + max(rows, widest), start)})
    for slot in draw(st.sets(st.sampled_from(slots), max_size=len(slots) - 1)):
        groups.leave(slot)
        del lanes[slot]
    served = draw(st.permutations(sorted(lanes)))[: draw(st.sampled_from([1, 2, 3, 9, 9]))]
    windows = tuple(window_of(slot, *lanes[slot]) for slot in served)
    return Placed(windows, groups, {slot: start for slot, (start, _) in lanes.items()})


def past(slot: int, position: int) -> tuple[tuple[int, int], ...]:
    """The keys that a lane's query at `position` sees when it is alone."""
    return tuple((slot, each) for each in range(position + 1))


@settings(max_examples=150)
@given(placed=rounds(together=False))
def test_every_packed_row_sees_exactly_its_own_lanes_past(placed: Placed) -> None:
    layout = packed_layout(placed.windows, placed.groups)
    rows = packed_rows(layout)
    seen = see_packed(layout, placed)
    assert [each.query for each in seen] == list(range(layout.rows))
    for (slot, position), each in zip(rows, seen, strict=True):
        assert each.keys == past(slot, position)


SIGHTS = st.sampled_from([Sight(window=1), Sight(window=16), Sight(window=40), Sight(window=300), Sight(chunk=24)])


def in_sight(sight: Sight, slot: int, position: int) -> set[tuple[int, int]]:
    """Said once more, in other words than the code's."""
    seen = set(past(slot, position))
    if sight.window:
        return {(each, place) for each, place in seen if position - place < sight.window}
    return {(each, place) for each, place in seen if place // sight.chunk == position // sight.chunk}


@settings(max_examples=250)
@given(placed=rounds(together=False), sight=SIGHTS)
def test_where_layers_see_only_so_far_every_row_sees_exactly_that(placed: Placed, sight: Sight) -> None:
    layout = packed_layout(placed.windows, placed.groups, sight)
    seen = see_packed(layout, placed, sight)
    assert [each.query for each in seen] == list(range(layout.rows))
    for (slot, position), each in zip(packed_rows(layout), seen, strict=True):
        assert len(each.keys) == len(set(each.keys))
        assert set(each.keys) == in_sight(sight, slot, position)


@settings(max_examples=250)
@given(
    window=st.integers(1, 40),
    length=st.integers(1, 700),
    drafted=st.lists(st.tuples(st.integers(1, HEADROOM), st.floats(0, 1)), min_size=1, max_size=6),
)
def test_a_rejected_draft_never_overwrites_what_is_still_in_sight(
    window: int, length: int, drafted: list[tuple[int, float]]
) -> None:
    """Window after window of one lane, each cut anywhere behind its first row; the ring is read after every write."""
    sight = Sight(window=window)
    ring: dict[int, int] = {position % sight.span: position for position in range(length)}
    for rows, share in drafted:
        end = length + rows
        ring |= {position % sight.span: position for position in range(length, end)}
        for query in range(length, end):
            for position in range(max(0, query - window + 1), query + 1):
                assert ring[position % sight.span] == position
        stood = held(sight.span, min(end, sight.span), np.array([end], dtype=np.int32))[0]
        first = max(0, length - window + 1)
        assert [ring[place] for place in range(len(stood)) if stood[place] >= first] == [
            position for position in stood.tolist() if position >= first
        ]
        length += 1 + int(share * (rows - 1))


def test_a_draft_wider_than_the_head_room_is_refused() -> None:
    groups = LaneGroups()
    groups.place({0: (400, 300)})
    wide = window_of(0, 300, HEADROOM + 1, drafted=HEADROOM)
    with pytest.raises(ValueError, match="head-room"):
        packed_layout([wide], groups, Sight(window=16))
    assert packed_layout([wide], groups, Sight(window=1000)).rows == HEADROOM + 1


@given(start=st.integers(0, 700))
def test_a_ring_holds_no_more_than_its_span(start: int) -> None:
    for sight in (Sight(window=16), Sight(chunk=100)):
        assert sight.places(1 << 20) == sight.span == sight.reach + HEADROOM
        assert sight.places(256) == min(256, sight.span)
        keys = held(sight.span, sight.span, np.array([start], dtype=np.int32))[0]
        assert sorted(keys[keys >= 0]) == list(range(max(0, start - sight.span), start))


@settings(max_examples=100)
@given(placed=rounds(together=False))
def test_packed_rows_are_stored_in_their_lanes_seats_and_nowhere_else(placed: Placed) -> None:
    layout = packed_layout(placed.windows, placed.groups)
    lengths = dict(placed.lengths) | {window.slot: window.end for window in placed.windows}
    expected = {
        (seat.capacity, seat.row, position): (slot, position)
        for slot, length in lengths.items()
        for seat in [placed.groups.seat(slot)]
        for position in range(length)
    }
    assert packed_memory(layout, placed).keys == expected


@settings(max_examples=100)
@given(placed=rounds(together=False))
def test_every_window_has_its_rows_once_and_in_order(placed: Placed) -> None:
    layout = packed_layout(placed.windows, placed.groups)
    assert sorted(entry.index for entry in layout.seated) == list(range(len(placed.windows)))
    first = 0
    for entry in layout.seated:
        assert entry.window is placed.windows[entry.index]
        assert entry.seat == placed.groups.seat(entry.window.slot)
        assert (entry.first, entry.last) == (first, first + entry.window.rows)
        first = entry.last
    assert layout.rows == first
    assert layout.positions.tolist() == [position for _, position in packed_rows(layout)]


@settings(max_examples=100)
@given(placed=rounds(together=False))
def test_padding_is_bounded(placed: Placed) -> None:
    """At most one padding lane a lane, never half of a width, none at all for wide windows; keys end with a window."""
    layout = packed_layout(placed.windows, placed.groups)
    for rectangle in layout.rectangles:
        entries = [entry for entry in layout.seated if rectangle.first <= entry.first < rectangle.last]
        assert rectangle.lanes <= 2 * len(entries)
        assert all(rectangle.width < 2 * entry.window.rows for entry in entries)
        assert rectangle.width <= WIDEST_SHARED or len(entries) == rectangle.lanes == 1
        assert rectangle.length == max(entry.window.end for entry in entries)


@settings(max_examples=150)
@given(placed=rounds(together=True))
def test_every_padded_window_sees_exactly_its_own_lanes_past(placed: Placed) -> None:
    layout = padded_layout(placed.windows, placed.groups)
    memory, seen = see_padded(layout, placed)
    assert sorted(layout.order) == list(range(len(placed.windows)))
    assert layout.starts.tolist() == [placed.windows[index].start for index in layout.order]
    for lane, index in enumerate(layout.order):
        window = placed.windows[index]
        for column in range(window.rows):
            assert seen[lane][column] == past(window.slot, window.start + column)
    for slot, length in placed.lengths.items():
        seat = placed.groups.seat(slot)
        assert memory.look(seat.capacity, seat.row, range(length)) == past(slot, length - 1), "padding hit a lane"


@given(rows=st.integers(1, 5000))
def test_a_width_class_is_the_next_power_of_two(rows: int) -> None:
    wide = width_class(rows)
    assert wide & (wide - 1) == 0
    assert wide // 2 < rows <= wide


def seated_alike(starts: list[int], rows: int) -> Placed:
    groups = LaneGroups()
    groups.place({slot: (start + rows, start) for slot, start in enumerate(starts)})
    windows = tuple(window_of(slot, start, rows) for slot, start in enumerate(starts))
    return Placed(windows, groups, dict(enumerate(starts)))


def test_lanes_of_one_age_take_one_slice_and_no_mask() -> None:
    placed = seated_alike([7] * 5, 1)
    layout = packed_layout(placed.windows, placed.groups)
    assert layout.writes == (SliceWrite(256, 0, 5, 0, 7, 1),)
    (rectangle,) = layout.rectangles
    assert (rectangle.queries, rectangle.mask, layout.outputs) == (None, None, None)


def test_a_chunk_alone_is_plain_causal_attention() -> None:
    placed = seated_alike([100], 50)
    layout = packed_layout(placed.windows, placed.groups)
    (rectangle,) = layout.rectangles
    assert (rectangle.queries, rectangle.mask, layout.outputs) == (None, "causal", None)


def test_one_long_draft_does_not_widen_its_neighbours() -> None:
    placed = seated_alike([20, 30, 40, 50], 1)
    wide = window_of(0, 20, 9, drafted=8)
    layout = packed_layout((wide, *placed.windows[1:]), placed.groups)
    assert sorted((rectangle.lanes, rectangle.width) for rectangle in layout.rectangles) == [(1, 9), (3, 1)]


def test_one_long_lane_does_not_lengthen_its_neighbours() -> None:
    placed = seated_alike([20, 3000, 40], 1)
    layout = packed_layout(placed.windows, placed.groups)
    assert sorted((rectangle.lanes, rectangle.length) for rectangle in layout.rectangles) == [(1, 3001), (2, 41)]


def test_padded_lanes_follow_their_rows_in_whatever_order_they_are_planned() -> None:
    """The first and the last may stand right while those between do not."""
    groups = LaneGroups(together=True)
    groups.place(dict.fromkeys(range(4), (10, 9)))
    windows = tuple(window_of(slot, 9, 1) for slot in (0, 2, 1, 3))
    layout = padded_layout(windows, groups)
    assert (layout.order, layout.row, layout.rows) == ((0, 2, 1, 3), 0, None)
    _, seen = see_padded(layout, Placed(windows, groups, dict.fromkeys(range(4), 9)))
    assert [lane[0][0] for lane in seen] == [(slot, 0) for slot in range(4)]
