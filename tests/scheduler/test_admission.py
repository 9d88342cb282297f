"""One pool for lanes and blocks: together they never exceed it, lanes come first, and looking changes nothing."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler.admission import Boundless, Pool
from tests.scheduler.memory import PlainBlocks, PlainLanes, class_of

LENGTHS = st.dictionaries(st.integers(0, 5), st.integers(1, 40), max_size=5)


class PoolMachine(RuleBasedStateMachine):
    """Lanes of any lengths, and blocks that come, go and are pinned, in a pool of any size."""

    @initialize(size=st.integers(0, 150), blocks_most=st.integers(0, 200))
    def begin(self, size: int, blocks_most: int) -> None:
        self.size, self.blocks_most = size, blocks_most
        self.lanes, self.blocks = PlainLanes(), PlainBlocks()
        self.pool = Pool(size, self.lanes, self.blocks, blocks_most)
        self.lanes.changed = self.blocks.changed = self.it_holds

    @invariant()
    def it_holds(self) -> None:
        """Also halfway through a change: whoever is to have more gets it after the other one has given it up."""
        assert self.lanes.most + max(self.blocks.most, self.blocks.used) <= self.size
        assert 0 <= self.blocks.most <= self.blocks_most
        assert self.lanes.most >= 0

    @rule(block=st.integers(0, 9), size=st.integers(1, 40))
    def store(self, block: int, size: int) -> None:
        """Blocks keep to what they may take."""
        if block not in self.blocks.sizes and self.blocks.used + size <= self.blocks.most:
            self.blocks.sizes[block] = size

    @rule(held=st.integers(0, 150))
    def hold(self, held: int) -> None:
        """So do lanes, spare rows included."""
        self.lanes.held = min(held, self.lanes.most)

    @rule(pinned=st.sets(st.integers(0, 9)))
    def pin(self, pinned: set[int]) -> None:
        self.blocks.pinned = pinned

    def fit(self, lengths: dict[int, int]) -> bool:
        return sum(map(class_of, lengths.values())) + self.blocks.unyielding() <= self.size

    @rule(lengths=LENGTHS)
    def look(self, lengths: dict[int, int]) -> None:
        before = (self.lanes.most, self.blocks.most, dict(self.blocks.sizes))
        assert self.pool.admits(lengths) == self.fit(lengths)
        covered = sum(map(class_of, lengths.values())) <= self.lanes.most
        assert self.pool.covers(lengths) == covered
        assert (self.lanes.most, self.blocks.most, self.blocks.sizes) == before

    @rule(lengths=LENGTHS)
    def secure(self, lengths: dict[int, int]) -> None:
        kept = self.blocks.sizes.keys() & self.blocks.pinned
        fits, covered = self.fit(lengths), self.pool.covers(lengths)
        needed = sum(map(class_of, lengths.values()))
        before = (dict(self.blocks.sizes), self.lanes.held)
        assert self.pool.secure(lengths) == self.pool.covers(lengths) == fits
        assert kept <= self.blocks.sizes.keys()
        if fits:
            assert needed <= self.lanes.most
            assert self.blocks.most <= self.size - needed
        if covered:
            assert (self.blocks.sizes, self.lanes.held) == before, "nothing goes that is not in the way"


PoolMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_where_lanes_need_it_blocks_go_and_where_they_hold_much_less_blocks_may_come_again() -> None:
    lanes, blocks = PlainLanes(), PlainBlocks()
    pool = Pool(100, lanes, blocks, 60)
    blocks.sizes = dict.fromkeys(range(6), 10)
    assert pool.secure({0: 32})
    assert blocks.used == 60
    assert pool.secure({0: 64})
    assert blocks.used <= 36
    lanes.held = 64
    assert pool.secure({0: 4})
    assert blocks.most <= 36, "what lanes hold is not the blocks' yet"
    lanes.held = 4
    assert pool.secure({0: 4})
    assert blocks.most == 60


def test_lanes_that_grow_step_by_step_do_not_drive_blocks_away_at_each() -> None:
    lanes, blocks = PlainLanes(), PlainBlocks()
    pool = Pool(4096, lanes, blocks, 4096)
    changes: list[int] = []
    blocks.changed = lambda: changes.append(blocks.most)
    for count in range(1, 257):
        lanes.held = 4 * (count - 1)
        assert pool.secure(dict.fromkeys(range(count), 4))
    assert len(changes) < 64


def test_without_blocks_the_pool_is_the_lanes() -> None:
    memory = PlainLanes()
    pool = Pool(32, memory, None, 16)
    assert memory.most == 32
    assert pool.secure({0: 16, 1: 16})
    assert pool.admits({0: 32})
    assert not pool.admits({0: 32, 1: 1})
    assert not pool.secure({0: 33})


def test_without_a_budget_everything_fits() -> None:
    room = Boundless()
    lengths = {0: 1 << 60}
    assert room.admits(lengths)
    assert room.secure(lengths)
    assert room.covers(lengths)
