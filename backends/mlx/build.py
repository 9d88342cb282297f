"""From a model reference to a backend that is known to answer right: load, choose the path, check.

A model takes the packed path if its attention passes through the seam and its ragged lanes agree with single ones; the
padded path if only that one agrees; and is refused otherwise.
"""

import logging
import time
from collections.abc import Sequence
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import mlx.core as mx
import msgspec
from mlx.nn.layers.base import Module

from backends.base import KVQuantization, ModelInfo
from backends.mlx import exponential, heap
from backends.mlx.backend import MLXBackend
from backends.mlx.blocks import LaneBlocks
from backends.mlx.caches.kinds import AttentionKind, Kind, UnknownCacheError, attention_kinds, layer_kinds, quantized
from backends.mlx.check import check_lanes
from backends.mlx.drafts.attach import attach, find_own
from backends.mlx.drafts.files import DrafterError
from backends.mlx.drafts.folders import LaneDrafter
from backends.mlx.drafts.model import DraftModel, DraftModelFacts
from backends.mlx.drafts.mtp import find_mtp
from backends.mlx.exponential import Attention
from backends.mlx.fingerprint import fingerprint
from backends.mlx.load import Loaded, LoadError, load_folder, locate, refuse_other_tokens
from backends.mlx.memory import LaneLedger, NoRoomError, Residence, budget_of, device_memory
from backends.mlx.owners import install_owners
from backends.mlx.patches import apply_patches
from backends.mlx.pull import Progress
from backends.mlx.regroup import ROWS_PER_LANE, SETTLED
from backends.mlx.rope import install_rope
from backends.mlx.runtime import DtypePolicy, MemoryLimit, describe_device, load_blas, set_blas_threads
from backends.mlx.seam import HeadRows, install_attention, install_head, install_swiglu
from backends.mlx.taps import TapError, Taps
from backends.mlx.threads import BlasPace
from backends.mlx.verify import Forward, PackedForward, PaddedForward
from backends.mlx.warmup import LargestRound, scratch_of, timed_rounds
from scheduler.request import Sampling
from scheduler.round import Window

_log = logging.getLogger("paceline.mlx")

Drafter = Path | Literal["auto", "mtp"]
"""The file of a drafter, or the folder of one that others published; the one that the model's own weights hold
(multi-token prediction); or the first of those made for the model that there is.
"""


def load_backend(
    reference: str,
    home: Path,
    dtype: DtypePolicy,
    progress: Progress,
    device: str,
    *,
    draft_model: str | None = None,
    drafter: Drafter | None = None,
    quantization: KVQuantization | None = None,
    memory: MemoryLimit | None = None,
    largest: LargestRound = LargestRound(rows=256, lanes=8, drafts=8),  # noqa: B008 (frozen)
) -> MLXBackend:
    """Load a model and check it; `device` is what to say of the machine in `ModelInfo`. To draft for it load a
    `draft_model` too, or a `drafter` that reads what the model computes, if "auto" finds any. `quantization`
    is how the model's keys and values are kept. With `memory` all that it holds is bounded, what rounds of up to
    `largest` take included, and a context that is too long for that is cut.

    Call on the thread that will use the backend. Raises LoadError for a model that cannot be loaded or served, for a
    draft model with another vocabulary than the model's, or whose caches cannot be cut, and for a drafter that is not
    for this model; and where the memory is not enough for the shortest lane.
    """
    heap.keep_freed()
    name, folder = locate(reference, home, progress)
    drafting = locate(draft_model, home, progress) if draft_model is not None else None
    if drafting is not None and not drafting[1].samefile(folder):
        refuse_other_tokens(*drafting, name, folder)
    loaded = load_folder(name, folder, dtype, progress)
    progress("check", 0, None)
    head = install_head(loaded.model)
    backend, forward = build_backend(loaded, head, device, quantization)
    ledger = LaneLedger(forward.store)
    if drafting is not None:
        shared = drafting[1].samefile(folder)
        second = loaded if shared else load_folder(*drafting, dtype, progress)
        progress("check", 0, None)
        source = _draft_model(second, loaded, head if shared else install_head(second.model))
        backend.drafters = (source,)
        backend.info = msgspec.structs.replace(backend.info, drafter=drafting[0])
        ledger = LaneLedger(forward.store, source.store, source.context_length)
    elif drafter is not None and (attached := _attach(backend, loaded, home, drafter, head, forward)) is not None:
        ledger = LaneLedger(forward.store, attached.store, loaded.context_length)
    backend.memory = ledger
    progress("warm up", 0, None)
    backend.info = msgspec.structs.replace(backend.info, timed_rounds=timed_rounds(backend))
    if memory is not None:
        _bound(backend, ledger, memory, largest)
    if backend.features is not None:
        backend.features.reset()  # of the warm-up's lanes
    return backend


