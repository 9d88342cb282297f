"""Folders of drafters that others published, as the hub has them: which kinds there are, and how each is known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from backends.mlx.drafts.assistant_files import attach_assistant
from backends.mlx.drafts.dflash_files import attach_dflash
from backends.mlx.drafts.files import DrafterError
from backends.mlx.exponential import Attention
from backends.mlx.features import Features
from backends.mlx.load import Loaded, LoadError, refuse_other_tokens
from backends.mlx.seam import HeadRows
from backends.mlx.taps import Taps
from backends.mlx.verify import Forward, LaneStore
from scheduler.draft import DraftSource


class LaneDrafter(DraftSource, Protocol):
    """A drafter that reads what a target computes."""

    @property
    def store(self) -> LaneStore | None:
        """Where its own lanes sit, if it has any."""
        ...


Attached = tuple[LaneDrafter, Taps, Features]
Config = dict[str, Any]
_Attach = Callable[[Path, Config, Loaded, HeadRows, Forward, Attention], Attached]


def attach_folder(folder: Path, loaded: Loaded, head: HeadRows, forward: Forward, attention: Attention) -> Attached:
    """The drafter in a folder, for a model that `forward` serves. `head` is the model's own. No code of the folder's is
    ever run.

    Raises DrafterError for a folder that cannot be read, a kind that is not known, another tokenizer than the model's
    (where the folder has one), and whatever else does not fit the model.
    """
    config = _config(folder)
    attach = _kind(config)
    if attach is None:
        told = config.get("architectures") or config.get("model_type")
        raise DrafterError(f"{folder} is no drafter that is known: it says that it is {told!r}")
    if (folder / "tokenizer.json").exists():
        try:
            refuse_other_tokens(folder.name, folder, loaded.name, loaded.folder)
        except LoadError as error:
            raise DrafterError(str(error)) from None
    try:
        return attach(folder, config, loaded, head, forward, attention)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # Fault boundary: config and weights are the user's, and MLX and mlx-lm raise whatever they trip over.
        raise DrafterError(f"the drafter {folder} does not fit {loaded.name}: {error}") from None


def _config(folder: Path) -> Config:
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=Config)
    except (OSError, ValueError, RecursionError) as error:  # msgspec's own are ValueErrors
        raise DrafterError(f"the drafter {folder} has no config.json that can be read: {error}") from None


def _kind(config: Config) -> _Attach | None:
    """What makes a drafter of it."""
    if config.get("model_type") in ("gemma4_assistant", "gemma4_unified_assistant"):
        return attach_assistant
    architectures = config.get("architectures")
    if "dflash_config" in config or (
        isinstance(architectures, list) and any("DFlash" in str(each) for each in architectures)
    ):
        return attach_dflash
    return None
