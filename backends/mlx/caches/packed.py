"""The cache of an attention layer on the packed path, as mlx-lm's model code meets it.

Every row is its own batch entry. Keys go to the lanes' buffers, and attention, entered through the seam, runs per
rectangle over them. What the model's code is handed back are the round's own keys: by them the seam finds the cache, so
that a layer may attend what another one cached.
"""

from typing import Any

import mlx.core as mx
import msgspec

from backends.mlx.caches.buffers import LayerBuffers
from backends.mlx.exponential import Attention
from backends.mlx.layout import PackedLayout, PackedRound, Rectangle

_handed: dict[int, tuple[mx.array, "PackedCache"]] = {}
"""Keys that were handed to model code in the forward that is being built, by identity, and by whom."""


PAST_THE_SEAM = "the model looks at cached keys past the attention function"
"""Why a model cannot be served on packed rows."""


def handed_by(keys: object) -> "PackedCache | None":
    """The packed cache that handed these very keys to the model's code in the present forward."""
    found = _handed.get(id(keys))
    return None if found is None else found[1]


def take_back() -> None:
    """The forward is built: forget what was handed out."""
    _handed.clear()


class _Rectangular(msgspec.Struct, frozen=True):
    """A call in which the model's code sees lanes of one width instead of packed rows."""

    packed: PackedRound
    starts: mx.array
    width: int


