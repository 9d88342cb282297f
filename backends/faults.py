"""Faults on demand: a backend that fails as a plan says, so that it can be seen what becomes of everybody else.

Only where a plan was given (`paceline serve --fault-plan FILE`); `backends.fault_plan` tells what it can say.
"""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar, runtime_checkable

import msgspec

from backends.base import Backend, Blocks, Flight, Masks, MemoryUse, ModelInfo
from backends.fault_plan import (
    Allocation,
    DiskFault,
    Fault,
    Hang,
    Keep,
    Nan,
    Plan,
    Raise,
    RaiseRead,
    RoundFault,
    Slow,
    SsdRead,
    SsdWrite,
    kind_of,
)
from scheduler.admission import LaneMemory
from scheduler.draft import DraftSource
from scheduler.round import Drawn, Window

_log = logging.getLogger("paceline.faults")

# ---- when ------------------------------------------------------------------------------------------------------------


class Lane(msgspec.Struct):
    """What was fed to a slot. Written by `Lanes`."""

    request_id: str
    text: list[int | None] = []
    """By position; None where it is not known."""

    def feed(self, window: Window) -> None:
        """What stood behind the window's start is gone."""
        del self.text[window.start :]
        self.text += [None] * (window.start - len(self.text))
        self.text += window.tokens

    def holds(self, marker: Sequence[int]) -> bool:
        """Whether the tokens stand there, one behind the other."""
        first, length = marker[0], len(marker)
        wanted = list(marker)
        return any(
            token == first and self.text[place : place + length] == wanted for place, token in enumerate(self.text)
        )

    def is_meant(self, fault: RoundFault) -> bool:
        """Whether a fault may strike it."""
        named = fault.request is None or fault.request in self.request_id
        return named and (fault.marker is None or self.holds(fault.marker))


class Lanes:
    """The lanes by slot, as far as windows tell. Written by `FaultyBackend`."""

    def __init__(self) -> None:
        self._lanes: dict[int, Lane] = {}

    def feed(self, windows: Iterable[Window]) -> None:
        """Take in a round."""
        for window in windows:
            if window.copies is not None and window.copies in self._lanes:
                self._lanes[window.slot] = Lane(window.request_id, list(self._lanes[window.copies].text))
            lane = self._lanes.get(window.slot)
            if lane is None or lane.request_id != window.request_id:
                lane = self._lanes[window.slot] = Lane(window.request_id, [])
            lane.feed(window)

    def meant(self, fault: RoundFault, slots: Iterable[int]) -> list[int]:
        """Those of the slots that a fault may strike."""
        return [slot for slot in slots if slot in self._lanes and self._lanes[slot].is_meant(fault)]

    def release(self, slot: int) -> None:
        """Forget a lane. Idempotent."""
        self._lanes.pop(slot, None)

    def reset(self) -> None:
        """Forget all lanes."""
        self._lanes.clear()


class Trigger:
    """Counts the occasions of one fault. Belongs to the thread on which they come."""

    def __init__(self, fault: Fault, name: str) -> None:
        """`name` tells it apart from all others, and its chances too."""
        self._fault = fault
        self._name = name
        self._occasions = 0
        self._struck = 0

    def pull(self, meant: bool = True) -> bool:
        """One occasion more: whether the fault strikes. `meant`: whether anybody is there whom it may strike."""
        fault, occasion = self._fault, self._occasions
        self._occasions += 1
        since = occasion - fault.after
        if not meant or since < 0 or (since + 1) % fault.every or self._struck == fault.times:
            return False
        if _chance(f"{self._name}/{occasion}") >= fault.probability:
            return False
        self._struck += 1
        return True


def _chance(name: str) -> float:
    """In [0, 1), the same for the same name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=6).digest(), "big") / 2.0**48


# ---- the faults ------------------------------------------------------------------------------------------------------


class InjectedError(RuntimeError):
    """What a plan had raised; it may stand for anything."""


@runtime_checkable
class Spoilable(Protocol):
    """A backend whose numbers can go wrong where real ones would."""

    def spoil(self, slot: int) -> None:
        """Make the slot's logits in the next forward NaN, the same way into everything that looks at logits."""
        ...


_DISK_POINTS: dict[type[DiskFault], str] = {SsdWrite: "written", SsdRead: "read"}
"""Where each strikes: see `Spill`."""
Wait = Callable[[float | None], object]
"""Wait for so many seconds; None for ever."""
_Kind = TypeVar("_Kind", bound=RoundFault)


class FaultyFlight:
    """Implements `backends.base.Flight`: another one, and what happens to it when it is read."""

    def __init__(self, flight: Flight, faults: Sequence[RoundFault], wait: Wait) -> None:
        self.flight = flight
        self._faults = faults
        self._wait = wait

    def read(self) -> list[Drawn]:
        """What the other one reads, late or never."""
        faults, self._faults = self._faults, ()
        for fault in faults:
            if isinstance(fault, Slow):
                self._wait(fault.seconds)
            elif isinstance(fault, Hang):
                self._wait(None)
        drawn = self.flight.read()
        if any(isinstance(fault, RaiseRead) for fault in faults):
            raise InjectedError("a fault plan had the flight fail")
        return drawn


