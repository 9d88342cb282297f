"""Weights as a folder's safetensors hold them, and how they are made to fit a network that drafts.

Knows no architecture: how weights are called, and what they mean, is the business of those who read them.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import infer_quant_config

from backends.mlx.drafts.eagle import parameters_of
from backends.mlx.drafts.files import DrafterError

Weights = dict[str, mx.array]


def weight_files(folder: Path) -> Iterator[Path]:
    """In the order of their names."""
    yield from sorted(folder.glob("*.safetensors"))


def opened(file: Path) -> Weights:
    """The arrays of a file, of which only the header is read. Raises DrafterError."""
    try:
        found = mx.load(str(file), format="safetensors")
    except (RuntimeError, ValueError) as error:
        raise DrafterError(f"{file} is damaged or incomplete: {error}") from None
    assert isinstance(found, dict)
    return found


def fill(network: nn.Module, weights: Weights, stored: Callable[[str], str], model: nn.Module, dtype: mx.Dtype) -> None:
    """Give a network its weights, evaluated: in the type that the model computes in, quantized if both are. `stored` as
    for `refuse_misfits`.

    Raises DrafterError, and whatever MLX does, for weights that are not whole or do not fit the network.
    """
    weights = quantized_alike(network, weights, kept=any(hasattr(part, "bits") for part in model.modules()))
    refuse_misfits(network, weights, stored)
    network.load_weights(list(_cast(model, weights, dtype).items()))
    network.eval()
    mx.eval(parameters_of(network))


def quantized_alike(network: nn.Module, weights: Weights, *, kept: bool) -> Weights:
    """Make the network's layers such as the weights are; or, if quantized ones are not to be kept, the weights such as
    the layers are, in float32. How each was quantized shows in its shape, and in the type of its scales.
    """
    plain = dict(weights)
    found: dict[str, dict[str, Any]] = {}
    for path, part in network.named_modules():
        if f"{path}.scales" in weights and f"{path}.weight" in weights:
            found[path] = infer_quant_config(path, part, weights)
    if kept:
        nn.quantize(network, class_predicate=lambda path, _: found.get(path, False))
        return plain
    for path, how in found.items():
        scales, biases = plain.pop(f"{path}.scales"), plain.pop(f"{path}.biases", None)
        if biases is not None:  # half-precision scales would round every product
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        plain[f"{path}.weight"] = mx.dequantize(plain[f"{path}.weight"], scales, biases, **how, dtype=mx.float32)
    return plain


def refuse_misfits(network: nn.Module, weights: Weights, stored: Callable[[str], str]) -> None:
    """Raise DrafterError unless there are all weights of the network, of its shapes, and no others. `stored` tells how
    the folder calls one of the network's.
    """
    wanted = {name: tuple(array.shape) for name, array in parameters_of(network).items()}
    found = {name: tuple(array.shape) for name, array in weights.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            raise DrafterError(f"{stored(name)} is missing")
        if name not in wanted:
            raise DrafterError(f"{stored(name)} belongs to no part of them")
        if wanted[name] != found[name]:
            raise DrafterError(f"{stored(name)} has the shape {found[name]} instead of {wanted[name]}")


def _cast(model: nn.Module, weights: Weights, dtype: mx.Dtype) -> Weights:
    """Floats in the target's type, but for those that the model wants in full."""
    may_narrow: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _: True)
    return {
        name: array.astype(dtype)
        if mx.issubdtype(array.dtype, mx.floating) and (dtype == mx.float32 or may_narrow(name))
        else array
        for name, array in weights.items()
    }
