"""What the target's layers make of each token of a forward, noted while the forward is built.

A tap is a layer of the model, by its place, whose output (the residual stream) is noted; or "head", what the
language-model head reads, behind the last norm. Layers are tapped by giving them a subclass of their own class, so that
nothing that a model's code asks of its layers is answered otherwise. A model that is never tapped is left as it was,
and one whose taps are removed is so again.
"""

from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from backends.mlx.seam import HeadRows

Tap = int | Literal["head"]
"""The place of a layer, from 0 on; or what the language-model head reads."""


class TapError(ValueError):
    """A model cannot be tapped there; the message says where."""


class Taps:
    """The tapped layers of one model. Written by whoever builds its forwards."""

    def __init__(self, model: nn.Module, head: HeadRows, taps: Sequence[Tap]) -> None:
        """`head` is the model's own. Raises TapError for a layer that it has not."""
        layers = getattr(model, "layers", None)
        count = len(layers) if isinstance(layers, list) else 0
        for tap in taps:
            if tap != "head" and not 0 <= tap < count:
                raise TapError(f"there is no layer {tap} to tap; the model has {count}")
        self.taps = tuple(taps)
        self._head = head
        self._tapped: list[nn.Module] = [layers[tap] for tap in taps if tap != "head"] if layers else []
        self._layers = {tap: _tapped(layers[tap]) for tap in taps if tap != "head"} if layers else {}
        head.noting = "head" in taps

    def remove(self) -> None:
        """Note nothing any more: what was noted and never taken would keep its forward's buffers alive. Idempotent."""
        self._head.noting, self._head.noted = False, None
        for layer in self._tapped:
            _untap(layer)

    def take(self) -> mx.array:
        """What was noted since the last call, `[rows, taps * dim]` in the order of the forward's rows and of the taps.

        Raises TapError if the forward went past a tap, or if what came by there are no hidden states of tokens.
        """
        noted = []
        for tap in self.taps:
            if tap == "head":
                found, self._head.noted = self._head.noted, None
            else:
                found = self._layers[tap].take()
            if found is None:
                raise TapError(f"the model's forward goes past the tap {tap!r}")
            if found.ndim != 3:  # [batch, length, dim]
                raise TapError(f"at the tap {tap!r} there is more than one hidden state for each token")
            noted.append(found.reshape(-1, found.shape[-1]))
        return noted[0] if len(noted) == 1 else mx.concatenate(noted, axis=-1)


class _Noted:
    """The newest output of one layer."""

    def __init__(self) -> None:
        self.output: mx.array | None = None

    def take(self) -> mx.array | None:
        output, self.output = self.output, None
        return output


def _tapped(layer: nn.Module) -> _Noted:
    """Note the layer's output from now on; once per layer."""
    noted = getattr(type(layer), "tap", None)
    if isinstance(noted, _Noted):
        return noted
    own: Any = type(layer)
    noted = _Noted()

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = own.__call__(self, *args, **kwargs)
        noted.output = result[0] if isinstance(result, tuple) else result
        return result

    layer.__class__ = type(own.__name__, (own,), {"__call__": call, "__module__": own.__module__, "tap": noted})
    return noted


def _untap(layer: nn.Module) -> None:
    if isinstance(getattr(type(layer), "tap", None), _Noted):
        layer.__class__ = type(layer).__mro__[1]
