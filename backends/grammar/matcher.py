"""A lane's place in a grammar that xgrammar compiled.

Owns the promises of `backends.grammar.base.Matcher` that xgrammar's matcher does not keep by itself: a refused token is
quiet, a fill behind the end allows the stop tokens, and whether the text can only end is known.
"""

import codecs
import math

import numpy as np

from backends.base import MaskWords
from backends.grammar.vocabulary import Vocabulary
from backends.grammar.xgrammar_core import CoreGrammar

_FORCED_CHARACTERS = 32
"""Of a forced text are split, per token that is asked for: a text of any length must not cost a round its time."""


_FEW = 64
"""Where more tokens are allowed than this, there is a choice."""


class XGrammarMatcher:
    """Implements `Matcher`."""

    def __init__(self, grammar: CoreGrammar, vocabulary: Vocabulary) -> None:
        self._core = grammar.matcher()
        self._vocabulary = vocabulary
        self._only_ends: list[bool | None] = [None]
        """After each accepted token, whether only a stop token may come next; None where nobody has asked."""

    def accept(self, token: int) -> bool:
        """Refuses quietly: special tokens, tokens that do not exist, and anything behind the end."""
        if not self._has_text(token) or self._core.is_terminated() or not self._core.accept_token(token, False):
            return False
        self._only_ends.append(None)
        return True

    def _has_text(self, token: int) -> bool:
        tokens = self._vocabulary.tokens
        return 0 <= token < len(tokens) and (bool(tokens[token]) or token in self._vocabulary.stop_tokens)

    def rollback(self, count: int) -> None:
        """As far back as the beginning."""
        if count:
            self._core.rollback(count)
            del self._only_ends[-count:]

    def fill(self, words: MaskWords) -> None:
        """Behind the end, the stop tokens."""
        if self._core.is_terminated():
            words[:] = self._stop_words()
        else:
            self._core.fill_next_token_bitmask(words, 0, False)

    @property
    def finished(self) -> bool:
        """Costs a fill only where the text may end, and one per position."""
        known = self._only_ends[-1]
        if known is None:
            known = self._core.is_terminated() or (self._core.is_completed() and self._allows_only_stops())
            self._only_ends[-1] = known
        return known

    def _allows_only_stops(self) -> bool:
        words = np.zeros(self._word_count(), dtype=np.int32)
        self._core.fill_next_token_bitmask(words, 0, False)
        return not (words & ~self._stop_words()).any()

    def _word_count(self) -> int:
        return math.ceil(len(self._vocabulary.tokens) / 32)

    def _stop_words(self) -> MaskWords:
        words = np.zeros(self._word_count(), dtype=np.uint32)
        for token in self._vocabulary.stop_tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words.view(np.int32)

    def forced(self, limit: int) -> tuple[int, ...]:
        """The text is followed token by token for as long as all tokens that are allowed begin alike, so its cost is
        bounded by `limit` masks (xgrammar's own search for it is not), and then split by the model's tokenizer.
        """
        text = self._forced_text(limit) if not self._core.is_terminated() else b""
        try:
            whole = codecs.getincrementaldecoder("utf-8")().decode(text)  # half a character at its end is left out
        except UnicodeDecodeError:
            return ()  # it begins in the middle of one
        return self._vocabulary.split(whole)[:limit] if whole else ()

    def _forced_text(self, limit: int) -> bytes:
        words = np.zeros(self._word_count(), dtype=np.int32)
        text = b""
        walked = 0
        while walked < limit:
            self._core.fill_next_token_bitmask(words, 0, False)
            token = self._only_way(words)
            if token is None or not self._core.accept_token(token, False):
                break
            text += self._vocabulary.tokens[token]
            walked += 1
        if walked:
            self._core.rollback(walked)
        return text

    def _only_way(self, words: MaskWords) -> int | None:
        """The longest of the allowed tokens with which all others agree: they begin it, or it begins them."""
        if np.bitwise_count(words.view(np.uint32)).sum() > _FEW:
            return None
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        pieces = sorted(
            ((self._vocabulary.tokens[token], token) for token in allowed), key=lambda piece: -len(piece[0])
        )
        if not pieces or not pieces[-1][0]:
            return None  # nothing, or a stop token
        for longest, token in pieces:
            if all(longest.startswith(other) or other.startswith(longest) for other, _ in pieces):
                return token
        return None
