"""From a client's constraint to a grammar: the door of this room.

A constraint is looked at here for its size and depth, vetted in a process that may be killed, compiled in this one, and
kept. Owns the cache and the vetting processes. Must not know HTTP or lanes.
"""

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from backends.base import ModelInfo
from backends.grammar.base import Grammar, GrammarError, GrammarUnavailableError, Matcher
from backends.grammar.cache import CacheStats, GrammarCache
from backends.grammar.deferred import DeferredGrammar
from backends.grammar.document import read_json
from backends.grammar.limits import Limits
from backends.grammar.matcher import XGrammarMatcher
from backends.grammar.spec import ConstraintSpec, SpecKind
from backends.grammar.vetting import Vetting
from backends.grammar.vocabulary import Vocabulary, load_vocabulary
from backends.grammar.xgrammar_core import CoreCompiler, CoreGrammar

_JSON_KINDS = frozenset({SpecKind.JSON_SCHEMA, SpecKind.CHOICE, SpecKind.STRUCTURAL_TAG})
_STRING_OR_BLANK = re.compile(r'("(?:[^"\\]|\\.)*")|\s+', re.DOTALL)
_STRING_OR_OTHER = re.compile(r'"(?:[^"\\]|\\.)*"|[^\[\]{}"]+', re.DOTALL)
_Key = tuple[str, ...]
_T = TypeVar("_T")


class CompilerStats(msgspec.Struct, frozen=True):
    """What became of the constraints so far."""

    cache: CacheStats
    refused: int
    """Constraints that were found to be at fault."""
    killed: int
    """Vetting processes that were lost, or killed at a limit."""


class CompiledGrammar:
    """Implements `Grammar`. For any thread."""

    def __init__(
        self, kind: SpecKind, key: _Key, grammar: CoreGrammar, vocabulary: Vocabulary, cache: GrammarCache
    ) -> None:
        self._kind = kind
        self._key = key
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._cache = cache

    @property
    def memory_bytes(self) -> int:
        """What it holds now, masks included."""
        return self._grammar.memory_bytes

    @property
    def summary(self) -> str:
        """Never its text."""
        return f"{self._kind} of {len(self._key[1])} characters"

    def matcher(self) -> Matcher:
        """A new matcher at the beginning of the text."""
        self._cache.grown(self._key)
        return XGrammarMatcher(self._grammar, self._vocabulary)


class _Engine(msgspec.Struct, frozen=True):
    """What a vocabulary is needed for; made once, when the first constraint comes."""

    vocabulary: Vocabulary
    compiler: CoreCompiler
    vetting: Vetting


