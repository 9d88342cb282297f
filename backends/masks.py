"""Token masks as the grammar writes them, a bit per token, and as samplers read them, a boolean per token."""

import numpy as np
import numpy.typing as npt

from backends.base import MaskWords

Allowed = npt.NDArray[np.bool_]
"""Which tokens may be drawn, `[rows, vocabulary]` or one row of it."""


def unpack(words: MaskWords, vocabulary: int) -> Allowed:
    """`[rows, vocabulary]` for words `[rows, n]`; tokens beyond the words are not allowed, bits beyond the vocabulary
    mean nothing.
    """
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    allowed = np.unpackbits(octets, axis=1, count=vocabulary, bitorder="little")
    return allowed.view(np.bool_)
