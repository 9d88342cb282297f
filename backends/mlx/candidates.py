"""The largest logits of many rows, without sorting or partitioning a vocabulary."""

import mlx.core as mx

BLOCK = 32
"""Tokens whose largest logit stands for them when candidates are looked for: about sqrt(vocabulary / candidates)."""


def largest(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest logits of each row, largest first, and their tokens (uint32), both `[rows, count]`.

    Exact, but which of several equal to the last one are among them is open. The `count` largest lie in the `count`
    blocks whose own largest are largest, so only those are looked into.
    """
    vocabulary = logits.shape[1]
    blocks = vocabulary // BLOCK
    if blocks <= count:
        return _largest_of(logits, mx.broadcast_to(mx.arange(vocabulary, dtype=mx.uint32), logits.shape), count)
    within = logits[:, : blocks * BLOCK].reshape(logits.shape[0], blocks, BLOCK)
    best = mx.argpartition(-within.max(axis=-1), count - 1, axis=-1)[:, :count].astype(mx.uint32)
    tokens = (best[:, :, None] * BLOCK + mx.arange(BLOCK, dtype=mx.uint32)).reshape(logits.shape[0], -1)
    if behind := vocabulary - blocks * BLOCK:
        tail = mx.arange(vocabulary - behind, vocabulary, dtype=mx.uint32)
        tokens = mx.concatenate([tokens, mx.broadcast_to(tail, (logits.shape[0], behind))], axis=-1)
    return _largest_of(mx.take_along_axis(logits, tokens, axis=-1), tokens, count)


def _largest_of(values: mx.array, tokens: mx.array, count: int) -> tuple[mx.array, mx.array]:
    if count < values.shape[1]:
        best = mx.argpartition(-values, count - 1, axis=-1)[:, :count]
        values, tokens = mx.take_along_axis(values, best, axis=-1), mx.take_along_axis(tokens, best, axis=-1)
    falling = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(values, falling, axis=-1), mx.take_along_axis(tokens, falling, axis=-1)
