"""The load-time check: several ragged lanes must give the logits that each lane gives alone.

A model whose own code mixes up lanes (masks of the wrong rank, positions taken from one lane) is found here, before it
answers anyone. The reference is mlx-lm's own single-sequence forward with mlx-lm's own cache.
"""

from collections.abc import Sequence

import mlx.core as mx
import msgspec
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from backends.mlx.verify import Forward
from scheduler.request import Sampling
from scheduler.round import Window

_TOLERANCE = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 2e-1}
"""The largest difference of logits that numbers of a type explain, in units of the logits' spread (at least 1)."""
_AGREEING_ROWS = {mx.float32: 1.0, mx.float16: 0.8, mx.bfloat16: 0.8}
"""The share of rows that must agree: in half precision a mixture's router may choose otherwise at a near-tie."""


class Disagreement(Exception):  # noqa: N818 (it is what was found, not a fault)
    """A model's lanes disagree with its single sequence; the message says at how many lanes and by how much."""


class _Probe(msgspec.Struct, frozen=True):
    """One lane of the check: its tokens, of which `chunked` are fed as a chunk. Then a window drafts `accepted` right
    tokens and `rejected` wrong ones, of which the first are kept, and a last window the rest.
    """

    slot: int
    tokens: tuple[int, ...]
    chunked: int
    accepted: int
    rejected: int

    @property
    def kept(self) -> int:
        """How much is cached before the last window."""
        return self.chunked + 1 + self.accepted

    def chunk(self) -> Window:
        return self._window(0, self.tokens[: self.chunked], samples=False)

    def wrong(self) -> Window:
        head, *right = self.tokens[self.chunked : self.kept]
        wrong = self.tokens[: self.rejected]
        return self._window(self.chunked, (head,), samples=True, draft=(*right, *wrong))

    def right(self) -> Window:
        head, *draft = self.tokens[self.kept :]
        return self._window(self.kept, (head,), samples=True, draft=tuple(draft))

    def _window(self, start: int, tokens: tuple[int, ...], *, samples: bool, draft: tuple[int, ...] = ()) -> Window:
        reach = len(self.tokens) + 1
        return Window(self.slot, str(self.slot), start, tokens, samples, Sampling(0.0), reach, draft=draft)


_LENGTHS = ((3, 0, 3, 3), (4, 2, 2, 4), (13, 1, 1, 2), (7, 3, 1, 1), (11, 0, 5, 2))
"""Of the probes in turn: tokens of the chunk, drafts that are right and wrong, tokens of the last window. The first two
have widths of which one is padded to the other where that is done at all; further ones are farther apart.
"""


def check_lanes(model: Module, forward: Forward, *, vocabulary: int, kv_heads: int) -> None:
    """Compare ragged lanes with single ones, at 2 and 3 lanes and as many as there are KV heads in any layer.

    Raises Disagreement, or whatever the model's code raises for several lanes. Leaves no lane behind.
    """
    for lanes in sorted({2, 3, kv_heads}):
        probes = _probes(lanes, vocabulary)
        try:
            logits = _ragged(forward, probes)
        finally:
            forward.reset()
        for probe in probes:
            _compare(lanes, logits[probe.slot], _alone(model, probe))


def _probes(lanes: int, vocabulary: int) -> list[_Probe]:
    draws = np.random.default_rng(lanes)
    probes = []
    for slot in range(lanes):
        chunked, accepted, rejected, last = _LENGTHS[slot % len(_LENGTHS)]
        tokens = draws.integers(1, vocabulary, size=chunked + 1 + accepted + last)
        probes.append(_Probe(slot, tuple(int(token) for token in tokens), chunked, accepted, rejected))
    return probes


def _ragged(forward: Forward, probes: Sequence[_Probe]) -> list[mx.array]:
    """Each probe's logits over its last window; chunks first, then drafts that are partly rejected, then the rest."""
    forward.run([probe.chunk() for probe in probes], None)
    mx.eval(forward.buffers())
    forward.keep({})
    mx.eval(forward.run([probe.wrong() for probe in probes], None).logits)
    forward.keep({probe.slot: probe.kept for probe in probes})
    verified = forward.run([probe.right() for probe in probes], None)
    if verified.logits is None:
        raise Disagreement("the forward gave no logits")
    rows = {sampled.index: verified.logits[sampled.first : sampled.last] for sampled in verified.sampled}
    return [rows[probe.slot] for probe in probes]


def _alone(model: Module, probe: _Probe) -> mx.array:
    """The same rows from one forward over the whole sequence."""
    logits: mx.array = model(mx.array([probe.tokens]), cache=make_prompt_cache(model))
    return logits[0, probe.kept :]


def _compare(lanes: int, ragged: mx.array, alone: mx.array) -> None:
    kind = alone.dtype
    spread = mx.maximum(mx.std(alone.astype(mx.float32)), 1.0)
    worst = mx.abs(ragged.astype(mx.float32) - alone.astype(mx.float32)).max(axis=-1) / spread
    agreeing = np.mean(np.array(worst) <= _TOLERANCE.get(kind, 1e-3))
    if agreeing < _AGREEING_ROWS.get(kind, 1.0):
        raise Disagreement(f"at {lanes} lanes, logits differ from a single lane's by {worst.max().item():.2g}")
