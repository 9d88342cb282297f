"""The compiler's door: what is refused, what is shared, what stays under a bound, and what is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.fake import EOS, FakeBackend
from backends.grammar.base import GrammarError, GrammarUnavailableError
from backends.grammar.cache import GrammarCache
from backends.grammar.compile import GrammarCompiler
from backends.grammar.limits import Limits
from backends.grammar.spec import ConstraintSpec, SpecKind
from backends.grammar.vetting import GrammarBusyError
from tests.backends.grammar.grammars import WORDS

ROOT = Path(__file__).parents[3]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
FAST = Limits(seconds=0.5)
SLOW_PATTERN = "((((((){999999}){999999}){999999}){999999}){999999}){999999}"
"""Nothing, very often: takes for ever without taking memory."""


@pytest.fixture(scope="module")
def shared() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(FakeBackend().info)
    yield compiler
    compiler.close()


@pytest.fixture
def hasty() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(FakeBackend().info, FAST)
    yield compiler
    compiler.close()


def schema(text: object) -> ConstraintSpec:
    return ConstraintSpec(SpecKind.JSON_SCHEMA, text if isinstance(text, str) else json.dumps(text))


def tag(form: object) -> ConstraintSpec:
    return ConstraintSpec(SpecKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": form}))


def children() -> set[int]:
    """Processes that this one started and that are not reaped."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def nested(levels: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in range(levels):
        found = {"items": found}
    return found


