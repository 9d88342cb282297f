"""The MLX backend: a loaded model behind `backends.base.Backend`. Every method belongs to the engine thread."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import mlx.core as mx

from backends.base import Flight, ModelInfo
from backends.mlx.sampler import SampledRow, draw
from backends.mlx.threads import BlasPace
from backends.mlx.verify import Draws, Forward, SampledWindow
from scheduler.round import Window


class MLXFlight:
    """A forward on its way: the device has the work, the host has not looked yet."""

    def __init__(
        self, windows: int, sampled: Sequence[SampledWindow], draws: Draws | None, landed: Callable[[], None]
    ) -> None:
        self._windows = windows
        self._sampled = sampled
        self._landed = landed
        self.draws = draws

    def read(self) -> list[list[int]]:
        """Wait, and return each window's draws (none for a chunk)."""
        drawn: list[list[int]] = [[] for _ in range(self._windows)]
        if self.draws is not None:
            tokens = cast("list[int]", self.draws.tokens.tolist())
            for window in self._sampled:
                drawn[window.index] = tokens[window.first : window.last]
        self._landed()
        return drawn


class MLXBackend:
    """Full-attention lanes of one mlx-lm model."""

    def __init__(self, info: ModelInfo, forward: Forward, pace: BlasPace | None = None) -> None:
        """`pace` where BLAS's threads can be set between rounds."""
        self.info = info
        self._forward = forward
        self._pace = pace

    def verify(self, windows: Sequence[Window], after: Flight | None = None) -> MLXFlight:
        """Start one forward over all windows, and draw from its sampled rows on the device."""
        carried = after.draws if isinstance(after, MLXFlight) else None
        landed = self._pace.launch(sum(window.rows for window in windows)) if self._pace else _nothing
        verified = self._forward.run(windows, carried)
        if verified.logits is None:
            mx.eval(self._forward.buffers())
            return MLXFlight(len(windows), (), None, landed)
        rows = [row for sampled in verified.sampled for row in _sampled_rows(windows[sampled.index])]
        tokens = draw(verified.logits, rows)
        mx.async_eval(tokens)
        newest = {windows[sampled.index].slot: sampled.last - 1 for sampled in verified.sampled}
        return MLXFlight(len(windows), verified.sampled, Draws(tokens, newest), landed)

    def keep(self, kept: Mapping[int, int]) -> dict[int, int]:
        """Full attention needs nothing done: what is not kept is overwritten by the lane's next window."""
        return dict(kept)

    def release(self, slot: int) -> None:
        """Give the lane's seat back. Idempotent."""
        self._forward.release(slot)

    def reset(self) -> None:
        """Forget every lane."""
        self._forward.reset()
        if self._pace:
            self._pace.reset()


def _nothing() -> None:
    """What a landing means where nobody paces."""


def _sampled_rows(window: Window) -> list[SampledRow]:
    first = window.start + window.real
    return [SampledRow(window.sampling, position) for position in range(first, window.end + 1)]
