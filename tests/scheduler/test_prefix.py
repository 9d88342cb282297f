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
        for key in self.index.clear():
            assert key not in self.pins
            assert key not in self.writing
            assert key not in self.reading
            self.model[Tier.RAM].pop(key, None)
            self.model[Tier.SSD].pop(key, None)

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
            assert stats.bytes == sum(self.model[tier].values()) <= stats.most
            assert {piece.key for piece in self.index.pieces(tier)} == set(self.model[tier])
            assert stats.pieces == len(self.model[tier])

    @invariant()
    def nothing_hangs_in_the_air(self) -> None:
        there = self.model[Tier.RAM].keys() | self.model[Tier.SSD].keys()
        for key in there:
            assert self.known[key].start == 0 or self.known[key].parent in there


Life.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLife = Life.TestCase
