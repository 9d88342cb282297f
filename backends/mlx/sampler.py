"""Draws one token per sampled row, all rows of a round at once; what it draws is defined in `backends.reference`.

Greedy rows take the largest logit and compute nothing else. Warm rows add keyed Gumbel noise to their logits over the
temperature and take the largest (the Gumbel-max trick). Rows that leave tokens out do so among a few candidates.
Whatever a row's logits are, no other row is drawn otherwise; rows whose logits are no numbers are told.
"""

from collections.abc import Mapping, Sequence

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from backends.masks import Allowed
from backends.mlx.adjust import Adjustments
from backends.mlx.finite import RowSums
from backends.mlx.logprobs import RowLogprobs
from backends.mlx.noise import noise
from backends.mlx.rows import Exp, SampledRow, chosen, chunks, keys_of, only, temperatures_of
from backends.mlx.truncate import TruncatedDraws
from scheduler.events import TokenLogprob
from scheduler.round import Drawn

NO_NUMBERS = "the model's logits are no finite numbers"
"""What is wrong with a window that has a broken row."""


class ReadRows(msgspec.Struct, frozen=True):
    """What was drawn in a round, on the host."""

    tokens: list[int]
    """One per row."""
    logprobs: Mapping[int, TokenLogprob]
    """By row, for those that asked."""
    broken: frozenset[int] = frozenset()
    """Rows whose tokens and log-probabilities mean nothing."""

    def window(self, first: int, last: int) -> Drawn:
        """The draws of rows `[first, last)`, which belong to one window."""
        if not self.broken.isdisjoint(range(first, last)):
            return Drawn(tuple(self.tokens[first:last]), error=NO_NUMBERS)
        logprobs = tuple(self.logprobs[row] for row in range(first, last) if row in self.logprobs)
        return Drawn(tuple(self.tokens[first:last]), logprobs)


class DrawnRows:
    """The draws of a round, under way on the device. Written by `read`."""

    def __init__(
        self,
        tokens: mx.array,
        truncated: tuple[Sequence[int], TruncatedDraws] | None,
        logprobs: tuple[Sequence[int], RowLogprobs] | None,
        sums: RowSums,
    ) -> None:
        self.tokens = tokens
        """Uint32 `[rows]`; final for every row that leaves no tokens out, so that plain rounds can feed on it."""
        self._truncated = truncated
        self._logprobs = logprobs
        self._sums = sums

    def launch(self) -> None:
        """Start what the device computes."""
        arrays = [self.tokens, self._sums.array]
        if self._truncated is not None:
            arrays.append(self._truncated[1].covered)
        if self._logprobs is not None:
            arrays.extend(self._logprobs[1].arrays())
        mx.async_eval(*arrays)

    def read(self) -> ReadRows:
        """Wait for the draws; rows that their candidates do not cover are drawn now."""
        tokens = np.array(self.tokens)
        if self._truncated is not None:
            rows, draws = self._truncated
            tokens[rows] = draws.read()
        logprobs: dict[int, TokenLogprob] = {}
        if self._logprobs is not None:
            rows, reported = self._logprobs
            with np.errstate(invalid="ignore"):  # of broken rows
                logprobs = dict(zip(rows, reported.read(tokens[rows]), strict=True))
        return ReadRows(tokens.tolist(), logprobs, self._sums.read())


def draw(
    logits: mx.array,
    rows: Sequence[SampledRow],
    *,
    adjustments: Adjustments | None = None,
    allowed: Allowed | None = None,
    ids: mx.array | None = None,
    exp: Exp = mx.exp,
) -> DrawnRows:
    """Draw from logits `[rows, vocabulary]` of any float type, after `adjustments` and among the `allowed` tokens.

    All but a plain argmax is computed in float32. `ids` (uint32) are the tokens that the logits' columns stand for,
    where there are not all; then nothing may be adjusted, forbidden, left out or reported.
    """
    sums = RowSums(logits)
    assert ids is None or not any(row.sampling.truncates for row in rows)
    reporting = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
    reported = None
    if reporting:
        tops = [rows[index].sampling.logprobs or 0 for index in reporting]
        reported = reporting, RowLogprobs(chosen(logits, reporting), tops, exp)
    if adjustments is not None:
        logits = adjustments.apply(logits.astype(mx.float32))
    if allowed is not None:
        logits = only(logits.astype(mx.float32), mx.array(allowed))
    tokens, truncated = _draw(logits, rows, exp, ids)
    return DrawnRows(tokens if ids is None else ids[tokens], truncated, reported, sums)


def _draw(
    logits: mx.array, rows: Sequence[SampledRow], exp: Exp, ids: mx.array | None
) -> tuple[mx.array, tuple[Sequence[int], TruncatedDraws] | None]:
    """Each row by its need, put back in order; and the rows that truncate."""
    needs = np.array([_need(row) for row in rows])
    kinds = [np.flatnonzero(needs == need) for need in range(3)]
    parts: list[mx.array] = []
    truncated = None
    for need, indices in enumerate(kinds):
        if not indices.size:
            continue
        part = chosen(logits, indices)
        those = [rows[index] for index in indices.tolist()]
        if need == _GREEDY:
            parts.append(mx.argmax(part, axis=-1))
        elif need == _WARM:
            parts.append(_draw_warm(part, those, ids))
        else:
            draws = TruncatedDraws(part.astype(mx.float32), those, exp)
            truncated = indices.tolist(), draws
            parts.append(draws.tokens)
    if len(parts) == 1:
        return parts[0], truncated
    back: npt.NDArray[np.int32] = np.argsort(np.concatenate(kinds)).astype(np.int32)
    return mx.concatenate(parts)[mx.array(back)], truncated


_GREEDY, _WARM, _TRUNCATED = range(3)


def _need(row: SampledRow) -> int:
    if row.sampling.temperature <= 0:
        return _GREEDY
    return _TRUNCATED if row.sampling.truncates else _WARM


def _draw_warm(logits: mx.array, rows: Sequence[SampledRow], ids: mx.array | None) -> mx.array:
    tokens = mx.arange(logits.shape[-1], dtype=mx.uint32) if ids is None else ids
    temperatures, keys = temperatures_of(rows), keys_of(rows)
    return mx.concatenate(
        [
            mx.argmax(logits[part].astype(mx.float32) / temperatures[part] + noise(keys[part], tokens), axis=-1)
            for part in chunks(logits)
        ]
    )
