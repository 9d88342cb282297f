"""From a model reference to a backend that is known to answer right: load, choose the path, check.

A model takes the packed path if its attention passes through the seam and its ragged lanes agree with single ones; the
padded path if only that one agrees; and is refused otherwise.
"""

import logging
import time
from pathlib import Path

import mlx.core as mx
import msgspec
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

from backends.base import ModelInfo
from backends.mlx import exponential
from backends.mlx.backend import MLXBackend
from backends.mlx.caches.buffers import LayerShape
from backends.mlx.check import check_lanes
from backends.mlx.drafts.model import DraftModel, DraftModelFacts
from backends.mlx.exponential import Attention
from backends.mlx.load import Loaded, LoadError, load_folder, locate, refuse_other_tokens
from backends.mlx.pull import Progress
from backends.mlx.rope import install_rope
from backends.mlx.runtime import DtypePolicy, describe_device, load_blas, set_blas_threads
from backends.mlx.seam import HeadRows, install_attention, install_head, install_swiglu
from backends.mlx.threads import BlasPace
from backends.mlx.verify import Forward, PackedForward, PaddedForward
from backends.mlx.warmup import timed_rounds

_log = logging.getLogger("paceline.mlx")


def load_backend(
    reference: str, home: Path, dtype: DtypePolicy, progress: Progress, device: str, draft_model: str | None = None
) -> MLXBackend:
    """Load a model and check it, and a `draft_model` to draft for it; `device` is what to say of the machine in
    `ModelInfo`.

    Call on the thread that will use the backend. Raises LoadError for a model that cannot be loaded or served, and for
    a draft model with another vocabulary than the model's.
    """
    name, folder = locate(reference, home, progress)
    drafting = locate(draft_model, home, progress) if draft_model is not None else None
    if drafting is not None and not drafting[1].samefile(folder):
        refuse_other_tokens(*drafting, name, folder)
    loaded = load_folder(name, folder, dtype, progress)
    progress("check", 0, None)
    head = install_head(loaded.model)
    forward = build_forward(loaded.model, loaded.vocab_size, loaded.name, head)
    backend = MLXBackend(_info(loaded, device, rectangle=isinstance(forward, PaddedForward)), forward, _blas_pace())
    if drafting is not None:
        shared = drafting[1].samefile(folder)
        drafter = loaded if shared else load_folder(*drafting, dtype, progress)
        progress("check", 0, None)
        backend.drafters = (_draft_model(drafter, loaded, head if shared else install_head(drafter.model)),)
    progress("warm up", 0, None)
    backend.info = msgspec.structs.replace(backend.info, timed_rounds=timed_rounds(backend))
    return backend


def _draft_model(drafter: Loaded, target: Loaded, head: HeadRows) -> DraftModel:
    """With lanes of its own, also where both are one model."""
    facts = DraftModelFacts(drafter.vocab_size, target.vocab_size, drafter.context_length)
    return DraftModel(build_forward(drafter.model, drafter.vocab_size, drafter.name, head), facts)


def _blas_pace() -> BlasPace | None:
    """Where the CPU computes with OpenBLAS, its threads are set round by round."""
    blas = load_blas("auto")
    if describe_device().kind != "cpu" or blas.name != "openblas" or blas.threads is None:
        return None
    return BlasPace(blas.threads, set_blas_threads, time.perf_counter)


def build_forward(model: Module, vocabulary: int, name: str, head: HeadRows | None = None) -> Forward:
    """The first path on which the model's ragged lanes agree with single ones. Raises LoadError if there is none.

    `head` as for `paths`.
    """
    shapes = layer_shapes(model, name)
    kv_heads = max(shape.kv_heads for shape in shapes)
    reasons = []
    for forward in paths(model, shapes, attention=fast_attention(model), head=head):
        try:
            check_lanes(model, forward, vocabulary=vocabulary, kv_heads=kv_heads)
        except Exception as error:  # the named boundary of a model's own code: what it cannot do is a reason to refuse
            reasons.append(f"{type(forward).__name__}: {error}")
            _log.info("%s cannot take this path: %s", name, reasons[-1])
            forward.reset()
        else:
            return forward
    raise LoadError(f"{name}: several lanes at once do not give what one lane gives: {'; '.join(reasons)}")


def paths(
    model: Module, shapes: list[LayerShape], *, attention: Attention, head: HeadRows | None = None
) -> list[Forward]:
    """The packed path where there is a seam for it, then the padded one.

    All forwards of one model must share one `head`, so that none computes by what a failed call of another left there;
    None installs it.
    """
    head = head or install_head(model)
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


def _info(loaded: Loaded, device: str, *, rectangle: bool) -> ModelInfo:
    return ModelInfo(
        name=loaded.name,
        folder=str(loaded.folder),
        vocab_size=loaded.vocab_size,
        context_length=loaded.context_length,
        eos_tokens=frozenset(loaded.eos_token_ids),
        defaults=loaded.generation_defaults,
        device=f"{device}, {loaded.dtype}",
        parameter_bytes=loaded.parameter_bytes,
        rectangle=rectangle,
    )
