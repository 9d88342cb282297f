"""Lanes' caches in pieces, for the prefix cache: out of the buffers, into the buffers, to bytes and back.

What layers keep of every position is cut into blocks, and arrays of one shape are stacked over layers, so that a block
is an array or two. What they keep otherwise, rings and states, is copied as it stands when a lane is at a piece's end.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import mlx.core as mx
import msgspec
import numpy as np

from backends.base import Block
from backends.groups import Seat
from backends.mlx.caches.buffers import LayerBuffers, Plane
from backends.mlx.caches.recurrent import Row, State
from backends.mlx.caches.sight import Sight
from backends.mlx.regroup import Regrouping
from backends.mlx.verify import LaneStore
from scheduler.pieces import Piece


class _Meta(msgspec.Struct, frozen=True, array_like=True):
    """Of all arrays of a block, in order."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class MLXBlock:
    """Evaluated arrays that own their memory."""

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self.arrays = tuple(arrays)

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def meta(self) -> bytes:
        """Dtypes and shapes."""
        dtypes = tuple(str(array.dtype).removeprefix("mlx.core.") for array in self.arrays)
        return msgspec.msgpack.encode(_Meta(dtypes, tuple(array.shape for array in self.arrays)))

    def parts(self) -> list[memoryview]:
        """The arrays' bytes."""
        flat = [array.reshape(-1).view(mx.uint8) for array in self.arrays if array.size]
        return [memoryview(array) for array in flat]  # type: ignore[arg-type]  # an array has a buffer, says MLX's guide


class _Stack(msgspec.Struct, frozen=True):
    """Planes of one shape, of all layers with one sight: they are stacked, `[planes, heads, places, dim]`."""

    plane: Plane
    sight: Sight
    members: tuple[tuple[LayerBuffers, int], ...]
    """Layers, and which plane of each."""

    def span(self, piece: Piece) -> tuple[int, int]:
        """Which places of a lane belong to a piece: of a ring all that it holds at the piece's end."""
        if self.sight.reach:
            return (0, min(piece.end, self.sight.span)) if piece.checkpoint else (0, 0)
        head = self.sight.head or piece.end
        return min(piece.start, head), min(piece.end, head)

    def shape(self, piece: Piece) -> tuple[int, ...]:
        """Of its array in a piece."""
        first, last = self.span(piece)
        return len(self.members), self.plane.heads, last - first, self.plane.dim

    def take(self, seat: Seat, piece: Piece) -> mx.array:
        """What a lane holds; not yet evaluated."""
        first, last = self.span(piece)
        if first == last:
            return mx.zeros(self.shape(piece), self.plane.dtype)
        return _owned([layer.planes[plane][seat.capacity][seat.row, :, first:last] for layer, plane in self.members])

    def put(self, seat: Seat, first: int, stacked: mx.array) -> None:
        """Let a lane hold it from place `first` on."""
        last = first + stacked.shape[2]
        for index, (layer, plane) in enumerate(self.members):
            buffer = layer.planes[plane].pop(seat.capacity)
            buffer[seat.row, :, first:last] = stacked[index]
            layer.planes[plane][seat.capacity] = buffer


