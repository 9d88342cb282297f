"""The tree of prefixes against a dictionary, whatever comes and goes: nothing is had that is not there, caps hold,
what is in use stays, and what others hang under goes after them.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from scheduler.pieces import Key, Piece, chain, checkpoint_key, root_of
from scheduler.prefix import PrefixIndex, Tier

BLOCK = 4
ROOT = root_of("model", "owner", "salt")


def blocks_of(tokens: Sequence[int], root: Key = ROOT) -> list[Piece]:
    """All whole blocks of a text."""
    pieces: list[Piece] = []
    for place, key in enumerate(chain(root, tokens, BLOCK)):
        parent = pieces[-1].key if pieces else root
        pieces.append(Piece(key, parent, place * BLOCK, (place + 1) * BLOCK))
    return pieces


def checkpoint_of(tokens: Sequence[int]) -> Piece:
    """The checkpoint at a text's end."""
    blocks = blocks_of(tokens)
    parent, start = (blocks[-1].key, blocks[-1].end) if blocks else (ROOT, 0)
    return Piece(checkpoint_key(parent, tokens[start:]), parent, start, len(tokens), checkpoint=True)


def pieces_of(tokens: Sequence[int]) -> list[Piece]:
    """All of a text: whole blocks, and a checkpoint where it ends behind them."""
    return blocks_of(tokens) + ([checkpoint_of(tokens)] if len(tokens) % BLOCK else [])


def filled(*texts: Sequence[int], ram: int = 1000, ssd: int = 0, size: int = 10, **kinds: bool) -> PrefixIndex:
    index = PrefixIndex(ram, ssd, block=BLOCK, **kinds)
    for text in texts:
        for piece in blocks_of(text):
            index.insert(piece, size)
    return index


TEXTS = st.lists(st.integers(0, 2), max_size=24)


