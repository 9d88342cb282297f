"""What a fault plan says: which faults, when, and whom they strike. A JSON file:

    {"seed": 7, "faults": [
        {"kind": "raise", "probability": 0.01},
        {"kind": "raise", "marker": [80, 79, 73]},
        {"kind": "nan", "every": 50, "times": 3},
        {"kind": "slow", "seconds": 0.5, "after": 100, "probability": 0.05},
        {"kind": "ssd_write", "error": "ENOSPC", "every": 4}
    ]}

Kinds of a round: `raise` (the forward cannot be started), `allocation` (the same, in the words of MLX when there is no
memory), `nan` (a lane's logits are NaN, and go through all that looks at logits), `slow` and `hang` (the forward takes
longer, or for ever), `raise_read` (it fails when it is read), `keep` (its caches cannot be cut). Kinds of a disk:
`ssd_write` and `ssd_read`. `Occasions` and `RoundFault` are what they may say of when and of whom. A fault strikes
where all that it says holds, so that one that says nothing always does; several may strike at once. What is left to
chance depends on the seed, the fault's place in the plan and how many occasions it had, and on nothing else.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class Occasions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """When a fault may strike. Occasions are the rounds, the calls of `keep`, or the disk's writes or reads."""

    after: Annotated[int, Meta(ge=0)] = 0
    """So many occasions pass first."""
    every: Annotated[int, Meta(ge=1)] = 1
    """Then each so-and-so-manieth is one."""
    times: Annotated[int, Meta(ge=1)] | None = None
    """It strikes no more often than this."""
    probability: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """How likely it strikes where all else holds."""


class RoundFault(Occasions, frozen=True, kw_only=True):
    """Whom a fault may strike: rounds that hold such a lane. Both must hold if both are said."""

    request: str | None = None
    """Its request's id holds this text."""
    marker: Annotated[tuple[int, ...], Meta(min_length=1)] | None = None
    """These tokens stand one behind the other in what was fed to it so far, its prompt or its answer. What was copied
    to it out of the prefix cache was not fed, so they are best put at the end of a prompt.
    """


class Raise(RoundFault, frozen=True, tag="raise"):
    """`verify` raises, before anything is computed."""


class Allocation(RoundFault, frozen=True, tag="allocation"):
    """`verify` raises what MLX does when it gets no memory."""


class Nan(RoundFault, frozen=True, tag="nan"):
    """The logits of lanes that draw are NaN: of all whom `request` and `marker` tell, else of any one."""


class Slow(RoundFault, frozen=True, tag="slow"):
    """The forward takes longer."""

    seconds: Annotated[float, Meta(gt=0)]


class Hang(RoundFault, frozen=True, tag="hang"):
    """The forward never ends."""


class RaiseRead(RoundFault, frozen=True, tag="raise_read"):
    """The flight raises when it is read."""


class Keep(RoundFault, frozen=True, tag="keep"):
    """`keep` raises, before anything is cut."""


class DiskFault(Occasions, frozen=True, kw_only=True):
    """A disk's error."""

    error: Literal["ENOSPC", "EIO", "EDQUOT", "EROFS"] = "EIO"


class SsdWrite(DiskFault, frozen=True, tag="ssd_write"):
    """A piece of the prefix cache cannot be written: its data, before it is synced."""


class SsdRead(DiskFault, frozen=True, tag="ssd_read"):
    """A piece of the prefix cache cannot be read."""


Fault = Raise | Allocation | Nan | Slow | Hang | RaiseRead | Keep | SsdWrite | SsdRead


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong."""

    faults: tuple[Fault, ...]
    seed: int = 0


class PlanError(ValueError):
    """A file that is no plan; the message names what is wrong with it."""


def read_plan(path: Path) -> Plan:
    """Raises OSError and PlanError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except msgspec.DecodeError as error:
        raise PlanError(f"the fault plan {path}: {error}") from error


def kind_of(fault: Occasions) -> str:
    """As the plan names it."""
    return str(fault.__struct_config__.tag)
