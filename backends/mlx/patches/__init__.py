"""Models whose own code cannot follow lanes: what is put in its place, one small file for each.

A patch is named after the module of mlx-lm's that it mends, or after what several have in common. It leaves calls that
do not concern packed rows as they were.
"""

from collections.abc import Callable, Mapping

from mlx.nn.layers.base import Module

from backends.mlx.patches import afm7, gpt_bigcode, llama4, plamo2, rope_utils, softcap

PATCHES: Mapping[str, Callable[[Module], None]] = {
    "afm7": afm7.patch,
    "gear": softcap.patch_gear,
    "gemma2": softcap.patch_gemma2,
    "gpt_bigcode": gpt_bigcode.patch,
    "llama4": llama4.patch,
    "plamo2": plamo2.patch,
    "rope_utils": rope_utils.patch,
}
"""By name of the module in `mlx_lm.models`; each is applied to every model that has a part defined there, once."""


def apply_patches(model: Module) -> None:
    """Mend the code of `model` where it is known to need it."""
    defining = {type(part).__module__.removeprefix("mlx_lm.models.") for part in model.modules()}
    for name in sorted(defining & PATCHES.keys()):
        PATCHES[name](model)
