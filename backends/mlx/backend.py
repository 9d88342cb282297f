"""The MLX backend: a loaded model behind `backends.base.Backend`. Every method belongs to the engine thread."""

from collections.abc import Callable, Collection, Mapping, Sequence

import mlx.core as mx
import numpy as np

from backends.base import Blocks, Flight, Masks, MemoryUse, ModelInfo
from backends.masks import Allowed, unpack
from backends.mlx import exponential
from backends.mlx.adjust import Adjustments, LaneTables
from backends.mlx.features import Features
from backends.mlx.memory import LaneLedger, PlainMemory, Residence
from backends.mlx.rows import Exp, SampledRow
from backends.mlx.sampler import DrawnRows, draw
from backends.mlx.threads import BlasPace
from backends.mlx.verify import Draws, Forward, Verified
from scheduler.admission import LaneMemory
from scheduler.draft import DraftSource
from scheduler.round import Drawn, Window


class Unsampled:
    """The logits of a forward, and all that is needed to draw from them but the masks."""

    def __init__(
        self,
        verified: Verified,
        windows: Sequence[Window],
        adjustments: Adjustments | None,
        masks: Masks | None,
        exp: Exp,
    ) -> None:
        self.sampled = verified.sampled
        self.newest = {windows[each.index].slot: each.last - 1 for each in verified.sampled}
        """Which row holds each slot's newest draw."""
        self._logits = verified.logits
        self._rows = [row for each in verified.sampled for row in _sampled_rows(windows[each.index])]
        self._adjustments = adjustments
        self._masks = masks
        self._exp = exp

    def draw(self) -> DrawnRows:
        """Wait for the masks and start drawing."""
        assert self._logits is not None
        allowed = self._allowed(self._logits.shape)
        drawn = draw(self._logits, self._rows, adjustments=self._adjustments, allowed=allowed, exp=self._exp)
        drawn.launch()
        self._logits = None
        return drawn

    def _allowed(self, shape: tuple[int, ...]) -> Allowed | None:
        """The masks of all rows; None if there is none."""
        masks = self._masks.wait() if self._masks is not None else {}
        if not masks:
            return None
        allowed = np.ones(shape, dtype=np.bool_)
        for window in self.sampled:
            if window.index in masks:
                allowed[window.first : window.last] = unpack(masks[window.index], shape[1])
        return allowed


class MLXFlight:
    """A forward on its way: the device has the work, the host has not looked yet. Written by `read` and `draws`."""

    def __init__(
        self, windows: int, unsampled: Unsampled | None, landed: Callable[[], None], *, at_once: bool = True
    ) -> None:
        """`unsampled` is None if no window samples. Draws `at_once`, or when someone looks."""
        self._windows = windows
        self._unsampled = unsampled
        self._landed = landed
        self._drawn = unsampled.draw() if unsampled is not None and at_once else None

    def draws(self) -> Draws | None:
        """What was drawn, on the device, for windows that carry it on; waits for masks if there are any."""
        if self._unsampled is None:
            return None
        return Draws(self._rows(self._unsampled).tokens, self._unsampled.newest)

    def read(self) -> list[Drawn]:
        """Wait, and return each window's draws (none for a chunk)."""
        drawn = [Drawn()] * self._windows
        if self._unsampled is not None:
            read = self._rows(self._unsampled).read()
            for window in self._unsampled.sampled:
                drawn[window.index] = read.window(window.first, window.last)
        self._landed()
        return drawn

    def _rows(self, unsampled: Unsampled) -> DrawnRows:
        if self._drawn is None:
            self._drawn = unsampled.draw()
        return self._drawn


