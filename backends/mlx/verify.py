"""The verify forward: windows in, logits of the sampled rows out. Packed where the model allows, padded elsewhere.

Owns the lanes' seats and buffers. Knows nothing of sampling; `MLXBackend` draws from the logits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx_lm.models.cache import CacheList

from backends.groups import Change, LaneGroups, Move
from backends.mlx.caches.buffers import LayerBuffers, LayerShape, Planes
from backends.mlx.caches.kinds import AttentionKind, Kind, ListKind, RecurrentKind, UnusedKind
from backends.mlx.caches.packed import PAST_THE_SEAM, PackedCache, UnusedCache, take_back
from backends.mlx.caches.padded import PaddedCache
from backends.mlx.caches.quantized import QuantizedCache, QuantizedShape
from backends.mlx.caches.recurrent import RecurrentCache
from backends.mlx.caches.sight import EVERYTHING, Sight
from backends.mlx.exponential import Attention
from backends.mlx.layout import WIDEST_SHARED, PackedRound, Seated
from backends.mlx.rectangle import padded_layout
from backends.mlx.regroup import Regrouping
from backends.mlx.seam import HeadRows
from backends.mlx.taps import Taps
from scheduler.round import Window


class SampledWindow(msgspec.Struct, frozen=True):
    """A window that was sampled: its place in the round, and its rows `[first, last)` among the sampled ones."""

    index: int
    first: int
    last: int


class TappedRows(msgspec.Struct, frozen=True):
    """What the taps noted, `[rows, width]`, and by the window's place in the round where its rows begin."""

    hidden: mx.array
    firsts: Mapping[int, int]


class Verified(msgspec.Struct, frozen=True):
    """What a forward gives: logits `[sampled rows, vocabulary]`, None if no window samples; and whose rows they are."""

    logits: mx.array | None
    sampled: tuple[SampledWindow, ...]
    tapped: TappedRows | None = None
    """Only where the forward has taps."""


class Draws(msgspec.Struct, frozen=True):
    """Tokens drawn on the device (`[sampled rows]`), and which of them is each slot's newest."""

    tokens: mx.array
    newest: Mapping[int, int]


class LaneStore:
    """Seats and, per attention layer, buffers; the two forwards stand on one each. Written by its forward."""

    def __init__(self, *, together: bool) -> None:
        self.groups = LaneGroups(together=together, row_bytes=self._row_bytes)
        self.layers: list[LayerBuffers] = []
        self.make_room: Callable[[int], None] | None = None
        """Called before lanes get other seats, with the bytes that all of them will take at the least."""

    def layer(self, shape: Planes, sight: Sight = EVERYTHING) -> LayerBuffers:
        """Buffers for one more layer; before any lane is seated."""
        self.layers.append(LayerBuffers(shape, sight))
        return self.layers[-1]

    def place(self, needs: Mapping[int, tuple[int, int]]) -> None:
        """Seat lanes: slot -> (positions needed, positions held)."""
        if self.groups.seated(needs):
            return
        if self.make_room is not None:
            self.make_room(self.groups.needed_with(needs))
        self._apply(self.groups.place(needs))

    def limit(self, most: int) -> None:
        """Take no spare rows beyond so many bytes, and give back those that are."""
        self._apply(self.groups.limit(most))

    def _row_bytes(self, capacity: int) -> int:
        return sum(layer.row_bytes(capacity) for layer in self.layers)

    def largest_share(self, capacity: int) -> float:
        """How much of a row the largest plane takes: what is held twice while buffers grow."""
        return max((layer.largest_plane(capacity) for layer in self.layers), default=0) / (
            self._row_bytes(capacity) or 1
        )

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
            layer.apply(*changes)


class Forward(Protocol):
    """Runs windows through the model. Implemented packed and padded."""

    taps: Taps | None
    """What is noted of all rows; None for nothing."""

    @property
    def store(self) -> LaneStore:
        """Where the lanes sit, and their buffers."""
        ...

    @property
    def regrouping(self) -> Regrouping | None:
        """The lanes' states, if some layer carries one."""
        ...

    @property
    def recurrent(self) -> bool:
        """Whether some layer carries a state, so that only the newest window can be cut."""
        ...

    @property
    def cuttable(self) -> bool:
        """Whether a lane can be had at any length up to its own: all layers keep all of its past."""
        ...

    def run(self, windows: Sequence[Window], carried: Draws | None) -> Verified:
        """Feed all windows; those marked `carried` feed their slot's newest token of `carried`."""
        ...

    def keep(self, kept: Mapping[int, int]) -> None:
        """Cut each slot to its kept length. Called once for each `run`, in order; what is not named keeps all."""
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


