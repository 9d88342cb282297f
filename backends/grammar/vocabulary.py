"""What the tokens of a model stand for, as bytes, and how its own tokenizer splits a text that goes on.

Owns the reading of a tokenizer's decoder: byte-level BPE, SentencePiece's way (a mark for the space, byte fallback),
and plain text. Must not know grammars.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from backends.base import ModelInfo

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE_MARK = "\u2581"
"""SentencePiece's sign for a space."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR = "\n"
"""Stands before a text that goes on, where a tokenizer adds a space to whatever begins one."""


class Vocabulary:
    """A model's tokens as bytes. Immutable; for any thread."""

    def __init__(self, tokens: Sequence[bytes], stop_tokens: frozenset[int], codec: "Tokenizer | None") -> None:
        """`codec` splits texts; None splits them into bytes."""
        self.tokens = tuple(tokens)
        """By token, one for each of the model's logits; empty for special tokens and for rows without a token."""
        self.stop_tokens = tuple(sorted(token for token in stop_tokens if token < len(tokens)))
        self._codec = codec
        self._anchor: tuple[int, ...] = (
            () if codec is None else tuple(codec.encode(_ANCHOR, add_special_tokens=False).ids)
        )
        self.fingerprint = self._fingerprint()
        """Equal for vocabularies whose masks are equal."""

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.stop_tokens).encode())
        for token in self.tokens:
            digest.update(len(token).to_bytes(4, "little"))
            digest.update(token)
        return digest.hexdigest()

    def split(self, text: str) -> tuple[int, ...]:
        """The tokens of a text that goes on from another, as the model's tokenizer has them; empty if it cannot split
        the text without changing it.
        """
        expected = text.encode()
        if self._codec is None:
            return tuple(expected)
        tokens = tuple(self._codec.encode(text, add_special_tokens=False).ids)
        if self.join(tokens) == expected:
            return tokens
        tokens = tuple(self._codec.encode(_ANCHOR + text, add_special_tokens=False).ids)
        behind = tokens[len(self._anchor) :]
        return behind if tokens[: len(self._anchor)] == self._anchor and self.join(behind) == expected else ()

    def join(self, tokens: Sequence[int]) -> bytes:
        """The bytes that tokens stand for, special ones and stop tokens left out."""
        return b"".join(self.tokens[token] for token in tokens if token < len(self.tokens))


def load_vocabulary(info: ModelInfo) -> Vocabulary:
    """The vocabulary of a loaded model; slow for a large one. Raises ValueError for a tokenizer that is not
    understood.
    """
    if info.folder is None:
        tokens = [bytes([token]) for token in range(256)]
        return Vocabulary(_padded(dict(enumerate(tokens)), info), info.eos_tokens, None)
    from tokenizers import Tokenizer

    file = Path(info.folder) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"the model in {info.folder} has no tokenizer.json, so its output cannot be constrained")
    codec = Tokenizer.from_file(str(file))
    codec.no_truncation()
    codec.no_padding()
    decoder = msgspec.json.decode(file.read_bytes()).get("decoder")
    read = _token_reader(set(_decoder_types(decoder)), decoder)
    added = codec.get_added_tokens_decoder()
    tokens_by_id = {token: read(text) for text, token in codec.get_vocab(with_added_tokens=False).items()}
    tokens_by_id.update({token: b"" if entry.special else entry.content.encode() for token, entry in added.items()})
    return Vocabulary(_padded(tokens_by_id, info), info.eos_tokens, codec)


def _padded(tokens: dict[int, bytes], info: ModelInfo) -> list[bytes]:
    """One entry per logit; end-of-sequence tokens have no text."""
    return [b"" if token in info.eos_tokens else tokens.get(token, b"") for token in range(info.vocab_size)]


def _decoder_types(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders", ()):
            yield from _decoder_types(part)


def _token_reader(types: set[str], decoder: Any) -> "Any":
    """From the text of a vocabulary entry to its bytes."""
    if "ByteLevel" in types:
        table = _byte_level_table()

        def byte_level(text: str) -> bytes:
            found = [table.get(character) for character in text]
            return text.encode() if None in found else bytes(byte for byte in found if byte is not None)

        return byte_level
    unknown = types - {"Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if unknown:
        raise ValueError(f"a tokenizer with the decoder {min(unknown)} cannot be constrained")
    marked = "Metaspace" in types or ("Replace" in types and _SPACE_MARK in repr(decoder))
    fallback = "ByteFallback" in types

    def plain(text: str) -> bytes:
        piece = _BYTE_PIECE.fullmatch(text) if fallback else None
        if piece is not None:
            return bytes([int(piece[1], 16)])
        return (text.replace(_SPACE_MARK, " ") if marked else text).encode()

    return plain


def _byte_level_table() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 stands for itself, the others are numbered from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table
