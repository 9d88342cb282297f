"""From the folder of a DFlash drafter to a drafter of a loaded target, or the reason why it cannot be one."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from backends.mlx.drafts.block import MOST_CONTEXT, BlockDrafter
from backends.mlx.drafts.dflash import DFlash, DFlashNetwork, dflash_shape
from backends.mlx.drafts.files import DrafterError
from backends.mlx.drafts.target import borrow
from backends.mlx.drafts.weights import fill, opened, weight_files
from backends.mlx.exponential import Attention
from backends.mlx.features import Features
from backends.mlx.load import Loaded
from backends.mlx.seam import HeadRows
from backends.mlx.taps import Taps
from backends.mlx.verify import Forward


def attach_dflash(
    folder: Path,
    config: dict[str, Any],
    loaded: Loaded,
    head: HeadRows,
    forward: Forward,  # noqa: ARG001 (one signature for all kinds)
    attention: Attention,
) -> tuple[BlockDrafter, Taps, Features]:
    """The drafter in a folder, whose config was read: see `folders.attach_folder`. Raises DrafterError, and whatever
    MLX does.
    """
    shape = dflash_shape(config)
    target = borrow(loaded.model)
    layers = len(loaded.model.layers)
    if shape.dims != target.dims or shape.target_layers not in (None, layers):
        wanted = f"{shape.target_layers or 'some'} layers of {shape.dims}"
        raise DrafterError(f"it is for a model of {wanted}, and this has {layers} of {target.dims}")
    if not 0 <= shape.mask < target.vocabulary:
        raise DrafterError(f"the model has no token {shape.mask}, which is its mask")
    network = DFlash(shape)
    weights = {name: array for file in weight_files(folder) for name, array in opened(file).items()}
    fill(network, weights, str, loaded.model, target.embedding(mx.array([0])).dtype)
    taps = Taps(loaded.model, head, shape.taps)
    features = Features(MOST_CONTEXT)
    return BlockDrafter(DFlashNetwork(network, shape, target), features, attention), taps, features
