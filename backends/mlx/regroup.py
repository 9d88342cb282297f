"""Modules that mix along the sequence in a way of their own, fed lanes again instead of packed rows.

On the packed path every row is a batch entry of its own, which suits everything but what looks at a row's neighbours.
Attention does that behind its seam; a recurrent module (state-space, gated delta, short convolution, ...) does it by a
state. So the rows that it gets are put together to lanes, `[lanes, width, ...]`, and mlx-lm's own code computes what it
would compute for these lanes alone. All else of the model still sees packed rows. Where the code minds masks and
lengths (which is found out at load), lanes of like widths are fed together, padded on the right; else only those of one
width are.

A state cannot be cut. Where a draft was rejected, the module is called again with its recorded inputs, cut to the rows
that were kept, upon the state from before. Of that only the recurrence itself is computed: what the linear layers gave
is known, and the module's outputs nobody asks for.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList

from backends.groups import LaneGroups
from backends.mlx.caches.packed import PackedCache
from backends.mlx.caches.recurrent import RecurrentCache, State
from backends.mlx.layout import PackedRound, Seated, width_class
from backends.mlx.owners import Layer, OwnersCall, Projections, building, projecting
from scheduler.round import Window

SETTLED = 64
"""States of lanes that are at least so long have one shape: all short convolutions are full."""
ROWS_PER_LANE = 3
"""States that are held for each lane at most: before the oldest round that is not settled, before the one that follows
it, and now; or before and after one whose draft was cut, and after what was kept of it.
"""


class _Part(msgspec.Struct, frozen=True):
    """Lanes that are fed together, each padded to `width`. `rows` are their packed rows, int32 `[lanes * width]`, where
    padding repeats one; `real` are the places of the others in it.
    """

    windows: tuple[Window, ...]
    width: int
    rows: np.ndarray
    real: np.ndarray

    @classmethod
    def of(cls, entries: Sequence[Seated]) -> "_Part":
        """Of windows that have a row at least."""
        widths = np.array([entry.window.rows for entry in entries])
        columns = np.arange(widths.max())
        firsts = np.array([entry.first for entry in entries])
        rows = firsts[:, None] + np.minimum(columns, widths[:, None] - 1)
        real = np.flatnonzero(columns < widths[:, None])
        return cls(tuple(entry.window for entry in entries), len(columns), rows.reshape(-1).astype(np.int32), real)

    @property
    def padded(self) -> bool:
        """Whether some lane has fewer rows than `width`."""
        return len(self.real) < len(self.rows)

    @property
    def starts(self) -> mx.array:
        """Each lane's first position, int32 `[lanes]`."""
        return mx.array([window.start for window in self.windows])

    @property
    def lengths(self) -> mx.array:
        """How many rows of each lane are real, int32 `[lanes]`."""
        return mx.array([window.rows for window in self.windows])

    def lanes_of(self, leaf: Any, positions: mx.array) -> Any:
        """An argument as these lanes' module is to see it: packed rows `[rows, 1, ...]` as `[lanes, width, ...]`, the
        rows' positions as the lanes' first ones, anything else as it is.
        """
        if leaf is positions:
            return self.starts
        if isinstance(leaf, mx.array) and leaf.ndim >= 2 and leaf.shape[:2] == (positions.size, 1):
            return self._gather(leaf)
        return leaf

    def _gather(self, packed: mx.array) -> mx.array:
        first = int(self.rows[0])
        neighbours = np.array_equal(self.rows, np.arange(first, first + len(self.rows)))
        picked = packed[first : first + len(self.rows)] if neighbours else mx.take(packed, mx.array(self.rows), axis=0)
        return picked.reshape(len(self.windows), self.width, *packed.shape[2:])

    def rows_of(self, output: mx.array) -> mx.array:
        """`[lanes, width, ...]` to the real ones of `[rows, 1, ...]`."""
        flat = output.reshape(-1, 1, *output.shape[2:])
        return mx.take(flat, mx.array(self.real), axis=0) if self.padded else flat