class LaneBlocks:
    """Implements `backends.base.Blocks` for a forward's lanes."""

    def __init__(self, store: LaneStore, regrouping: Regrouping | None, namespace: str) -> None:
        """`regrouping` where layers carry states."""
        self.namespace = namespace
        self._store = store
        self._regrouping = regrouping
        self._stacks = list(_stacks(store.layers))
        self.blocks = any(not stack.sight.reach for stack in self._stacks)
        self.checkpoints = regrouping is not None or any(stack.sight.reach for stack in self._stacks)

    def take(self, slot: int, pieces: Sequence[Piece]) -> list[Block | None]:
        """Copy pieces out of a slot; None for a checkpoint at a length where its states do not stand."""
        seat = self._store.groups.seat(slot)
        taken: list[Block | None] = []
        for piece in pieces:
            states = self._states(slot, piece.end) if piece.checkpoint else []
            if states is None:
                taken.append(None)
            else:
                taken.append(MLXBlock([*(stack.take(seat, piece) for stack in self._stacks), *states]))
        mx.eval([block.arrays for block in taken if isinstance(block, MLXBlock)])
        return taken

    def _states(self, slot: int, length: int) -> list[mx.array] | None:
        """All entries of all states, an empty array for one that was never written."""
        if self._regrouping is None:
            return []
        states = self._regrouping.states(slot, length)
        if states is None:
            return None
        return [mx.zeros((0,)) if row is None else _owned([row.batch[row.row]]) for state in states for row in state]

    def put(self, slot: int, reach: int, pieces: Sequence[tuple[Piece, Block]]) -> None:
        """Copy pieces into a slot, which holds all before them."""
        first, last = pieces[0][0], pieces[-1][0]
        self._store.place({slot: (max(reach, last.end), first.start)})
        seat = self._store.groups.seat(slot)
        blocks = [(piece, block) for piece, block in pieces if isinstance(block, MLXBlock)]
        for index, stack in enumerate(self._stacks):
            for start, arrays in _runs(stack, index, blocks):
                stack.put(seat, start, arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=2))
        if self._regrouping is not None and last.checkpoint:
            self._regrouping.put(slot, last.end, self._as_states(blocks[-1][1].arrays[len(self._stacks) :]))
        mx.eval(self._store.arrays())

    def _as_states(self, arrays: Sequence[mx.array]) -> list[State]:
        assert self._regrouping is not None
        rows = [Row(array, 0) if array.size else None for array in arrays]
        bounds = np.cumsum([0, *self._regrouping.entries])
        return [tuple(rows[first:last]) for first, last in pairwise(bounds)]

    def parse(self, piece: Piece, meta: bytes, data: memoryview) -> MLXBlock:
        """A piece out of bytes. Raises ValueError."""
        try:
            read = msgspec.msgpack.decode(meta, type=_Meta)
            dtypes = [_dtype(name) for name in read.dtypes]
        except (msgspec.MsgspecError, AttributeError) as error:
            raise ValueError(f"no block of this model: {error}") from None
        states = sum(self._regrouping.entries) if self._regrouping is not None and piece.checkpoint else 0
        expected = [(stack.plane.dtype, stack.shape(piece)) for stack in self._stacks]
        told = list(zip(dtypes, read.shapes, strict=False))
        if len(told) != len(expected) + states or told[: len(expected)] != expected:
            raise ValueError("no block of this model: its arrays have other shapes")
        sizes = [dtype.size * int(np.prod(shape)) for dtype, shape in told]
        if sum(sizes) != len(data):
            raise ValueError("no block of this model: it has another length")
        bounds = np.cumsum([0, *sizes])
        arrays = [
            _array(data[first:last], dtype, shape)
            for (dtype, shape), (first, last) in zip(told, pairwise(bounds), strict=True)
        ]
        mx.eval(arrays)
        return MLXBlock(arrays)


def _stacks(layers: Sequence[LayerBuffers]) -> Iterator[_Stack]:
    """All planes of all layers, those of one shape and sight together."""
    members: dict[tuple[int, int, mx.Dtype, Sight], list[tuple[LayerBuffers, int]]] = {}
    for layer in layers:
        for index, plane in enumerate(layer.shapes):
            members.setdefault((plane.heads, plane.dim, plane.dtype, layer.sight), []).append((layer, index))
    for (heads, dim, dtype, sight), found in members.items():
        yield _Stack(Plane(heads, dim, dtype), sight, tuple(found))


def _runs(stack: _Stack, index: int, blocks: Sequence[tuple[Piece, MLXBlock]]) -> Iterator[tuple[int, list[mx.array]]]:
    """The pieces' arrays of one stack, those that lie behind one another together, and where each run begins."""
    run: list[mx.array] = []
    begin = end = 0
    for piece, block in blocks:
        first, last = stack.span(piece)
        if first == last:
            continue
        if run and first != end:
            yield begin, run
            run = []
        if not run:
            begin = first
        run.append(block.arrays[index])
        end = last
    if run:
        yield begin, run


def _owned(parts: Sequence[mx.array]) -> mx.array:
    """Views, stacked, in memory of their own. Of a single one a stack would be a view again; a product is not."""
    return mx.stack(list(parts)) if len(parts) > 1 else (parts[0] * mx.array(1, parts[0].dtype))[None]


def _dtype(name: str) -> mx.Dtype:
    dtype = getattr(mx, name)
    if not isinstance(dtype, mx.Dtype):
        raise ValueError(f"no block of this model: {name} is no dtype")
    return dtype


_WORDS: dict[int, Callable[..., np.ndarray]] = {
    size: lambda data, kind=kind: np.frombuffer(data, dtype=kind)
    for size, kind in ((1, np.uint8), (2, np.uint16), (4, np.uint32), (8, np.uint64))
}


def _array(data: memoryview, dtype: mx.Dtype, shape: tuple[int, ...]) -> mx.array:
    """Bytes as an array: by way of numbers of its width, as numpy has not every dtype of MLX's."""
    if not len(data):
        return mx.zeros(shape, dtype)
    return mx.array(_WORDS[dtype.size](data)).view(dtype).reshape(shape)