class FaultyBackend:
    """Implements `backends.base.Backend`: another one, with the faults of a plan. All but `disk` belongs to the engine
    thread.
    """

    def __init__(self, backend: Backend, plan: Plan, *, wait: Wait | None = None) -> None:
        """Raises ValueError for a plan with NaN where the other backend cannot be spoiled."""
        if any(isinstance(fault, Nan) for fault in plan.faults) and not isinstance(backend, Spoilable):
            raise ValueError("this backend's logits cannot be made NaN")
        self._backend = backend
        self._seed = plan.seed
        self._triggers = [(fault, Trigger(fault, f"{plan.seed}/{place}")) for place, fault in enumerate(plan.faults)]
        self._wait = wait or threading.Event().wait
        self._lanes = Lanes()
        self._rounds = 0
        kinds = ", ".join(dict.fromkeys(kind_of(fault) for fault in plan.faults))
        _log.warning("FAULTS ARE INJECTED into this server, as a plan says: %s", kinds or "none")

    # ---- as the other backend has it --------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        return self._backend.info

    @property
    def blocks(self) -> Blocks | None:
        """Its lanes' caches in pieces."""
        return self._backend.blocks

    @property
    def memory(self) -> LaneMemory:
        """What its lanes take."""
        return self._backend.memory

    @property
    def drafters(self) -> Sequence[DraftSource]:
        """Draft sources that it brings itself."""
        return self._backend.drafters

    def use(self) -> MemoryUse | None:
        """What is held now."""
        return self._backend.use()

    def rest(self) -> None:
        """Nothing runs until the next `verify`."""
        self._backend.rest()

    def release(self, slot: int) -> None:
        """Forget a slot's lane. Idempotent."""
        self._lanes.release(slot)
        self._backend.release(slot)

    def reset(self) -> None:
        """Forget every lane."""
        self._lanes.reset()
        self._backend.reset()

    # ---- with faults ------------------------------------------------------------------------------------------------

    def verify(self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None) -> Flight:
        """Start a forward, unless a fault prevents it. Raises InjectedError."""
        self._lanes.feed(windows)
        self._rounds += 1
        slots = [window.slot for window in windows]
        drawing = [window.slot for window in windows if window.samples]
        spoiled = [slot for fault, meant in self._struck(Nan, drawing) for slot in self._victims(fault, meant)]
        landing = [fault for kind in (Slow, Hang, RaiseRead) for fault, _ in self._struck(kind, slots)]
        failing, starved = self._struck(Raise, slots), self._struck(Allocation, slots)
        if failing:
            raise InjectedError("a fault plan had the forward fail")
        if starved:
            raise InjectedError("[malloc] Unable to allocate 1099511627776 bytes (a fault plan had it so).")
        for slot in spoiled:
            assert isinstance(self._backend, Spoilable)
            self._backend.spoil(slot)
        flight = after.flight if isinstance(after, FaultyFlight) else after
        return FaultyFlight(self._backend.verify(windows, flight, masks), landing, self._wait)

    def _victims(self, fault: Nan, meant: Sequence[int]) -> Sequence[int]:
        """All if it says whom, else one."""
        if fault.request is not None or fault.marker is not None:
            return meant
        return [meant[int(_chance(f"{self._seed}/victim/{self._rounds}") * len(meant))]]

    def keep(self, kept: Mapping[int, int]) -> dict[int, int]:
        """Cut every lane, unless a fault prevents it. Raises InjectedError."""
        if self._struck(Keep, kept):
            raise InjectedError("a fault plan had the caches fail")
        return self._backend.keep(kept)

    def _struck(self, kind: type[_Kind], slots: Iterable[int]) -> list[tuple[_Kind, list[int]]]:
        """The faults of a kind that strike now, and the slots that each is meant for."""
        struck: list[tuple[_Kind, list[int]]] = []
        slots = tuple(slots)
        for fault, trigger in self._triggers:
            if isinstance(fault, kind):
                meant = self._lanes.meant(fault, slots)
                if trigger.pull(bool(meant)):
                    _log.info("injected: %s in round %d, slots %s", kind_of(fault), self._rounds, meant)
                    struck.append((fault, meant))
        return struck

    def disk(self, point: str) -> None:
        """What `backends.spill.Spill` takes as its faults: raises the OSError that the disk is to have. A point is only
        ever called on one thread.
        """
        for fault, trigger in self._triggers:
            if isinstance(fault, DiskFault) and point == _DISK_POINTS[type(fault)] and trigger.pull():
                _log.info("injected: %s, %s", kind_of(fault), fault.error)
                number = getattr(errno, fault.error)
                raise OSError(number, f"{os.strerror(number)} (a fault plan had it so)")


def disk_faults(backend: Backend) -> Callable[[str], None]:
    """What befalls the files of a backend's prefix cache: nothing, unless a plan says so."""
    return backend.disk if isinstance(backend, FaultyBackend) else _spare


def _spare(_point: str) -> None:
    """Nothing befalls it."""