class _Projected(msgspec.Struct, frozen=True):
    """What the linear layers gave for one part."""

    part: _Part
    made: dict[Layer, mx.array]


class _Called(msgspec.Struct, frozen=True):
    """One call of a module in a round: what it got, packed, and its lanes' states before."""

    call: OwnersCall
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: tuple[tuple[RecurrentCache, dict[int, State]], ...]
    """For each recurrent cache among the arguments, by slot."""
    attention: tuple[PackedCache, ...]
    """Other caches among the arguments."""
    projected: list[_Projected]
    """Of the parts that may be cut."""

    def known(self, part: _Part) -> dict[Layer, mx.array]:
        """What the linear layers gave for the rows of `part`, `[lanes, width, ...]` each."""
        rows = np.concatenate([each.part.rows[each.part.real] for each in self.projected])
        places = np.zeros(rows.max() + 1, dtype=np.int32)
        places[rows] = np.arange(len(rows))
        picked = mx.array(places[part.rows])
        shape = (len(part.windows), part.width)
        layers = set.intersection(*(set(each.made) for each in self.projected))
        return {
            layer: mx.take(_rows_of_all(self.projected, layer), picked, axis=0).reshape(*shape, -1) for layer in layers
        }


def _rows_of_all(projected: Sequence[_Projected], layer: Layer) -> mx.array:
    flat = [each.part.rows_of(each.made[layer])[:, 0] for each in projected]
    return flat[0] if len(flat) == 1 else mx.concatenate(flat)


class _Round:
    """A round whose end is not settled yet."""

    def __init__(self, packed: PackedRound) -> None:
        self.packed = packed
        self.drafts = any(entry.window.draft for entry in packed.seated)
        self.states: list[tuple[RecurrentCache, dict[int, State]]] = []
        """The lanes' states before."""
        self.calls: list[_Called] = []
        """Only of rounds with drafts, which may be cut."""


