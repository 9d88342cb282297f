"""Features against a dictionary from (request, position) to a row: whatever is cut, and whoever leaves, a lane has the
rows of one run of positions, and nobody has those of another.
"""

from random import Random

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backends.mlx.features import FeaturePiece, Features, LaneFeatures, gathered, normalised
from backends.mlx.verify import TappedRows
from scheduler.round import Window
from tests.backends.mlx.windows import window_of

WIDTH = 3


class Begun(msgspec.Struct):
    """A round under way, and which of its lanes have left since."""

    windows: list[Window]
    left: set[str]

    def serves(self, window: Window) -> bool:
        return window.request_id not in self.left


class Noted(msgspec.Struct):
    """What the model knows of a lane: the run `[start, end)` of positions that can be had."""

    start: int
    end: int


class Rounds(RuleBasedStateMachine):
    """One or two rounds under way; the second is of lanes that the first does not cut."""

    most: int | None = None

    @initialize()
    def begin_with_nothing(self) -> None:
        self.features = Features(self.most)
        self.rows: dict[tuple[str, int], np.ndarray] = {}
        self.noted: dict[str, Noted] = {}
        self.fed: dict[str, int] = {}
        """How many positions of each lane are cached."""
        self.flying: list[Begun] = []
        self.written = 0

    @precondition(lambda self: not self.flying)
    @rule(
        sizes=st.dictionaries(st.integers(0, 4), st.tuples(st.integers(1, 7), st.integers(0, 4)), min_size=1),
        gaps=st.dictionaries(st.integers(0, 4), st.integers(0, 9)),
        order=st.randoms(use_true_random=False),
    )
    def begin(self, sizes: dict[int, tuple[int, int]], gaps: dict[int, int], order: Random) -> None:
        """Real tokens and drafts; of a lane with a gap something was cached elsewhere."""
        windows = []
        for slot, (real, drafted) in sizes.items():
            start = self.fed.get(str(slot), 0) + gaps.get(slot, 0)
            windows.append(window_of(slot, start, real + drafted, drafted=drafted))
        self.start(windows, order)

    @precondition(lambda self: len(self.flying) == 1)
    @rule(order=st.randoms(use_true_random=False), staying=st.sets(st.integers(0, 4)))
    def begin_ahead(self, order: Random, staying: set[int]) -> None:
        """A token of each lane that is under way without a draft, as far as it is to stay."""
        (flying,) = self.flying
        ahead = [each for each in flying.windows if not each.draft and each.slot in staying and flying.serves(each)]
        if ahead:
            self.start([window_of(each.slot, each.end, 1) for each in ahead], order)

    def start(self, windows: list[Window], order: Random) -> None:
        """Their rows lie in any order, with padding between them."""
        order.shuffle(windows)
        firsts, total = {}, 0
        for index in sorted(range(len(windows)), key=lambda _: order.random()):
            total += order.randint(0, 2)
            firsts[index] = total
            total += windows[index].rows
        rows = np.arange(self.written, self.written + total * WIDTH, dtype=np.float32).reshape(total, WIDTH)
        self.written += rows.size
        for index, window in enumerate(windows):
            for row in range(window.rows):
                self.rows[window.request_id, window.start + row] = rows[firsts[index] + row]
        self.features.begin(windows, TappedRows(mx.array(rows), firsts))
        self.flying.append(Begun(windows, set()))

    @precondition(lambda self: self.flying)
    @rule(cuts=st.dictionaries(st.integers(0, 4), st.integers(0, 9)))
    def keep(self, cuts: dict[int, int]) -> None:
        """Whoever is under way again keeps all; of others any part is cut, or all, or nothing is said."""
        flying, *rest = self.flying
        again = {each.slot for begun in rest for each in begun.windows}
        kept = {}
        for window in flying.windows:
            cut = 0 if window.slot in again or window.slot not in cuts else min(cuts[window.slot], window.rows)
            if window.slot in cuts:
                kept[window.slot] = window.end - cut
            if flying.serves(window):
                self.note(window, window.end - cut)
        self.features.keep(kept)
        self.flying = rest

    def note(self, window: Window, end: int) -> None:
        self.fed[window.request_id] = end
        if end == window.start:
            return
        lane = self.noted.get(window.request_id)
        if lane is None or lane.end != window.start:
            lane = self.noted[window.request_id] = Noted(window.start, end)
        lane.end = end
        if self.most is not None:
            lane.start = max(lane.start, end - self.most)

    @rule(slot=st.integers(0, 4))
    def leave(self, slot: int) -> None:
        """Also while it is under way. Who comes back under the name is another lane."""
        self.features.forget(str(slot))
        self.noted.pop(str(slot), None)
        self.fed.pop(str(slot), None)
        for flying in self.flying:
            flying.left.add(str(slot))

    @precondition(lambda self: self.noted)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """What a reader has used is dropped; it may ask for more, or for less, than there is."""
        name = data.draw(st.sampled_from(sorted(self.noted)))
        lane = self.noted[name]
        start = data.draw(st.integers(lane.start - 2, lane.end + 2))
        found = self.features.of(name)
        assert found is not None
        found.drop(start)
        lane.start = min(max(lane.start, start), lane.end)

    @rule()
    def reset(self) -> None:
        self.features.reset()
        self.noted.clear()
        self.fed.clear()
        self.flying.clear()

    @invariant()
    def everybody_has_their_own_run(self) -> None:
        for name in map(str, range(5)):
            found, lane = self.features.of(name), self.noted.get(name)
            assert (found is None) == (lane is None), f"lane {name} left" if lane is None else f"lane {name} is there"
            if found is None or lane is None:
                continue
            assert (found.start, found.end) == (lane.start, lane.end)
            assert all(piece.count > 0 for piece in found.pieces)
            assert sum(piece.count for piece in found.pieces) == lane.end - lane.start
            if found.pieces:
                expected = [self.rows[name, position] for position in range(lane.start, lane.end)]
                assert np.array_equal(np.array(gathered(found.pieces)), expected)


