"""What the tokens of a model stand for, as bytes, and how its own tokenizer splits a text that goes on.

Must not know grammars.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backends.base import ModelInfo
from backends.spelling import spelling_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
    read = spelling_of(codec)
    added = codec.get_added_tokens_decoder()
    tokens_by_id = {token: read(text) for text, token in codec.get_vocab(with_added_tokens=False).items()}
    tokens_by_id.update({token: b"" if entry.special else entry.content.encode() for token, entry in added.items()})
    return Vocabulary(_padded(tokens_by_id, info), info.eos_tokens, codec)


def _padded(tokens: dict[int, bytes], info: ModelInfo) -> list[bytes]:
    """One entry per logit; end-of-sequence tokens have no text."""
    return [b"" if token in info.eos_tokens else tokens.get(token, b"") for token in range(info.vocab_size)]