@given(kept=st.lists(TEXTS, max_size=6), asked=TEXTS)
def test_what_is_had_is_the_longest_beginning_in_whole_blocks(kept: list[list[int]], asked: list[int]) -> None:
    index = filled(*kept)
    longest = max(
        (
            length
            for text in kept
            for length in range(0, len(text) // BLOCK * BLOCK + 1, BLOCK)
            if text[:length] == asked[:length] and length <= len(asked)
        ),
        default=0,
    )
    found = index.match(ROOT, asked)
    assert found.length == found.branch == longest
    assert list(found.pieces) == blocks_of(asked[:longest])


@given(kept=st.lists(TEXTS, max_size=6), asked=TEXTS)
def test_where_a_text_paused_it_is_had_to_its_last_token(kept: list[list[int]], asked: list[int]) -> None:
    index = filled(*kept)
    for text in kept:
        index.insert(checkpoint_of(text), 10)
    whole = filled(*kept).match(ROOT, asked).length
    paused = max((len(text) for text in kept if text == asked[: len(text)] and len(text) - whole < BLOCK), default=0)
    assert index.match(ROOT, asked).length == max(whole, paused)


@given(kept=st.lists(TEXTS, max_size=6), asked=TEXTS, blocks=st.booleans())
def test_where_caches_cannot_be_cut_it_is_the_last_checkpoint(
    kept: list[list[int]], asked: list[int], blocks: bool
) -> None:
    index = filled(*(kept if blocks else ()), checkpoints=True, blocks=blocks)
    for text in kept:
        index.insert(checkpoint_of(text), 10)
    longest = max((len(text) for text in kept if text == asked[: len(text)]), default=0)
    found = index.match(ROOT, asked)
    assert found.length == longest
    if found.pieces:
        *before, last = found.pieces
        assert last == checkpoint_of(asked[:longest])
        assert before == (blocks_of(asked[:longest]) if blocks else [])


def test_where_there_are_no_blocks_it_is_known_all_the_same_where_texts_part() -> None:
    index = PrefixIndex(100, block=BLOCK, checkpoints=True, blocks=False)
    for piece in blocks_of(range(20)):
        index.see(piece.key)
    assert index.match(ROOT, (*range(10), 99, 98, 97)).branch == 8
    assert index.match(ROOT, range(20)).branch == 20


@pytest.mark.parametrize("parts", [("other", "owner", "salt"), ("model", "", "ownersalt"), ("model", "ownersalt", "")])
def test_another_namespace_owner_or_salt_has_nothing(parts: tuple[str, ...]) -> None:
    index = filled(range(40))
    assert index.match(ROOT, range(40)).length == 40
    assert index.match(root_of(*parts), range(40)).length == 0


def test_what_was_used_last_stays_and_ends_go_before_beginnings() -> None:
    first, second = range(12), range(100, 112)
    index = filled(first, second, ram=60)
    index.use(piece.key for piece in blocks_of(first))
    gone = index.insert(blocks_of(range(200, 204))[0], 10).gone
    assert gone == (blocks_of(second)[-1].key,)
    assert index.match(ROOT, first).length == 12
    assert index.match(ROOT, second).length == 8


def test_a_checkpoint_that_saves_little_for_its_bytes_goes_before_one_that_saves_much() -> None:
    index = PrefixIndex(100, block=BLOCK, checkpoints=True, blocks=False)
    near, far, new = checkpoint_of(range(41)), checkpoint_of(range(40)), checkpoint_of(range(100, 140))
    index.insert(far, 45)
    index.insert(near, 45)
    index.use((near.key,))
    assert index.insert(new, 45).gone == (near.key,), "one token behind the other, though it was used last"


def test_of_two_checkpoints_as_far_behind_one_block_one_can_go() -> None:
    index = filled(range(8), range(8))
    first, second = checkpoint_of((*range(8), 50, 51)), checkpoint_of((*range(8), 60, 61))
    index.insert(first, 10)
    index.insert(second, 10)
    index.forget(first.key)
    assert index.match(ROOT, (*range(8), 60, 61, 62)).pieces[-1] == second
    assert index.match(ROOT, (*range(8), 50, 51, 62)).length == 8


def test_what_is_pinned_stays_and_what_finds_no_room_is_refused() -> None:
    index = filled(range(12), ram=30)
    index.pin(piece.key for piece in blocks_of(range(12)))
    assert not index.insert(blocks_of(range(100, 104))[0], 10).granted
    assert index.stats(Tier.RAM).refused == 1
    index.unpin(piece.key for piece in blocks_of(range(12)))
    assert index.insert(blocks_of(range(100, 104))[0], 10).granted


def test_a_block_without_the_one_before_it_is_refused() -> None:
    index = PrefixIndex(1000, block=BLOCK)
    assert not index.insert(blocks_of(range(8))[1], 10).granted
    assert index.stats(Tier.RAM).bytes == 0


def test_what_is_lost_takes_along_what_hangs_under_it() -> None:
    index = filled(range(16), ram=40, ssd=1000)
    pieces = blocks_of(range(16))
    for piece in pieces:
        assert index.reserve(piece.key, 12).granted
        index.written(piece.key)
    for piece in blocks_of(range(100, 116)):
        index.insert(piece, 10)
    assert not index.holds(pieces[0].key, Tier.RAM)
    assert index.match(ROOT, range(16)).length == 16, "on the SSD"
    assert index.load(pieces[1].key).granted
    assert set(index.lost(pieces[1].key)) == {piece.key for piece in pieces[1:]}
    assert index.match(ROOT, range(16)).length == 4
    assert not index.loaded(pieces[1].key, 10)
    assert index.stats(Tier.SSD).bytes == 12


def test_less_memory_drives_out_what_saves_least_and_leaves_what_is_in_use() -> None:
    index = filled(range(12), range(100, 112))
    first, second = blocks_of(range(12)), blocks_of(range(100, 112))
    index.pin((first[1].key,))
    assert index.unyielding(Tier.RAM) == 20, "what is pinned, and what it hangs under"
    assert index.limit(40) == ((first[2].key, second[2].key), ())
    assert index.limit(0) == ((second[1].key, second[0].key), ())
    assert index.stats(Tier.RAM).bytes == 20
    index.unpin((first[1].key,))
    assert index.unyielding(Tier.RAM) == 0
    assert set(index.limit(0)[0]) == {piece.key for piece in first[:2]}


def test_what_hangs_on_the_ssd_under_something_that_only_memory_had_is_forgotten_and_nothing_else() -> None:
    """A block on both, one in memory alone, one on the SSD alone."""
    index = filled(range(12), ssd=1000)
    both, memory, disk = blocks_of(range(12))
    for piece in (both, memory, disk):
        assert index.reserve(piece.key, 10).granted
        index.written(piece.key)
    assert index.limit(20) == ((disk.key,), ())
    assert index.lost(memory.key) == ()
    assert index.limit(0) == ((both.key,), (memory.key, disk.key))
    assert index.match(ROOT, range(12)).pieces == (both,)
    assert index.holds(both.key, Tier.SSD)


def test_what_something_on_its_way_hangs_under_stays() -> None:
    index = filled(range(8), ssd=1000)
    above, below = blocks_of(range(8))
    assert index.reserve(below.key, 10).granted
    index.written(below.key)
    assert index.limit(10) == ((below.key,), ())
    index.limit(20)
    assert index.load(below.key).granted
    assert index.limit(0) == ((), ())
    assert index.unyielding(Tier.RAM) == 20
    assert index.loaded(below.key, 10)
    assert index.limit(0) == ((below.key,), (above.key, below.key))


class Life(RuleBasedStateMachine):
    """Pieces of few texts, in two small tiers, against what a dictionary says of them."""

    texts = Bundle("texts")

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(100, 150, block=BLOCK)
        self.model: dict[Tier, dict[Key, int]] = {Tier.RAM: {}, Tier.SSD: {}}
        self.reading: set[Key] = set()
        self.writing: set[Key] = set()
        self.pins: list[Key] = []
        self.known: dict[Key, Piece] = {}
        self.over = 0
        """What is in memory beyond its cap, because it was in use when that was set."""

    def drop(self, tier: Tier, keys: Sequence[Key]) -> None:
        for key in keys:
            assert key not in self.pins
            assert key not in self.writing
            assert key not in self.reading
            del self.model[tier][key]

    @rule(target=texts, text=st.lists(st.integers(0, 1), min_size=BLOCK, max_size=5 * BLOCK))
    def text(self, text: list[int]) -> list[int]:
        for piece in pieces_of(text):
            self.known[piece.key] = piece
        return text

    @rule(text=texts, size=st.integers(1, 40))
    def insert(self, text: list[int], size: int) -> None:
        for piece in pieces_of(text):
            there = piece.key in self.model[Tier.RAM]
            room = self.index.insert(piece, size)
            self.drop(Tier.RAM, room.gone)
            if room.granted and not there:
                self.model[Tier.RAM][piece.key] = size

    @rule(text=texts, size=st.integers(1, 40))
    def spill(self, text: list[int], size: int) -> None:
        for piece in pieces_of(text):
            if piece.key in self.model[Tier.RAM] and piece.key not in self.model[Tier.SSD] | dict.fromkeys(
                self.reading
            ):
                room = self.index.reserve(piece.key, size)
                self.drop(Tier.SSD, room.gone)
                if room.granted:
                    self.model[Tier.SSD][piece.key] = size
                    self.writing.add(piece.key)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), good=st.booleans())
    def spilled(self, data: st.DataObject, good: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.writing)))
        self.writing.discard(key)
        if good:
            self.index.written(key)
        else:
            self.index.unwritten(key)
            self.model[Tier.SSD].pop(key, None)

    @rule(text=texts)
    def load(self, text: list[int]) -> None:
        for piece in pieces_of(text):
            if piece.key in self.model[Tier.SSD] and piece.key not in self.model[Tier.RAM]:
                room = self.index.load(piece.key)
                self.drop(Tier.RAM, room.gone)
                if room.granted:
                    self.model[Tier.RAM][piece.key] = self.model[Tier.SSD][piece.key]
                    self.reading.add(piece.key)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), good=st.booleans())
    def loaded(self, data: st.DataObject, good: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.reading)))
        if good:
            self.model[Tier.RAM][key] = max(1, self.model[Tier.RAM][key] - 3)
            assert self.index.loaded(key, self.model[Tier.RAM][key])
            self.reading.discard(key)
            return
        for lost in self.index.lost(key):
            assert any(piece == lost for piece in self.lineage(lost))
            assert key in self.lineage(lost)
            self.model[Tier.RAM].pop(lost, None)
            self.model[Tier.SSD].pop(lost, None)
            self.reading.discard(lost)
            self.writing.discard(lost)
            self.pins = [pin for pin in self.pins if pin != lost]

    def lineage(self, key: Key) -> list[Key]:
        keys = [key]
        while keys[-1] in self.known:
            keys.append(self.known[keys[-1]].parent)
        return keys

    @rule(text=texts)
    def pin(self, text: list[int]) -> None:
        keys = [piece.key for piece in self.index.match(ROOT, text).pieces]
        self.index.pin(keys)
        self.index.use(keys)
        self.pins += keys

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(set(self.pins))))
        self.pins.remove(key)
        self.index.unpin((key,))

    @rule()
    def clear(self) -> None:
        self.forget(self.index.clear())

    def forget(self, keys: Sequence[Key]) -> None:
        for key in keys:
            assert key not in self.pins
            assert key not in self.writing
            assert key not in self.reading
            assert key not in self.index
            self.model[Tier.RAM].pop(key, None)
            self.model[Tier.SSD].pop(key, None)

    @rule(most=st.integers(0, 100))
    def limit(self, most: int) -> None:
        """What is in use stays, and nothing else that is too much; the SSD loses nothing that can be had without it."""
        only_here = self.model[Tier.RAM].keys() - self.model[Tier.SSD].keys()
        fitted = sum(self.model[Tier.RAM].values()) <= most
        in_use = self.bytes_in_use()
        gone, forgotten = self.index.limit(most)
        self.drop(Tier.RAM, gone)
        self.forget(forgotten)
        left = sum(self.model[Tier.RAM].values())
        assert left <= max(most, in_use)
        assert not (fitted and (gone or forgotten))
        for key in forgotten:
            assert any(above in only_here and above in forgotten for above in self.lineage(key))
        self.over = max(0, left - most)

    def bytes_in_use(self) -> int:
        used = {above for key in {*self.pins, *self.reading, *self.writing} for above in self.lineage(key)}
        return sum(size for key, size in self.model[Tier.RAM].items() if key in used)

    @invariant()
    def it_is_known_what_cannot_go(self) -> None:
        assert self.index.unyielding(Tier.RAM) == self.bytes_in_use()

    @rule(text=texts)
    def match(self, text: list[int]) -> None:
        there = self.model[Tier.RAM] | self.model[Tier.SSD]
        expected = []
        for piece in blocks_of(text):
            if piece.key not in there:
                break
            expected.append(piece)
        rest = text[len(expected) * BLOCK :]
        parent = expected[-1].key if expected else ROOT
        tails = [
            self.known[checkpoint_key(parent, rest[:length])]
            for length in range(1, len(rest) + 1)
            if checkpoint_key(parent, rest[:length]) in there
        ]
        expected += tails[-1:]
        assert list(self.index.match(ROOT, text).pieces) == expected

    @invariant()
    def accounts_are_right_and_caps_hold(self) -> None:
        for tier in Tier:
            stats = self.index.stats(tier)
            over = self.over if tier is Tier.RAM else 0
            assert stats.bytes == sum(self.model[tier].values()) <= stats.most + over
            assert {piece.key for piece in self.index.pieces(tier)} == set(self.model[tier])
            assert stats.pieces == len(self.model[tier])
        ram = self.index.stats(Tier.RAM)
        self.over = min(self.over, max(0, ram.bytes - ram.most))

    @invariant()
    def nothing_hangs_in_the_air(self) -> None:
        there = self.model[Tier.RAM].keys() | self.model[Tier.SSD].keys()
        for key in there:
            assert self.known[key].start == 0 or self.known[key].parent in there


Life.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLife = Life.TestCase
