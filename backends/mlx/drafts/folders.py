"""Drafters that others published: a folder with a configuration and weights, as the hub has them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from backends.mlx.drafts.block import MOST_CONTEXT, BlockDrafter
from backends.mlx.drafts.dflash import DFlash, DFlashNetwork, dflash_shape
from backends.mlx.drafts.files import DrafterError
from backends.mlx.drafts.fill import fill
from backends.mlx.drafts.mtp_weights import Naming, read_weights
from backends.mlx.drafts.target import borrow
from backends.mlx.exponential import Attention
from backends.mlx.features import Features
from backends.mlx.load import Loaded
from backends.mlx.seam import HeadRows
from backends.mlx.taps import Taps

Attached = tuple[BlockDrafter, Taps, Features]
Config = Mapping[str, Any]


def attach_folder(folder: Path, loaded: Loaded, head: HeadRows, attention: Attention) -> Attached:
    """A drafter that reads what the taps note, once a forward has them. `head` is the target's own.

    Raises DrafterError for a folder that holds none, none of a kind that is known, or one that does not fit the model.
    """
    config = _config(folder)
    attach = next((known for names, known in _KINDS if names(config)), None)
    try:
        if attach is None:
            raise DrafterError(f"its kind is not known: {config.get('architectures') or config.get('model_type')}")
        return attach(folder, config, loaded, head, attention)
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        # Fault boundary: the weights are the user's, and MLX raises whatever it trips over.
        raise DrafterError(f"the drafter in {folder} cannot draft for {loaded.name}: {error}") from None


def _config(folder: Path) -> Config:
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise DrafterError(f"{folder} holds no drafter: {error}") from None


def _attach_dflash(folder: Path, config: Config, loaded: Loaded, head: HeadRows, attention: Attention) -> Attached:
    shape = dflash_shape(config)
    target = borrow(loaded.model)
    layers = len(loaded.model.layers)
    if shape.dims != target.dims or shape.target_layers not in (None, layers):
        wanted = f"{shape.target_layers or 'some'} layers of {shape.dims}"
        raise DrafterError(f"it is for a model of {wanted}, and this has {layers} of {target.dims}")
    if not 0 <= shape.mask < target.vocabulary:
        raise DrafterError(f"the model has no token {shape.mask}, which is its mask")
    network = DFlash(shape)
    naming = Naming("", ())
    fill(network, read_weights(folder, naming), naming, loaded.model, target.embedding(mx.array([0])).dtype)
    taps = Taps(loaded.model, head, shape.taps)
    features = Features(MOST_CONTEXT)
    return BlockDrafter(DFlashNetwork(network, shape, target), features, attention), taps, features


def _is_dflash(config: Config) -> bool:
    return "dflash_config" in config or any("DFlash" in str(name) for name in config.get("architectures") or ())


_KINDS: tuple[tuple[Callable[[Config], bool], Callable[..., Attached]], ...] = ((_is_dflash, _attach_dflash),)
"""How each is known, and what makes a drafter of it."""