def build_backend(
    loaded: Loaded, head: HeadRows, device: str, quantization: KVQuantization | None = None
) -> tuple[MLXBackend, Forward]:
    """A loaded model, its lanes checked, and the forward that serves it. Raises LoadError."""
    forward = build_forward(loaded.model, loaded.vocab_size, loaded.name, head, quantization)
    blocks = LaneBlocks(forward.store, forward.regrouping, _namespace(loaded, forward, quantization))
    backend = MLXBackend(_info(loaded, device, forward), forward, _blas_pace(), blocks)
    forward.store.groups.lane_bytes = state_bytes(forward)
    return backend, forward


def _attach(
    backend: MLXBackend,
    loaded: Loaded,
    home: Path,
    drafter: Drafter,
    head: HeadRows,
    forward: Forward,
) -> LaneDrafter | None:
    """Let a drafter read what the model's forward computes. One that was found and does not fit is told of and left
    out; one that was named is refused.
    """
    file = find_own(loaded, home) if drafter == "auto" else None if drafter == "mtp" else drafter
    if file is None and drafter == "auto" and not find_mtp(loaded):
        return None
    try:
        source, taps, features = attach(file, loaded, head, forward, fast_attention(loaded.model))
        try_taps(forward, taps)
    except (DrafterError, TapError) as error:
        if drafter == "auto":
            _log.warning("%s is served without a drafter: %s", loaded.name, error)
            return None
        raise LoadError(f"{loaded.name}: {error}") from None
    backend.features = features
    backend.drafters = (source,)
    backend.info = msgspec.structs.replace(backend.info, drafter="mtp" if file is None else _name(file))
    return source


def _name(file: Path) -> str:
    """Of a drafter, for people."""
    return file.resolve().name if file.is_dir() else file.stem


def try_taps(forward: Forward, taps: Taps) -> None:
    """Give a forward its taps. Call while nobody is served. Raises TapError, and leaves none, if it goes past one; that
    shows when it is built.
    """
    forward.taps = taps
    try:
        forward.run([Window(0, "taps", 0, (1,), False, Sampling(0.0), 2)], None)
        mx.eval(forward.buffers())
        forward.keep({})
    except TapError:
        forward.taps = None
        taps.remove()
        raise
    finally:
        forward.reset()


def state_bytes(forward: Forward) -> int:
    """What the states of one lane take, before and after a round: found by a lane whose states are full."""
    regrouping = forward.regrouping
    if regrouping is None:
        return 0
    forward.run([Window(0, "states", 0, (1,) * SETTLED, False, Sampling(0.0), SETTLED)], None)
    mx.eval(forward.buffers())
    forward.keep({})
    found = regrouping.lane_bytes(0)
    forward.reset()
    return ROWS_PER_LANE * found


def _bound(backend: MLXBackend, ledger: LaneLedger, memory: MemoryLimit, largest: LargestRound) -> None:
    """Find out what is there and what a round takes, and hold to it."""
    machine = describe_device()
    device = device_memory(machine.kind, machine.recommended_bytes)
    scratch = scratch_of(backend, device, largest)
    # States of lanes that left live on until the next round has replaced all.
    left = largest.lanes * ledger.state_bytes // ROWS_PER_LANE
    scratch = msgspec.structs.replace(scratch, fixed=scratch.fixed + left)
    device.clear()
    info = backend.info
    try:
        budget, longest = budget_of(memory.of(machine), device.use().active, scratch, ledger, info.context_length)
    except NoRoomError as error:
        raise LoadError(f"{info.name}: {error}") from None
    if longest < info.context_length:
        _log.warning("%s: of its %d tokens of context %d fit into memory", info.name, info.context_length, longest)
    backend.info = msgspec.structs.replace(info, context_length=longest, budget=budget)
    backend.residence = Residence(device, budget)
    ledger.limit(budget.pool)


def _namespace(loaded: Loaded, forward: Forward, quantization: KVQuantization | None) -> str:
    """Everything that what lanes cache depends on besides their tokens."""
    versions = [f"{name} {version(name)}" for name in ("mlx", "mlx-lm")]
    shapes = [(layer.sight, layer.shapes) for layer in forward.store.layers]
    parts = (fingerprint(loaded.folder), loaded.dtype, describe_device().kind, quantization, shapes, *versions)
    return f"{loaded.name}: {blake2b(repr(parts).encode(), digest_size=16).hexdigest()}"


def _draft_model(drafter: Loaded, target: Loaded, head: HeadRows) -> DraftModel:
    """With lanes of its own, also where both are one model."""
    facts = DraftModelFacts(drafter.vocab_size, target.vocab_size, drafter.context_length)
    forward = build_forward(drafter.model, drafter.vocab_size, drafter.name, head)
    if forward.recurrent:
        raise LoadError(
            f"{drafter.name}: its layers carry a state, which several drafted tokens cannot be taken back from"
        )
    namespace = _namespace(drafter, forward, None) + " as a draft model"
    return DraftModel(forward, facts, LaneBlocks(forward.store, forward.regrouping, namespace))


