"""The keyed noise of contract rule 7: a 32-bit hash of (seed, choice, position, token id), and what is made of it.

This hash is part of the answer to every seeded request and never changes between versions. Here is its definition over
numpy, which `backends.reference` uses as it is; `backends.mlx.noise` computes the same bits with MLX.

Two rounds of the "lowbias32" mixer (C. Wellons, "Prospecting for Hash Functions", 2018) over the token id, each keyed
by one half of a 64-bit row key, which is splitmix64 (Steele, Lea, Flood 2014) over seed, choice and position.
"""

import numpy as np
import numpy.typing as npt

_MASK64 = (1 << 64) - 1
MIX_A = 0x7FEB352D
MIX_B = 0x846CA68B
LARGEST_UNIT = 1.0 - 2.0**-24
"""The largest float32 below one: the top 128 hash values would round to 1 and their noise to minus infinity."""


def row_key(seed: int, choice: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys for the row that draws the token at absolute `position`."""
    state = _splitmix64(seed & _MASK64)
    state = _splitmix64(state ^ (choice & 0xFFFFFFFF))
    state = _splitmix64(state ^ (position & 0xFFFFFFFF))
    return state >> 32, state & 0xFFFFFFFF


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def token_hash(key: tuple[int, int], tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The 32-bit hash of each token id under a row key; any shape, uint32 in and out."""
    return _lowbias32(_lowbias32(tokens ^ np.uint32(key[0])) ^ np.uint32(key[1]))


def _lowbias32(value: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    value = (value ^ (value >> np.uint32(16))) * np.uint32(MIX_A)
    value = (value ^ (value >> np.uint32(15))) * np.uint32(MIX_B)
    return value ^ (value >> np.uint32(16))


def gumbel(hashed: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise g = -log(-log1p(-u)), u = (x + 0.5) / 2**32, in float32; finite for every hash value."""
    unit = (hashed.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    unit = np.minimum(unit, np.float32(LARGEST_UNIT))
    noise: npt.NDArray[np.float32] = -np.log(-np.log1p(-unit))
    return noise
