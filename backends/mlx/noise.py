"""The keyed Gumbel noise of contract rule 7 with MLX: bit for bit the hash of `backends.noise`, on any tokens."""

import mlx.core as mx

from backends.noise import LARGEST_UNIT, MIX_A, MIX_B

_TINY = 1e-30


def noise(keys: mx.array, tokens: mx.array) -> mx.array:
    """Standard Gumbel noise, float32 `[rows, n]`; row keys uint32 `[rows, 2]`, tokens uint32 `[n]` or `[rows, n]`.

    A token's noise depends on its row's key and on itself alone.
    """
    hashed = _lowbias32(_lowbias32(tokens ^ keys[:, :1]) ^ keys[:, 1:])
    unit = mx.minimum((hashed.astype(mx.float32) + 0.5) * 2.0**-32, LARGEST_UNIT)
    return -mx.log(_minus_log1p_minus(unit))


def _minus_log1p_minus(unit: mx.array) -> mx.array:
    """-log1p(-u) for u in (0, 1 - 2**-24], by Kahan's correction of log(1 - u): u * log(1 - u) / ((1 - u) - 1).

    MLX's x86 wheel computes `log1p` one number at a time and `log` vectorised: a third of the time. Where 1 - u rounds
    to 1, the quotient of two tiny numbers is 1, as it should be.
    """
    rest = 1.0 - unit
    return unit * ((mx.log(rest) - _TINY) / ((rest - 1.0) - _TINY))


def _lowbias32(value: mx.array) -> mx.array:
    value = (value ^ (value >> 16)) * mx.array(MIX_A, mx.uint32)
    value = (value ^ (value >> 15)) * mx.array(MIX_B, mx.uint32)
    return value ^ (value >> 16)
