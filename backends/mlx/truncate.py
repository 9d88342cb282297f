"""Draws that leave tokens out: top-k, then top-p on what top-k left, then min-p, all by value (`backends.reference`).

What is kept is always "every token whose logit is at least a cut". It is found among the largest logits of the row, a
few dozen candidates; the noise is computed for them alone. A row is *covered* if its smallest candidate is cut itself:
then no token outside can be kept. For the other rows all tokens are looked at, once the round is read.
"""

from collections.abc import Sequence

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from backends.mlx.candidates import largest
from backends.mlx.noise import noise
from backends.mlx.rows import Exp, SampledRow, chosen, chunks, highest_of, keys_of, mass, only, temperatures_of

CANDIDATES = (64, 128, 256)
"""As many as the largest top-k of the rows asks for, and one more to be cut; what asks for more is not covered."""


class Settings(msgspec.Struct, frozen=True):
    """The rows' settings as vectors: numpy where the host decides, float32 `[rows, 1]` on the device."""

    top_k: npt.NDArray[np.int64]
    """`[rows]`; 0 for none."""
    top_p: npt.NDArray[np.float32]
    """`[rows, 1]`."""
    temperatures: mx.array
    reach: mx.array
    """How far below the largest logit min-p's cut lies: T * log(min_p), minus infinity for none."""
    keys: mx.array


def settings_of(rows: Sequence[SampledRow]) -> Settings:
    """The settings of rows whose sampling truncates."""
    min_p = np.array([[row.sampling.min_p] for row in rows], dtype=np.float32)
    temperatures = np.array([[row.sampling.temperature] for row in rows], dtype=np.float32)
    with np.errstate(divide="ignore"):
        reach = temperatures * np.log(min_p)
    return Settings(
        np.array([max(row.sampling.top_k, 0) for row in rows]),
        np.array([[row.sampling.top_p] for row in rows], dtype=np.float32),
        temperatures_of(rows),
        mx.array(reach),
        keys_of(rows),
    )


class TruncatedDraws:
    """One draw per row: among candidates at once, among all tokens for the rows that need it when read."""

    def __init__(self, logits: mx.array, rows: Sequence[SampledRow], exp: Exp) -> None:
        """Logits float32 `[rows, vocabulary]`, after penalties, bias and mask; each row's sampling truncates."""
        self._logits = logits
        self._rows = rows
        self._exp = exp
        self.tokens, self.covered = _draw_among_candidates(logits, settings_of(rows), exp)
        """Uint32 and boolean `[rows]`, on the device; the token of a row that is not covered is not final."""

    def read(self) -> npt.NDArray[np.uint32]:
        """The final tokens `[rows]`."""
        tokens, wide = np.array(self.tokens), np.flatnonzero(~np.array(self.covered))
        if wide.size:
            tokens[wide] = self._draw_wide(wide)
        return tokens

    def _draw_wide(self, wide: npt.NDArray[np.intp]) -> npt.NDArray[np.uint32]:
        logits = chosen(self._logits, wide)
        rows = [self._rows[index] for index in wide.tolist()]
        return np.concatenate(
            [_draw_among_all(logits[part], settings_of(rows[part]), self._exp) for part in chunks(logits)]
        )


# ---- covered rows ----------------------------------------------------------------------------------------------------


def _draw_among_candidates(logits: mx.array, settings: Settings, exp: Exp) -> tuple[mx.array, mx.array]:
    """Tokens, and whether each row was covered."""
    vocabulary = logits.shape[1]
    wanted = settings.top_k[settings.top_k < CANDIDATES[-1]].max(initial=0)
    count = min(next(enough for enough in CANDIDATES if enough > wanted), vocabulary)
    values, tokens = largest(logits, count)
    kth = _kth(values, settings.top_k)
    cut = _candidate_cut(logits, values, kth, settings, exp)
    scores = values / settings.temperatures + noise(settings.keys, tokens)
    drawn = _lowest_best(only(scores, values >= cut), tokens)
    if count == vocabulary:
        return drawn, mx.ones(drawn.shape, dtype=mx.bool_)
    smallest = values[:, -1]
    # All that top-k leaves are candidates, and top-p takes its share of all of it.
    within = mx.array(settings.top_k == 0) | (smallest < kth[:, 0])
    return drawn, ((smallest < cut[:, 0]) & within) | (smallest == -mx.inf)


def _kth(values: mx.array, top_k: npt.NDArray[np.int64]) -> mx.array:
    """Each row's k-th largest candidate `[rows, 1]`: the smallest if there are fewer, anything without a top-k."""
    places = np.clip(top_k, 1, values.shape[1])[:, None] - 1
    return mx.take_along_axis(values, mx.array(places), axis=-1)


