"""`overhead`: what the planner and the suffix source cost beside a round of 32 lanes, and what a history holds.

The engine's loop plays known texts (see `replay`) while the planner's and the source's calls are timed, in pure Python;
the round is one of the model's, measured in between, or given. MLX is imported by the measurement only.
"""

import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.bench.options import Json, Model, Pairs, say, warn_if_busy
from deploy.bench.recording import LaneRecord, RecordedCosts, Recording, RoundRecord
from deploy.bench.replay import play, warmed
from deploy.bench.report import Bound, bound_table, ratios, show, spread
from deploy.bench.texts import ORDINARY, PASSAGES
from scheduler.cost import RoundShape
from scheduler.draft import Draft, DraftAsk
from scheduler.pace import Choice, LaneOffers, Pace
from scheduler.request import Sampling
from scheduler.round import Window
from scheduler.suffix import TOKEN_BYTES, SuffixDrafts

if TYPE_CHECKING:
    from api.text import Tokenizer

LANES = 32
CEILING = 0.02
"""The share of a round's time that deciding what to draft may take."""
_CONTEXT = 200
_PROMPT, _OUTPUT = 160, 160
"""Tokens of each lane."""
_HISTORY_BYTES = 4 << 20


class Stopwatch:
    """Adds up the time that is spent in some calls, in seconds, and for how many lanes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.lanes = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around what is to be counted."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


class TimedPace(Pace):
    """The planner, timed. Written by the scheduler."""

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self._watch = watch

    def choose(self, lanes: Sequence[LaneOffers], prefill: RoundShape, rows: int) -> dict[str, Choice]:
        """As the planner."""
        with self._watch.running():
            return super().choose(lanes, prefill, rows)

    def would_draft(self, lanes: Sequence[LaneOffers]) -> bool:
        """As the planner."""
        with self._watch.running():
            return super().would_draft(lanes)

    def observe(self, lane: LaneOffers, came: Sequence[int]) -> None:
        """As the planner."""
        with self._watch.running():
            super().observe(lane, came)

    def timed(self, shape: RoundShape, seconds: float) -> None:
        """As the planner."""
        with self._watch.running():
            super().timed(shape, seconds)


class TimedSource:
    """The suffix source, timed. Written by the ladder."""

    name = SuffixDrafts.name
    costly = SuffixDrafts.costly

    def __init__(self, watch: Stopwatch) -> None:
        self._source = SuffixDrafts()
        self._watch = watch

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """As the source."""
        self._watch.lanes += len(asks)
        with self._watch.running():
            return self._source.propose(asks)

    def forget(self, request_id: str) -> None:
        """As the source."""
        with self._watch.running():
            self._source.forget(request_id)


def overhead(
    model: Model,
    pairs: Pairs = 9,
    round_ms: Annotated[
        float | None, typer.Option(min=0.1, help="What a plain round of 32 lanes takes; measured, if absent.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure planner and suffix source at 32 lanes, and a history's memory."""
    warn_if_busy()
    timed_round = _measured_round(str(model)) if round_ms is None else _given(round_ms / 1e3)
    tokenizer = _tokenizer(model)
    recording = known_texts(tokenizer.encode, timed_round())
    decided, computed = [], []
    for repeat in range(pairs):
        computed.append(timed_round())
        decided.append(deciding_seconds(recording))
        say(f"{repeat + 1} of {pairs}: {decided[-1] * 1e3:.2f} ms to decide, {computed[-1] * 1e3:.1f} ms to compute")
    words = [token for lane in recording.lanes for token in lane.output]
    bounds = [
        Bound("planner and suffix source over a plain round", LANES, ratios(decided, computed), CEILING, at_most=True),
        Bound("history of these texts over its cap", 1, spread([history_share(words)]), 1.0, at_most=True),
        Bound("history in which nothing comes twice over its cap", 1, spread([history_share(())]), 1.0, at_most=True),
    ]
    notes = [f"deciding: {spread([each * 1e3 for each in decided])} ms a round of {LANES} lanes, on average"]
    show([bound_table("Overhead", bounds)], notes, {"bounds": bounds, "deciding_s": decided}, as_json=json)
    raise typer.Exit(0 if all(bound.holds for bound in bounds) else 1)


