"""`rounds`: what single rounds cost, in process: packed against padded, ragged against even, mixed against apart.

Every case times two ways of doing the same work, taking turns, and reports the ratio of their medians over the pairs.
MLX is imported by the measurements only, after OpenBLAS.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.bench.options import Json, Model, Pairs, say, warn_if_busy
from deploy.bench.report import Bound, bound_table, ratios, show
from scheduler.request import Sampling
from scheduler.round import Window

if TYPE_CHECKING:
    from backends.base import Backend

GREEDY = Sampling(temperature=0.0)
RAGGED = (0, 6, 1, 5, 2, 4, 3, 3)
"""Accepted drafts of eight lanes; their mean is that of the even round."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The same model on the packed path, on the padded one, on the packed one with MLX's own softmax and RoPE, and on
    the packed one with the taps that a drafter reads.
    """

    packed: "Backend"
    padded: "Backend"
    stock: "Backend"
    tapped: "Backend"


@dataclass(frozen=True, slots=True)
class Case:
    """Two ways of doing one thing, and how much of the second's time the first may take at most."""

    claim: str
    lanes: int
    most: float
    ours: Callable[[], None]
    theirs: Callable[[], None]


def rounds(
    model: Model,
    pairs: Pairs = 9,
    only: Annotated[str, typer.Option(help="Run the cases whose name holds this.")] = "",
    json: Json = False,
) -> None:
    """Time rounds of SmolLM2's size and bounds, without a server."""
    warn_if_busy()
    bench = _load(str(model))
    bounds = []
    for make in CASES:
        case = make(bench)
        if only in case.claim:
            bounds.append(_measure(case, pairs))
            say(f"{case.claim}: {bounds[-1].measured}")
    show([bound_table("Rounds (time over time)", bounds)], [], {"bounds": bounds}, as_json=json)
    raise typer.Exit(0 if all(bound.holds for bound in bounds) else 1)


def _measure(case: Case, pairs: int) -> Bound:
    case.ours()
    case.theirs()
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        for way, times in zip((case.ours, case.theirs), taken, strict=True):
            start = time.perf_counter()
            way()
            times.append(time.perf_counter() - start)
    return Bound(case.claim, case.lanes, ratios(*taken), case.most, at_most=True)


def _load(reference: str) -> Bench:
    from backends.mlx.runtime import load_blas

    load_blas()
    from pathlib import Path

    import mlx.core as mx

    from backends.base import ModelInfo
    from backends.mlx.backend import MLXBackend
    from backends.mlx.build import fast_attention, paths, prepare
    from backends.mlx.distill.subject import suiting
    from backends.mlx.drafts.reading import MOST_UNREAD
    from backends.mlx.drafts.target import borrow
    from backends.mlx.features import Features
    from backends.mlx.load import load
    from backends.mlx.seam import install_head
    from backends.mlx.taps import Taps

    def forwards(*, stock: bool = False, tapped: bool = False) -> "list[Backend]":
        loaded = load(reference, Path(), "auto", lambda _stage, _done, _total: None)
        kinds = prepare(loaded.model)
        head = install_head(loaded.model)
        attention = mx.fast.scaled_dot_product_attention if stock else fast_attention(loaded.model)
        info = ModelInfo("bench", None, loaded.vocab_size, 0, frozenset(), {}, "", 0)
        backends: list[Backend] = []
        for forward in paths(loaded.model, kinds, attention=attention, head=head):
            backend = MLXBackend(info, forward)
            if tapped:
                shape = suiting(borrow(loaded.model).dims, len(loaded.model.layers))
                forward.taps = Taps(loaded.model, head, shape.taps)
                backend.features = Features(MOST_UNREAD)
            backends.append(backend)
        return backends

    packed, padded = forwards()
    return Bench(packed, padded, forwards(stock=True)[0], forwards(tapped=True)[0])


def _tokens(rows: int, seed: int = 1) -> tuple[int, ...]:
    return tuple((seed * 7919 + row * 104729) % 40_000 + 100 for row in range(rows))


def _window(slot: int, start: int, *, draft: int = 0, chunk: int = 0) -> Window:
    """A decode window with a draft, or a prefill chunk."""
    tokens = _tokens(chunk or 1, slot + start)
    end = start + len(tokens) + draft
    return Window(slot, str(slot), start, tokens, not chunk, GREEDY, end + 1, draft=_tokens(draft, slot))


def _fill(backend: "Backend", lengths: Sequence[int]) -> None:
    """Open a lane in each slot with so many tokens cached."""
    backend.reset()
    for slot, length in enumerate(lengths):
        for start in range(0, length, 512):
            chunk = _window(slot, start, chunk=min(512, length - start))
            _verify(backend, [chunk])


def _between(
    claim: str,
    most: float,
    ours: "Backend",
    theirs: "Backend",
    lengths: Sequence[int],
    windows: Sequence[Window],
) -> Case:
    """The same round on two backends, behind lanes of these lengths."""
    for backend in (ours, theirs):
        _fill(backend, lengths)
    return Case(claim, len(windows), most, lambda: _verify(ours, windows), lambda: _verify(theirs, windows))


