"""What the layers of a model cache, found by letting mlx-lm's own caches see one token.

The registry of cache families: a class of mlx-lm's, and what it means here. A class that is not in it is refused by
name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import msgspec
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from backends.base import KVQuantization
from backends.mlx.caches.buffers import LayerShape
from backends.mlx.caches.sight import EVERYTHING, Sight
from backends.mlx.seam import noting_latent


class AttentionKind(msgspec.Struct, frozen=True):
    """Keys and values per position. If `latent`, keys are a latent vector with rotary dimensions behind it, and values
    are the latent vector again (multi-head latent attention in its absorbed form).
    """

    shape: LayerShape
    sight: Sight = EVERYTHING
    latent: bool = False
    quantization: KVQuantization | None = None


class RecurrentKind(msgspec.Struct, frozen=True):
    """A state of so many arrays, which is all that the layer keeps of the past."""

    entries: int


class UnusedKind(msgspec.Struct, frozen=True):
    """A cache that the model makes, and whose layer does not look at it."""


class ListKind(msgspec.Struct, frozen=True):
    """Several caches of one layer."""

    parts: tuple["Kind", ...]


Kind = AttentionKind | RecurrentKind | UnusedKind | ListKind


class UnknownCacheError(Exception):
    """A cache class that is in no registry; the message names it."""


def layer_kinds(model: Module) -> list[Kind]:
    """One per cache of the model, in the order of mlx-lm's own. Raises UnknownCacheError."""
    caches = make_prompt_cache(model)
    for cache in caches:
        _look_up(cache)
    with noting_latent() as latent:
        mx.eval(model(mx.array([[1]]), cache=caches))
        return [_kind(cache, latent) for cache in caches]


def attention_kind(cache: object, call: Callable[[], mx.array]) -> AttentionKind:
    """What a layer caches that attends, in a cache of mlx-lm's that is empty before the call, of which nothing is
    evaluated. Raises UnknownCacheError for one that does not attend.
    """
    with noting_latent() as latent:
        call()
        kind = _kind(cache, latent)
    if not isinstance(kind, AttentionKind):
        raise UnknownCacheError(f"{type(cache).__name__} in which nothing is kept by position")
    return kind


def attention_kinds(kinds: Sequence[Kind]) -> list[AttentionKind]:
    """All that attend, those inside of lists too."""
    found: list[AttentionKind] = []
    for kind in kinds:
        if isinstance(kind, ListKind):
            found += attention_kinds(kind.parts)
        elif isinstance(kind, AttentionKind):
            found.append(kind)
    return found


def quantized(kinds: Sequence[Kind], how: KVQuantization) -> list[Kind]:
    """The same, with keys and values of layers that see everything quantized; what is bounded anyway stays exact.

    Raises ValueError where that cannot be.
    """
    return [_quantized(kind, how) for kind in kinds]


def _quantized(kind: Kind, how: KVQuantization) -> Kind:
    match kind:
        case ListKind():
            return ListKind(tuple(_quantized(part, how) for part in kind.parts))
        case AttentionKind(shape=shape, sight=sight) if sight == EVERYTHING:
            if kind.latent:
                raise ValueError("latent attention keeps so little that it is not quantized")
            if shape.key_dim % how.group_size or shape.value_dim % how.group_size:
                raise ValueError(
                    f"heads of {shape.key_dim} and {shape.value_dim} cannot be quantized in groups of {how.group_size}"
                )
            return msgspec.structs.replace(kind, quantization=how)
        case _:
            return kind


def _full(cache: KVCache, latent: Sequence[object]) -> Kind:
    return _attention(cache, latent, EVERYTHING)


def _rotating(cache: RotatingKVCache, latent: Sequence[object]) -> Kind:
    if cache.keep:
        raise UnknownCacheError(f"RotatingKVCache that keeps its first {cache.keep} positions")
    return _attention(cache, latent, Sight(window=cache.max_size))


def _chunked(cache: ChunkedKVCache, latent: Sequence[object]) -> Kind:
    return _attention(cache, latent, Sight(chunk=cache.chunk_size))


def _recurrent(cache: ArraysCache, latent: Sequence[object]) -> RecurrentKind:  # noqa: ARG001 (one signature for all)
    return RecurrentKind(len(cache.cache))


def _list(cache: CacheList, latent: Sequence[object]) -> ListKind:
    return ListKind(tuple(_kind(part, latent) for part in cache.caches))


FAMILIES: dict[type, Callable[[Any, Sequence[object]], Kind]] = {
    KVCache: _full,
    RotatingKVCache: _rotating,
    ChunkedKVCache: _chunked,
    ArraysCache: _recurrent,
    CacheList: _list,
}
"""What each class of mlx-lm's means here, seen behind its first token."""


def _look_up(cache: object) -> Callable[[Any, Sequence[object]], Kind]:
    if type(cache) not in FAMILIES:
        raise UnknownCacheError(type(cache).__name__)
    for part in cache.caches if isinstance(cache, CacheList) else ():
        _look_up(part)
    return FAMILIES[type(cache)]


def _kind(cache: object, latent: Sequence[object]) -> Kind:
    return _look_up(cache)(cache, latent)


def _attention(cache: Any, latent: Sequence[object], sight: Sight) -> AttentionKind | UnusedKind:
    if cache.keys is None:
        return UnusedKind()
    _, heads, _, key_dim = cache.keys.shape
    value_dim = cache.values.shape[3]
    if any(cache is each for each in latent):
        return AttentionKind(LayerShape(heads, key_dim + value_dim, 0, cache.keys.dtype), sight, latent=True)
    return AttentionKind(LayerShape(heads, key_dim, value_dim, cache.keys.dtype), sight)
