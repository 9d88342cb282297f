"""What the parts of the sampler share: how a row is drawn, and operations on rows of logits."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from backends.noise import row_key
from scheduler.request import Sampling

Exp = Callable[[mx.array], mx.array]
"""e**x for float32 x up to 0, any shape; what lies below the float32 range may come out as any number below 1e-37."""

CHUNK = 1 << 19
"""Logits that the CPU works on at once: 2 MB temporaries stay in its cache and in the allocator's hands. glibc gives
larger ones back to the system after every operation (40 rows of 49,152 logits: noise in 17 ms instead of 40).
"""


class SampledRow(msgspec.Struct, frozen=True):
    """How one row of logits is drawn from, and the absolute position of the token that it draws."""

    sampling: Sampling
    position: int


def keys_of(rows: Sequence[SampledRow]) -> mx.array:
    """The rows' noise keys, uint32 `[rows, 2]`."""
    keys = [row_key(row.sampling.seed, row.sampling.choice, row.position) for row in rows]
    return mx.array(np.array(keys, dtype=np.uint32))


def temperatures_of(rows: Sequence[SampledRow]) -> mx.array:
    """Float32 `[rows, 1]`."""
    return mx.array(np.array([[row.sampling.temperature] for row in rows], dtype=np.float32))


def chosen(logits: mx.array, indices: Sequence[int] | npt.NDArray[np.intp]) -> mx.array:
    """These rows of `logits`, without a copy if they are all of them."""
    return logits if len(indices) == logits.shape[0] else logits[mx.array(np.asarray(indices, dtype=np.int32))]


def only(values: mx.array, kept: mx.array) -> mx.array:
    """Float32 `values` where `kept` (boolean, same shape), minus infinity elsewhere.

    A minimum with plus and minus infinity: on the CPU, `mx.where` takes six times as long for rows of logits.
    """
    return mx.minimum(values, (kept.astype(mx.float32) - 0.5) * mx.inf)


def chunks(logits: mx.array) -> list[slice]:
    """The rows of `logits`, in parts that are computed one after another; on a GPU all at once."""
    rows, vocabulary = logits.shape
    step = max(CHUNK // vocabulary, 1) if mx.default_device().type == mx.cpu else rows
    return [slice(first, first + step) for first in range(0, rows, step)]


def mass(logits: mx.array, highest: mx.array, temperatures: mx.array, exp: Exp) -> mx.array:
    """The sum of e**((logit - highest) / temperature) of each row, `[rows, 1]` like `highest` and `temperatures`."""
    return mx.concatenate(
        [
            exp((logits[part] - highest[part]) / temperatures[part]).sum(axis=-1, keepdims=True)
            for part in chunks(logits)
        ]
    )


def highest_of(logits: mx.array) -> mx.array:
    """Each row's largest logit `[rows, 1]`, finite even if all are minus infinity, so that it can be subtracted."""
    return mx.maximum(logits.max(axis=-1, keepdims=True), mx.finfo(mx.float32).min)
