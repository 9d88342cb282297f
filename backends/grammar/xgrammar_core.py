"""xgrammar without torch: the one file that touches it.

Its package imports torch at once, for three helper modules that a server has no use for; the compiled core needs
apache-tvm-ffi and numpy alone. So an empty package of the same name, with the right path, stands in while the core's
two modules are imported, which takes a fraction of the time and of the memory. Where a release has moved them, and
torch is there, the plain import serves. xgrammar is pinned exactly; a test of ours notices when that changes.
"""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, Protocol, cast

from backends.base import MaskWords

_RAW = 0
"""xgrammar's vocabulary type for tokens that are given as the bytes they stand for."""
_importing = threading.Lock()


class CoreMatcher(Protocol):
    """What we use of xgrammar's matcher. Every call releases the GIL."""

    def accept_token(self, token: int, debug: bool, /) -> bool:
        """Go on by a token; False, and nothing moved, if the grammar does not allow it."""
        ...

    def fill_next_token_bitmask(self, words: MaskWords, row: int, debug: bool, /) -> bool:
        """Write the mask of what may come next into one row of words."""
        ...

    def find_jump_forward_string(self) -> str:
        """The text that must come next; it ends before a character that is not complete."""
        ...

    def rollback(self, count: int, /) -> None:
        """Take tokens back."""
        ...

    def is_terminated(self) -> bool:
        """A stop token was accepted."""
        ...

    def is_completed(self) -> bool:
        """The text may end here."""
        ...


class CoreGrammar:
    """A grammar compiled for one vocabulary; immutable but for the masks that it keeps once computed. Any thread."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @property
    def memory_bytes(self) -> int:
        """What it holds now; it grows while masks are filled."""
        return int(self._handle.memory_size_bytes())

    def matcher(self) -> CoreMatcher:
        """A matcher at the beginning, without a limit to its rollback."""
        return cast("CoreMatcher", _core().GrammarMatcher(self._handle, None, False, -1, None))


class CoreCompiler:
    """Compiles for one vocabulary; masks are computed when they are first needed. Any thread, several at once."""

    def __init__(self, vocabulary: Sequence[bytes], stop_tokens: Sequence[int]) -> None:
        """`vocabulary[token]` is what a token stands for, empty for a token that no mask may allow. Stop tokens lie
        inside it; they are allowed where the text may end.
        """
        core = _core()
        info = core.TokenizerInfo(list(vocabulary), _RAW, len(vocabulary), list(stop_tokens), False)
        self._compiler = core.GrammarCompiler(info, 1, False, -1, True)

    def grammar(self, text: str) -> CoreGrammar:
        """A grammar in xgrammar's GBNF dialect whose first rule is `root`. Raises RuntimeError."""
        return self._compiled(lambda: self._compiler.compile_grammar_from_strings(text, "root"))

    def structural_tag(self, text: str) -> CoreGrammar:
        """An xgrammar structural tag, as JSON. Raises RuntimeError."""
        return self._compiled(lambda: self._compiler.compile_structural_tag(text))

    def _compiled(self, compile_now: Callable[[], Any]) -> CoreGrammar:
        try:
            return CoreGrammar(compile_now())
        except UnicodeDecodeError:  # its messages show the first byte of a character that is no syntax
            raise RuntimeError("it holds a character that is no syntax") from None


@cache
def _core() -> Any:
    with _importing:
        loaded = sys.modules.get("xgrammar")
        if loaded is not None and "torch" in sys.modules:
            return importlib.import_module("xgrammar.base")._core  # noqa: SLF001 - it has no other name
        try:
            return _import_without_torch()
        except ImportError:
            for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
                del sys.modules[name]
            importlib.import_module("xgrammar")
            return importlib.import_module("xgrammar.base")._core  # noqa: SLF001


def _import_without_torch() -> Any:
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("xgrammar is not installed")
    package = ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["xgrammar"] = package
    importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.base")._core  # noqa: SLF001
