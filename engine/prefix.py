"""The prefix cache's bytes: blocks in RAM, and their way to the SSD and back. The scheduler decides what is taken and
kept; this does it.

Belongs to the engine thread. The SSD's own threads only ever see bytes, and answer by the mailbox.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from backends.base import Accompanied, Block, Blocks
from backends.spill import Spill, SpillStats
from backends.spill_format import Content
from engine.messages import Fetched, Message, Spilled
from scheduler.draft import DraftAsk
from scheduler.pieces import BLOCK_TOKENS, Chain, Key, Piece, root_of
from scheduler.prefix import PrefixIndex, Room, Tier, TierStats
from scheduler.request import Request
from scheduler.reuse import Reuse
from scheduler.round import Restore, Store

_TAKEN = 16
"""Pieces that are copied out of a lane at once, before it is known whether there is room for them."""
_COPIED_BYTES = 64 << 20
"""What a draft model's lane is given at once, at most."""


class PrefixStats(msgspec.Struct, frozen=True):
    """One consistent snapshot."""

    ram: TierStats
    ssd: TierStats
    spill: SpillStats | None
    """None without an SSD tier."""
    restored_tokens: int = 0
    """Tokens that were copied to lanes."""


class PrefixCache:
    """A `scheduler.reuse.Shelf`. Written by `Executor` and by `Loop`, for the messages that are its."""

    def __init__(
        self,
        blocks: Blocks,
        ram_bytes: int,
        spill: Spill | None,
        ssd_bytes: int,
        send: Callable[[Message], None],
        *,
        block: int = BLOCK_TOKENS,
    ) -> None:
        """`send` leaves a message for the engine thread, from any thread; `block` in tokens."""
        self.index = PrefixIndex(
            ram_bytes, ssd_bytes if spill else 0, block=block, checkpoints=blocks.checkpoints, blocks=blocks.blocks
        )
        self.reuse = Reuse(self.index, self, blocks.namespace)
        self._blocks = blocks
        self._held: dict[Key, Block] = {}
        self._spill = spill
        self._send = send
        self._unspilled: dict[Key, None] = {}
        """In RAM and not yet on the SSD, oldest first."""
        self._reading: dict[Key, Blocks] = {}
        """What is being read, and whose it is."""
        self._companions: list[DraftCompanion] = []
        self._restored_tokens = 0
        self.ram_bytes = ram_bytes
        """What blocks may take in memory where there is plenty."""
        if spill is not None:
            spill.remove([each.piece.key for each in spill.found if not self.index.found(each.piece, each.size)])
            spill.remove(self.index.trim())

    def stats(self) -> PrefixStats:
        """The accounts as they stand."""
        spill = self._spill.stats if self._spill is not None else None
        return PrefixStats(self.index.stats(Tier.RAM), self.index.stats(Tier.SSD), spill, self._restored_tokens)

    # ---- to lanes ---------------------------------------------------------------------------------------------------

    def restore(self, restores: Sequence[Restore]) -> int:
        """Copy pieces into lanes; how many bytes they were."""
        size = 0
        for restore in restores:
            held = [(piece, self._held[piece.key]) for piece in restore.pieces]
            self._blocks.put(restore.slot, restore.reach, held)
            size += sum(block.nbytes for _, block in held)
            self._restored_tokens += restore.pieces[-1].end - restore.pieces[0].start
            if self._spill is not None:
                self._spill.touch([piece.key for piece in restore.pieces])
        return size

    def forget(self, keys: Iterable[Key]) -> None:
        """Pieces are no good, wherever they lie, nor is what hangs under them."""
        for key in keys:
            self._forget(self.index.forget(key))

    # ---- from lanes -------------------------------------------------------------------------------------------------

    def store(self, stores: Iterable[Store]) -> None:
        """Copy what can be kept out of lanes, as far as there is room."""
        by_slot: dict[int, list[Piece]] = {}
        for store in stores:
            by_slot.setdefault(store.slot, []).append(store.piece)
        for slot, pieces in by_slot.items():
            self._store_of(slot, [piece for piece in pieces if not self.index.holds(piece.key, Tier.RAM)])
        if by_slot:
            self.write_behind()

    def _store_of(self, slot: int, wanted: Sequence[Piece]) -> None:
        """A few at a time: where there is no room for some, there is none for what hangs under them."""
        for first in range(0, len(wanted), _TAKEN):
            some = wanted[first : first + _TAKEN]
            taken = zip(some, self._blocks.take(slot, some), strict=True)
            if not all(self.keep(piece, block) for piece, block in taken if block is not None):
                return

    def keep(self, piece: Piece, block: Block) -> bool:
        """Hold a block; False if there is no room."""
        room = self.index.insert(piece, block.nbytes)
        self._drop(room)
        if room.granted:
            self._held[piece.key] = block
            if self._spill is not None and not self.index.holds(piece.key, Tier.SSD):
                self._unspilled[piece.key] = None
        return room.granted

    def _drop(self, room: Room) -> None:
        for key in room.gone:
            self._held.pop(key, None)
            self._unspilled.pop(key, None)

    def limit(self, most: int) -> None:
        """What the blocks in RAM may take from now on; what is too much goes, all but what is in use."""
        gone, forgotten = self.index.limit(most)
        self._drop(Room(True, gone))
        self._forget(forgotten)

    # ---- to the SSD and back ----------------------------------------------------------------------------------------

    def write_behind(self) -> int:
        """Hand over to the writer what it takes, in the order in which it came; how many pieces it did not take."""
        if self._spill is None or not self._spill.stats.writable:
            return 0
        for key in list(self._unspilled):
            piece, block = self.index.piece(key), self._held[key]
            room = self.index.reserve(key, self._spill.size(piece, block.meta, block.nbytes))
            self._spill.remove(room.gone)
            if room.granted and not self._spill.write(piece, block.meta, block.parts(), self._on_written(key)):
                self.index.unwritten(key)
                break
            del self._unspilled[key]
        return len(self._unspilled)

    def _on_written(self, key: Key) -> Callable[[bool], None]:
        return lambda written: self._send(Spilled(key, written))

    def receive(self, message: Fetched | Spilled) -> None:
        """One of the SSD's threads is done with a piece."""
        if isinstance(message, Fetched):
            self._fetched(message)
        else:
            self._spilled(message)

    def _spilled(self, message: Spilled) -> None:
        if message.written:
            self.index.written(message.key)
        else:
            self.index.unwritten(message.key)
            if message.key in self._held and self._spill is not None and not self._spill.stats.writable:
                self._unspilled[message.key] = None  # once there is room on the disk again
        self.write_behind()

    def fetch(self, key: Key, blocks: Blocks | None = None) -> bool:
        """Begin to read a piece into RAM, of the target's lanes or of whose `blocks` these are; False if there is no
        room for it.
        """
        if self._spill is None or not self.index.holds(key, Tier.SSD):
            return False
        room = self.index.load(key)
        self._drop(room)
        if room.granted:
            self._reading[key] = blocks or self._blocks
            self._spill.read(key, lambda content: self._send(Fetched(key, content)))
        return room.granted

    def _fetched(self, message: Fetched) -> None:
        """A piece was read: it is a block in RAM now, or it is forgotten with all that hangs under it."""
        block = self._parsed(message.key, message.content)
        if block is None:
            self.damaged((message.key,))
        elif self.index.loaded(message.key, block.nbytes):
            self._held[message.key] = block

    def expect(self, request: Request) -> None:
        """A request waits: its draft model's pieces are read ahead too."""
        for companion in self._companions:
            companion.expect(request)

    def _parsed(self, key: Key, content: Content | None) -> Block | None:
        blocks = self._reading.pop(key, self._blocks)
        if content is None or key not in self.index or content.piece != self.index.piece(key):
            return None
        try:
            return blocks.parse(content.piece, content.meta, content.data)
        except ValueError:
            return None

    def damaged(self, keys: Iterable[Key]) -> None:
        """These files are no good. What lies in RAM too is."""
        for key in keys:
            self._forget(self.index.lost(key))
            if self._spill is not None:
                self._spill.remove((key,))

    def _forget(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._held.pop(key, None)
            self._unspilled.pop(key, None)
        if self._spill is not None:
            self._spill.remove(keys)

    # ---- draft models -----------------------------------------------------------------------------------------------

    def accompany(self, drafter: Accompanied) -> None:
        """Let a draft model's lanes share the cache, under a namespace of their own. One whose lanes cannot be cut
        computes for itself.
        """
        if drafter.blocks is not None and not drafter.blocks.checkpoints:
            companion = DraftCompanion(self, drafter.blocks)
            drafter.companion = companion
            self._companions.append(companion)

    def held(self, key: Key) -> Block | None:
        """A piece in RAM."""
        return self._held.get(key) if self.index.holds(key, Tier.RAM) else None

    # ---- as a whole -------------------------------------------------------------------------------------------------

    def clear(self) -> int:
        """Forget everything that is not in use, in both tiers; how many pieces."""
        gone = self.index.clear()
        self._forget(gone)
        return len(gone)

    @property
    def spill(self) -> Spill | None:
        """The SSD tier; None without one."""
        return self._spill

    def close(self, seconds: float) -> None:
        """Write what is not written yet, for so long at most."""
        if self._spill is None:
            return
        deadline = time.monotonic() + seconds
        while self.write_behind() and time.monotonic() < deadline:
            self._spill.flush(deadline - time.monotonic())
        self._spill.close(max(0.0, deadline - time.monotonic()))


class DraftCompanion:
    """Implements `backends.base.Companion`: the pieces of one draft model's lanes, in the same cache, under roots of
    their own. What is not there the draft model computes; nothing ever waits for it.
    """

    def __init__(self, cache: PrefixCache, blocks: Blocks) -> None:
        self._cache = cache
        self._blocks = blocks
        self._texts: dict[str, Chain] = {}
        """By request, as far as they were looked at."""

    def expect(self, request: Request) -> None:
        """Read ahead what is on the SSD."""
        root = root_of(self._blocks.namespace, request.owner, request.cache_salt)
        self._fetch(self._cache.index.match(root, request.prompt).pieces)

    def restore(self, slot: int, ask: DraftAsk, held: int) -> int:
        """Whole blocks from the one on in which the slot's text ends."""
        pieces = self._cache.index.match(self._root(ask), ask.tokens[:-1]).pieces
        self._cache.index.use(piece.key for piece in pieces)
        found: list[tuple[Piece, Block]] = []
        size = 0
        for piece in pieces:
            block = self._cache.held(piece.key)
            if block is None or size > _COPIED_BYTES:
                break
            if piece.end > held:
                found.append((piece, block))
                size += block.nbytes
        if not found:
            self._fetch(pieces)
            return held
        self._blocks.put(slot, len(ask.tokens) + ask.budget, found)
        return found[-1][0].end

    def store(self, slot: int, ask: DraftAsk, held: int) -> None:
        """Copy out each block when it is whole."""
        text = self._texts.setdefault(ask.request_id, Chain(self._root(ask), self._cache.index.block))
        whole = text.grow(ask.tokens, held)
        wanted = [piece for piece in whole if not self._cache.index.holds(piece.key, Tier.RAM)]
        if wanted:
            for piece, taken in zip(wanted, self._blocks.take(slot, wanted), strict=True):
                if taken is not None:
                    self._cache.keep(piece, taken)

    def forget(self, request_id: str) -> None:
        """The lane left. Idempotent."""
        self._texts.pop(request_id, None)

    def _root(self, ask: DraftAsk) -> Key:
        return root_of(self._blocks.namespace, ask.owner, ask.cache_salt)

    def _fetch(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            index = self._cache.index
            ready = index.holds(piece.key, Tier.RAM) or index.loading(piece.key)
            if not ready and not self._cache.fetch(piece.key, self._blocks):
                return
