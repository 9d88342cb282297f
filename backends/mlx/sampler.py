"""Draws one token per sampled row, all rows of a round at once.

Greedy rows take the largest logit and compute nothing else. The others add keyed Gumbel noise to their logits over the
temperature and take the largest (the Gumbel-max trick), with the noise of `backends.noise`, bit for bit the same hash.
"""

from collections.abc import Sequence

import mlx.core as mx
import msgspec
import numpy as np

from backends.noise import LARGEST_UNIT, MIX_A, MIX_B, row_key
from scheduler.request import Sampling


class SampledRow(msgspec.Struct, frozen=True):
    """How one row of logits is drawn from, and the absolute position of the token that it draws."""

    sampling: Sampling
    position: int


def draw(logits: mx.array, rows: Sequence[SampledRow]) -> mx.array:
    """Tokens, uint32 `[rows]`, for logits `[rows, vocabulary]`."""
    warm = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    if not warm:
        return mx.argmax(logits, axis=-1)
    if len(warm) == len(rows):
        return _draw_warm(logits, rows)
    cold = [index for index, row in enumerate(rows) if row.sampling.temperature <= 0]
    drawn = mx.concatenate(
        [
            mx.argmax(logits[mx.array(cold)], axis=-1),
            _draw_warm(logits[mx.array(warm)], [rows[index] for index in warm]),
        ]
    )
    return drawn[mx.array(np.argsort(np.array(cold + warm)).astype(np.int32))]


def _draw_warm(logits: mx.array, rows: Sequence[SampledRow]) -> mx.array:
    temperatures = mx.array(np.array([[row.sampling.temperature] for row in rows], dtype=np.float32))
    scores = logits.astype(mx.float32) / temperatures + noise(_keys(rows), logits.shape[-1])
    return mx.argmax(scores, axis=-1)


def _keys(rows: Sequence[SampledRow]) -> mx.array:
    keys = [row_key(row.sampling.seed, row.sampling.choice, row.position) for row in rows]
    return mx.array(np.array(keys, dtype=np.uint32))


def noise(keys: mx.array, vocabulary: int) -> mx.array:
    """Gumbel noise, float32 `[rows, vocabulary]`, for row keys uint32 `[rows, 2]` (contract rule 7)."""
    hashed = _lowbias32(mx.arange(vocabulary, dtype=mx.uint32) ^ keys[:, :1])
    hashed = _lowbias32(hashed ^ keys[:, 1:])
    unit = mx.minimum((hashed.astype(mx.float32) + 0.5) * 2.0**-32, LARGEST_UNIT)
    return -mx.log(-mx.log1p(-unit))


def _lowbias32(value: mx.array) -> mx.array:
    value = (value ^ (value >> 16)) * mx.array(MIX_A, mx.uint32)
    value = (value ^ (value >> 15)) * mx.array(MIX_B, mx.uint32)
    return value ^ (value >> 16)
