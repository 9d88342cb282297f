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
    """One lane of the check: its tokens, how many are fed as chunks, as real tokens and as a draft."""

    slot: int
    tokens: tuple[int, ...]
    chunked: int
    rejected: int
    """A draft of that many wrong tokens is verified and dropped before the true one."""

    def chunk(self) -> Window:
        return self._window(0, self.tokens[: self.chunked], samples=False)

    def wrong(self) -> Window:
        head = self.tokens[self.chunked : self.chunked + 1]
        draft = tuple(reversed(self.tokens[: self.rejected]))
        return self._window(self.chunked, head, samples=True, draft=draft)

    def right(self) -> Window:
        head, *draft = self.tokens[self.chunked :]
        return self._window(self.chunked, (head,), samples=True, draft=tuple(draft))

    def _window(self, start: int, tokens: tuple[int, ...], *, samples: bool, draft: tuple[int, ...] = ()) -> Window:
        reach = len(self.tokens) + 1
        return Window(self.slot, str(self.slot), start, tokens, samples, Sampling(0.0), reach, draft=draft)


def check_lanes(model: Module, forward: Forward, *, vocabulary: int, kv_heads: int) -> None:
    """Compare ragged lanes with single ones, at 2 and 3 lanes and as many as there are KV heads.

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
        chunked = 3 + 5 * slot % 11
        tokens = draws.integers(1, vocabulary, size=chunked + 1 + slot % 4)
        probes.append(_Probe(slot, tuple(int(token) for token in tokens), chunked, rejected=2 * slot % 5))
    return probes


def _ragged(forward: Forward, probes: Sequence[_Probe]) -> list[mx.array]:
    """Each probe's logits over its last window; chunks first, then drafts that are rejected, then the true ones."""
    forward.run([probe.chunk() for probe in probes], None)
    mx.eval(forward.buffers())
    mx.eval(forward.run([probe.wrong() for probe in probes], None).logits)
    verified = forward.run([probe.right() for probe in probes], None)
    if verified.logits is None:
        raise Disagreement("the forward gave no logits")
    rows = {sampled.index: verified.logits[sampled.first : sampled.last] for sampled in verified.sampled}
    return [rows[probe.slot] for probe in probes]


def _alone(model: Module, probe: _Probe) -> mx.array:
    """The same rows from one forward over the whole sequence."""
    logits: mx.array = model(mx.array([probe.tokens]), cache=make_prompt_cache(model))
    return logits[0, probe.chunked :]


def _compare(lanes: int, ragged: mx.array, alone: mx.array) -> None:
    kind = alone.dtype
    spread = mx.maximum(mx.std(alone.astype(mx.float32)), 1.0)
    worst = mx.abs(ragged.astype(mx.float32) - alone.astype(mx.float32)).max(axis=-1) / spread
    agreeing = np.mean(np.array(worst) <= _TOLERANCE.get(kind, 1e-3))
    if agreeing < _AGREEING_ROWS.get(kind, 1.0):
        raise Disagreement(f"at {lanes} lanes, logits differ from a single lane's by {worst.max().item():.2g}")
