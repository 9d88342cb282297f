"""Which prefixes of earlier texts are kept, and where: a tree of blocks by chained hashes, in two tiers of bytes. Pure.

What goes first when a tier is full: never what is pinned or what others hang under; of the rest what saves least, in
tokens to be computed again for a byte, where what was used long ago counts less (GreedyDual-Size; Cao and Irani 1997,
"Cost-Aware WWW Proxy Caching Algorithms").
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from heapq import heapify, heappop, heappush

import msgspec

from scheduler.pieces import BLOCK_TOKENS, Key, Piece, chain, checkpoint_key

_SEEN = 1 << 16
"""Blocks that are remembered by key alone."""
_SLACK = 64
"""So many items that are no longer true may lie in a heap besides as many as are."""


class Tier(IntEnum):
    """Where bytes lie."""

    RAM = 0
    SSD = 1


TIERS = tuple(Tier)


class Match(msgspec.Struct, frozen=True):
    """What is known of a text's beginning."""

    pieces: tuple[Piece, ...] = ()
    """In the order in which they are put together: blocks, and a checkpoint if caches cannot be cut."""
    branch: int = 0
    """How much of the text was there before, which may be more than can be had."""

    @property
    def length(self) -> int:
        """How many tokens need not be computed."""
        return self.pieces[-1].end if self.pieces else 0


class TierStats(msgspec.Struct, frozen=True):
    """One tier's account."""

    bytes: int
    most: int
    """The cap."""
    pieces: int
    evictions: int
    refused: int
    """Pieces for which there was no room."""


class Room(msgspec.Struct, frozen=True):
    """What came of asking for room in a tier."""

    granted: bool
    gone: tuple[Key, ...] = ()
    """What lies in that tier no more, and is to be dropped there."""


_ENOUGH = Room(granted=True)


class _Entry:
    """One piece in the tree. Written by `PrefixIndex`."""

    __slots__ = ("below", "loading", "piece", "pins", "ranks", "saves", "sizes")

    def __init__(self, piece: Piece, saves: int) -> None:
        self.piece = piece
        self.saves = saves
        """How many tokens are computed again without it."""
        self.sizes: list[int | None] = [None, None]
        """Bytes by tier; None where it is not."""
        self.ranks = [(0.0, 0), (0.0, 0)]
        """By tier: the lowest goes first."""
        self.below: set[Key] = set()
        """What hangs under it."""
        self.pins = 0
        self.loading = False
        """Its bytes are on the way from the SSD to RAM, where they are counted already."""


