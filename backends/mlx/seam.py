"""Where mlx-lm's model code is entered: its attention function, its SwiGLU and its language-model head.

`install_attention` replaces the `scaled_dot_product_attention` that a model's modules import, so that attention over a
packed cache runs per rectangle. `install_swiglu` replaces their `swiglu` where a faster one is at hand.
`install_head` lets a forward compute logits for chosen rows only. All leave calls that do not concern them as they
were, and are installed once per model.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from backends.mlx.caches.packed import PackedCache, handed_by
from backends.mlx.exponential import SMALLEST_SWIGLU

_ATTENTION = "scaled_dot_product_attention"
_SWIGLU = "swiglu"


def install_attention(model: nn.Module) -> bool:
    """Put the seam into every module that defines a part of `model`; False if none of them imports the function."""
    modules = _modules(model, _ATTENTION)
    for module in modules:
        _replace(module, _ATTENTION, _lane_attention)
    return bool(modules)


def install_swiglu(model: nn.Module, swiglu: Callable[[mx.array, mx.array], mx.array]) -> None:
    """Let the parts of `model` compute float32 SwiGLUs of some size with `swiglu(gate, up)`."""

    def wrap(original: Callable[..., mx.array], _: str) -> Callable[..., mx.array]:
        def sized_swiglu(gate: mx.array, up: mx.array) -> mx.array:
            large = gate.size >= SMALLEST_SWIGLU and gate.dtype == mx.float32
            return swiglu(gate, up) if large else original(gate, up)

        return sized_swiglu

    for module in _modules(model, _SWIGLU):
        _replace(module, _SWIGLU, wrap)


def _modules(model: nn.Module, name: str) -> list[ModuleType]:
    """The modules that define parts of `model` and hold a function called `name`."""
    defining = sorted({type(part).__module__ for part in model.modules()})
    return [module for each in defining if hasattr(module := sys.modules[each], name)]


def _replace(
    module: ModuleType, name: str, wrap: Callable[[Callable[..., mx.array], str], Callable[..., mx.array]]
) -> None:
    """Replace a module's function by one wrapped around it, once."""
    original: Callable[..., mx.array] = getattr(module, name)
    if not hasattr(original, "seam_over"):
        wrapped = wrap(original, module.__name__)
        wrapped.seam_over = original  # type: ignore[attr-defined]
        setattr(module, name, wrapped)


def _lane_attention(original: Callable[..., mx.array], module: str) -> Callable[..., mx.array]:
    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
        **others: Any,
    ) -> mx.array:
        packed = handed_by(keys) or cache
        if isinstance(packed, PackedCache):
            if others or not (mask is None or (packed.latent and keys is values)):
                raise ValueError(f"{module} masks attention in a way of its own, which packed rows cannot follow")
            rotary = mask if isinstance(mask, mx.array) else None
            return packed.attend(queries, scale=scale, sinks=sinks, rotary=rotary)
        if keys is values and isinstance(mask, mx.array) and mask.dtype != mx.bool_:
            _latent.append(cache)
        if sinks is not None:
            others["sinks"] = sinks
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **others)

    return attention


_latent: list[object] = []
"""Caches of mlx-lm's whose layers attended a latent vector, as far as anybody wants to know."""


@contextmanager
def noting_latent() -> Iterator[list[object]]:
    """Yields what becomes a list of the caches whose layers attend a latent vector (their values are their keys, and
    scores of rotary dimensions come as a mask), while single tokens are computed with mlx-lm's own caches.
    """
    _latent.clear()
    try:
        yield _latent
    finally:
        _latent.clear()


class HeadRows:
    """Which rows the head computes. Written by the forward before each call of the model.

    `rows` (int32) indexes the flattened `[batch * length]` rows of the hidden states; None computes all of them.
    """

    def __init__(self) -> None:
        self.rows: mx.array | None = None
        self.noting = False
        """Whether the hidden states of all rows are wanted, too (see `taps`)."""
        self.noted: mx.array | None = None

    def pick(self, hidden: mx.array) -> mx.array:
        """Hidden states `[batch, length, dim]` to the chosen `[1, rows, dim]`."""
        if self.noting:
            self.noted = hidden
        if self.rows is None:
            return hidden
        return mx.take(hidden.reshape(-1, hidden.shape[-1]), self.rows, axis=0)[None]


class PickingHead(nn.Module):
    """A language-model head that computes the chosen rows only."""

    def __init__(self, head: nn.Module, chosen: HeadRows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.head = head
        self._chosen = chosen

    def __call__(self, hidden: mx.array) -> mx.array:
        """Logits `[1, rows, vocabulary]` of the chosen rows."""
        logits: mx.array = self.head(self._chosen.pick(hidden))
        return logits


def install_head(model: nn.Module) -> HeadRows:
    """Make the model's head obey the `HeadRows` that is returned.

    An own head (`lm_head`) is wrapped where it hangs; a tied one through the embedding's `as_linear`. Whether a model
    has either shows in the shape of its logits: the load-time check relies on that.
    """
    chosen = HeadRows()
    for part in model.modules():
        if "lm_head" in part and isinstance(part["lm_head"], nn.Module):
            part.lm_head = PickingHead(part["lm_head"], chosen)
        if isinstance(part, (nn.Embedding, nn.QuantizedEmbedding)):
            _pick_before(part, chosen)
    return chosen


def _pick_before(embedding: nn.Module, chosen: HeadRows) -> None:
    as_linear: Callable[[mx.array], mx.array] = embedding.as_linear
    embedding.as_linear = lambda hidden: as_linear(chosen.pick(hidden))