class Regrouping:
    """The recurrent side of one packed forward. Written by `PackedForward`: `begin` and `end` around the model's call,
    and one `keep` for each round, in order.
    """

    def __init__(self, caches: Sequence[RecurrentCache], groups: LaneGroups, *, masks: bool) -> None:
        """`masks`: whether the modules mind masks and lengths."""
        self._caches = caches
        self._masks = masks
        self._groups = groups
        self._lengths: dict[int, int] = {}
        """How far each lane's states have come."""
        self._rounds: deque[_Round] = deque()
        self._sharing: set[int] = set()
        """Lanes whose states may lie in batches with others'."""
        self._alike: list[_Part] = []
        """Lanes of the round that is being built, those of one width together."""
        self._padded: list[_Part] = []
        """And those of like widths."""

    @contextmanager
    def building(self, packed: PackedRound) -> Iterator[None]:
        """While the model is called for a round. Raises RuntimeError for a lane whose state stands elsewhere than its
        window starts.
        """
        if not self._caches:
            yield
            return
        for entry in packed.seated:
            self._meet(entry.window)
        slots = [entry.window.slot for entry in packed.seated]
        self._rounds.append(_Round(packed))
        self._rounds[-1].states = [(cache, {slot: cache.state(slot) for slot in slots}) for cache in self._caches]
        self._alike = _parts(packed.seated, self._age, int)
        self._padded = _parts(packed.seated, self._age, width_class) if self._masks else self._alike
        building.append(self)
        try:
            yield
        finally:
            building.pop()
        for entry in packed.seated:
            self._lengths[entry.window.slot] = entry.window.end
        self._part(set(slots))

    def _part(self, fed: set[int]) -> None:
        """Lanes that were not fed with the others are not to keep those's old states alive. Where a round is still
        under way, that has time: it would be waited for.
        """
        left = (self._sharing - fed) & self._lengths.keys()
        if len(self._rounds) > 1:
            self._sharing |= fed
            return
        for cache in self._caches:
            cache.own(left)
        self._sharing = fed

    def _meet(self, window: Window) -> None:
        if window.start == 0:
            self.release(window.slot)
        elif self._lengths.get(window.slot) != window.start:
            raise RuntimeError(
                f"a window from {window.start} on a state after {self._lengths.get(window.slot, 0)} tokens"
            )

    def _age(self, slot: int) -> object:
        """Lanes of one age can be fed together: their states have one shape. A new lane has none, which is not the same
        to a module as one of zeros.
        """
        length = self._lengths.get(slot, 0)
        if not length or length >= SETTLED:
            return bool(length)
        rows = [row for cache in self._caches for row in cache.state(slot)]
        return tuple(None if row is None else row.batch.shape[1:] for row in rows)

    def call(self, call: OwnersCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One module's call with packed arguments: lanes in, packed rows out."""
        present = self._rounds[-1]
        rows, positions = present.packed.rows, present.packed.positions
        slots = [entry.window.slot for entry in present.packed.seated]
        caches = list(_caches_in((args, kwargs)))
        called = _Called(
            call,
            args,
            kwargs,
            tuple(
                (cache, {slot: cache.state(slot) for slot in slots})
                for cache in caches
                if isinstance(cache, RecurrentCache)
            ),
            tuple(cache for cache in caches if isinstance(cache, PackedCache)),
            [],
        )
        parts = self._alike if called.attention else self._padded
        outputs = []
        for part in parts:
            projections = Projections()
            outputs.append(self._feed(called, part, positions, projections))
            if any(window.draft for window in part.windows):
                shape = (len(part.windows), part.width)
                made = {layer: output for layer, output in projections.made.items() if output.shape[:-1] == shape}
                called.projected.append(_Projected(part, made))
        if present.drafts:
            present.calls.append(called)
        order = np.concatenate([part.rows[part.real] for part in parts])
        return _joined(parts, outputs, None if np.array_equal(order, np.arange(rows)) else mx.array(np.argsort(order)))

    def _feed(self, called: _Called, part: _Part, positions: mx.array, projections: Projections) -> Any:
        """Call for one part upon the states from before; what it writes are its lanes' states now."""
        slots = [window.slot for window in part.windows]
        lengths = part.lengths if part.padded else None
        for cache, before in called.before:
            cache.open(slots, [before[slot] for slot in slots])
            cache.lengths = lengths
        inner = PackedRound(part.windows, self._groups) if called.attention else None
        starts = part.starts if inner is not None else None
        for attending in called.attention:
            attending.rectangular(inner, starts, part.width)
        try:
            args, kwargs = tree_map(lambda leaf: part.lanes_of(leaf, positions), (called.args, called.kwargs))
            mask = None if lengths is None else mx.arange(part.width) < lengths[:, None]
            with projecting(projections):
                return called.call(mask, args, kwargs)
        finally:
            for cache, _ in called.before:
                cache.close()
            for attending in called.attention:
                attending.rectangular(None)

    def keep(self, kept: Mapping[int, int]) -> None:
        """Of the oldest round that is not settled, lanes keep so many positions; what is not named keeps all. Windows
        without a draft keep all or nothing.
        """
        if not self._caches:
            return
        settled = self._rounds.popleft()
        cut = [
            msgspec.structs.replace(entry, window=_first_rows(entry.window, kept[entry.window.slot]))
            for entry in settled.packed.seated
            if kept.get(entry.window.slot, entry.window.end) < entry.window.end
        ]
        if not cut:
            return
        if self._rounds:
            raise RuntimeError("a draft was cut after the next round had begun")
        for cache, before in settled.states:
            for entry in cut:
                cache.put(entry.window.slot, before[entry.window.slot])
        self._lengths |= {entry.window.slot: entry.window.start for entry in cut}
        self._feed_again(settled, [entry for entry in cut if entry.window.rows])
        self._lengths |= {entry.window.slot: entry.window.end for entry in cut}

    def _feed_again(self, settled: _Round, cut: Sequence[Seated]) -> None:
        """The rows that were kept, to every module that was called."""
        if cut and not settled.calls:
            raise RuntimeError("a window without a draft was cut")
        alike = _parts(cut, self._age, int)
        together = _parts(cut, self._age, lambda _: 0) if self._masks else alike
        for called in settled.calls:
            for part in alike if called.attention else together:
                self._feed(called, part, settled.packed.positions, Projections(called.known(part)))

    def share(self, source: int, target: int, length: int) -> None:
        """Let one lane have another's states, which must stand at this length."""
        if not self._caches or not length:
            return
        if self._lengths.get(source) != length:
            raise RuntimeError(f"a state after {self._lengths.get(source, 0)} tokens cannot be had after {length}")
        for cache in self._caches:
            cache.put(target, cache.state(source))
        self._lengths[target] = length

    def lane_bytes(self, slot: int) -> int:
        """What a lane's states take by themselves."""
        rows = [row for cache in self._caches for row in cache.state(slot) if row is not None]
        return sum(row.batch.nbytes // row.batch.shape[0] for row in rows)

    @property
    def entries(self) -> list[int]:
        """Arrays of a state, by layer."""
        return [cache.entries for cache in self._caches]

    def states(self, slot: int, length: int) -> list[State] | None:
        """A lane's states at a length: where it stands, or where a round that is not settled found it; else None."""
        if self._lengths.get(slot) == length:
            return [cache.state(slot) for cache in self._caches]
        for present in self._rounds:
            if any(entry.window.slot == slot and entry.window.start == length for entry in present.packed.seated):
                return [before[slot] for _, before in present.states]
        return None

    def put(self, slot: int, length: int, states: Sequence[State]) -> None:
        """Let a lane stand at a length, with these states."""
        for cache, state in zip(self._caches, states, strict=True):
            cache.put(slot, state)
        self._lengths[slot] = length

    def release(self, slot: int) -> None:
        """Forget a lane. Idempotent."""
        self._lengths.pop(slot, None)
        for cache in self._caches:
            cache.drop(slot)

    def reset(self) -> None:
        """Forget everything."""
        self._lengths.clear()
        self._rounds.clear()
        self._sharing.clear()
        for cache in self._caches:
            cache.clear()

    def arrays(self) -> list[mx.array]:
        """All states."""
        return [array for cache in self._caches for array in cache.arrays()]


_building: list[Regrouping] = []
"""Whose forward is being built; at most one."""


def _parts(seated: Sequence[Seated], age: Callable[[int], object], width: Callable[[int], int]) -> list[_Part]:
    """Lanes of one age and of what is one width, in the order in which a round of them alone would have its rows."""
    alike: dict[tuple[object, int], list[Seated]] = {}
    for entry in sorted(seated, key=lambda entry: (entry.seat.capacity, entry.seat.row)):
        alike.setdefault((age(entry.window.slot), width(entry.window.rows)), []).append(entry)
    return [_Part.of(entries) for entries in alike.values()]


def _first_rows(window: Window, end: int) -> Window:
    """A window up to a position."""
    rows = end - window.start
    tokens = window.tokens[:rows]
    return msgspec.structs.replace(window, tokens=tokens, draft=window.draft[: max(0, rows - window.real)])


def _caches_in(tree: Any) -> Iterator[object]:
    if isinstance(tree, (RecurrentCache, PackedCache)):
        yield tree
    elif isinstance(tree, CacheList):
        yield from _caches_in(tree.caches)
    elif isinstance(tree, (list, tuple)):
        for leaf in tree:
            yield from _caches_in(leaf)
    elif isinstance(tree, dict):
        yield from _caches_in(list(tree.values()))


def _joined(parts: Sequence[_Part], outputs: Sequence[Any], order: mx.array | None) -> Any:
    """The parts' outputs, `[lanes, width, ...]` each, as packed rows."""

    def join(*leaves: Any) -> Any:
        if not isinstance(leaves[0], mx.array):
            return leaves[0]
        flat = [part.rows_of(leaf) for part, leaf in zip(parts, leaves, strict=True)]
        joined = flat[0] if len(flat) == 1 else mx.concatenate(flat)
        return joined if order is None else mx.take(joined, order, axis=0)

    return tree_map(join, outputs[0], *outputs[1:])
