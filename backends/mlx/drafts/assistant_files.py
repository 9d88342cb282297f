"""From the folder of a Gemma 4 assistant to a drafter of a loaded target, or the reason why it cannot be one."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.models import gemma4, gemma4_text

from backends.mlx.caches.buffers import LayerBuffers
from backends.mlx.caches.sight import EVERYTHING
from backends.mlx.drafts.assistant import Assistant, AssistantShape, LayerType
from backends.mlx.drafts.assistant_drafter import AssistantDrafter, TargetLanes
from backends.mlx.drafts.eagle import parameters_of
from backends.mlx.drafts.files import DrafterError
from backends.mlx.drafts.target import borrow
from backends.mlx.drafts.weights import Weights, opened, quantized_alike, refuse_misfits, weight_files
from backends.mlx.exponential import Attention
from backends.mlx.features import Features
from backends.mlx.load import Loaded
from backends.mlx.seam import HeadRows, install_attention
from backends.mlx.taps import Taps
from backends.mlx.verify import Forward, PackedForward

_OUT, _IN = "lm_head.", "model.embed_tokens."
"""The head and the table of embeddings, one of which may be lacking; no token is ever looked up in the latter."""
_HEAD = "head."
_ORDERING = "masked_embedding.token_ordering"


def attach_assistant(
    folder: Path, config: dict[str, Any], loaded: Loaded, head: HeadRows, forward: Forward, attention: Attention
) -> tuple[AssistantDrafter, Taps, Features]:
    """The assistant in a folder, whose config was read: see `folders.attach_folder`. Raises DrafterError, and whatever
    MLX and mlx-lm do.
    """
    shape = msgspec.convert(config, AssistantShape)
    target = _target_lanes(loaded, forward)
    _refuse_other_measures(shape, loaded, target)
    network = _network(folder, shape, target)
    taps = Taps(loaded.model, head, ("head",))
    install_attention(network)
    features = Features(1)
    return AssistantDrafter(network, target, features, attention), taps, features


def _target_lanes(loaded: Loaded, forward: Forward) -> TargetLanes:
    """What an assistant has of a Gemma 4 whose keys and values lie in buffers as they are."""
    model = loaded.model
    text = model.language_model if isinstance(model, gemma4.Model) else model
    if not isinstance(text, gemma4_text.Model):
        raise DrafterError("an assistant drafts for Gemma 4 only")
    if not isinstance(forward, PackedForward):
        raise DrafterError("the model is served in rectangles, whose lanes lie otherwise")
    layers = forward.store.layers
    if any(len(layer.shapes) != 2 for layer in layers):
        raise DrafterError("the model's keys and values are quantized, and an assistant attends exact ones")
    kinds: list[LayerType] = text.args.layer_types[: text.args.num_hidden_layers - text.args.num_kv_shared_layers]
    found: dict[LayerType, LayerBuffers] = dict(zip(kinds, layers, strict=True))  # the last of each type
    if len(found) != 2 or found["full_attention"].sight != EVERYTHING or not found["sliding_attention"].sight.window:
        raise DrafterError("the model has not both kinds of layers that an assistant attends")
    table, scale = borrow(model).embedding, text.model.embed_scale
    return TargetLanes(forward.store, found, lambda tokens: table(tokens) * scale)


def _refuse_other_measures(shape: AssistantShape, loaded: Loaded, target: TargetLanes) -> None:
    text, dims = shape.text_config, target.embedding(mx.array([0])).shape[-1]
    if shape.backbone_hidden_size != dims:
        raise DrafterError(f"it reads hidden states of {shape.backbone_hidden_size} numbers, not {dims}")
    if text.vocab_size != loaded.vocab_size:
        raise DrafterError(f"its vocabulary has {text.vocab_size} tokens, not {loaded.vocab_size}")
    window = target.layers["sliding_attention"].sight.window
    if text.sliding_window < window:
        raise DrafterError(f"its sliding layers see {text.sliding_window} positions, not {window}")
    for kind in text.layer_types:
        heads = target.layers[kind].shapes[0].heads
        if text.num_attention_heads % heads:
            raise DrafterError(f"its {text.num_attention_heads} heads cannot share {heads} in layers of {kind}")


def _network(folder: Path, shape: AssistantShape, target: TargetLanes) -> Assistant:
    """With the folder's weights, evaluated, in the target's type; of quantized ones the numbers that they mean."""
    network = Assistant(shape, {kind: layer.shapes[0].dim for kind, layer in target.layers.items()})
    weights, head = _read(folder)
    weights = quantized_alike(network, weights, kept=False)
    refuse_misfits(network, weights, lambda name: head + name.removeprefix(_HEAD) if name.startswith(_HEAD) else name)
    if _ORDERING in weights:
        weights[_ORDERING] = _ordering(weights[_ORDERING])
    dtype = target.embedding(mx.array([0])).dtype
    floats = {name: array.astype(dtype) for name, array in weights.items() if name != _ORDERING}
    network.load_weights(list((weights | floats).items()))
    network.eval()
    mx.eval(parameters_of(network))
    return network


def _read(folder: Path) -> tuple[Weights, str]:
    """All weights by the network's names, and what those of the head are called in the folder."""
    stored = {name: array for file in weight_files(folder) for name, array in opened(file).items()}
    if not stored:
        raise DrafterError("its folder holds no weights")
    head, other = (_OUT, _IN) if any(name.startswith(_OUT) for name in stored) else (_IN, _OUT)
    kept = {name: array for name, array in stored.items() if not name.startswith(other)}
    return {_HEAD + name.removeprefix(head) if name.startswith(head) else name: kept[name] for name in kept}, head


def _ordering(stored: mx.array) -> mx.array:
    """Int32; raises DrafterError unless it has every token once."""
    if not mx.issubdtype(stored.dtype, mx.integer):
        raise DrafterError(f"{_ORDERING} holds no whole numbers")
    if not mx.array_equal(mx.sort(stored.astype(mx.int64)), mx.arange(stored.size, dtype=mx.int64)):
        raise DrafterError(f"{_ORDERING} has not every token once")
    return stored.astype(mx.int32)