def _candidate_cut(logits: mx.array, values: mx.array, kth: mx.array, settings: Settings, exp: Exp) -> mx.array:
    """The smallest logit that is kept, `[rows, 1]`, by candidates `values` in falling order.

    Wrong only where it lies below all candidates, or where top-k leaves more than the candidates.
    """
    highest = highest_of(values)
    cut = highest + settings.reach
    limits_k = settings.top_k > 0
    if limits_k.any():
        cut = mx.maximum(cut, only(kth, mx.array(limits_k[:, None])))
    limits_p = settings.top_p[:, 0] < 1
    if limits_p.any():
        weights = exp((values - highest) / settings.temperatures)
        above = mx.cumsum(weights, axis=-1, inclusive=False)
        total = _totals(logits, highest, weights, values >= kth, settings, exp)
        # Among equal values the first decides, as what lies strictly above it lies strictly above all of them.
        nucleus = mx.where(above < mx.array(settings.top_p) * total, values, mx.inf).min(axis=-1, keepdims=True)
        nucleus = mx.minimum(nucleus, highest)
        cut = mx.maximum(cut, only(nucleus, mx.array(limits_p[:, None])))
    return cut


def _totals(
    logits: mx.array, highest: mx.array, weights: mx.array, left: mx.array, settings: Settings, exp: Exp
) -> mx.array:
    """What top-p is a share of, `[rows, 1]`: the weights of the candidates that top-k left; without a top-k those of
    the whole vocabulary.
    """
    among_all = np.flatnonzero((settings.top_p[:, 0] < 1) & (settings.top_k == 0))
    if len(among_all) == len(settings.top_k):
        return mass(logits, highest, settings.temperatures, exp)
    totals = (weights * left).sum(axis=-1, keepdims=True)
    if among_all.size:
        part, best, temperatures = (chosen(each, among_all) for each in (logits, highest, settings.temperatures))
        totals[mx.array(among_all)] = mass(part, best, temperatures, exp)
    return totals


def _lowest_best(scores: mx.array, tokens: mx.array) -> mx.array:
    """The token of each row's largest score; of equal ones the lowest, in whatever order they stand."""
    best = scores.max(axis=-1, keepdims=True)
    lowest: mx.array = mx.where(scores == best, tokens, tokens.max()).min(axis=-1)
    return lowest


# ---- rows that their candidates do not cover -------------------------------------------------------------------------


def _draw_among_all(logits: mx.array, settings: Settings, exp: Exp) -> npt.NDArray[np.uint32]:
    """Tokens `[rows]`, by rejection: the best score is drawn, and final if less than `top_p` lies strictly above it.

    Otherwise that token is outside the nucleus, as is every token at or below it, so the draw goes on above it. The
    tokens left shrink by half a turn on average, and the likeliest is never rejected.
    """
    likeliest = logits.max(axis=-1, keepdims=True)
    highest = highest_of(logits)
    floor = _top_k_cuts(logits, settings.top_k)
    weights = exp((logits - highest) / settings.temperatures) * (logits >= floor)
    limit = mx.where(mx.array(settings.top_p) < 1, mx.array(settings.top_p) * weights.sum(-1, keepdims=True), mx.inf)
    scores = logits / settings.temperatures + noise(settings.keys, mx.arange(logits.shape[1], dtype=mx.uint32))
    scores = only(scores, logits >= mx.maximum(floor, highest + settings.reach))
    drawn = np.zeros(len(settings.top_k), dtype=np.uint32)
    pending = np.arange(len(drawn))
    while True:
        best = mx.argmax(scores, axis=-1, keepdims=True)
        value = mx.take_along_axis(logits, best, axis=-1)
        above = logits > value
        outside = ((weights * above).sum(axis=-1, keepdims=True) >= limit) & (value < likeliest)
        drawn[pending] = np.array(best)[:, 0]
        again = np.flatnonzero(np.array(outside))
        if not again.size:
            return drawn
        pending = pending[again]
        scores = only(chosen(scores, again), chosen(above, again))
        logits, weights, limit, likeliest = (chosen(each, again) for each in (logits, weights, limit, likeliest))


def _top_k_cuts(logits: mx.array, top_k: npt.NDArray[np.int64]) -> mx.array:
    """Each row's k-th largest logit `[rows, 1]`; minus infinity without a top-k."""
    vocabulary = logits.shape[1]
    cuts = mx.full((len(top_k), 1), -mx.inf)
    for wanted in np.unique(top_k[(top_k > 0) & (top_k < vocabulary)]):
        rows = np.flatnonzero(top_k == wanted)
        place = vocabulary - int(wanted)
        cuts[mx.array(rows)] = mx.partition(chosen(logits, rows), place, axis=-1)[:, place : place + 1]
    return cuts