class GrammarCompiler:
    """Compiles the constraints of one model's clients. For any thread but an event loop's: `compile` blocks."""

    def __init__(self, info: ModelInfo, limits: Limits | None = None) -> None:
        """Does no work yet."""
        self._info = info
        self._limits = limits or Limits()
        self._cache = GrammarCache(self._limits.cache_bytes)
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._engine: _Engine | None = None
        self._under_way: dict[_Key, Future[CompiledGrammar]] = {}
        self._refused = 0
        self._closed = False

    def cached(self, spec: ConstraintSpec) -> Grammar | None:
        """The grammar of a constraint, if it is kept. Waits for nobody, but reads the text; raises GrammarError for one
        that can be refused by that alone.
        """
        engine = self._engine
        if engine is None:
            return None
        kept = self._cache.get(_key(engine, spec.kind, self._counted(lambda: self._checked(spec))), again=True)
        return _deferred(kept, spec) if isinstance(kept, CompiledGrammar) else None

    def compile(self, spec: ConstraintSpec, deadline: float | None = None) -> Grammar:
        """A grammar that enforces a constraint exactly. Raises GrammarError, whose message is for the client, and
        GrammarUnavailableError where the constraint is not to blame: it may be sent again.

        `deadline` (`time.monotonic`) is when to give up, by default the limit from now on.
        """
        until = time.monotonic() + self._limits.seconds if deadline is None else deadline
        return _deferred(self._counted(lambda: self._compiled(spec.kind, self._checked(spec), until)), spec)

    def _counted(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except GrammarUnavailableError:
            raise
        except GrammarError:
            with self._lock:
                self._refused += 1
            raise

    @property
    def stats(self) -> CompilerStats:
        """Counters."""
        engine = self._engine
        return CompilerStats(self._cache.stats(), self._refused, 0 if engine is None else engine.vetting.killed)

    def close(self) -> None:
        """End the vetting processes. Grammars that were compiled stay usable. Idempotent."""
        with self._starting:
            self._closed = True
            engine = self._engine
        if engine is not None:
            engine.vetting.close()

    def _checked(self, spec: ConstraintSpec) -> str:
        """The text in the form that equal constraints share. What it costs is bounded by the size of the text."""
        if spec.kind == SpecKind.JSON_OBJECT:
            return ""
        # Characters first: each takes a byte at least, and a text of any length is counted without being encoded.
        if len(spec.text) > self._limits.text_bytes or len(_encoded(spec.text)) > self._limits.text_bytes:
            raise GrammarError(f"it is larger than {self._limits.text_bytes} bytes")
        if not spec.text.strip():
            raise GrammarError("it is empty")
        if spec.kind not in _JSON_KINDS:
            return spec.text
        if _depth(spec.text) > self._limits.depth:
            raise GrammarError(f"it is nested more than {self._limits.depth} levels deep")
        read_json(spec.text)
        return _STRING_OR_BLANK.sub(lambda found: found[1] or "", spec.text)

    def _compiled(self, kind: SpecKind, text: str, deadline: float) -> CompiledGrammar:
        engine = self._started()
        key = _key(engine, kind, text)
        with self._lock:
            shared = self._under_way.get(key)
            if shared is None:
                kept = self._cache.get(key)
                if isinstance(kept, CompiledGrammar):
                    return kept
                ours: Future[CompiledGrammar] = Future()
                self._under_way[key] = ours
        if shared is not None:
            return shared.result()
        try:
            grammar = self._compile_anew(engine, kind, key, deadline)
        except BaseException as error:
            self._finish(key)
            ours.set_exception(error)
            raise
        self._cache.put(key, grammar)
        self._finish(key)
        ours.set_result(grammar)
        return grammar

    def _finish(self, key: _Key) -> None:
        with self._lock:
            del self._under_way[key]

    def _compile_anew(self, engine: _Engine, kind: SpecKind, key: _Key, deadline: float) -> CompiledGrammar:
        translated = engine.vetting.vet(kind, key[1], deadline)
        compiler = engine.compiler
        grammar = compiler.structural_tag(translated.text) if translated.tag else compiler.grammar(translated.text)
        return CompiledGrammar(kind, key, grammar, engine.vocabulary, self._cache)

    def _started(self) -> _Engine:
        with self._starting:
            if self._closed:
                raise GrammarUnavailableError("the server is stopping")
            if self._engine is None:
                try:
                    vocabulary = load_vocabulary(self._info)
                except ValueError as error:
                    raise GrammarError(str(error)) from None
                compiler = CoreCompiler(vocabulary.tokens, vocabulary.stop_tokens)
                self._engine = _Engine(vocabulary, compiler, Vetting(vocabulary, self._limits))
            return self._engine


def _key(engine: _Engine, kind: SpecKind, text: str) -> _Key:
    return (kind.value, text, engine.vocabulary.fingerprint)


def _deferred(grammar: CompiledGrammar, spec: ConstraintSpec) -> Grammar:
    return DeferredGrammar(grammar, spec.after) if spec.after else grammar


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise GrammarError("it holds half a surrogate pair") from None


def _depth(text: str) -> int:
    """How deep the brackets of a JSON text are nested; of a text that is not JSON, as far as that can be said."""
    depth = deepest = 0
    for sign in _STRING_OR_OTHER.sub("", text):
        depth += 1 if sign in "[{" else -1
        deepest = max(deepest, depth)
    return deepest
