"""Log-probabilities for the rows that asked: log-softmax of the target's raw logits (contract rule 6)."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from backends.mlx.candidates import largest
from backends.mlx.rows import Exp, highest_of, mass
from scheduler.events import TokenLogprob

_CANDIDATES = 64
"""How many of the likeliest tokens are looked at, at least: equal ones are put in order on the host."""


class RowLogprobs:
    """What is to be reported of some rows; computed at once, read when their tokens are known."""

    def __init__(self, logits: mx.array, tops: Sequence[int], exp: Exp) -> None:
        """Raw logits `[rows, vocabulary]`, and how many of the likeliest tokens each row reports."""
        self._logits = logits.astype(mx.float32)
        self._tops = tops
        highest = highest_of(self._logits)
        self._normalisers = highest + mx.log(mass(self._logits, highest, mx.ones(highest.shape), exp))
        wanted = min(max(_CANDIDATES, 2 * max(tops)), logits.shape[1])
        self._values, self._tokens = largest(self._logits, wanted)

    def arrays(self) -> list[mx.array]:
        """What the device computes."""
        return [self._normalisers, self._values, self._tokens]

    def read(self, drawn: npt.NDArray[np.uint32]) -> list[TokenLogprob]:
        """One per row, for the tokens drawn there, `[rows]`."""
        logits = np.array(mx.take_along_axis(self._logits, mx.array(drawn)[:, None], axis=-1))[:, 0]
        normalisers = np.array(self._normalisers)[:, 0]
        values, tokens = np.array(self._values), np.array(self._tokens)
        reported = []
        for row, top in enumerate(self._tops):
            best, logprobs = self._likeliest(row, top, values[row], tokens[row])
            pairs = zip(best.tolist(), (logprobs - normalisers[row]).tolist(), strict=True)
            reported.append(TokenLogprob(float(logits[row] - normalisers[row]), tuple(pairs)))
        return reported

    def _likeliest(
        self, row: int, top: int, values: npt.NDArray[np.float32], tokens: npt.NDArray[np.uint32]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
        """The `top` likeliest tokens and their logits, of equal ones the lowest first."""
        whole = self._logits.shape[1]
        if len(values) < whole and top and values[top - 1] == values[-1]:
            values, tokens = np.array(self._logits[row]), np.arange(whole, dtype=np.uint32)
        order = np.lexsort((tokens, -values))[:top]
        return tokens[order], values[order]
