"""The bytes of a single token, as logprobs show them: exact also for half a character.

Owns how a tokenizer spells bytes (byte-level BPE; SentencePiece's word marks with byte fallback). Knows nothing of
running text: that is the detokenizers'.
"""

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_WORD_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in SentencePiece's vocabularies."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_MARKING = frozenset({"ByteFallback", "Metaspace"})


class TokenBytes:
    """The bytes of each token of a tokenizer; for any thread. Frozen after its making, but for what it remembers."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._added = {token: str(added.content) for token, added in tokenizer.get_added_tokens_decoder().items()}
        kinds = set(_kinds(tokenizer))
        self._byte_level = "ByteLevel" in kinds
        self._word_marks = bool(kinds & _WORD_MARKING)
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """A token outside the vocabulary has no bytes; a special one has those of its name."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if self._byte_level:
            return b"".join(_BYTE_OF.get(character) or character.encode() for character in written)
        if self._word_marks:
            byte = _BYTE_TOKEN.fullmatch(written)
            return bytes.fromhex(byte[1]) if byte else written.replace(_WORD_MARK, " ").encode()
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()


def _kinds(tokenizer: "tokenizers.Tokenizer") -> Iterator[str]:
    """The types of all of a tokenizer's decoders."""
    if tokenizer.decoder is None:
        return
    open_ones: list[dict[str, Any]] = [json.loads(tokenizer.decoder.__getstate__())]
    while open_ones:
        decoder = open_ones.pop()
        yield decoder["type"]
        if decoder["type"] == "Replace" and decoder["pattern"].get("String") == _WORD_MARK:
            yield "Metaspace"
        open_ones += decoder.get("decoders", [])


def _byte_alphabet() -> dict[str, bytes]:
    """Byte-level BPE (GPT-2) writes each byte as one printable character: itself if it is one, else from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(rest)}
    return {character: bytes((byte,)) for character, byte in spelled.items()}


_BYTE_OF = _byte_alphabet()
