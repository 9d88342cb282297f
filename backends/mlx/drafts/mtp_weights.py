"""Multi-token-prediction weights as a model's folder holds them; mlx-lm drops them when it loads the model.

Finds them by their published names, and gives them the names and the form that a network made of mlx-lm's own layers
wants: what mlx-lm's `sanitize` does with the weights of a model's layers is done here with those of one layer more.
Knows nothing of what the network computes.
"""

import re
from collections import defaultdict
from pathlib import Path

import mlx.core as mx
import msgspec

from backends.mlx.drafts.files import DrafterError
from backends.mlx.drafts.weights import Weights, opened, weight_files

_WRAPPER = "language_model."
"""What mlx-lm puts before all names of a model for text and images (its `qwen3_5.Model.sanitize`)."""
_EXPERT = re.compile(r"(.*mlp)\.experts\.(\d+)\.(\w+\.\w+)")
_FUSED = ".experts.gate_up_proj"
_BLOCK = 128


class Naming(msgspec.Struct, frozen=True):
    """How such weights are called in a folder, and in a network."""

    prefix: str
    """What the names in a folder begin with."""
    parts: tuple[tuple[str, str | None], ...]
    """How they go on, and what the network has for it; None for what it does not read. The first that fits counts."""
    zero_centred: bool = False
    """Whether norms are published as their distance from one."""

    def own(self, stored: str) -> str | None:
        """The network's name for a weight in a folder, or what is left of it; None for one that it does not read."""
        rest = stored.removeprefix(_WRAPPER)
        if not rest.startswith(self.prefix):
            return None
        rest = rest.removeprefix(self.prefix)
        for begin, own in self.parts:
            if rest.startswith(begin):
                return None if own is None else own + rest.removeprefix(begin)
        return rest

    def stored(self, own: str) -> str:
        """The name in a folder of one of the network's weights."""
        for begin, part in self.parts:
            if part is not None and own.startswith(part):
                return self.prefix + begin + own.removeprefix(part)
        return self.prefix + own


def holds_weights(folder: Path, naming: Naming) -> bool:
    """Whether a folder has any of them. Files that cannot be read are passed over."""
    for file in weight_files(folder):
        try:
            if any(naming.own(name) for name in opened(file)):
                return True
        except DrafterError:
            continue
    return False


def read_weights(folder: Path, naming: Naming) -> Weights:
    """All of them by the network's names, none but norms evaluated; empty if there are none.

    Experts are stacked, and one is added to norms that are zero-centred. That they are shows in the folder's
    convolutions, as for the model's own layers: mlx-lm turns them when it adds one (`sanitize` of its qwen3_next and
    qwen3_5). Or in a mean below zero, where weights as they were published lie beside a model that was converted: what
    Qwen publishes as `pre_fc_norm_embedding` is negative throughout (found by MTPLX). Converters that added one to some
    of these norms only have been seen (by oMLX); drafts of such weights are wrong.

    Numbers of 8 bits are widened. Raises DrafterError for a file that cannot be read, or experts that differ.
    """
    weights: Weights = {}
    published = False
    for file in weight_files(folder):
        for name, array in opened(file).items():
            own = naming.own(name)
            if own is not None:
                weights[own] = array
            published |= name.endswith("conv1d.weight") and array.shape[-1] != 1
    weights = _halved(_stacked(_widened(weights)))
    norms = {name: array for name, array in weights.items() if name.endswith("norm.weight")}
    if naming.zero_centred and (published or any(bool(array.mean() < 0) for array in norms.values())):
        weights |= {name: array + 1.0 for name, array in norms.items()}
    return weights


def split_latent(weights: Weights, heads: int, key_dim: int) -> Weights:
    """The projection from the latent vector to each head's keys and values (`kv_b_proj`, `[heads * (key_dim +
    value_dim), rank]`) as the two that mlx-lm's layers have: `embed_q` `[heads, rank, key_dim]` and `unembed_out`
    `[heads, value_dim, rank]`. Raises DrafterError if it is quantized.
    """
    found = {name: array for name, array in weights.items() if ".kv_b_proj." in name}
    split = {name: array for name, array in weights.items() if name not in found}
    for name, array in found.items():
        base, part = name.split(".kv_b_proj.")
        if part != "weight":
            raise DrafterError(f"{name} is quantized, which is not known of it")
        both = array.reshape(heads, -1, array.shape[-1])
        split[f"{base}.embed_q.weight"] = mx.contiguous(both[:, :key_dim].swapaxes(-1, -2))
        split[f"{base}.unembed_out.weight"] = mx.contiguous(both[:, key_dim:])
    return split


def _widened(weights: Weights) -> Weights:
    """Numbers of 8 bits (E4M3) with a scale for each block of 128 by 128 of them, as float32."""
    wide = dict(weights)
    for name in weights:
        narrow = weights.get(name.removesuffix("_scale_inv"))
        if name.endswith(".weight_scale_inv") and narrow is not None and narrow.dtype == mx.uint8:
            rows, columns = narrow.shape
            scales = mx.repeat(wide.pop(name).astype(mx.float32), _BLOCK, axis=0)[:rows]
            scales = mx.repeat(scales, _BLOCK, axis=1)[:, :columns]
            wide[name.removesuffix("_scale_inv")] = mx.from_fp8(narrow, dtype=mx.float32) * scales
    return wide


def _stacked(weights: Weights) -> Weights:
    """Experts that lie apart (`experts.3.up_proj.weight`) as one array (`switch_mlp.up_proj.weight`)."""
    whole: Weights = {}
    apart: dict[str, dict[int, mx.array]] = defaultdict(dict)
    for name, array in weights.items():
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            whole[name] = array
        else:
            apart[f"{expert[1]}.switch_mlp.{expert[3]}"][int(expert[2])] = array
    for name, experts in apart.items():
        try:
            whole[name] = mx.stack([experts[number] for number in sorted(experts)])
        except ValueError as error:
            raise DrafterError(f"the experts of {name} differ: {error}") from None
    return whole


def _halved(weights: Weights) -> Weights:
    """Experts whose gate and up projection are one array (mlx-lm's `qwen3_5_moe.Model.sanitize`), as two."""
    whole = dict(weights)
    for name in weights:
        if name.endswith(_FUSED):
            experts = name.removesuffix(_FUSED)
            gate, up = mx.split(whole.pop(name), 2, axis=-2)
            whole[f"{experts}.switch_mlp.gate_proj.weight"] = gate
            whole[f"{experts}.switch_mlp.up_proj.weight"] = up
            down = whole.pop(f"{experts}.experts.down_proj", None)
            if down is not None:
                whole[f"{experts}.switch_mlp.down_proj.weight"] = down
    return whole
