"""How lanes' claims on the prefix cache give way: what is renounced, limited and spoiled, and nothing else."""

from scheduler.lane import Lane
from scheduler.prefix import PrefixIndex, Tier
from scheduler.request import Request
from scheduler.reuse import Reuse
from tests.scheduler.memory import PlainShelf

BLOCK = 4


class Served:
    """Lanes of one owner, which all take what there is and give what they have."""

    def __init__(self, **kinds: bool) -> None:
        self.index = PrefixIndex(1000, block=BLOCK, **kinds)
        self.reuse = Reuse(self.index, PlainShelf(self.index), "model")
        self.seated = 0

    def lane(self, *tokens: int) -> Lane:
        lane = Lane(Request(f"r{self.seated}", tokens, 10), submitted=0.0)
        lane.seat(self.seated, self.seated, 0.0)
        self.seated += 1
        self.reuse.admit(lane, self.reuse.match(lane))
        return lane

    def compute(self, lane: Lane, cached: int) -> None:
        """It has computed so much, and gives it."""
        lane.cached = cached
        for store in self.reuse.stores(lane):
            self.index.insert(store.piece, store.piece.end - store.piece.start)


def test_what_lanes_renounce_is_in_use_no_more_and_they_compute_it() -> None:
    served = Served()
    served.compute(served.lane(*range(21)), 20)
    reader = served.lane(*range(21))
    assert served.reuse.waits(reader)
    assert served.reuse.unyielding() == served.reuse.used == 20
    served.reuse.renounce()
    assert served.reuse.unyielding() == 0
    assert not served.reuse.waits(reader)
    assert served.reuse.restores([reader], decoding=False, now=0.0) == []
    assert reader.cached == 0
    assert served.reuse.limit(0) == 0


def test_what_is_being_copied_stays_until_it_is_and_the_rest_goes() -> None:
    served = Served()
    served.compute(served.lane(*range(21)), 20)
    served.compute(served.lane(*range(100, 109)), 8)
    reader = served.lane(*range(21))
    (restore,) = served.reuse.restores([reader], decoding=False, now=0.0)
    assert restore.pieces[-1].end == reader.cached == 20
    served.reuse.renounce()
    assert served.reuse.limit(0) == served.reuse.unyielding() == 20
    served.reuse.restored(20, 0.001)
    assert served.reuse.limit(0) == 0


def test_where_a_lane_has_no_numbers_nothing_of_its_text_is_kept_and_all_of_the_others() -> None:
    served = Served()
    writer = served.lane(*range(21))
    served.compute(writer, 20)
    other = served.lane(*range(8), *range(100, 109))
    served.compute(other, 16)
    assert served.index.match(served.reuse.root(other.request), other.tokens).length == 16
    spoiled = served.lane(*range(8), *range(200, 209))
    served.compute(spoiled, 16)
    served.reuse.spoil(spoiled)
    assert served.index.match(served.reuse.root(spoiled.request), range(8)).length == 0
    assert served.reuse.used == 0, "what hangs under a spoiled beginning was computed from it"
    untouched = served.lane(*range(300, 309))
    served.compute(untouched, 8)
    served.reuse.spoil(spoiled)
    assert [piece.end for piece in served.index.pieces(Tier.RAM)] == [4, 8]


def test_where_there_are_no_blocks_every_checkpoint_of_a_spoiled_text_goes() -> None:
    served = Served(checkpoints=True, blocks=False)
    for end in (6, 11):
        writer = served.lane(*range(end + 1))
        served.compute(writer, end)
    assert len(served.index.pieces(Tier.RAM)) == 2
    served.reuse.spoil(writer)
    assert served.index.pieces(Tier.RAM) == []


def test_what_a_lane_once_computed_is_not_counted_as_spared_when_it_is_given_it_back() -> None:
    served = Served()
    served.compute(served.lane(*range(9)), 8)
    lane = served.lane(*range(21))
    served.reuse.restores([lane], decoding=False, now=0.0)
    assert lane.usage().cached_tokens == 8
    served.compute(lane, 16)
    lane.begin_again()
    assert lane.usage().cached_tokens == 0
    served.reuse.admit(lane, served.reuse.match(lane))
    served.reuse.restores([lane], decoding=False, now=0.0)
    assert lane.cached == 16
    assert lane.usage().cached_tokens == 8
