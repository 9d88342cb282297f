"""The verify forward: windows in, logits of the sampled rows out. Packed where the model allows, padded elsewhere.

Owns the lanes' seats and buffers. Knows nothing of sampling; `MLXBackend` draws from the logits.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np

from backends.mlx.caches.buffers import LayerBuffers, LayerShape
from backends.mlx.caches.full import PackedCache, PaddedCache
from backends.mlx.caches.groups import Change, LaneGroups, Move
from backends.mlx.exponential import Attention
from backends.mlx.layout import packed_layout
from backends.mlx.rectangle import padded_layout
from backends.mlx.seam import HeadRows
from scheduler.round import Window


class SampledWindow(msgspec.Struct, frozen=True):
    """A window that was sampled: its place in the round, and its rows `[first, last)` among the sampled ones."""

    index: int
    first: int
    last: int


class Verified(msgspec.Struct, frozen=True):
    """What a forward gives: logits `[sampled rows, vocabulary]`, None if no window samples; and whose rows they are."""

    logits: mx.array | None
    sampled: tuple[SampledWindow, ...]


class Draws(msgspec.Struct, frozen=True):
    """Tokens drawn on the device (`[sampled rows]`), and which of them is each slot's newest."""

    tokens: mx.array
    newest: Mapping[int, int]


class Forward(Protocol):
    """Runs windows through the model. Implemented packed and padded."""

    def run(self, windows: Sequence[Window], carried: Draws | None) -> Verified:
        """Feed all windows; those marked `carried` feed their slot's newest token of `carried`."""
        ...

    def release(self, slot: int) -> None:
        """Give a lane's seat back. Idempotent."""
        ...

    def reset(self) -> None:
        """Give all seats back."""
        ...

    def buffers(self) -> list[mx.array]:
        """All cache arrays."""
        ...


class LaneStore:
    """Seats and, per attention layer, buffers; the two forwards stand on one each. Written by its forward."""

    def __init__(self, shapes: Sequence[LayerShape], *, together: bool) -> None:
        self.groups = LaneGroups(together=together)
        self.layers = [LayerBuffers(shape) for shape in shapes]

    def place(self, needs: Mapping[int, tuple[int, int]]) -> None:
        """Seat lanes: slot -> (positions needed, positions held)."""
        self._apply(self.groups.place(needs))

    def share(self, windows: Sequence[Window]) -> None:
        """Copy to each seated lane what its window says that it has in common with a sibling."""
        seat = self.groups.seat
        self._apply(
            [
                Move(seat(window.copies), seat(window.slot), window.start)
                for window in windows
                if window.copies is not None
            ]
        )

    def release(self, slot: int) -> None:
        """Give a lane's seat back. Idempotent."""
        self._apply(self.groups.leave(slot))

    def reset(self) -> None:
        """Give all seats back."""
        self._apply(self.groups.clear())

    def arrays(self) -> list[mx.array]:
        """All buffers of all layers."""
        return [array for layer in self.layers for array in layer.arrays()]

    def _apply(self, changes: Sequence[Change]) -> None:
        for layer in self.layers:
            for change in changes:
                layer.apply(change)


class StoredForward:
    """What both forwards do with the lanes' seats."""

    def __init__(self, store: LaneStore) -> None:
        self._store = store

    def release(self, slot: int) -> None:
        """Give a lane's seat back. Idempotent."""
        self._store.release(slot)

    def reset(self) -> None:
        """Give all seats back."""
        self._store.reset()

    def buffers(self) -> list[mx.array]:
        """All cache arrays."""
        return self._store.arrays()


class PackedForward(StoredForward):
    """One forward over `[rows, 1]` tokens: real rows only, attention per rectangle."""

    def __init__(self, model: nn.Module, head: HeadRows, shapes: Sequence[LayerShape], attention: Attention) -> None:
        self._model = model
        self._head = head
        super().__init__(LaneStore(shapes, together=False))
        self._caches = [PackedCache(layer, attention) for layer in self._store.layers]

    def run(self, windows: Sequence[Window], carried: Draws | None) -> Verified:
        """Feed all windows in one forward."""
        self._store.place({window.slot: (max(window.end, window.reach), window.start) for window in windows})
        self._store.share(windows)
        layout = packed_layout(windows, self._store.groups)
        for cache in self._caches:
            cache.layout = layout
        ordered = [entry.window for entry in layout.seated]
        firsts = [entry.first for entry in layout.seated]
        rows, sampled = _sampled_rows(ordered, [entry.index for entry in layout.seated], firsts)
        tokens = _packed_tokens(ordered, carried)[:, None]
        logits = _logits(self._model, self._head, tokens, self._caches, rows, layout.rows)
        return Verified(logits if rows else None, sampled)