def _blas_pace() -> BlasPace | None:
    """Where the CPU computes with OpenBLAS, its threads are set round by round."""
    blas = load_blas("auto")
    if describe_device().kind != "cpu" or blas.name != "openblas" or blas.threads is None:
        return None
    return BlasPace(blas.threads, set_blas_threads, time.perf_counter)


def build_forward(
    model: Module,
    vocabulary: int,
    name: str,
    head: HeadRows | None = None,
    quantization: KVQuantization | None = None,
) -> Forward:
    """The first path on which the model's ragged lanes agree with single ones. Raises LoadError if there is none.

    `head` as for `paths`. What is checked is the model's own code, with exact keys and values; `quantization` comes
    behind it, and needs the packed path.
    """
    try:
        kinds = prepare(model)
        kept = kinds if quantization is None else quantized(kinds, quantization)
    except UnknownCacheError as error:
        raise LoadError(f"{name}: its layers cache in a {error}, which cannot be served yet") from None
    except ValueError as error:
        raise LoadError(f"{name}: {error}") from None
    head = head or install_head(model)
    attention = fast_attention(model)
    forward = _agreeing(model, kinds, vocabulary, name, paths(model, kinds, attention=attention, head=head))
    if quantization is None:
        return forward
    if not isinstance(forward, PackedForward):
        raise LoadError(f"{name}: its attention goes past the seam, so that its keys and values cannot be quantized")
    return PackedForward(model, head, kept, attention, masks=forward.masks)


def _agreeing(model: Module, kinds: Sequence[Kind], vocabulary: int, name: str, forwards: Sequence[Forward]) -> Forward:
    kv_heads = max((kind.shape.kv_heads for kind in attention_kinds(kinds)), default=1)
    reasons = []
    for forward in forwards:
        try:
            check_lanes(model, forward, vocabulary=vocabulary, kv_heads=kv_heads)
        except Exception as error:  # the named boundary of a model's own code: what it cannot do is a reason to refuse
            reasons.append(f"{type(forward).__name__}: {error}")
            _log.info("%s cannot take this path: %s", name, reasons[-1])
            forward.reset()
        else:
            return forward
    raise LoadError(f"{name}: several lanes at once do not give what one lane gives: {'; '.join(reasons)}")


def prepare(model: Module) -> list[Kind]:
    """Put patches and seams into a model's code, and see what its layers cache. Raises UnknownCacheError for caches of
    a family that is not known.
    """
    apply_patches(model)
    install_attention(model)
    install_owners(model)
    return layer_kinds(model)


def paths(model: Module, kinds: Sequence[Kind], *, attention: Attention, head: HeadRows | None = None) -> list[Forward]:
    """The packed path, with padded lanes in recurrent modules before it, if there are any; then the padded one where
    every layer sees everything. `kinds` are those of the model, which was prepared.

    All forwards of one model must share one `head`, so that none computes by what a failed call of another left there;
    None installs it.
    """
    head = head or install_head(model)
    packed = PackedForward(model, head, kinds, attention)
    forwards: list[Forward] = [packed]
    if packed.recurrent:
        forwards.insert(0, PackedForward(model, head, kinds, attention, masks=True))
    plain = [kind for kind in kinds if isinstance(kind, AttentionKind) and kind == AttentionKind(kind.shape)]
    if len(plain) == len(kinds):
        forwards.append(PaddedForward(model, head, [kind.shape for kind in plain]))
    return forwards


def fast_attention(model: Module) -> Attention:
    """MLX's own attention; but where exponentials of ours are faster, they serve attention and SwiGLU, and RoPE, which
    suffers from the same cause, is computed once a round.
    """
    if not exponential.pays():
        return mx.fast.scaled_dot_product_attention
    install_swiglu(model, exponential.swiglu)
    install_rope(model)
    return exponential.attention


def _info(loaded: Loaded, device: str, forward: Forward) -> ModelInfo:
    return ModelInfo(
        name=loaded.name,
        folder=str(loaded.folder),
        vocab_size=loaded.vocab_size,
        context_length=loaded.context_length,
        eos_tokens=frozenset(loaded.eos_token_ids),
        defaults=loaded.generation_defaults,
        device=f"{device}, {loaded.dtype}",
        parameter_bytes=loaded.parameter_bytes,
        rectangle=isinstance(forward, PaddedForward),
        cuttable=forward.cuttable,
        # On a CPU, MLX takes no more than a few operations ahead: to start a forward is to wait for the one before it.
        pipelines=describe_device().kind != "cpu",
    )