class PackedCache:
    """What a layer sees of a packed round. `round` is set for all layers before each forward.

    `attention` is called as `mx.fast.scaled_dot_product_attention` is.
    """

    def __init__(self, buffers: LayerBuffers, attention: Attention, *, latent: bool = False) -> None:
        """`latent`: keys are a latent vector with rotary dimensions behind it, and values the latent vector again."""
        self._buffers = buffers
        self._attention = attention
        self.latent = latent
        self._round: PackedRound | None = None
        self._rectangular: _Rectangular | None = None
        self._wide: dict[int, tuple[mx.array, ...]] = {}
        """Keys and values of the rectangles that are wider than their ring, by packed row."""
        self._newest: tuple[mx.array, mx.array] | None = None
        self.attended = True
        """Whether what was stored in this forward was attended through the cache too."""

    def begin(self, packed: PackedRound) -> None:
        """The next forward is of this round."""
        self._round = packed
        self._newest = None
        self.attended = True
        self._wide.clear()

    def rectangular(self, part: PackedRound | None, starts: mx.array | None = None, width: int = 0) -> None:
        """Until further notice the model's code sees the windows of `part`, which all have this width, as
        `[lanes, heads, width, dim]`; None: packed rows again.
        """
        self._rectangular = None
        if part is not None and starts is not None:
            self._rectangular = _Rectangular(part, starts, width)

    @property
    def offset(self) -> mx.array:
        """Each packed row's position, int32 `[rows]`: RoPE rotates every row by its own. Of a rectangle, each lane's
        first one.
        """
        return self._current().positions if self._rectangular is None else self._rectangular.starts

    @property
    def keys(self) -> mx.array:
        """Nobody's to look at: they lie in other lanes' company. Raises ValueError."""
        raise ValueError(PAST_THE_SEAM)

    def make_mask(self, *_: Any, window_size: int | None = None, **__: Any) -> None:
        """Rows of length 1 need no mask; the rectangles bring their own."""
        seen = self._buffers.sight.window
        if window_size and seen and window_size != seen:
            raise ValueError(f"a mask of {window_size} positions over a cache of {seen}")
        if window_size and not seen:
            raise ValueError(f"a mask of {window_size} positions over a cache of all")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store the round's keys and values (`[rows, kv_heads, 1, dim]`); `attend` finds them in the buffers."""
        if self._rectangular is None:
            self._store(self._current(), keys, values)
        else:
            self._store(self._current(), _to_rows(keys), _to_rows(values))
        if self.latent:  # scores of the rotary part then come as the rotated queries themselves
            values = mx.eye(values.shape[-1], dtype=values.dtype)[None, None]
        _handed[id(keys)] = (keys, self)
        self.attended = False
        self._newest = (keys, values)
        return keys, values

    def store(self, keys: mx.array, values: mx.array) -> None:
        """As `update_and_fetch`, of what nobody attends in this forward."""
        self._write(self._current(), self._planes(keys, values))

    def _store(self, packed: PackedRound, keys: mx.array, values: mx.array) -> None:
        """Put packed keys and values where the round wants them."""
        stored = self._planes(keys, values)
        for rectangle in self._layout().rectangles:
            if rectangle.wide:
                self._wide[rectangle.first] = self._ring_and_rows(rectangle, stored)
        self._write(packed, stored)

    def _write(self, packed: PackedRound, stored: tuple[mx.array, ...]) -> None:
        for write in packed.writes(self._buffers.sight):
            self._buffers.write(write, *stored)

    def _planes(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """What is stored of packed keys and values."""
        if self.latent:
            return (mx.concatenate([keys, values], axis=-1),)
        return (keys, values) if values.shape[-1] else (keys,)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` returned, for a layer that attends this one's keys."""
        assert self._newest is not None, "nothing was stored in this forward"
        return self._newest

    def lend(self) -> mx.array:
        """What stands for the lanes' keys in a layer that stores none itself: given as keys and values to the attention
        function, it attends what is cached already. Until `take_back`, once a forward.
        """
        keys = mx.zeros(0)
        _handed[id(keys)] = (keys, self)
        self.attended = False
        return keys

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        rotary: mx.array | None = None,
        attention: Attention | None = None,
    ) -> mx.array:
        """Attention of packed queries `[rows, heads, 1, dim]` over the lanes' keys; the same shape out.

        `rotary` (`[rows, heads, 1, rotary dims]`, scaled) are the other half of the queries of latent attention;
        `attention` stands in for the cache's own.
        """
        self.attended = True
        shape = queries.shape
        if self._rectangular is not None:
            queries = _to_rows(queries)
            rotary = None if rotary is None else _to_rows(rotary)
        if rotary is not None:
            queries, scale = mx.concatenate([queries * scale, rotary], axis=-1), 1.0
        layout = self._layout()
        attention = attention or self._attention
        parts = [self._attend(queries, rectangle, scale, sinks, attention) for rectangle in layout.rectangles]
        joined = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        output = joined if layout.outputs is None else mx.take(joined, layout.outputs, axis=0)
        if self.latent:
            output = output[..., : shape[-1]]
        return output if self._rectangular is None else _to_lanes(output, self._rectangular.width)

    def _attend(
        self, packed: mx.array, rectangle: Rectangle, scale: float, sinks: mx.array | None, attention: Attention
    ) -> mx.array:
        keys, values = self._keys_and_values(rectangle)
        queries = _gather(packed, rectangle)
        output = attention(queries, keys, values, scale=scale, mask=rectangle.mask, sinks=sinks)
        return output if rectangle.width == 1 else _to_rows(output)

    def _keys_and_values(self, rectangle: Rectangle) -> tuple[mx.array, mx.array]:
        if rectangle.wide:
            held = self._wide[rectangle.first]
        else:
            held = self._buffers.held(rectangle.capacity, rectangle.row, rectangle.lanes, rectangle.length)
        return held[0], held[-1]

    def _ring_and_rows(self, rectangle: Rectangle, stored: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        """Of each plane what a lane's ring holds before the round, and behind it the lane's rows of this round."""
        places = rectangle.length - rectangle.width
        rows = slice(rectangle.first, rectangle.last)
        ring = self._buffers.held(rectangle.capacity, rectangle.row, 1, places)
        return tuple(
            mx.concatenate([before, _to_lanes(packed[rows], rectangle.width)], axis=2)
            for before, packed in zip(ring, stored, strict=True)
        )

    def _layout(self) -> PackedLayout:
        return self._current().layout(self._buffers.sight)

    def _current(self) -> PackedRound:
        if self._rectangular is not None:
            return self._rectangular.packed
        assert self._round is not None, "a forward without a round"
        return self._round


class UnusedCache:
    """Stands where a model's code wants a cache that no layer looks at."""

    def make_mask(self, *_: Any, **__: Any) -> None:
        """Rows of length 1 need none."""


def _gather(packed: mx.array, rectangle: Rectangle) -> mx.array:
    """Packed queries `[rows, heads, 1, dim]` to a rectangle's `[lanes, heads, width, dim]`."""
    if rectangle.queries is not None:
        packed = mx.take(packed, rectangle.queries, axis=0)
    elif rectangle.last - rectangle.first < packed.shape[0]:
        packed = packed[rectangle.first : rectangle.last]
    return packed if rectangle.width == 1 else _to_lanes(packed, rectangle.width)


def _to_rows(lanes: mx.array) -> mx.array:
    """`[lanes, heads, width, dim]` to `[lanes * width, heads, 1, dim]`."""
    _, heads, _, dim = lanes.shape
    return lanes.transpose(0, 2, 1, 3).reshape(-1, heads, 1, dim)


def _to_lanes(rows: mx.array, width: int) -> mx.array:
    """`[lanes * width, heads, 1, dim]` to `[lanes, heads, width, dim]`."""
    _, heads, _, dim = rows.shape
    return rows.reshape(-1, width, heads, dim).transpose(0, 2, 1, 3)
