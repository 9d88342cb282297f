"""The protocol between the engine and whatever computes: one verify forward over the windows of a round.

A backend owns the lanes' caches, addressed by slot. It decides nothing: which windows a round holds, what is accepted
and who leaves is told to it. All of its methods are called on the engine thread.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from scheduler.admission import LaneMemory
from scheduler.cost import RoundShape
from scheduler.draft import DraftAsk, DraftSource
from scheduler.pieces import Piece
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


class Budget(msgspec.Struct, frozen=True):
    """What the process may hold in memory, in bytes, and how much of that is spoken for from the start."""

    total: int
    weights: int
    """The model's, and a draft model's."""
    scratch: int
    """What a forward takes while it runs, and what buffers that grow hold twice."""

    @property
    def pool(self) -> int:
        """What is left for lanes and prefix blocks."""
        return self.total - self.weights - self.scratch


class MemoryUse(msgspec.Struct, frozen=True):
    """What is held in memory now, in bytes, as the device's allocator measures it."""

    active: int
    """In arrays: weights, lanes, prefix blocks and what a forward takes."""
    peak: int
    """The most that `active` ever was."""
    buffer_cache: int
    """Freed, and kept by the allocator for what comes next."""


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
    pipelines: bool = True
    """Whether a forward can be started while another one is under way, without waiting for that."""
    timed_rounds: tuple[tuple[RoundShape, float], ...] = ()
    """What some rounds cost at load, in seconds; the planner starts from them."""
    drafter: str | None = None
    """What drafts for it with weights of its own, for people."""
    budget: Budget | None = None
    """None where nothing is bounded. One lane of `context_length` fits into its pool in any case."""


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


class Block(Protocol):
    """A piece of a lane's caches, copied out and evaluated: nothing that is written to the caches can change it."""

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        ...

    @property
    def meta(self) -> bytes:
        """How its parts are to be read."""
        ...

    def parts(self) -> list[memoryview]:
        """Its bytes. To be made on the engine thread; any thread may read them, and releases them."""
        ...


class Blocks(Protocol):
    """Lanes' caches in pieces: out of a slot, into a slot, and out of bytes. Belongs to the engine thread."""

    @property
    def namespace(self) -> str:
        """Names everything that pieces depend on: whatever has this name too may use them."""
        ...

    @property
    def checkpoints(self) -> bool:
        """Whether some layer can only be had as it stands, so that a piece with `checkpoint` is needed."""
        ...

    @property
    def blocks(self) -> bool:
        """Whether some layer keeps something of every position, so that the other pieces hold something."""
        ...

    def take(self, slot: int, pieces: Sequence[Piece]) -> list[Block | None]:
        """Copy pieces out of a slot; None for a checkpoint at a length where the slot does not stand."""
        ...

    def put(self, slot: int, reach: int, pieces: Sequence[tuple[Piece, Block]]) -> None:
        """Copy pieces into a slot, which they open if they begin at 0 and which else holds all before them; evaluated.
        `reach` is as of a window.
        """
        ...

    def parse(self, piece: Piece, meta: bytes, data: memoryview) -> Block:
        """A piece out of what `meta` and the joined `parts` of one were. Raises ValueError for what cannot be one."""
        ...


class Companion(Protocol):
    """The prefix cache as a draft model sees it, whose lanes go by slots of its own. On the engine thread."""

    def restore(self, slot: int, ask: DraftAsk, held: int) -> int:
        """Copy more of a lane's text into a slot, behind the `held` tokens that it holds; how many it holds then."""
        ...

    def store(self, slot: int, ask: DraftAsk, held: int) -> None:
        """A slot holds so many of a lane's tokens now."""
        ...

    def forget(self, request_id: str) -> None:
        """The lane left. Idempotent."""
        ...


@runtime_checkable
class Accompanied(Protocol):
    """A draft source with lanes of its own, which can be had in pieces, unless `blocks` is None."""

    blocks: Blocks | None
    companion: Companion | None
    """Where it is told of pieces; set once, before it is asked anything."""


class Backend(Protocol):
    """Computes rounds. Implemented by `backends.fake.FakeBackend` and `backends.mlx.backend.MLXBackend`."""

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        ...

    @property
    def blocks(self) -> Blocks | None:
        """Its lanes' caches in pieces; None if it has none to give."""
        ...

    @property
    def memory(self) -> LaneMemory:
        """What its lanes take, a draft model's included."""
        ...

    def use(self) -> MemoryUse | None:
        """What is held now; None where nothing is measured."""
        ...

    def rest(self) -> None:
        """Nothing runs from now until the next `verify`: give back what is only held to be fast."""
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
