"""The protocol between the engine and whatever computes: one verify forward over the windows of a round.

A backend owns the lanes' caches, addressed by slot. It decides nothing: which windows a round holds, what is accepted
and who leaves is told to it. All of its methods are called on the engine thread.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from scheduler.cost import RoundShape
from scheduler.draft import DraftSource
from scheduler.round import Drawn, Window

MaskWords = npt.NDArray[np.int32]
"""Which tokens may be drawn, 32 to a word: bit `t % 32` of word `t // 32` of a row is token t. `[rows, words]`."""


MOST_DRAFT_TOKENS = 31
"""The longest draft of a window: caches that hold only so much of the past keep room for one more row than this."""


class KVQuantization(msgspec.Struct, frozen=True):
    """How keys and values are kept in few bits, in groups along each head. Raises ValueError for what MLX cannot do."""

    bits: int
    group_size: int = 64
    start: int = 0
    """Positions before this one are not quantized."""

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError("the bits of keys and values must be 4 or 8")
        if self.group_size not in (32, 64, 128):
            raise ValueError("the group size of keys and values must be 32, 64 or 128")
        if self.start < 0:
            raise ValueError("quantization cannot start before the first position")


class ModelInfo(msgspec.Struct, frozen=True):
    """What the outside may know of a loaded model."""

    name: str
    """The repo's or folder's own name."""
    folder: str | None
    """Where its tokenizer and templates lie; None for a backend without files."""
    vocab_size: int
    context_length: int
    """The most tokens, prompt and completion together."""
    eos_tokens: frozenset[int]
    defaults: dict[str, float]
    """Sampling defaults of the model's generation_config (`temperature`, ...), only what it names."""
    device: str
    """What computes, for people: device, BLAS, dtype."""
    parameter_bytes: int
    rectangle: bool = False
    """Whether a round is one padded rectangle, in which a lane's long window costs rows in every lane."""
    cuttable: bool = True
    """Whether a slot's caches hold its lane at every length up to its own, and not just where it stands."""
    timed_rounds: tuple[tuple[RoundShape, float], ...] = ()
    """What some rounds cost at load, in seconds; the planner starts from them."""


class Masks(Protocol):
    """The token masks of a round's constrained windows, filled while the forward runs."""

    def wait(self) -> Mapping[int, MaskWords]:
        """By index of the window in the round: a row for each of its sampled rows. Whatever window is absent is free.
        Returns within the time limit of a fill, whatever happened.
        """
        ...


class Flight(Protocol):
    """A verify forward under way."""

    def read(self) -> list[Drawn]:
        """Wait for the forward and return, per window in order, what the target draws: a token per sampled row (the
        last real token and every draft position), nothing for a prefill chunk. The single readback of a round.
        """
        ...


class Backend(Protocol):
    """Computes rounds. Implemented by `backends.fake.FakeBackend` and `backends.mlx.backend.MLXBackend`."""

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        ...

    @property
    def drafters(self) -> Sequence[DraftSource]:
        """Draft sources that it brings itself, with models of their own. Asked on the engine thread."""
        ...

    def verify(self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None) -> Flight:
        """Start one forward over all windows.

        Each window's tokens and drafts are written at positions `[start, start + len(tokens) + len(draft))` of its
        slot's caches; what stood there before is overwritten. A slot that holds nothing is opened by its first window.
        Windows marked `carried` take their one token from the draws of `after`, which need not have been read.
        `masks` are waited for when the flight is read.
        """
        ...

    def keep(self, kept: Mapping[int, int]) -> dict[int, int]:
        """Cut each slot to its kept length, and return how far each one is really cached (contract rule 15).

        Called once for every `verify`, in order; slots that are not named keep all.
        """
        ...

    def release(self, slot: int) -> None:
        """Forget a slot's lane. Idempotent; a flight that still holds the slot is not disturbed."""
        ...

    def reset(self) -> None:
        """Forget every lane: after a failed forward the caches are presumed lost."""
        ...