class StoredForward:
    """What both forwards do with the lanes' seats."""

    def __init__(self, model: nn.Module, head: HeadRows, *, together: bool) -> None:
        self._model = model
        self._head = head
        self.store = LaneStore(together=together)
        self.taps: Taps | None = None

    def _tapped(self, indices: Sequence[int], firsts: Sequence[int]) -> TappedRows | None:
        """What the taps noted in the forward just built, in which these windows' rows begin there."""
        return None if self.taps is None else TappedRows(self.taps.take(), dict(zip(indices, firsts, strict=True)))

    def release(self, slot: int) -> None:
        """Give a lane's seat back. Idempotent."""
        self.store.release(slot)

    def reset(self) -> None:
        """Give all seats back."""
        self.store.reset()

    def buffers(self) -> list[mx.array]:
        """All cache arrays."""
        return self.store.arrays()


class PackedForward(StoredForward):
    """One forward over `[rows, 1]` tokens: real rows only, attention per rectangle, recurrent modules per width."""

    def __init__(
        self,
        model: nn.Module,
        head: HeadRows,
        kinds: Sequence[Kind],
        attention: Attention,
        *,
        masks: bool = False,
    ) -> None:
        """`masks`: whether the recurrent modules mind masks and lengths, so that their lanes may be padded."""
        super().__init__(model, head, together=False)
        self._attention = attention
        self._attending: list[PackedCache] = []
        self._recurrent: list[RecurrentCache] = []
        self._caches = [self._cache(kind) for kind in kinds]
        self._regrouped = Regrouping(self._recurrent, self.store.groups, masks=masks)
        self.masks = masks
        self.arranged: Callable[[Sequence[Seated]], None] | None = None
        """Told how a round's rows lie before the model is called, for a model that is fed more than tokens."""

    @property
    def regrouping(self) -> Regrouping | None:
        """The lanes' states, if some layer carries one."""
        return self._regrouped if self._recurrent else None

    @property
    def recurrent(self) -> bool:
        """Whether some layer carries a state."""
        return bool(self._recurrent)

    @property
    def cuttable(self) -> bool:
        """Whether all layers keep all of a lane's past."""
        return not self._recurrent and all(not layer.sight.reach for layer in self.store.layers)

    def _cache(self, kind: Kind) -> object:
        """What stands for one of mlx-lm's caches."""
        match kind:
            case AttentionKind():
                self._attending.append(self._attending_cache(kind))
                return self._attending[-1]
            case RecurrentKind():
                self._recurrent.append(RecurrentCache(kind.entries))
                return self._recurrent[-1]
            case UnusedKind():
                return UnusedCache()
            case ListKind():
                return CacheList(*(self._cache(part) for part in kind.parts))

    def _attending_cache(self, kind: AttentionKind) -> PackedCache:
        how = kind.quantization
        if how is None:
            return PackedCache(self.store.layer(kind.shape, kind.sight), self._attention, latent=kind.latent)
        exact = self.store.layer(kind.shape, Sight(head=how.start)) if how.start else None
        return QuantizedCache(self.store.layer(QuantizedShape(kind.shape, how)), exact, how, self._attention)

    def run(self, windows: Sequence[Window], carried: Draws | None) -> Verified:
        """Feed all windows in one forward."""
        self.store.place({window.slot: (max(window.end, window.reach), window.start) for window in windows})
        self._share(windows)
        packed = PackedRound(windows, self.store.groups)
        if self.arranged is not None:
            self.arranged(packed.seated)
        for cache in self._attending:
            cache.begin(packed)
        ordered = [entry.window for entry in packed.seated]
        indices, firsts = [entry.index for entry in packed.seated], [entry.first for entry in packed.seated]
        rows, sampled = _sampled_rows(ordered, indices, firsts)
        tokens = _packed_tokens(ordered, carried)[:, None]
        try:
            with self._regrouped.building(packed):
                logits = _logits(self._model, self._head, tokens, self._caches, rows, packed.rows)
        finally:
            take_back()
        if not all(cache.attended for cache in self._attending):
            raise ValueError(PAST_THE_SEAM)
        return Verified(logits if rows else None, sampled, self._tapped(indices, firsts))

    def _share(self, windows: Sequence[Window]) -> None:
        self.store.share(windows)
        for window in windows:
            if window.copies is not None:
                self._regrouped.share(window.copies, window.slot, window.start)

    def keep(self, kept: Mapping[int, int]) -> None:
        """Attention needs nothing done: what is not kept is overwritten by the lane's next window. States go back."""
        self._regrouped.keep(kept)

    def release(self, slot: int) -> None:
        """Give a lane's seat back, and its states. Idempotent."""
        super().release(slot)
        self._regrouped.release(slot)

    def reset(self) -> None:
        """Give all seats back, and all states."""
        super().reset()
        self._regrouped.reset()

    def buffers(self) -> list[mx.array]:
        """All cache arrays."""
        return [*super().buffers(), *self._regrouped.arrays()]


