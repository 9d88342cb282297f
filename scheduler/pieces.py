"""What a text is cut into, so that what was computed for its beginning can be found again: pieces, by chained hashes.

A text is cut into blocks of so many tokens. A block's key is a hash over its namespace and over every token up to its
end, so that equal prefixes are one block, and a key that is found means that all before it is known too. Where a text
paused, a checkpoint is kept besides, at any length: it hangs under the last whole block before it and holds what blocks
do not, which is the tokens behind that block, and of caches that cannot be cut (rings, states) all that there is.

Pure.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec

BLOCK_TOKENS = 64
"""Tokens of a block."""
_KEY_BYTES = 16

Key = bytes
"""Chained hash of all tokens up to the end of a block or checkpoint; of no tokens at all, a root."""


def root_of(*namespace: str) -> Key:
    """The key under which all texts of a namespace hang: what may share blocks, and nothing else, has equal parts."""
    hashed = blake2b(digest_size=_KEY_BYTES)
    for part in namespace:
        encoded = part.encode()
        hashed.update(len(encoded).to_bytes(8, "little") + encoded)
    return hashed.digest()


def extended(key: Key, tokens: Sequence[int]) -> Key:
    """The key of the block of these tokens behind a block or root."""
    return blake2b(key + array("I", tokens).tobytes(), digest_size=_KEY_BYTES).digest()


def checkpoint_key(parent: Key, tail: Sequence[int]) -> Key:
    """The key of a checkpoint `tail` behind a block; never that of a block."""
    return blake2b(parent + array("I", tail).tobytes(), digest_size=_KEY_BYTES, person=b"checkpoint").digest()


def chain(root: Key, tokens: Sequence[int], block: int) -> Iterator[Key]:
    """The keys of all whole blocks of a text."""
    packed = memoryview(array("I", tokens).tobytes())
    width = block * array("I").itemsize
    key = root
    for end in range(width, len(packed) + 1, width):
        key = blake2b(key + packed[end - width : end], digest_size=_KEY_BYTES).digest()
        yield key


class Piece(msgspec.Struct, frozen=True):
    """What is kept of a text under one key."""

    key: Key
    parent: Key
    """The block before it; a root, if there is none."""
    start: int
    """How much of the text lies before it."""
    end: int
    """How much of the text is known with it."""
    checkpoint: bool = False


class Chain:
    """A text that grows, cut into pieces. Written by whoever follows the text."""

    def __init__(self, root: Key, block: int) -> None:
        """`block` in tokens."""
        self.root = root
        self.keys: list[Key] = []
        """Of its whole blocks so far."""
        self._block = block

    @property
    def end(self) -> int:
        """How much of the text is in whole blocks."""
        return len(self.keys) * self._block

    @property
    def _last(self) -> Key:
        return self.keys[-1] if self.keys else self.root

    def grow(self, tokens: Sequence[int], length: int) -> list[Piece]:
        """The blocks that are whole now that `length` tokens of the text are there, and were not before."""
        blocks: list[Piece] = []
        while self.end + self._block <= length:
            start, parent = self.end, self._last
            self.keys.append(extended(parent, tokens[start : start + self._block]))
            blocks.append(Piece(self.keys[-1], parent, start, self.end))
        return blocks

    def checkpoint(self, tokens: Sequence[int], length: int) -> Piece:
        """At `length`, which lies behind all whole blocks."""
        key = checkpoint_key(self._last, tokens[self.end : length])
        return Piece(key, self._last, self.end, length, checkpoint=True)