class FewRounds(Rounds):
    """Of each lane the newest four positions."""

    most = 4


TestRounds = Rounds.TestCase
TestFewRounds = FewRounds.TestCase


# ---- examples --------------------------------------------------------------------------------------------------------


def test_pieces_of_several_lanes_and_rounds_come_in_the_order_in_which_they_are_asked_for() -> None:
    one, two = (mx.arange(first, first + 12).reshape(6, 2) for first in (0, 100))
    pieces = [FeaturePiece(two, 4, 2), FeaturePiece(one, 1, 1), FeaturePiece(two, 0, 1), FeaturePiece(one, 1, 2)]
    expected = [[108, 109], [110, 111], [2, 3], [100, 101], [2, 3], [4, 5]]
    assert np.array(gathered(iter(pieces))).tolist() == expected


def test_a_piece_that_is_dropped_in_part_ends_where_it_did() -> None:
    lane = LaneFeatures(10, slot=0)
    rows = mx.arange(20).reshape(10, 2)
    lane.add(FeaturePiece(rows, 3, 5), slot=4)
    lane.drop(12)
    assert (lane.start, lane.end, lane.slot) == (12, 15, 4)
    assert np.array(gathered(lane.pieces)).tolist() == np.array(rows[5:8]).tolist()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_each_tap_is_normalised_by_itself(dtype: mx.Dtype) -> None:
    """However large the one is beside the other; and a row of zeros stays one."""
    numbers = np.random.default_rng(1).normal(size=(4, 3, 8)) * np.array([1.0, 100.0, 0.01])[:, None]
    numbers[2] = 0
    hidden = mx.array(numbers.astype(np.float32)).astype(dtype)
    rounded = np.array(hidden.astype(mx.float32)).astype(np.float64)
    expected = rounded / np.sqrt(np.square(rounded).mean(axis=-1, keepdims=True) + 1e-6)
    found = normalised(hidden.reshape(4, 24), 3)
    assert found.dtype == mx.float32
    assert np.abs(np.array(found) - expected.reshape(4, 24)).max() <= 1e-5