class PaddedForward(StoredForward):
    """One right-padded `[lanes, width]` forward for the decode windows, and another for the prefill chunks."""

    def __init__(self, model: nn.Module, head: HeadRows, shapes: Sequence[LayerShape]) -> None:
        self._model = model
        self._head = head
        super().__init__(LaneStore(shapes, together=True))
        self._caches = [PaddedCache(layer) for layer in self._store.layers]

    def run(self, windows: Sequence[Window], carried: Draws | None) -> Verified:
        """Feed the chunks in one rectangle, then all sampled windows in another."""
        chunks = [index for index, window in enumerate(windows) if not window.samples]
        if chunks:
            self._run([windows[index] for index in chunks], chunks, None)
            mx.async_eval(self._store.arrays())
        indices = [index for index, window in enumerate(windows) if window.samples]
        if not indices:
            return Verified(None, ())
        return self._run([windows[index] for index in indices], indices, carried)

    def _run(self, windows: Sequence[Window], indices: Sequence[int], carried: Draws | None) -> Verified:
        width = max(window.rows for window in windows)
        self._store.place({window.slot: (max(window.start + width, window.reach), window.start) for window in windows})
        self._store.share(windows)
        layout = padded_layout(windows, self._store.groups)
        for cache in self._caches:
            cache.layout = layout
        ordered = [windows[index] for index in layout.order]
        firsts = [lane * width for lane in range(layout.lanes)]
        rows, sampled = _sampled_rows(ordered, [indices[index] for index in layout.order], firsts)
        tokens = _padded_tokens(ordered, width, carried)
        logits = _logits(self._model, self._head, tokens, self._caches, rows, layout.lanes * width)
        return Verified(logits if rows else None, sampled)


def _sampled_rows(
    windows: Sequence[Window], indices: Sequence[int], firsts: Sequence[int]
) -> tuple[list[int], tuple[SampledWindow, ...]]:
    """The rows of the forward that are sampled, and which of them belong to which window of the round."""
    rows: list[int] = []
    sampled: list[SampledWindow] = []
    for window, index, first in zip(windows, indices, firsts, strict=True):
        if window.samples:
            before = len(rows)
            rows.extend(range(first + window.real - 1, first + window.rows))
            sampled.append(SampledWindow(index, before, len(rows)))
    return rows, tuple(sampled)


def _packed_tokens(windows: Sequence[Window], carried: Draws | None) -> mx.array:
    """Token ids, int32 or uint32 `[rows]`."""
    if carried is not None:
        return carried.tokens[mx.array([carried.newest[window.slot] for window in windows])]
    return mx.array([token for window in windows for token in (*window.tokens, *window.draft)])


def _padded_tokens(windows: Sequence[Window], width: int, carried: Draws | None) -> mx.array:
    """Token ids `[lanes, width]`, padded with token 0."""
    if carried is not None:
        return _packed_tokens(windows, carried)[:, None]
    tokens = np.zeros((len(windows), width), dtype=np.int32)
    for lane, window in enumerate(windows):
        tokens[lane, : window.rows] = (*window.tokens, *window.draft)
    return mx.array(tokens)


def _logits(
    model: nn.Module,
    head: HeadRows,
    tokens: mx.array,
    caches: Sequence[PackedCache] | Sequence[PaddedCache],
    rows: Sequence[int],
    total: int,
) -> mx.array:
    """Logits `[sampled rows, vocabulary]`; the head computes no other row. Nothing is evaluated yet."""
    chosen = mx.array(list(rows) or [0])
    head.rows = None if len(rows) == total else chosen
    try:
        logits: mx.array = model(tokens, cache=list(caches))
        logits = logits.reshape(-1, logits.shape[-1])
        obeyed = head.rows is None or logits.shape[0] == chosen.size
    finally:
        head.rows = None  # also where the model raised: its next caller may be another one
    return logits if obeyed else mx.take(logits, chosen, axis=0)