def _verify(backend: "Backend", *rounds_of: Sequence[Window]) -> None:
    for windows in rounds_of:
        backend.verify(windows).read()
        backend.keep({window.slot: window.end for window in windows})


def _against_rectangle(
    bench: Bench, claim: str, most: float, lengths: Sequence[int], windows: Sequence[Window]
) -> Case:
    return _between(f"{claim}, packed over rectangle", most, bench.packed, bench.padded, lengths, windows)


def _long_lane(bench: Bench) -> Case:
    lengths = [300] * 7 + [3000]
    windows = [_window(slot, length) for slot, length in enumerate(lengths)]
    return _against_rectangle(bench, "7 lanes of 300 tokens and one of 3000", 0.5, lengths, windows)


def _one_draft(bench: Bench) -> Case:
    lengths = [300 - 3 * slot for slot in range(8)]
    windows = [_window(slot, length, draft=8 if slot == 3 else 0) for slot, length in enumerate(lengths)]
    return _against_rectangle(bench, "8 drafts beside 7 plain lanes", 0.5, lengths, windows)


def _prefill(bench: Bench) -> Case:
    windows = [_window(slot, 0, chunk=rows) for slot, rows in enumerate((40, 60, 90, 200))]
    return _against_rectangle(bench, "prefill of 40, 60, 90 and 200", 0.6, [], windows)


def _alike(bench: Bench) -> Case:
    windows = [_window(slot, 300, draft=5) for slot in range(8)]
    return _against_rectangle(bench, "8 lanes alike, 5 drafts", 1.06, [300] * 8, windows)


def _plain_alike(bench: Bench) -> Case:
    return _against_rectangle(
        bench, "8 lanes alike, no drafts", 1.06, [300] * 8, [_window(slot, 300) for slot in range(8)]
    )


def _mixed(bench: Bench) -> Case:
    _fill(bench.packed, [300] * 8)
    decode = [_window(slot, 300) for slot in range(8)]
    chunk = [_window(8, 0, chunk=32)]
    return Case(
        "8 lanes and a 32-row chunk, one round over two",
        9,
        0.85,
        lambda: _verify(bench.packed, [*decode, *chunk]),
        lambda: _verify(bench.packed, decode, chunk),
    )


def _tapped(claim: str, lengths: Sequence[int], windows: Sequence[Window]) -> Callable[[Bench], Case]:
    """What a drafter may read costs no more than this, whether it is read or not."""
    return lambda bench: _between(
        f"{claim}, with taps over without", 1.02, bench.tapped, bench.packed, lengths, windows
    )


def _acceptance(bench: Bench) -> Case:
    _fill(bench.packed, [260] * 8)
    return Case(
        "12 rounds, ragged acceptance over even",
        8,
        1.03,
        lambda: _decode(bench.packed, RAGGED),
        lambda: _decode(bench.packed, [3] * 8),
    )


def _decode(backend: "Backend", accepted: Sequence[int], rounds_done: int = 12) -> None:
    """Rounds of 6 drafts each, from 260 cached tokens on; what lanes keep takes turns, so that all grow alike."""
    starts = [260] * 8
    for turn in range(rounds_done):
        backend.verify([_window(slot, start, draft=6) for slot, start in enumerate(starts)]).read()
        kept = [start + 1 + accepted[(slot + turn) % 8] for slot, start in enumerate(starts)]
        starts = [backend.keep({slot: length})[slot] for slot, length in enumerate(kept)]


def _against_stock(bench: Bench, claim: str, lengths: Sequence[int], windows: Sequence[Window]) -> Case:
    return _between(f"{claim}, over MLX's own softmax and RoPE", 1.0, bench.packed, bench.stock, lengths, windows)


def _stock_prefill(bench: Bench) -> Case:
    windows = [_window(slot, 0, chunk=rows) for slot, rows in enumerate((40, 60, 90, 200))]
    return _against_stock(bench, "prefill of 40, 60, 90 and 200", [], windows)


def _stock_decode(bench: Bench) -> Case:
    return _against_stock(bench, "1 plain lane", [128], [_window(0, 128)])


def _stock_crowd(bench: Bench) -> Case:
    lengths = [128 - slot for slot in range(8)]
    return _against_stock(bench, "8 plain lanes", lengths, [_window(slot, at) for slot, at in enumerate(lengths)])


CASES = (
    _tapped("1 plain lane", [128], [_window(0, 128)]),
    _tapped("8 plain lanes", [300] * 8, [_window(slot, 300) for slot in range(8)]),
    _tapped("8 lanes, 4 drafts", [300] * 8, [_window(slot, 300, draft=4) for slot in range(8)]),
    _tapped("a chunk of 256", [], [_window(0, 0, chunk=256)]),
    _acceptance,
    _long_lane,
    _one_draft,
    _prefill,
    _alike,
    _plain_alike,
    _mixed,
    _stock_prefill,
    _stock_decode,
    _stock_crowd,
)
