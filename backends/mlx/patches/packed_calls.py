"""How a patch takes over a class's call where packed rows pass through it."""

from collections.abc import Callable
from typing import Any

from mlx.nn.layers.base import Module

from backends.mlx.caches.packed import PackedCache

Call = Callable[..., Any]


def take_over(owner: type[Module], call: Call) -> None:
    """Let `call(module, ...)` serve whatever comes with a packed cache; all else goes to the class's own, as before.
    Once per class.
    """
    original = owner.__call__
    if hasattr(original, "taken_over"):
        return

    def either(self: Module, *args: Any, **kwargs: Any) -> Any:
        packed = any(is_packed(each) for each in (*args, *kwargs.values()))
        return call(self, *args, **kwargs) if packed else original(self, *args, **kwargs)

    either.taken_over = original  # type: ignore[attr-defined]
    owner.__call__ = either  # type: ignore[method-assign]


def is_packed(argument: Any) -> bool:
    """Whether it is a packed cache, or a list that begins with one."""
    if isinstance(argument, (list, tuple)):
        return bool(argument) and is_packed(argument[0])
    return isinstance(argument, PackedCache)