REFUSED = [
    (schema(""), "empty"),
    (schema("  \n"), "empty"),
    (schema("{"), "not JSON"),
    (schema("[" * 50_000), "levels deep"),
    (schema(nested(100)), "levels deep"),
    (schema({"description": "x" * 10_000_000}), "larger than"),
    (schema({"description": "é" * 200_000}), "not JSON|larger than"),
    (schema("false"), "nothing satisfies"),
    (schema("3"), "a schema is an object"),
    (schema({"type": "colour"}), "#/type"),
    (ConstraintSpec(SpecKind.REGEX, "a(?=b)"), "look-around"),
    (ConstraintSpec(SpecKind.REGEX, "(a{1000}){1000}"), "parts"),
    (ConstraintSpec(SpecKind.REGEX, "[]"), "no text matches"),
    (ConstraintSpec(SpecKind.REGEX, r"\ud83d"), "no text matches"),
    (ConstraintSpec(SpecKind.REGEX, r"[\ud800-\udfff]+x"), "no text matches"),
    (ConstraintSpec(SpecKind.REGEX, "a\ud83d"), "half a surrogate pair"),
    (ConstraintSpec(SpecKind.CHOICE, r'["a", "\ud83d"]'), "half a surrogate pair"),
    (ConstraintSpec(SpecKind.EBNF, r'root ::= "\uD83D"'), "half a surrogate pair"),
    (ConstraintSpec(SpecKind.EBNF, 'root ::= "a"\u00a0"b"'), "no syntax"),
    (ConstraintSpec(SpecKind.EBNF, "root ::= missing"), '^it is not a valid grammar: EBNF .*"missing" is not defined'),
    (ConstraintSpec(SpecKind.EBNF, "root ::= root"), "no text satisfies"),
    (ConstraintSpec(SpecKind.EBNF, 'start ::= "a"'), "root"),
    (ConstraintSpec(SpecKind.EBNF, "root ::= Token(3)"), "not of tokens"),
    (ConstraintSpec(SpecKind.EBNF, "root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "(?i)nest"),
    (ConstraintSpec(SpecKind.CHOICE, "[]"), "not empty"),
    (ConstraintSpec(SpecKind.CHOICE, '["a", "a"]'), "twice"),
    (ConstraintSpec(SpecKind.CHOICE, '["a", 1]'), "list of strings"),
    (ConstraintSpec(SpecKind.CHOICE, '[""]'), "empty text"),
    (ConstraintSpec(SpecKind.CHOICE, json.dumps([str(number) for number in range(1001)])), "more than 1000"),
    (ConstraintSpec(SpecKind.STRUCTURAL_TAG, "[]"), "structural_tag"),
    (ConstraintSpec(SpecKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {"type": "token"}}'), "token"),
    (tag({"type": "const_string", "value": "\ud83d"}), "half a surrogate pair"),
    (tag({"type": "const_string"}), "^it is not a valid structural tag: ConstString format must have a value"),
    (tag({"type": "tag", "begin": 5, "content": {"type": "any_text"}, "end": "x"}), "begin field must be a string$"),
    (
        tag({"type": "repeat", "min": 0, "max": 2**32 + 1, "content": {"type": "any_text"}}),
        "#/format/max: .*1000000000",
    ),
    (
        ConstraintSpec(
            SpecKind.STRUCTURAL_TAG,
            '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {"contains": {}}}}}',
        ),
        "#/format/json_schema: #/not/contains",
    ),
]


@pytest.mark.parametrize(("spec", "reason"), REFUSED, ids=[f"{spec.kind} {spec.text[:40]}" for spec, _ in REFUSED])
def test_what_is_refused(shared: GrammarCompiler, spec: ConstraintSpec, reason: str) -> None:
    refused = shared.stats.refused
    with pytest.raises(GrammarError, match=reason) as caught:
        shared.compile(spec)
    assert not re.search(r"/project/|/cpp/|Check failed", str(caught.value))
    assert not isinstance(caught.value, GrammarUnavailableError)
    assert shared.stats.refused == refused + 1


def test_equal_constraints_share_a_grammar(shared: GrammarCompiler) -> None:
    first = shared.compile(schema('{"type":"object", "title":"a  b"}'))
    hits = shared.stats.cache.hits
    assert shared.compile(schema('{ "type" : "object",\n"title":"a  b" }')) is first
    assert shared.stats.cache.hits == hits + 1
    assert shared.compile(schema('{"type":"object", "title":"a b"}')) is not first
    assert first.summary.startswith("json_schema of ")
    assert "title" not in first.summary


def test_what_is_kept_is_found_without_compiling() -> None:
    compiler = GrammarCompiler(FakeBackend().info)
    spec, spaced = schema('{"type":"null"}'), schema('{ "type": "null" }')
    try:
        assert compiler.cached(spec) is None
        assert compiler.cached(schema("{")) is None  # nothing was compiled yet: not even the vocabulary is known
        grammar = compiler.compile(spec)
        assert compiler.cached(spec) is compiler.cached(spaced) is grammar
        assert compiler.cached(schema('{"type":"string"}')) is None
        deferred = compiler.cached(msgspec.structs.replace(spec, after=(5,)))
        assert deferred is not None
        assert [deferred.matcher().accept(token) for token in (5, 9)] == [True, True]
        assert (compiler.stats.cache.hits, compiler.stats.cache.misses) == (3, 1)
        with pytest.raises(GrammarError, match="not JSON"):
            compiler.cached(schema("{"))
        assert compiler.stats.refused == 1
    finally:
        compiler.close()


def test_concurrent_equal_constraints_are_compiled_once(shared: GrammarCompiler) -> None:
    misses = shared.stats.cache.misses
    gate = threading.Barrier(6)

    def compiled(_index: int) -> object:
        gate.wait()
        return shared.compile(schema({"type": "object", "properties": {"once": {"type": "string"}}}))

    with ThreadPoolExecutor(6) as threads:
        assert len(set(map(id, threads.map(compiled, range(6))))) == 1
    assert shared.stats.cache.misses == misses + 1


def test_a_deferred_grammar(shared: GrammarCompiler) -> None:
    matcher = shared.compile(ConstraintSpec(SpecKind.REGEX, "ab", after=(5,))).matcher()
    assert [matcher.accept(token) for token in (99, 5, ord("b"), ord("a"), ord("b"), EOS)] == [
        True, True, False, True, True, True,
    ]  # fmt: skip


@LINUX
def test_a_killed_compile_leaves_nothing_behind(hasty: GrammarCompiler) -> None:
    others = children()
    hasty.compile(ConstraintSpec(SpecKind.REGEX, "a"))  # whatever is opened once is open now
    first, files = children() - others, open_files()
    assert len(first) == 1
    with pytest.raises(GrammarError, match="to compile"):
        hasty.compile(ConstraintSpec(SpecKind.REGEX, SLOW_PATTERN))
    assert hasty.stats.killed == 1
    assert children() == others
    hasty.compile(ConstraintSpec(SpecKind.REGEX, "b"))
    second = children() - others
    assert len(second) == 1
    assert second != first
    assert open_files() == files
    hasty.close()
    assert children() == others
    assert open_files() == files - 2


# ---- processes that are lost


@LINUX
@pytest.mark.parametrize("lost_by", [signal.SIGKILL, signal.SIGSTOP])
def test_an_idle_process_that_is_lost_is_nobodys_fault(lost_by: signal.Signals) -> None:
    compiler = GrammarCompiler(FakeBackend().info)
    others = children()
    try:
        compiler.compile(ConstraintSpec(SpecKind.REGEX, "first"))
        for attempt in range(3):
            (process,) = children() - others
            os.kill(process, lost_by)
            compiler.compile(ConstraintSpec(SpecKind.REGEX, f"behind{attempt}"))
            assert compiler.stats.killed == attempt + 1
            assert process not in children()
        assert compiler.stats.refused == 0
    finally:
        compiler.close()


def at_work(known: set[int], asking: threading.Thread) -> int:
    """The process that was started last, once it was asked: it limits its processor time then."""
    while asking.is_alive():
        for process in children() - known:
            limits = Path(f"/proc/{process}/limits").read_text()
            if not re.search(r"Max cpu time +unlimited", limits):
                return process
        asking.join(0.01)
    raise AssertionError("it ended by itself")


class Asking(threading.Thread):
    """A constraint that takes for ever, asked for in a thread."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        super().__init__()
        self._compiler = compiler
        self.error: GrammarError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._compiler.compile(ConstraintSpec(SpecKind.REGEX, SLOW_PATTERN))
        except GrammarError as error:
            self.error = error


@LINUX
def test_only_a_constraint_at_which_two_processes_die_is_to_blame() -> None:
    compiler = GrammarCompiler(FakeBackend().info, Limits(seconds=60))
    known = children()
    try:
        asking = Asking(compiler)
        for _ in range(2):
            process = at_work(known, asking)
            known.add(process)
            os.kill(process, signal.SIGKILL)
        asking.join()
        assert str(asking.error) == "compiling it takes too much memory or breaks the compiler"
        assert type(asking.error) is GrammarError
        assert (compiler.stats.killed, compiler.stats.refused) == (2, 1)
    finally:
        compiler.close()


@LINUX
def test_a_constraint_is_tried_again_when_its_process_dies() -> None:
    compiler = GrammarCompiler(FakeBackend().info, Limits(seconds=1.5))
    known = children()
    try:
        asking = Asking(compiler)
        os.kill(at_work(known, asking), signal.SIGKILL)
        asking.join()
        assert "to compile" in str(asking.error)
        assert compiler.stats.killed == 2
    finally:
        compiler.close()


@LINUX
def test_a_process_that_is_held_up_is_not_the_constraints_fault() -> None:
    compiler = GrammarCompiler(FakeBackend().info, Limits(seconds=4))
    known = children()
    try:
        asking = Asking(compiler)
        os.kill(at_work(known, asking), signal.SIGSTOP)
        asking.join()
        assert isinstance(asking.error, GrammarBusyError)
        assert (compiler.stats.killed, compiler.stats.refused) == (1, 0)
        assert children() == known
    finally:
        compiler.close()


def broken_python(monkeypatch: pytest.MonkeyPatch) -> Limits:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    return Limits()


def silent_python(monkeypatch: pytest.MonkeyPatch) -> Limits:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    return Limits()


def no_time(_monkeypatch: pytest.MonkeyPatch) -> Limits:
    return Limits(start_seconds=0.0)


@LINUX
@pytest.mark.parametrize("broken", [broken_python, silent_python, no_time])
def test_a_process_that_cannot_start_is_the_servers_fault(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], Limits]
) -> None:
    compiler = GrammarCompiler(FakeBackend().info, broken(monkeypatch))
    files = open_files()
    try:
        for _ in range(3):  # no place is lost
            with pytest.raises(GrammarUnavailableError, match="cannot compile constraints now"):
                compiler.compile(ConstraintSpec(SpecKind.REGEX, "a"))
        assert compiler.stats.refused == 0
        assert open_files() == files
    finally:
        compiler.close()


@LINUX
def test_limits_set_from_outside_hold() -> None:
    program = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (6_000_000 * 1024,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (3600, 3600))
from backends.fake import FakeBackend
from backends.grammar.compile import GrammarCompiler
from backends.grammar.limits import Limits
from backends.grammar.spec import ConstraintSpec, SpecKind

compiler = GrammarCompiler(FakeBackend().info, Limits(memory_bytes=1 << 40, seconds=5000))
print(compiler.compile(ConstraintSpec(SpecKind.REGEX, "abc")).summary)
compiler.close()
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("regex of 3 characters\n", "")


def test_whose_time_was_spent_in_the_queue_is_not_to_blame(shared: GrammarCompiler) -> None:
    refused = shared.stats.refused
    with pytest.raises(GrammarBusyError):
        shared.compile(ConstraintSpec(SpecKind.REGEX, "late"), deadline=time.monotonic())
    assert shared.stats.refused == refused
    shared.compile(ConstraintSpec(SpecKind.REGEX, "late"))


# ---- trials


def test_a_grammar_that_is_slow_only_later_is_found(shared: GrammarCompiler) -> None:
    """Behind twelve and more free letters, many ways to read the same text."""
    rules = [f"r{at} ::= r{at + 1} r{at + 2} | r{at + 2} r{at + 1} | r{at + 1} | [^]" for at in range(60)]
    grammar = "root ::= [bc]{20} r0\n" + "\n".join(rules) + "\nr60 ::= [^]\nr61 ::= [^] | r0\n"
    with pytest.raises(GrammarError, match="one token of it takes more than 1 s"):
        shared.compile(ConstraintSpec(SpecKind.EBNF, grammar))


def test_a_text_that_cannot_be_completed_is_found_later(shared: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="cannot be completed"):
        shared.compile(ConstraintSpec(SpecKind.EBNF, 'root ::= [bc]{30} x\nx ::= x "a"'))


def test_every_token_of_a_trial_is_timed() -> None:
    compiler = GrammarCompiler(FakeBackend().info, Limits(mask_seconds=-1.0))
    try:
        with pytest.raises(GrammarError, match="one token of it takes more than -1 s"):
            compiler.compile(schema({"type": "object"}))
    finally:
        compiler.close()


# ---- bounds


@LINUX
def test_a_process_that_takes_too_much_memory() -> None:
    compiler = GrammarCompiler(FakeBackend().info, Limits(seconds=60, memory_bytes=1 << 20))
    try:
        big = {"enum": [f"{'x' * 40}{number}" for number in range(4000)]}
        with pytest.raises(GrammarError, match="memory"):
            compiler.compile(schema(big))
        assert compiler.stats.cache.entries == 0
    finally:
        compiler.close()


def test_a_slow_one_does_not_hold_up_the_others(hasty: GrammarCompiler) -> None:
    """One of the two processes is slow; the other ones go through the second, before the first is killed."""
    hasty.compile(ConstraintSpec(SpecKind.REGEX, "a"))
    finished: list[str] = []

    def compiled(pattern: str) -> None:
        try:
            hasty.compile(ConstraintSpec(SpecKind.REGEX, pattern))
        except GrammarError:
            pattern = "slow"
        finished.append(pattern)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(compiled, [SLOW_PATTERN, "b"]))
        list(threads.map(compiled, ["c", "d"]))
    assert sorted(finished) == ["b", "c", "d", "slow"]


def test_nobody_is_free() -> None:
    compiler = GrammarCompiler(FakeBackend().info, Limits(seconds=0.4, processes=1))
    try:
        compiler.compile(ConstraintSpec(SpecKind.REGEX, "a"))

        def reason(pattern: str) -> str:
            try:
                compiler.compile(ConstraintSpec(SpecKind.REGEX, pattern))
            except GrammarError as error:
                return type(error).__name__
            return "compiled"

        slow = [SLOW_PATTERN + "a" * extra for extra in range(6)]
        with ThreadPoolExecutor(6) as threads:
            reasons = set(threads.map(reason, slow))
        assert reasons == {"GrammarError", GrammarBusyError.__name__}
        assert reason("b") == "compiled"
    finally:
        compiler.close()


@LINUX
def test_closing_ends_whoever_waits() -> None:
    compiler = GrammarCompiler(FakeBackend().info, Limits(seconds=120, processes=1))
    compiler.compile(ConstraintSpec(SpecKind.REGEX, "a"))
    before = children()
    reasons: list[str] = []

    def waiting() -> None:
        try:
            compiler.compile(ConstraintSpec(SpecKind.REGEX, SLOW_PATTERN))
        except GrammarError as error:
            reasons.append(str(error))

    thread = threading.Thread(target=waiting)
    thread.start()
    while thread.is_alive() and not reasons:
        compiler.close()
        thread.join(0.05)
    assert reasons == ["the server is stopping"]
    assert len(children()) == len(before) - 1
    with pytest.raises(GrammarError, match="stopping"):
        compiler.compile(ConstraintSpec(SpecKind.REGEX, "b"))


class Blob:
    def __init__(self, size: int) -> None:
        self.memory_bytes = size


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 120), st.integers(0, 60)), max_size=30))
def test_a_cache_stays_under_its_cap(steps: list[tuple[str, int, int]]) -> None:
    """Things grow after they were put in; whoever was used last stays longest."""
    cache = GrammarCache(100)
    order: list[str] = []
    blobs: dict[str, Blob] = {}
    for name, size, growth in steps:
        if name in order:
            assert cache.get((name,)) is blobs[name]
            blobs[name].memory_bytes += growth
            cache.grown((name,))
        else:
            assert cache.get((name,)) is None
            blobs[name] = Blob(size)
            cache.put((name,), blobs[name])
        order = [*(known for known in order if known != name), name]
        while sum(blobs[known].memory_bytes for known in order) > 100:
            del order[0]
        assert [cache.get((known,)) for known in blobs if known not in order] == [None] * (len(blobs) - len(order))
        assert cache.stats().bytes == sum(blobs[known].memory_bytes for known in order)
        assert cache.stats().entries == len(order)


def test_grammars_that_grow_while_masks_are_filled_are_accounted_for() -> None:
    compiler = GrammarCompiler(FakeBackend().info, Limits(cache_bytes=200_000))
    try:
        for number in range(12):
            grammar = compiler.compile(schema({"type": "string", "pattern": f"^[a-z]{{{number}}}[0-9x]*é?$"}))
            before = compiler.stats.cache.bytes
            matcher = grammar.matcher()
            row = np.zeros(WORDS, dtype=np.int32)
            for byte in b'"' + b"a" * number + b"012":
                matcher.fill(row)
                assert matcher.accept(byte)
            assert compiler.stats.cache.bytes != before
            assert compiler.stats.cache.bytes <= 200_000
        assert compiler.stats.cache.evictions > 0 or compiler.stats.cache.entries == 12
    finally:
        compiler.close()


def test_a_process_that_served_a_constraint_has_no_torch() -> None:
    program = """
import sys
import numpy as np
from backends.fake import FakeBackend
from backends.grammar.compile import GrammarCompiler
from backends.grammar.spec import ConstraintSpec, SpecKind

compiler = GrammarCompiler(FakeBackend().info)
matcher = compiler.compile(ConstraintSpec(SpecKind.JSON_SCHEMA, '{"type": "object"}')).matcher()
matcher.fill(np.zeros(9, dtype=np.int32))
assert matcher.accept(ord("{"))
compiler.close()
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "triton", "xgrammar"}))
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("['xgrammar']\n", "")