class PaddedForward(StoredForward):
    """One right-padded `[lanes, width]` forward for the decode windows, and another for the prefill chunks; for models
    all of whose layers see everything.
    """

    regrouping = None
    recurrent = False
    cuttable = True

    def __init__(self, model: nn.Module, head: HeadRows, shapes: Sequence[LayerShape]) -> None:
        super().__init__(model, head, together=True)
        self._caches = [PaddedCache(self.store.layer(shape)) for shape in shapes]

    def run(self, windows: Sequence[Window], carried: Draws | None) -> Verified:
        """Feed the chunks in one rectangle, then all sampled windows in another."""
        self.store.place({window.slot: (max(window.end, window.reach), window.start) for window in windows})
        self.store.share(windows)
        chunks = [index for index, window in enumerate(windows) if not window.samples]
        parts = [
            self._run([windows[index] for index in indices], indices, None)
            for indices in self._rectangles(windows, chunks)
        ]
        if chunks:
            mx.async_eval(self.store.arrays(), *(part.tapped.hidden for part in parts if part.tapped is not None))
        sampled = self._rectangles(windows, [index for index, window in enumerate(windows) if window.samples])
        parts += [self._run([windows[index] for index in indices], indices, carried) for indices in sampled]
        return _joined(parts)

    def _rectangles(self, windows: Sequence[Window], indices: Sequence[int]) -> list[list[int]]:
        """Which of them are fed together: as a rule all; but padding must not need a larger class than its lane, and of
        wide ones there must not be more padding than rows.
        """
        rectangles: list[list[int]] = []
        for index in sorted(indices, key=lambda index: -windows[index].rows):
            room = self.store.groups.seat(windows[index].slot).capacity - windows[index].start
            widest = min(room, max(2 * windows[index].rows, WIDEST_SHARED))
            fitting = [members for members in rectangles if windows[members[0]].rows <= widest]
            if fitting:
                fitting[0].append(index)
            else:
                rectangles.append([index])
        return rectangles

    def _run(self, windows: Sequence[Window], indices: Sequence[int], carried: Draws | None) -> Verified:
        width = max(window.rows for window in windows)
        layout = padded_layout(windows, self.store.groups)
        for cache in self._caches:
            cache.layout = layout
        ordered = [windows[index] for index in layout.order]
        placed = [indices[index] for index in layout.order]
        firsts = [lane * width for lane in range(layout.lanes)]
        rows, sampled = _sampled_rows(ordered, placed, firsts)
        tokens = _padded_tokens(ordered, width, carried)
        logits = _logits(self._model, self._head, tokens, self._caches, rows, layout.lanes * width)
        return Verified(logits if rows else None, sampled, self._tapped(placed, firsts))

    def keep(self, kept: Mapping[int, int]) -> None:
        """Nothing needs to be done: what is not kept is overwritten by the lane's next window."""


def _joined(parts: Sequence[Verified]) -> Verified:
    """What several forwards gave, as of one."""
    if len(parts) == 1:
        return parts[0]
    logits = [part.logits for part in parts if part.logits is not None]
    sampled: list[SampledWindow] = []
    before = 0
    for part in parts:
        sampled += [SampledWindow(each.index, before + each.first, before + each.last) for each in part.sampled]
        before = sampled[-1].last if sampled else 0
    tapped = _joined_taps([part.tapped for part in parts if part.tapped is not None])
    return Verified(mx.concatenate(logits) if logits else None, tuple(sampled), tapped)


def _joined_taps(parts: Sequence[TappedRows]) -> TappedRows | None:
    if not parts:
        return None
    firsts: dict[int, int] = {}
    before = 0
    for part in parts:
        firsts |= {index: before + first for index, first in part.firsts.items()}
        before += part.hidden.shape[0]
    return TappedRows(mx.concatenate([part.hidden for part in parts]), firsts)


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
    caches: Sequence[object],
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
