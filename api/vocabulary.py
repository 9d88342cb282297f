"""The bytes of a single token, as logprobs show them: exact also for half a character.

Knows nothing of running text: that is the detokenizers'.
"""

from typing import TYPE_CHECKING

from backends.spelling import Spelling, spelling_of

if TYPE_CHECKING:
    import tokenizers


class TokenBytes:
    """The bytes of each token of a tokenizer; for any thread. Frozen after its making, but for what it remembers."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._added = {token: str(added.content) for token, added in tokenizer.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}
        self._spelling: Spelling | None
        try:
            self._spelling = spelling_of(tokenizer)
        except ValueError:
            self._spelling = None  # its decoder is asked for each token, which may lose half a character

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
        if self._spelling is not None:
            return self._spelling(written)
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()
