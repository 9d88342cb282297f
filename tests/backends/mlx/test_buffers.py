"""The buffers against a dictionary of numpy arrays, and what their changes cost in memory: writes are in place, a lane
that joins or outgrows its class is the only one that is copied (contract rule 19).
"""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backends.groups import LaneGroups, Move, Resize, Seat
from backends.mlx.backend import MLXBackend
from backends.mlx.caches.buffers import LayerBuffers, LayerShape, ScatterWrite, SliceWrite
from backends.mlx.caches.sight import EVERYTHING, Sight
from backends.mlx.layout import packed_layout
from scheduler.round import Window
from tests.backends.mlx.allocating import allocated
from tests.backends.mlx.random_models import random_model
from tests.backends.mlx.serving import INFO, Paths, both_paths
from tests.backends.mlx.windows import window_of

NARROW = LayerShape(kv_heads=2, key_dim=3, value_dim=1, dtype=mx.float32)


class Buffers(RuleBasedStateMachine):
    """Rounds of random windows through the packed layout's own writes. The model holds each lane's keys and values."""

    sight = EVERYTHING

    @initialize()
    def start(self) -> None:
        self.buffers = LayerBuffers(NARROW, self.sight)
        self.groups = LaneGroups(row_bytes=self.buffers.row_bytes)
        self.keys: dict[int, np.ndarray] = {}
        self.values: dict[int, np.ndarray] = {}
        self.written = 0

    @rule(
        rows=st.dictionaries(st.integers(0, 5), st.one_of(st.integers(1, 12), st.sampled_from([40, 250])), min_size=1),
        cut=st.integers(0, 10),
    )
    def feed(self, rows: dict[int, int], cut: int) -> None:
        """Every lane forgets up to `cut` of its newest positions first, as after a rejected draft."""
        starts = {slot: max(0, len(self.keys.get(slot, ())) - cut) for slot in rows}
        windows = [window_of(slot, starts[slot], width) for slot, width in rows.items()]
        for change in self.groups.place({each.slot: (each.end, each.start) for each in windows}):
            self.buffers.apply(change)
        layout = packed_layout(windows, self.groups, self.sight)
        keys, values = self.numbers(layout.rows, 3), self.numbers(layout.rows, 1)
        for write in layout.writes:
            self.buffers.write(write, mx.array(keys[:, :, None]), mx.array(values[:, :, None]))
        for entry in layout.seated:
            self.extend(entry.window, keys[entry.first : entry.last], values[entry.first : entry.last])

    def numbers(self, rows: int, dim: int) -> np.ndarray:
        """Numbers that were never written before, `[rows, kv_heads, dim]`; exact in float32."""
        count = rows * NARROW.kv_heads * dim
        fresh = np.arange(self.written, self.written + count, dtype=np.float32)
        self.written += count
        return fresh.reshape(rows, NARROW.kv_heads, dim)

    def extend(self, window: Window, keys: np.ndarray, values: np.ndarray) -> None:
        for held, fresh in ((self.keys, keys), (self.values, values)):
            kept = held.get(window.slot, fresh[:0])[: window.start]
            held[window.slot] = np.concatenate([kept, fresh])

    @rule(slot=st.integers(0, 5))
    def leave(self, slot: int) -> None:
        for change in self.groups.leave(slot):
            self.buffers.apply(change)
        self.keys.pop(slot, None)
        self.values.pop(slot, None)

    @rule(spare=st.integers(0, 2000))
    def limit(self, spare: int) -> None:
        """Rows are given back; whoever sits behind a free one moves."""
        needed = self.groups.needed({slot: len(keys) for slot, keys in self.keys.items()})
        for change in self.groups.limit(needed + spare):
            self.buffers.apply(change)

    @invariant()
    def they_take_what_is_said(self) -> None:
        assert self.groups.held == sum(array.nbytes for array in self.buffers.arrays())

    @precondition(lambda self: self.keys)
    @invariant()
    def every_lane_holds_its_own(self) -> None:
        for slot, expected in self.keys.items():
            seat, length = self.groups.seat(slot), len(expected)
            kept = np.arange(max(0, length - self.sight.reach) if self.sight.reach else 0, length)
            places = kept % self.sight.places(seat.capacity)
            keys = np.array(self.buffers.keys[seat.capacity])[seat.row][:, places]
            values = np.array(self.buffers.values[seat.capacity])[seat.row][:, places]
            assert np.array_equal(keys.swapaxes(0, 1), expected[kept])
            assert np.array_equal(values.swapaxes(0, 1), self.values[slot][kept])

    @invariant()
    def rings_are_bounded(self) -> None:
        if self.sight.span:
            assert all(array.shape[2] <= self.sight.span for array in self.buffers.arrays())


class Rings(Buffers):
    """Of a layer that sees 20 positions: what it may still need is there, also when drafts were rejected."""

    sight = Sight(window=20)


class WideRings(Buffers):
    """Of a layer that sees 300: lanes lie as in any buffer until they outgrow a class."""

    sight = Sight(window=300)


TestBuffers = Buffers.TestCase
TestRings = Rings.TestCase
TestWideRings = WideRings.TestCase
for _machine in (TestBuffers, TestRings, TestWideRings):
    _machine.settings = settings(max_examples=40, stateful_step_count=15)


# ---- what it costs ---------------------------------------------------------------------------------------------------

WIDE = LayerShape(kv_heads=2, key_dim=16, value_dim=16, dtype=mx.float32)
LANE_BYTES = 2 * 2 * 16 * 4 * 1024
"""Keys and values of one lane of 1,024 positions in one layer of `WIDE`."""