def known_texts(encode: "Callable[..., list[int]]", plain_s: float) -> Recording:
    """32 lanes: half of them write what stands in their prompt, half what does not. Wide rounds cost what makes drafts
    pay about as often as not: eight times the rows in three times the time of a plain round, which takes `plain_s`.
    """
    passages = [encode(passage, special=False) for passage in PASSAGES]
    ordinary = encode(" ".join(ORDINARY), special=False)
    lanes = []
    for lane in range(LANES):
        copied = passages[lane % len(passages)]
        start = 53 * lane % (len(ordinary) - _PROMPT - _OUTPUT)
        prompt = ordinary[start : start + _PROMPT]
        output = copied if lane % 2 else ordinary[start + _PROMPT : start + _PROMPT + _OUTPUT]
        lanes.append(LaneRecord(str(lane), (*prompt, *(copied if lane % 2 else ())), tuple(output)))
    attended = LANES * _CONTEXT
    rounds = (
        RoundRecord(RoundShape(LANES, False, attended), plain_s, served=False),
        RoundRecord(RoundShape(LANES, True, attended), plain_s, served=False),
        RoundRecord(RoundShape(8 * LANES, True, 8 * attended), 3 * plain_s, served=False),
    )
    return Recording(LANES, tuple(lanes), rounds)


def deciding_seconds(recording: Recording) -> float:
    """Seconds that the planner and the suffix source take for a round of `LANES` lanes, on average over a replay: while
    prompts are read fewer lanes decode, so it is counted by the lane.
    """
    watch = Stopwatch()
    play(
        recording,
        RecordedCosts(recording.rounds),
        "pace",
        lambda _backend: warmed(TimedPace(watch), recording),
        sources=[TimedSource(watch)],
    )
    return watch.seconds / watch.lanes * LANES


def history_share(words: Sequence[int], cap_bytes: int = _HISTORY_BYTES) -> float:
    """What a full history of such outputs really holds, over its cap; without words, of outputs of ever new tokens."""
    tracemalloc.start()
    try:
        source = SuffixDrafts(cap_bytes)
        before = tracemalloc.get_traced_memory()[0]
        most, place = 0.0, 0
        for turn in range(4 * cap_bytes // (TOKEN_BYTES * _OUTPUT)):
            places = range(place, place + _OUTPUT)
            output = tuple(words[at % len(words)] if words else at for at in places)
            place += _OUTPUT
            source.propose([DraftAsk(str(turn), (0, *output), 1, 4)])
            source.forget(str(turn))
            most = max(most, tracemalloc.get_traced_memory()[0] - before)
        return most / cap_bytes
    finally:
        tracemalloc.stop()


def _given(seconds: float) -> Callable[[], float]:
    return lambda: seconds


def _tokenizer(model: Path) -> "Tokenizer":
    from api.text import load_tokenizer
    from backends.base import ModelInfo

    return load_tokenizer(ModelInfo("bench", str(model.resolve()), 0, 0, frozenset(), {}, "", 0))


def _measured_round(reference: str) -> Callable[[], float]:
    """How to time a plain round of the model: 32 lanes that hold some text."""
    from backends.mlx.runtime import load_blas

    load_blas()
    from backends.mlx.build import load_backend

    greedy = Sampling(temperature=0.0)
    backend = load_backend(reference, Path(), "auto", lambda _stage, _done, _total: None, "bench")
    for slot in range(LANES):
        prompt = tuple((slot * 7919 + place * 104729) % 40_000 + 100 for place in range(_CONTEXT))
        backend.verify([Window(slot, str(slot), 0, prompt, False, greedy, _CONTEXT + 2)]).read()
    windows = [Window(slot, str(slot), _CONTEXT, (100,), True, greedy, _CONTEXT + 2) for slot in range(LANES)]

    def timed_round() -> float:
        start = time.perf_counter()
        backend.verify(windows).read()
        return time.perf_counter() - start

    timed_round()
    return timed_round
