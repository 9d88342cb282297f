"""Exponentials out of operations that MLX vectorises on every CPU: SwiGLU and attention's softmax.

MLX's x86 wheel computes `exp` (and so sigmoid and softmax) one number at a time, 12 to 20 ns each, which is a third of
the time of a prefill on the CPU; multiplications, additions and integer operations run at 0.2 ns. `exp2` here is the
textbook range reduction with a minimax polynomial, good to 2.4e-7 relative. Whether it pays is measured at load
(`pays`), never assumed: GPUs and other processors have an `exp` of their own.
"""

import time
from collections.abc import Callable

import mlx.core as mx

_LOG2_E = 1.4426950408889634
_ROUNDER = 12582912.0
"""1.5 * 2**23: adding it to a float32 rounds it to an integer, which then stands in the low bits of the sum."""
_POLYNOMIAL = (0.00134004, 0.00967604, 0.05550327, 0.24022107, 0.69314721, 1.00000008)
"""2**f on [-0.5, 0.5], degree 5, highest first; Chebyshev interpolation, largest relative error 1.05e-7."""
_LOWEST = -126.0
"""The exponent of the smallest normal float32; what lies below counts as that."""
SMALLEST_SWIGLU = 8192
"""Elements from which the polynomial beats the cost of its many operations."""
SMALLEST_SCORES = 16384

Attention = Callable[..., mx.array]


def exp2(power: mx.array) -> mx.array:
    """2**power for float32 powers in [-126, 127], any shape."""
    rounded = power + _ROUNDER
    fraction = power - (rounded - _ROUNDER)
    value = fraction * _POLYNOMIAL[0] + _POLYNOMIAL[1]
    for coefficient in _POLYNOMIAL[2:]:
        value = value * fraction + coefficient
    return (value.view(mx.int32) + (rounded.view(mx.int32) << 23)).view(mx.float32)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up, float32, any shape; what silu rounds to zero comes out below 1e-30 for gates down to -1e6."""
    power = mx.clip(gate * -_LOG2_E, _LOWEST, -_LOWEST)
    return (gate * up) / (exp2(power) + 1.0)


def softmax(scores: mx.array) -> mx.array:
    """Softmax over the last axis, float32; a row needs one finite score at least."""
    highest = scores.max(axis=-1, keepdims=True)
    weights = exp2(mx.maximum((scores - highest) * _LOG2_E, _LOWEST))
    return weights / weights.sum(axis=-1, keepdims=True)


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """`mx.fast.scaled_dot_product_attention` with the softmax above where the scores are many and all of it is float32.

    Queries `[batch, heads, width, dim]`, keys and values `[batch, kv_heads, length, dim]`; heads may be a multiple of
    kv_heads. `mask` as there: boolean `[batch, 1, width, length]`, "causal" or None.
    """
    batch, heads, width, _ = queries.shape
    _, kv_heads, length, _ = keys.shape
    few = batch * heads * width * length < SMALLEST_SCORES
    if few or sinks is not None or queries.dtype != mx.float32:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    grouped = (queries * scale).reshape(batch, kv_heads, heads // kv_heads * width, -1)
    scores = grouped @ keys.swapaxes(-1, -2)
    if mask is not None:
        visible = _causal(width, length) if isinstance(mask, str) else mask[:, :, None]
        by_query = scores.reshape(batch, kv_heads, -1, width, length)
        scores = mx.where(visible, by_query, mx.finfo(mx.float32).min).reshape(scores.shape)
    return (softmax(scores) @ values).reshape(batch, heads, width, -1)


def _causal(width: int, length: int) -> mx.array:
    return mx.arange(length) <= mx.arange(length - width, length)[:, None]


def pays() -> bool:
    """Whether `exp2` beats MLX's own `exp` on the device in use, by trying both once."""
    sample = mx.linspace(-10.0, 10.0, 1 << 18)
    return _seconds(lambda: exp2(sample)) < 0.8 * _seconds(lambda: mx.exp(sample))


def _seconds(compute: Callable[[], mx.array]) -> float:
    """The best of three, after one to warm up."""
    mx.eval(compute())
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(compute())
        taken.append(time.perf_counter() - start)
    return min(taken)


def exp(power: mx.array) -> mx.array:
    """e**power for float32 powers up to 87, any shape; what lies below -87 counts as that."""
    return exp2(mx.maximum(power * _LOG2_E, _LOWEST))


def best_exp() -> Callable[[mx.array], mx.array]:
    """The `exp` above where it pays on the device in use, else MLX's own."""
    return exp if pays() else mx.exp
