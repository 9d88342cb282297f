"""From a model reference to a backend that is known to answer right: load, choose the path, check.

A model takes the packed path if its attention passes through the seam and its ragged lanes agree with single ones; the
padded path if only that one agrees; and is refused otherwise.
"""

import logging
import time
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

from backends.base import ModelInfo
from backends.mlx import exponential
from backends.mlx.backend import MLXBackend
from backends.mlx.caches.buffers import LayerShape
from backends.mlx.check import check_lanes
from backends.mlx.exponential import Attention
from backends.mlx.load import Loaded, LoadError, load
from backends.mlx.pull import Progress
from backends.mlx.rope import install_rope
from backends.mlx.runtime import DtypePolicy, describe_device, load_blas, set_blas_threads
from backends.mlx.seam import install_attention, install_head, install_swiglu
from backends.mlx.threads import BlasPace
from backends.mlx.verify import Forward, PackedForward, PaddedForward

_log = logging.getLogger("paceline.mlx")


def load_backend(reference: str, home: Path, dtype: DtypePolicy, progress: Progress, device: str) -> MLXBackend:
    """Load a model and check it; `device` is what to say of the machine in `ModelInfo`.

    Call on the thread that will use the backend. Raises LoadError for a model that cannot be loaded or served.
    """
    loaded = load(reference, home, dtype, progress)
    progress("check", 0, None)
    forward = build_forward(loaded.model, loaded.vocab_size, loaded.name)
    return MLXBackend(_info(loaded, device), forward, _blas_pace())


def _blas_pace() -> BlasPace | None:
    """Where the CPU computes with OpenBLAS, its threads are set round by round."""
    blas = load_blas("auto")
    if describe_device().kind != "cpu" or blas.name != "openblas" or blas.threads is None:
        return None
    return BlasPace(blas.threads, set_blas_threads, time.perf_counter)


def build_forward(model: Module, vocabulary: int, name: str) -> Forward:
    """The first path on which the model's ragged lanes agree with single ones. Raises LoadError if there is none."""
    shapes = layer_shapes(model, name)
    kv_heads = max(shape.kv_heads for shape in shapes)
    reasons = []
    for forward in paths(model, shapes, attention=fast_attention(model)):
        try:
            check_lanes(model, forward, vocabulary=vocabulary, kv_heads=kv_heads)
        except Exception as error:  # the named boundary of a model's own code: what it cannot do is a reason to refuse
            reasons.append(f"{type(forward).__name__}: {error}")
            _log.info("%s cannot take this path: %s", name, reasons[-1])
            forward.reset()
        else:
            return forward
    raise LoadError(f"{name}: several lanes at once do not give what one lane gives: {'; '.join(reasons)}")


def paths(model: Module, shapes: list[LayerShape], *, attention: Attention) -> list[Forward]:
    """The packed path where there is a seam for it, then the padded one."""
    head = install_head(model)
    padded = PaddedForward(model, head, shapes)
    return [PackedForward(model, head, shapes, attention), padded] if install_attention(model) else [padded]


def fast_attention(model: Module) -> Attention:
    """MLX's own attention; but where exponentials of ours are faster, they serve attention and SwiGLU, and RoPE, which
    suffers from the same cause, is computed once a round.
    """
    if not exponential.pays():
        return mx.fast.scaled_dot_product_attention
    install_swiglu(model, exponential.swiglu)
    install_rope(model)
    return exponential.attention


def layer_shapes(model: Module, name: str) -> list[LayerShape]:
    """What each layer caches, seen on one token in mlx-lm's own caches. Raises LoadError unless all are `KVCache`."""
    caches = make_prompt_cache(model)
    others = sorted({type(cache).__name__ for cache in caches if type(cache) is not KVCache})
    if others:
        raise LoadError(f"{name}: its layers cache in {', '.join(others)}; only full attention can be served yet")
    mx.eval(model(mx.array([[1]]), cache=caches))
    return [LayerShape(*_shape(cache.keys), cache.values.shape[3], cache.keys.dtype) for cache in caches]


def _shape(keys: mx.array) -> tuple[int, int]:
    _, heads, _, dim = keys.shape
    return heads, dim


def _info(loaded: Loaded, device: str) -> ModelInfo:
    return ModelInfo(
        name=loaded.name,
        folder=str(loaded.folder),
        vocab_size=loaded.vocab_size,
        context_length=loaded.context_length,
        eos_tokens=frozenset(loaded.eos_token_ids),
        defaults=loaded.generation_defaults,
        device=f"{device}, {loaded.dtype}",
        parameter_bytes=loaded.parameter_bytes,
    )