def wide_buffers(rows: int = 8) -> LayerBuffers:
    buffers = LayerBuffers(WIDE)
    buffers.apply(Resize(1024, rows))
    mx.eval(buffers.arrays())
    return buffers


def ones(rows: int) -> mx.array:
    made = mx.ones((rows, WIDE.kv_heads, 1, WIDE.key_dim))
    mx.eval(made)
    return made


SCATTERED = ScatterWrite(1024, 0, 3, mx.array([[5], [0], [5]]), mx.array([[7], [1000], [8]]))


@pytest.mark.parametrize("write", [SliceWrite(1024, 0, 3, 2, 500, 1), SliceWrite(1024, 0, 3, 4, 9, 3), SCATTERED])
def test_writes_are_in_place(write: SliceWrite | ScatterWrite) -> None:
    buffers, packed = wide_buffers(), ones(3)

    def write_once() -> None:
        buffers.write(write, packed, packed)
        mx.eval(buffers.arrays())

    write_once()
    assert allocated(write_once) < LANE_BYTES // 100


def test_the_measure_sees_a_copy() -> None:
    """A view that is held across a write makes the write copy the whole buffer: what the tests here would notice."""
    buffers, packed = wide_buffers(), ones(3)
    view = buffers.keys[1024][:1]

    def write_once() -> None:
        buffers.write(SliceWrite(1024, 0, 3, 2, 500, 1), packed, packed)
        mx.eval(buffers.arrays(), view)

    assert allocated(write_once) >= 8 * LANE_BYTES // 2


def test_a_move_copies_one_lane_into_what_is_there() -> None:
    buffers = wide_buffers()
    buffers.apply(Resize(2048, 4))
    mx.eval(buffers.arrays())

    def move() -> None:
        buffers.apply(Move(Seat(1024, 3), Seat(2048, 2), 1000))
        mx.eval(buffers.arrays())

    assert allocated(move) <= 1.1 * LANE_BYTES


@pytest.mark.parametrize("length", [1000, 1024])
def test_a_copy_within_a_group_copies_one_lane_too(length: int) -> None:
    """A sibling's prompt; a copy of a whole row would otherwise be a view, which makes the write copy the group."""
    buffers = wide_buffers()

    def copy() -> None:
        buffers.apply(Move(Seat(1024, 3), Seat(1024, 2), length))
        mx.eval(buffers.arrays())

    copy()
    assert allocated(copy) <= 1.1 * LANE_BYTES


def test_a_dropped_group_gives_its_memory_back() -> None:
    buffers = wide_buffers()
    buffers.apply(Resize(2048, 1))
    mx.eval(buffers.arrays())
    before = mx.get_active_memory()
    buffers.apply(Resize(1024, 0))
    assert before - mx.get_active_memory() >= 8 * LANE_BYTES
    assert list(buffers.keys) == list(buffers.values) == [2048]


# ---- and in whole rounds ---------------------------------------------------------------------------------------------

LAYERS, LANES, LENGTH = 4, 8, 1000
ROUND_BYTES = 2 * LANE_BYTES
"""What a small round may need for itself: activations, masks and scores."""


@pytest.fixture(scope="module")
def paths() -> Paths:
    return both_paths(random_model("llama", num_hidden_layers=LAYERS))


def seated(paths: Paths) -> MLXBackend:
    """Eight lanes in the class of 1,024, with one position written: what the others hold does not matter here."""
    paths.packed.reset()
    backend = MLXBackend(INFO, paths.packed)
    backend.verify([window_of(slot, 0, 1, reach=LENGTH, samples=False) for slot in range(LANES)]).read()
    return backend


def serve_round(backend: MLXBackend, windows: list[Window]) -> None:
    backend.verify(windows).read()


def longer(slot: int, reach: int = 0) -> Window:
    return window_of(slot, LENGTH, 1, reach=reach)


def test_rounds_copy_no_cache(paths: Paths) -> None:
    backend = seated(paths)
    plain = [longer(slot) for slot in range(LANES)]
    ragged = [window_of(slot, LENGTH, 1 + slot % 4, drafted=slot % 4) for slot in range(LANES)]
    mixed = [*plain[:5], window_of(6, LENGTH - 40, 40, samples=False)]
    for windows in (plain, ragged, mixed):
        backend.verify(windows).read()
        assert allocated(partial(serve_round, backend, windows)) < 4 * ROUND_BYTES


def test_a_lane_that_joins_copies_nobody(paths: Paths) -> None:
    backend = seated(paths)
    backend.release(2)
    backend.verify([longer(slot) for slot in range(LANES) if slot != 2]).read()
    joining = [*(longer(slot) for slot in range(2)), window_of(9, 0, 9, reach=LENGTH, samples=False)]
    assert allocated(lambda: backend.verify(joining).read()) < 4 * ROUND_BYTES


def test_a_lane_that_outgrows_its_class_is_the_only_one_copied(paths: Paths) -> None:
    """The new group of one row is 2 lanes' worth a layer; copying the old group would cost 8 more in some layer."""
    backend = seated(paths)
    outgrowing = [longer(slot, reach=1025 if slot == 3 else 0) for slot in range(LANES)]
    backend.verify([longer(slot) for slot in range(LANES)]).read()
    grown = 2 * LANE_BYTES * LAYERS
    assert allocated(lambda: backend.verify(outgrowing).read()) < grown + ROUND_BYTES


def test_lanes_that_leave_free_the_memory(paths: Paths) -> None:
    backend = seated(paths)
    before = mx.get_active_memory()
    for slot in range(LANES):
        backend.release(slot)
        backend.release(slot)
    assert before - mx.get_active_memory() >= LANES * LANE_BYTES * LAYERS
    assert paths.packed.buffers() == []
