"""How a tokenizer's vocabulary spells bytes: byte-level BPE, SentencePiece's way (a mark for the space, byte fallback),
or plainly.

Owns the reading of a tokenizer's decoder. Knows nothing of running text, and nothing of added tokens: those stand for
themselves.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's sign for a space."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KNOWN = frozenset({"Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})

Spelling = Callable[[str], bytes]
"""From the text of a vocabulary's entry to the bytes that it stands for."""


def spelling_of(tokenizer: "Tokenizer") -> Spelling:
    """Raises ValueError, naming it, for a decoder that is not understood."""
    decoder = None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    types = set(_types(decoder))
    if "ByteLevel" in types:
        return _byte_level
    if unknown := types - _KNOWN:
        raise ValueError(f"tokens that the decoder {min(unknown)} joins cannot be told apart by their bytes")
    marked = "Metaspace" in types or ("Replace" in types and _SPACE_MARK in json.dumps(decoder, ensure_ascii=False))
    fallback = "ByteFallback" in types

    def plain(text: str) -> bytes:
        piece = _BYTE_PIECE.fullmatch(text) if fallback else None
        if piece is not None:
            return bytes.fromhex(piece[1])
        return (text.replace(_SPACE_MARK, " ") if marked else text).encode()

    return plain


def _types(decoder: Any) -> Iterator[str]:
    """Of a decoder and of all that it is made of."""
    if decoder is not None:
        yield str(decoder["type"])
        for part in decoder.get("decoders", ()):
            yield from _types(part)


def _byte_level(text: str) -> bytes:
    """A token with a sign outside of the alphabet was added as it is written."""
    found = [_BYTE_OF.get(sign) for sign in text]
    return text.encode() if None in found else bytes(byte for byte in found if byte is not None)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's signs for bytes: printable Latin-1 stands for itself, the others are numbered from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
