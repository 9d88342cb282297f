"""Grammars over bytes without a vetting process, and walks through them."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from backends.fake import EOS, FakeBackend
from backends.grammar.matcher import XGrammarMatcher
from backends.grammar.spec import SpecKind
from backends.grammar.translate import translate
from backends.grammar.vocabulary import Vocabulary, load_vocabulary
from backends.grammar.xgrammar_core import CoreCompiler, CoreGrammar

WORDS = 9
"""Of a mask row over 257 tokens."""


@cache
def byte_vocabulary() -> Vocabulary:
    return load_vocabulary(FakeBackend().info)


@cache
def byte_compiler() -> CoreCompiler:
    vocabulary = byte_vocabulary()
    return CoreCompiler(vocabulary.tokens, vocabulary.stop_tokens)


def grammar_of(kind: SpecKind, text: str) -> CoreGrammar:
    translated = translate(kind, text)
    compiler = byte_compiler()
    return compiler.structural_tag(translated.text) if translated.tag else compiler.grammar(translated.text)


def matcher_of(grammar: CoreGrammar) -> XGrammarMatcher:
    return XGrammarMatcher(grammar, byte_vocabulary())


def allowed(matcher: XGrammarMatcher, words: int = WORDS, vocabulary: int = 257) -> list[int]:
    """The tokens of the mask, ascending."""
    row = np.full(words, -1, dtype=np.int32)
    matcher.fill(row)
    return [int(token) for token in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:vocabulary])]


def accepts(grammar: CoreGrammar, text: str | bytes) -> bool:
    """Whether a whole text is in the language: byte by byte, then the end."""
    matcher = matcher_of(grammar)
    data = text.encode() if isinstance(text, str) else text
    return all(matcher.accept(byte) for byte in data) and matcher.accept(EOS)


def walk(matcher: XGrammarMatcher, choices: Sequence[int], closing: bytes = b'"}]', liked: bytes = b"") -> bytes | None:
    """A text that follows masks: each choice picks a token, one of the `liked` if there is any; behind the last choice,
    whatever closes is preferred. None if the text does not come to its end.
    """
    text = bytearray()
    for step in range(len(choices) + 400):
        tokens = allowed(matcher)
        if step < len(choices):
            candidates = [token for token in tokens if token in set(liked)] or tokens
            token = candidates[choices[step] % len(candidates)]
        else:
            wanted = [EOS, *closing, *b'0el:,tfn"']
            token = next((token for token in wanted if token in tokens), tokens[0])
        assert matcher.accept(token)
        if token == EOS:
            return bytes(text)
        text.append(token)
    return None
