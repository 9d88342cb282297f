"""Which modules of a model own recurrent states, and how their calls are led to a packed forward's `Regrouping`.

Owners are found by letting the model see one token with caches that note who looks at them: the innermost module that
is handed a state and reads or writes it. Inside of an owner's call the linear layers are watched too: what they gave
need not be computed again where the owner is called again over the same rows.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

Call = Callable[..., Any]
Layer = tuple[int, int]
"""A linear layer by identity, and the number of its call within one call of its owner."""


class Regroups(Protocol):
    """Who takes over the owners' calls. Implemented by `Regrouping`."""

    def call(self, call: "OwnersCall", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Packed arguments in, packed outputs out."""
        ...


building: list[Regroups] = []
"""Whose forward is being built; at most one. Calls of owners go there; while it is empty they are as they were."""


class OwnersCall:
    """An owner's own call, which may be told of padding where it takes a mask."""

    def __init__(self, call: Call, owner: Module) -> None:
        self._call = call
        self._owner = owner
        names = list(signature(call).parameters)[1:]
        self._place = names.index("mask") if "mask" in names else None

    def __call__(self, mask: mx.array | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call with the arguments, but with this mask if there is one."""
        if mask is not None and self._place is not None:
            if self._place < len(args):
                args = (*args[: self._place], mask, *args[self._place + 1 :])
            else:
                kwargs = kwargs | {"mask": mask}
        return self._call(self._owner, *args, **kwargs)


class Projections:
    """What the linear layers gave during one call of an owner. Written by the layers."""

    def __init__(self, given: Mapping[Layer, mx.array] | None = None) -> None:
        """`given` are outputs that are known and not computed again."""
        self.made: dict[Layer, mx.array] = {}
        self._given = given or {}
        self._calls: dict[int, int] = {}

    def through(self, layer: Module, call: Call, x: mx.array) -> mx.array:
        """One call of a layer."""
        number = self._calls[id(layer)] = self._calls.get(id(layer), -1) + 1
        key = (id(layer), number)
        known = self._given.get(key)
        output: mx.array = call(layer, x) if known is None else known
        self.made[key] = output
        return output


_projecting: list[Projections] = []


@contextmanager
def projecting(projections: Projections) -> Iterator[None]:
    """Meanwhile the linear layers of owners go through these."""
    _projecting.append(projections)
    try:
        yield
    finally:
        _projecting.pop()


# ---- installed -------------------------------------------------------------------------------------------------------


def install_owners(model: Module) -> None:
    """Lead the calls of the modules that own states, and of their linear layers. Once per model."""
    for owner in _owners(model):
        _become(owner, _owning)
        for part in owner.modules():
            if isinstance(part, (nn.Linear, nn.QuantizedLinear)):
                _become(part, _projecting_layer)


def _become(module: Module, make: Callable[[type[Module]], Call]) -> None:
    """Give a module a class of its own over the one that it has, once."""
    original = type(module)
    if hasattr(original, "led"):
        return
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    module.__class__ = type(original.__name__, (original,), {"__call__": make(original), "led": True} | names)


def _owning(original: type[Module]) -> Call:
    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        if not building:
            return original.__call__(self, *args, **kwargs)
        return building[-1].call(OwnersCall(original.__call__, self), args, kwargs)

    return call


def _projecting_layer(original: type[Module]) -> Call:
    def call(self: Module, x: mx.array) -> mx.array:
        if not _projecting:
            output: mx.array = original.__call__(self, x)
            return output
        return _projecting[-1].through(self, original.__call__, x)

    return call


# ---- found -----------------------------------------------------------------------------------------------------------


class _NotingCache(ArraysCache):  # type: ignore[misc]  # mlx-lm's is untyped
    """Notes which module is at work when its state is read or written."""

    def __init__(self, entries: int, at_work: list[Module], owners: dict[int, Module]) -> None:
        super().__init__(entries)
        self._at_work = at_work
        self._owners = owners

    def __getitem__(self, entry: int) -> mx.array | None:
        self._note()
        found: mx.array | None = super().__getitem__(entry)
        return found

    def __setitem__(self, entry: int, value: mx.array | None) -> None:
        self._note()
        super().__setitem__(entry, value)

    def _note(self) -> None:
        owner = self._at_work[-1]
        self._owners[id(owner)] = owner


def _owners(model: Module) -> list[Module]:
    """The innermost modules that are handed a recurrent cache and use it, seen on one token."""
    at_work: list[Module] = []
    owners: dict[int, Module] = {}

    def noting(cache: object) -> object:
        if isinstance(cache, ArraysCache):
            return _NotingCache(len(cache.cache), at_work, owners)
        if isinstance(cache, CacheList):
            return CacheList(*(noting(part) for part in cache.caches))
        return cache

    caches = [noting(cache) for cache in make_prompt_cache(model)]
    if not any(_has_noting(cache) for cache in caches):
        return []
    with _watched(model, at_work):
        mx.eval(model(mx.array([[1]]), cache=caches))
    return list(owners.values())


def _has_noting(tree: Any) -> bool:
    if isinstance(tree, CacheList):
        return _has_noting(tree.caches)
    if isinstance(tree, (list, tuple)):
        return any(_has_noting(leaf) for leaf in tree)
    return isinstance(tree, _NotingCache)


@contextmanager
def _watched(model: Module, at_work: list[Module]) -> Iterator[None]:
    """Meanwhile every module that is handed a noting cache stands on `at_work` during its call."""
    classes = {each for module in model.modules() for each in type(module).__mro__ if "__call__" in vars(each)}
    originals = {each: each.__call__ for each in classes if issubclass(each, nn.Module)}

    def watch(original: Call) -> Call:
        def call(self: Module, *args: Any, **kwargs: Any) -> Any:
            if not _has_noting((*args, *kwargs.values())):
                return original(self, *args, **kwargs)
            at_work.append(self)
            try:
                return original(self, *args, **kwargs)
            finally:
                at_work.pop()

        return call

    for each, original in originals.items():
        each.__call__ = watch(original)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for each, original in originals.items():
            each.__call__ = original  # type: ignore[method-assign]
