"""Text out of tokens as they come: never half a character, and the joined pieces are the text of the whole.

One detokenizer belongs to one lane. Knows nothing of stop strings, HTTP or the engine.
"""

import codecs
from typing import TYPE_CHECKING, Protocol

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    import tokenizers

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What stands for bytes that are no character."""
_HELD_TOKENS = 32
"""With this many tokens and no whole character, what the model writes is no text; it is not held back any longer."""


class Detokenizer(Protocol):
    """Implemented by `StreamDetokenizer` and `ByteDetokenizer`."""

    def push(self, token: int) -> str:
        """The text that is certain now that this token came; often empty."""
        ...

    def close(self) -> str:
        """What was held back, as it is: no further token comes."""
        ...


class ByteDetokenizer:
    """Tokens 0 to 255 are bytes, others have no text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Whole characters only."""
        return self._decoder.decode(bytes((token,))) if token < 256 else ""

    def close(self) -> str:
        """U+FFFD for a character that was only begun."""
        return self._decoder.decode(b"", final=True)


class StreamDetokenizer:
    """Follows tokenizers' `DecodeStream`, and goes on where that one stops.

    `DecodeStream` fails for good ("Invalid prefix encountered") when a token changes text that it already gave out,
    as a stray byte does under byte fallback; and it holds back without bound while the text ends in U+FFFD. Both are
    met by decoding what is held by itself, next to the text before it, and by starting afresh.
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._anchor: list[int] = []
        """Tokens given out before the held ones, which are whole text by themselves."""
        self._held: list[int] = []
        """Tokens whose text was not given out yet."""

    def push(self, token: int) -> str:
        """The text up to the last whole character."""
        self._held.append(token)
        try:
            text: str | None = self._stream.step(self._tokenizer, token)
        except Exception:  # tokenizers raises the base class
            return self._restart(len(self._held))
        if text is not None:
            self._anchor, self._held = self._held, []
            return text
        return "" if len(self._held) < _HELD_TOKENS else self._restart(self._certain())

    def close(self) -> str:
        """U+FFFD for a character that was only begun."""
        held, self._held = self._held, []
        return self._text(held) if held else ""

    def _restart(self, count: int) -> str:
        """Give out the first `count` held tokens, and begin a new stream with the rest."""
        given, self._held = self._held[:count], self._held[count:]
        text = self._text(given)
        alone = self._decode(given)
        if alone and REPLACEMENT not in alone:
            self._anchor = given
        self._stream = DecodeStream(ids=self._anchor, skip_special_tokens=True)
        for token in self._held:
            self._stream.step(self._tokenizer, token)
        return text

    def _certain(self) -> int:
        """How many of the held tokens can be given out without cutting a character in two."""
        whole = self._decode(self._held)
        for cut in range(len(self._held) - 1, 0, -1):
            head, tail = self._decode(self._held[:cut]), self._decode(self._held[cut:])
            if tail and head + tail == whole:
                return cut
        return len(self._held)

    def _text(self, tokens: "Sequence[int]") -> str:
        """Their text behind the anchor: some decoders drop the space before the first word of a sequence."""
        before, both = self._decode(self._anchor), self._decode([*self._anchor, *tokens])
        return both[len(before) :] if both.startswith(before) else self._decode(tokens)

    def _decode(self, tokens: "Sequence[int]") -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)