class _Account:
    """One tier's bytes, and the order in which what lies there goes. Written by `PrefixIndex`."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.used = 0
        self.pieces = 0
        self.evictions = 0
        self.refused = 0
        self.clock = 0.0
        """The rank of what went last: what is used from then on ranks above it."""
        self.heap: list[tuple[tuple[float, int], Key]] = []
        """Everything that may go, by rank; and what is no longer true."""


class PrefixIndex:
    """The tree and both tiers' accounts. Who holds the bytes tells what comes and goes, and drops what is named."""

    def __init__(
        self,
        ram_bytes: int,
        ssd_bytes: int = 0,
        *,
        block: int = BLOCK_TOKENS,
        checkpoints: bool = False,
        blocks: bool = True,
    ) -> None:
        """`checkpoints`: caches cannot be cut, so that a text is only had up to one. `blocks`: some layers keep keys
        and values of every position, so that a checkpoint needs the blocks before it.
        """
        self.block = block
        self.checkpoints = checkpoints
        self.blocks = blocks
        self._entries: dict[Key, _Entry] = {}
        self._tails: dict[Key, Counter[int]] = {}
        """By the block before them: how many checkpoints lie so many tokens behind it."""
        self._seen: OrderedDict[Key, None] = OrderedDict()
        """Where there are no blocks: those that would be, newest last, so that it is known where texts part."""
        self._accounts = (_Account(ram_bytes), _Account(ssd_bytes))
        self._uses = 0

    # ---- what is known ----------------------------------------------------------------------------------------------

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def holds(self, key: Key, tier: Tier) -> bool:
        """Whether a piece's bytes lie in a tier, all of them."""
        entry = self._entries.get(key)
        return entry is not None and entry.sizes[tier] is not None and not (tier is Tier.RAM and entry.loading)

    def loading(self, key: Key) -> bool:
        """Whether its bytes are on the way to RAM."""
        entry = self._entries.get(key)
        return entry is not None and entry.loading

    def piece(self, key: Key) -> Piece:
        """A known one."""
        return self._entries[key].piece

    def size(self, key: Key) -> int:
        """A known piece's bytes, wherever they lie."""
        return max(size or 0 for size in self._entries[key].sizes)

    def pieces(self, tier: Tier) -> list[Piece]:
        """All that lies in a tier."""
        return [entry.piece for entry in self._entries.values() if entry.sizes[tier] is not None]

    def stats(self, tier: Tier) -> TierStats:
        """A tier's account."""
        account = self._accounts[tier]
        return TierStats(account.used, account.cap, account.pieces, account.evictions, account.refused)

    def match(self, root: Key, tokens: Sequence[int]) -> Match:
        """The longest beginning of a text that can be had."""
        keys = list(chain(root, tokens, self.block))
        known: list[Piece] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            known.append(entry.piece)
        branch = (
            len(known) if self.blocks else next((n for n, key in enumerate(keys) if key not in self._seen), len(keys))
        )
        branch *= self.block
        if not self.checkpoints:
            tail = self._checkpoint(known[-1].key if known else root, tokens[branch:])
            return Match((*known, tail) if tail is not None else tuple(known), branch)
        parents = [root, *keys[: len(known) if self.blocks else None]]
        for blocks in range(len(parents) - 1, -1, -1):
            checkpoint = self._checkpoint(parents[blocks], tokens[blocks * self.block :])
            if checkpoint is not None:
                return Match((*known[:blocks], checkpoint), branch)
        return Match((), branch)

    def see(self, key: Key) -> None:
        """A text has this block, which holds nothing."""
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > _SEEN:
            self._seen.popitem(last=False)

    def _checkpoint(self, parent: Key, rest: Sequence[int]) -> Piece | None:
        """The last one under a block that lies on the rest of a text."""
        for length in sorted(+self._tails.get(parent, Counter()), reverse=True):
            if length <= len(rest):
                entry = self._entries.get(checkpoint_key(parent, rest[:length]))
                if entry is not None:
                    return entry.piece
        return None

    # ---- it is used -------------------------------------------------------------------------------------------------

    def use(self, keys: Iterable[Key]) -> None:
        """A text was asked for: its pieces are the newest now. Unknown ones are ignored."""
        for key in keys:
            if (entry := self._entries.get(key)) is not None:
                self._freshen(entry)

    def pin(self, keys: Iterable[Key]) -> None:
        """Keep known pieces where they are until they are unpinned as often."""
        for key in keys:
            self._entries[key].pins += 1

    def unpin(self, keys: Iterable[Key]) -> None:
        """Undo a `pin`. Pieces that were lost meanwhile are ignored."""
        for key in keys:
            if (entry := self._entries.get(key)) is not None and entry.pins:
                entry.pins -= 1
                self._offer(entry)

    # ---- bytes come and go ------------------------------------------------------------------------------------------

    def insert(self, piece: Piece, size: int) -> Room:
        """A piece's bytes are to lie in RAM. Refused where there is no room, or nothing that it could hang under."""
        return self._add(piece, size, Tier.RAM)

    def reserve(self, key: Key, size: int) -> Room:
        """A known piece is to be written to the SSD, and counts there from now on. If granted, it is pinned until
        `written` or `unwritten`.
        """
        entry = self._entries[key]
        room = self._add(entry.piece, size, Tier.SSD)
        if room.granted:
            entry.pins += 1
        return room

    def written(self, key: Key) -> None:
        """What was reserved is written."""
        self.unpin((key,))

    def unwritten(self, key: Key) -> None:
        """What was reserved could not be written."""
        if (entry := self._entries.get(key)) is not None:
            self._remove(entry, Tier.SSD)
            self.unpin((key,))

    def found(self, piece: Piece, size: int) -> bool:
        """A file was found at the start. Tell them in the order of their last use, but those that others hang under
        first, and `trim` then. False: it hangs in the air.
        """
        account = self._accounts[Tier.SSD]
        cap, account.cap = account.cap, account.used + size
        granted = self._add(piece, size, Tier.SSD).granted
        account.cap = cap
        return granted

    def trim(self) -> tuple[Key, ...]:
        """Of what was found, what must go for the SSD's cap to hold."""
        return self._make_room(Tier.SSD, 0).gone

    def load(self, key: Key) -> Room:
        """A piece that lies on the SSD alone is to be read into RAM, and counts there from now on."""
        entry = self._entries[key]
        room = self._add(entry.piece, entry.sizes[Tier.SSD] or 0, Tier.RAM)
        entry.loading = room.granted
        return room

    def loaded(self, key: Key, size: int) -> bool:
        """What was to be read is there, and takes so much (no more than was read). False: nobody waits for it."""
        entry = self._entries.get(key)
        if entry is None or not entry.loading:
            return False
        entry.loading = False
        self._accounts[Tier.RAM].used += size - (entry.sizes[Tier.RAM] or 0)
        entry.sizes[Tier.RAM] = size
        self._offer(entry)
        return True

    def abandon(self) -> None:
        """Nobody waits any more for what is being read, nor is there room for it."""
        for entry in list(self._entries.values()):
            if entry.loading:
                entry.loading = False
                self._remove(entry, Tier.RAM)

    def lost(self, key: Key) -> tuple[Key, ...]:
        """What lies on the SSD under this key is no good. What is known no more for it: that piece, unless it lies in
        RAM too, and then all that hangs under it; whatever lies anywhere of them is to be dropped.
        """
        entry = self._entries.get(key)
        if entry is None:
            return ()
        if entry.sizes[Tier.RAM] is not None and not entry.loading:
            self._remove(entry, Tier.SSD)
            return ()
        return tuple(self._forget(key))

    def forget(self, key: Key) -> tuple[Key, ...]:
        """A piece is no good, wherever it lies. What is known no more for it, and is to be dropped."""
        return tuple(self._forget(key))

    def limit(self, most: int) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
        """What RAM may hold from now on. What goes for it, all but what is in use: what lies there no more, and what is
        known no more at all, for it hung under something that only RAM had.
        """
        account = self._accounts[Tier.RAM]
        account.cap = most
        gone = [*self._make_room(Tier.RAM, 0).gone]
        forgotten: list[Key] = []
        if account.used > most:
            for entry in sorted(self._entries.values(), key=lambda entry: entry.piece.end, reverse=True):
                if account.used > most and entry.sizes[Tier.RAM] is not None and not self._in_use(entry):
                    forgotten += self._forget(entry.piece.key)
                    gone += self._make_room(Tier.RAM, 0).gone  # what hangs above it may go now, and stay on the SSD
        return tuple(gone), tuple(forgotten)

    def _in_use(self, entry: _Entry) -> bool:
        """Whether it, or something that hangs under it, is pinned or on its way."""
        waiting = [entry.piece.key]
        while waiting:
            each = self._entries[waiting.pop()]
            if each.pins or each.loading:
                return True
            waiting += each.below
        return False

    def unyielding(self, tier: Tier) -> int:
        """Bytes in a tier that cannot go now: what is pinned or on its way, and what that hangs under."""
        held: set[Key] = set()
        for entry in self._entries.values():
            above: _Entry | None = entry if entry.pins or entry.loading else None
            while above is not None and above.piece.key not in held:
                held.add(above.piece.key)
                above = self._entries.get(above.piece.parent)
        return sum(self._entries[key].sizes[tier] or 0 for key in held)

    def clear(self) -> tuple[Key, ...]:
        """Forget all that is not in use; what is to be dropped."""
        gone: list[Key] = []
        for entry in sorted(self._entries.values(), key=lambda entry: entry.piece.end, reverse=True):
            if not entry.pins and not entry.loading and not entry.below:
                gone += self._forget(entry.piece.key)
        return tuple(gone)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _add(self, piece: Piece, size: int, tier: Tier) -> Room:
        account = self._accounts[tier]
        parent = self._entries.get(piece.parent)
        entry = self._entries.get(piece.key)
        if entry is not None and entry.sizes[tier] is not None:
            self._freshen(entry)
            return _ENOUGH
        if parent is None and piece.start and self.blocks:
            account.refused += 1
            return Room(granted=False)
        room = _ENOUGH
        if account.used + size > account.cap:
            with self._guarding(each for each in (parent, entry) if each is not None):
                room = self._make_room(tier, size)
        if not room.granted:
            account.refused += 1
            return room
        if entry is None:
            entry = self._entries[piece.key] = _Entry(piece, self._saves(piece))
            if piece.checkpoint:
                self._tails.setdefault(piece.parent, Counter())[piece.end - piece.start] += 1
            if parent is not None:
                parent.below.add(piece.key)
        entry.sizes[tier] = size
        account.used += size
        account.pieces += 1
        self._freshen(entry)
        return room

    @contextmanager
    def _guarding(self, entries: Iterable[_Entry]) -> Iterator[None]:
        guarded = list(entries)
        for entry in guarded:
            entry.pins += 1
        yield
        for entry in guarded:
            entry.pins -= 1
            self._offer(entry)

    def _saves(self, piece: Piece) -> int:
        """How many tokens before its end would be computed without it: a block's own, or those since the last
        checkpoint.
        """
        if not (piece.checkpoint and self.checkpoints):
            return piece.end - piece.start
        start, parent, limit = piece.start, piece.parent, piece.end - piece.start
        while True:
            before = [tail for tail, count in self._tails.get(parent, Counter()).items() if count and tail < limit]
            if before:
                return piece.end - start - max(before)
            entry = self._entries.get(parent)
            if entry is None:
                return piece.end
            start, parent, limit = entry.piece.start, entry.piece.parent, self.block + 1

    def _make_room(self, tier: Tier, size: int) -> Room:
        account = self._accounts[tier]
        gone: list[Key] = []
        while account.used + size > account.cap:
            entry = self._lowest(tier) if size <= account.cap else None
            if entry is None:
                return Room(False, tuple(gone))
            account.clock = max(account.clock, entry.ranks[tier][0])
            account.evictions += 1
            gone.append(entry.piece.key)
            self._remove(entry, tier)
        return Room(True, tuple(gone))

    def _lowest(self, tier: Tier) -> _Entry | None:
        heap = self._accounts[tier].heap
        while heap:
            rank, key = heappop(heap)
            entry = self._entries.get(key)
            if entry is not None and entry.ranks[tier] == rank and self._may_go(entry, tier):
                return entry
        return None

    def _may_go(self, entry: _Entry, tier: Tier) -> bool:
        """Whether it can leave a tier with nothing in use, and nothing left hanging in the air."""
        if entry.sizes[tier] is None or entry.pins or entry.loading:
            return False
        if entry.sizes[1 - tier] is None:
            return not entry.below
        return all(self._entries[key].sizes[tier] is None for key in entry.below)

    def _freshen(self, entry: _Entry) -> None:
        self._uses += 1
        for tier in TIERS:
            if (size := entry.sizes[tier]) is not None:
                entry.ranks[tier] = (self._accounts[tier].clock + entry.saves / max(size, 1), self._uses)
        self._offer(entry)

    def _offer(self, entry: _Entry) -> None:
        """Whatever may go is in the heap, under its present rank."""
        for tier in TIERS:
            if self._may_go(entry, tier):
                account = self._accounts[tier]
                heappush(account.heap, (entry.ranks[tier], entry.piece.key))
                if len(account.heap) > _SLACK + 2 * account.pieces:
                    account.heap = [item for item in set(account.heap) if self._is_true(item, tier)]
                    heapify(account.heap)

    def _is_true(self, item: tuple[tuple[float, int], Key], tier: Tier) -> bool:
        entry = self._entries.get(item[1])
        return entry is not None and entry.ranks[tier] == item[0]

    def _remove(self, entry: _Entry, tier: Tier) -> None:
        """Out of one tier; forgotten if it is in no other."""
        size = entry.sizes[tier]
        if size is None:
            return
        entry.sizes[tier] = None
        account = self._accounts[tier]
        account.used -= size
        account.pieces -= 1
        if entry.sizes[1 - tier] is None and not entry.below:
            self._forget(entry.piece.key)
        else:
            self._offer(entry)
            self._offer_parent(entry)

    def _forget(self, key: Key) -> list[Key]:
        """Out of the tree, with all that hangs under it."""
        forgotten: list[Key] = []
        top = self._entries.get(key)
        waiting = [key]
        while waiting:
            entry = self._entries.pop(waiting.pop(), None)
            if entry is None:
                continue
            forgotten.append(entry.piece.key)
            waiting += entry.below
            for tier in TIERS:
                if (size := entry.sizes[tier]) is not None:
                    self._accounts[tier].used -= size
                    self._accounts[tier].pieces -= 1
            if entry.piece.checkpoint:
                tails = self._tails[entry.piece.parent]
                tails[entry.piece.end - entry.piece.start] -= 1
                if not +tails:
                    del self._tails[entry.piece.parent]
        if top is not None:
            self._offer_parent(top)
        return forgotten

    def _offer_parent(self, entry: _Entry) -> None:
        parent = self._entries.get(entry.piece.parent)
        if parent is not None:
            if entry.piece.key not in self._entries:
                parent.below.discard(entry.piece.key)
            self._offer(parent)