class MLXBackend:
    """Full-attention lanes of one mlx-lm model."""

    def __init__(
        self, info: ModelInfo, forward: Forward, pace: BlasPace | None = None, blocks: Blocks | None = None
    ) -> None:
        """`pace` where BLAS's threads can be set between rounds; `blocks` are those of the forward's lanes."""
        self.info = info
        self.blocks: Blocks | None = blocks
        self.drafters: Sequence[DraftSource] = ()
        self._forward = forward
        self._pace = pace
        self._tables = LaneTables()
        self._exp = exponential.best_exp()
        self.memory: LaneMemory = LaneLedger(forward.store)
        """With a draft model's lanes, if there is one."""
        self.residence = Residence(PlainMemory())
        """Of what may be held; replaced at load, once that is known."""
        self.features: Features | None = None
        """What the forward's taps note, for drafters that read it."""
        self._spoiled: set[int] = set()

    @property
    def taps(self) -> int:
        """How many places of the model are tapped."""
        return 0 if self._forward.taps is None else len(self._forward.taps.taps)

    def verify(self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None) -> MLXFlight:
        """Start one forward over all windows, and draw from its sampled rows on the device; with `masks`, once read."""
        carried = after.draws() if isinstance(after, MLXFlight) else None
        self.residence.run()
        landed = self._landing(windows)
        spoiled, self._spoiled = self._spoiled, set()
        verified = _spoil(self._forward.run(windows, carried), windows, spoiled)
        if self.features is not None and verified.tapped is not None:
            self.features.begin(windows, verified.tapped)
            mx.async_eval(verified.tapped.hidden)
        if verified.logits is None:
            mx.eval(self._forward.buffers())
            return MLXFlight(len(windows), None, landed)
        adjusted = [windows[sampled.index] for sampled in verified.sampled]
        if masks is not None or any(window.sampling.counts for window in adjusted):
            mx.async_eval(verified.logits)  # the host has work to do meanwhile
        adjustments = self._tables.adjustments(adjusted, verified.logits.shape[-1])
        unsampled = Unsampled(verified, windows, adjustments, masks, self._exp)
        return MLXFlight(len(windows), unsampled, landed, at_once=masks is None)

    def _landing(self, windows: Sequence[Window]) -> Callable[[], None]:
        """What is to be done when this round has landed."""
        paced = self._pace.launch(sum(window.rows for window in windows)) if self._pace else _nothing
        if all(window.samples for window in windows):
            return paced

        def landed() -> None:
            paced()
            self.residence.prefilled()

        return landed

    def spoil(self, slot: int) -> None:
        """Make the slot's logits in the next forward NaN: see `backends.faults`."""
        self._spoiled.add(slot)

    def keep(self, kept: Mapping[int, int]) -> dict[int, int]:
        """Cut every lane's caches to what it keeps; all of them can be cut there."""
        self._forward.keep(kept)
        if self.features is not None:
            self.features.keep(kept)
        return dict(kept)

    def release(self, slot: int) -> None:
        """Give the lane's seat back. Idempotent."""
        self._forward.release(slot)
        self._tables.release(slot)

    def reset(self) -> None:
        """Forget every lane."""
        self._forward.reset()
        if self.features is not None:
            self.features.reset()
        self._tables.reset()
        if self._pace:
            self._pace.reset()

    def use(self) -> MemoryUse:
        """What MLX holds in memory now."""
        return self.residence.use()

    def rest(self) -> None:
        """No round comes for some time, or none at all: wire nothing, and keep nothing that was freed. Idempotent."""
        self.residence.rest()


def _nothing() -> None:
    """What a landing means where nobody paces."""


def _spoil(verified: Verified, windows: Sequence[Window], slots: Collection[int]) -> Verified:
    """The same forward, but the sampled rows of these slots are NaN."""
    if not slots or verified.logits is None:
        return verified
    added = np.zeros((verified.logits.shape[0], 1), dtype=np.float32)
    for each in verified.sampled:
        if windows[each.index].slot in slots:
            added[each.first : each.last] = np.nan
    return Verified(verified.logits + mx.array(added).astype(verified.logits.dtype), verified.sampled, verified.tapped)


def _sampled_rows(window: Window) -> list[SampledRow]:
    first = window.start + window.real
    return [SampledRow(window.sampling, position) for position in range(first, window.end + 1)]
