"""`sampling`: what drawing 40 rows costs beside the forward that made them, in process, setting by setting.

The rows are those of 8 lanes with 4 drafts each in the middle of ordinary text, so that the distributions are as peaked
and as flat as they are in use. MLX is imported by the measurements only, after OpenBLAS.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from deploy.bench.options import Json, Model, Pairs, say, warn_if_busy
from deploy.bench.report import Bound, bound_table, ratios, show
from deploy.bench.texts import PASSAGES
from scheduler.request import Sampling
from scheduler.round import History, Window

if TYPE_CHECKING:
    import mlx.core as mx

    from backends.mlx.sampler import DrawnRows
    from backends.mlx.verify import Forward

LANES, DRAFTS = 8, 4
T = TypeVar("T")
SETTINGS: tuple[tuple[str, Sampling, float], ...] = (
    ("greedy", Sampling(0.0), 0.05),
    ("temperature and top_p", Sampling(0.8, seed=1, top_p=0.9), 0.35),
    ("temperature", Sampling(0.8, seed=1), 0.35),
    ("temperature and top_k", Sampling(0.8, seed=1, top_k=40), 0.35),
    ("temperature and min_p", Sampling(0.8, seed=1, min_p=0.05), 0.35),
    ("temperature 1.5 and top_p", Sampling(1.5, seed=1, top_p=0.95), 1.0),
    ("greedy with penalties", Sampling(0.0, repetition_penalty=1.1, frequency_penalty=0.2), 0.35),
    ("greedy with 5 log-probabilities", Sampling(0.0, logprobs=5), 0.35),
)
"""Name, settings, and the most of the forward's time that drawing may take."""


def sampling(model: Model, pairs: Pairs = 9, json: Json = False) -> None:
    """Time the row sampler against the forward whose rows it draws from."""
    warn_if_busy()
    forward, texts = _load(str(model))
    bounds = [_measure(forward, texts, *setting, pairs) for setting in SETTINGS]
    show([bound_table("Drawing 40 rows over their forward (time over time)", bounds)], [], bounds, as_json=json)
    raise typer.Exit(0 if all(bound.holds for bound in bounds) else 1)


def _load(reference: str) -> "tuple[Forward, list[tuple[int, ...]]]":
    """The packed forward, and a text of tokens for each lane."""
    from backends.mlx.runtime import load_blas

    load_blas()
    from api.text import load_tokenizer
    from backends.base import ModelInfo
    from backends.mlx.build import build_forward
    from backends.mlx.load import load

    loaded = load(reference, Path(), "auto", lambda _stage, _done, _total: None)
    info = ModelInfo(loaded.name, str(loaded.folder), loaded.vocab_size, 0, frozenset(), {}, "", 0)
    tokenizer = load_tokenizer(info)
    texts = [
        tuple(tokenizer.encode(" ".join(PASSAGES[lane:] + PASSAGES[:lane]), special=False)) for lane in range(LANES)
    ]
    return build_forward(loaded.model, loaded.vocab_size, loaded.name), texts


def _measure(
    forward: "Forward", texts: list[tuple[int, ...]], name: str, settings: Sampling, most: float, pairs: int
) -> Bound:
    import mlx.core as mx

    from backends.mlx import exponential
    from backends.mlx.adjust import LaneTables
    from backends.mlx.rows import SampledRow
    from backends.mlx.sampler import draw

    length = 200
    windows = [_window(lane, text, length, settings) for lane, text in enumerate(texts)]
    rows = [SampledRow(settings, window.start + 1 + place) for window in windows for place in range(DRAFTS + 1)]
    tables, exp = LaneTables(), exponential.best_exp()

    def compute() -> "mx.array":
        logits = forward.run(windows, None).logits
        assert logits is not None
        mx.eval(logits)
        return logits

    def draw_rows(logits: "mx.array") -> "DrawnRows":
        adjustments = tables.adjustments(windows, logits.shape[-1])
        return draw(logits, rows, adjustments=adjustments, exp=exp)

    for lane, text in enumerate(texts):
        forward.run([Window(lane, str(lane), 0, text[:length], False, settings, length + 6)], None)
        mx.eval(forward.buffers())
    draw_rows(compute()).read()
    forwards, draws = [], []
    for _ in range(pairs):
        logits, seconds = _timed(compute)
        forwards.append(seconds)
        draws.append(_timed(partial(_read, draw_rows, logits))[1])
    forward.reset()
    measured = Bound(name, LANES, ratios(draws, forwards), most, at_most=True)
    say(f"{name}: {measured.measured}, {sorted(draws)[len(draws) // 2] * 1e3:.1f} ms")
    return measured


def _read(draw_rows: "Callable[[mx.array], DrawnRows]", logits: "mx.array") -> None:
    draw_rows(logits).read()


def _window(lane: int, text: tuple[int, ...], start: int, settings: Sampling) -> Window:
    """A decode window in the middle of a text; its draft goes on with the text itself."""
    draft = text[start + 1 : start + 1 + DRAFTS]
    history = History(text[: start + 1], 20) if settings.counts else None
    end = start + 2 + DRAFTS
    return Window(lane, str(lane), start, text[start : start + 1], True, settings, end, DRAFTS, draft, history=history)


def _timed(compute: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = compute()
    return result, time.perf_counter() - start
