"""Memory on the device: the lanes' buffers as one account, what else a budget is made of, and the allocator's limits.

Owns the numbers; decides nothing about lanes. Scratch is not known beforehand, so it is measured: what the largest
rounds take over what stays, at two lengths of their lanes, so that it can be told for any length.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, Protocol

import mlx.core as mx
import msgspec

from backends.base import MOST_DRAFT_TOKENS, Budget, MemoryUse
from backends.groups import capacity_class, longest_lane
from backends.mlx import heap
from backends.mlx.verify import LaneStore

# ---- lanes -----------------------------------------------------------------------------------------------------------


class LaneLedger:
    """Implements `scheduler.admission.LaneMemory` over the lanes of a model and of one that drafts for it.

    A draft model's lane is taken to be there for every lane, and as long, with the longest draft behind it. Both share
    one limit: where one needs room, the other gives back its spare rows.
    """

    def __init__(self, target: LaneStore, drafter: LaneStore | None = None, drafted_length: int = 0) -> None:
        """`drafted_length` is the draft model's context: it has no longer lanes."""
        self._target = target
        self._drafter = drafter
        self._drafted_length = drafted_length
        self._most: int | None = None
        if drafter is not None:
            target.make_room = partial(self._make_room, target, drafter)
            drafter.make_room = partial(self._make_room, drafter, target)

    @property
    def held(self) -> int:
        """Bytes of all buffers, and of states."""
        return self._target.groups.held + (self._drafter.groups.held if self._drafter is not None else 0)

    def needed(self, lengths: Mapping[int, int]) -> int:
        """Bytes that lanes of these lengths need."""
        needed = self._target.groups.needed(lengths)
        if self._drafter is None:
            return needed
        drafted = [min(length + MOST_DRAFT_TOKENS, self._drafted_length) for length in lengths.values()]
        return needed + self._drafter.groups.needed_by(drafted)

    @property
    def state_bytes(self) -> int:
        """What of that is states, for each lane."""
        return self._target.groups.lane_bytes

    def limit(self, most: int) -> None:
        """What all buffers may take from now on."""
        self._most = most
        if self._drafter is not None:
            self._drafter.limit(most - self._target.groups.held)
        self._target.limit(self._left(self._drafter))

    def growing(self, length: int) -> float:
        """Which share of the buffers may be held twice while they grow, with lanes of up to a length."""
        capacity = capacity_class(length)
        return max(store.largest_share(capacity) for store in (self._target, self._drafter) if store is not None)

    def _left(self, other: LaneStore | None) -> int:
        assert self._most is not None
        return self._most - (other.groups.held if other is not None else 0)

    def _make_room(self, store: LaneStore, other: LaneStore, needed: int) -> None:
        """One of them is about to need so much."""
        if self._most is not None:
            other.limit(self._most - needed)
            store.limit(self._left(other))


# ---- the budget ------------------------------------------------------------------------------------------------------

MARGIN = 1.5
"""Scratch is so much more than what was measured: rounds come in more shapes than are tried, and buffers in sizes of
whole pages.
"""
_CACHED = 0.5
"""Which share of the scratch the allocator may keep of what was freed, for the next round."""


class Scratch(msgspec.Struct, frozen=True):
    """What the largest round takes beside what stays, in bytes: grows with the length of its lanes."""

    fixed: int
    per_position: float = 0.0

    def at(self, length: int) -> int:
        """With lanes of a length, margin included."""
        return int(MARGIN * (self.fixed + self.per_position * length))


class NoRoomError(Exception):
    """Not even the smallest lane fits; the message says what takes how much."""


def budget_of(
    total: int, weights: int, scratch: Scratch, ledger: LaneLedger, context_length: int
) -> tuple[Budget, int]:
    """The budget, and the longest lane up to a context that fits into its pool alone. Raises NoRoomError.

    Longer lanes need more scratch, so that shorter ones leave more for lanes.
    """

    def budget(length: int) -> Budget:
        left = total - weights - scratch.at(length)
        growing = ledger.growing(length)  # and a lane is on its way from one buffer to another
        pool = int((left - growing * ledger.needed({0: length})) / (1 + growing))
        return Budget(total, weights, total - weights - pool)

    longest = longest_lane(context_length, lambda length: ledger.needed({0: length}) <= budget(length).pool)
    if longest is None:
        smallest = min(context_length, capacity_class(1))
        parts = (weights, scratch.at(smallest), ledger.needed({0: smallest}))
        told = "weights of {} MB, {} MB for a round and {} MB for the shortest lane".format(*map(_megabytes, parts))
        raise NoRoomError(f"{told} do not fit into {_megabytes(total)} MB: raise --memory or take a smaller model")
    return budget(longest), longest


def _megabytes(size: int) -> int:
    return -(-size // 1_000_000)


def most_held(device: "DeviceMemory", action: Callable[[], object]) -> int:
    """The most bytes that were held during an action, beyond those that are held after it."""
    device.forget_peak()
    action()
    use = device.use()
    return max(0, use.peak - use.active)


# ---- the device ------------------------------------------------------------------------------------------------------


class DeviceMemory(Protocol):
    """MLX's allocator. Implemented with and without memory that can be wired. On the engine thread."""

    def limit(self, total: int, cached: int) -> None:
        """Hold no more than `total` bytes, if that can be helped; of what was freed keep no more than `cached`."""
        ...

    def wire(self, most: int) -> int:
        """Keep up to so many bytes resident, whatever else the machine does; returns what it was before."""
        ...

    def clear(self) -> None:
        """Keep nothing of what was freed for arrays of the same sizes."""
        ...

    def give_back(self) -> None:
        """Keep nothing of what was freed."""
        ...

    def use(self) -> MemoryUse:
        """What is held now."""
        ...

    def forget_peak(self) -> None:
        """The peak is what is held now."""
        ...


class PlainMemory:
    """Implements `DeviceMemory` where MLX wires nothing: on a CPU and on CUDA."""

    def limit(self, total: int, cached: int) -> None:
        """Set MLX's memory and cache limits."""
        mx.set_memory_limit(total)
        mx.set_cache_limit(cached)

    def wire(self, most: int) -> int:  # noqa: ARG002 (there is nothing to be wired)
        """Nothing to do."""
        return 0

    def clear(self) -> None:
        """Empty MLX's buffer cache, into the process's heap."""
        mx.clear_cache()

    def give_back(self) -> None:
        """Empty both."""
        mx.clear_cache()
        heap.give_back()

    def use(self) -> MemoryUse:
        """MLX's own counts."""
        active = mx.get_active_memory()
        return MemoryUse(active, max(active, mx.get_peak_memory()), mx.get_cache_memory())

    def forget_peak(self) -> None:
        """Begin to look for the peak."""
        mx.synchronize()
        mx.reset_peak_memory()


class MetalMemory(PlainMemory):
    """Implements `DeviceMemory` where the GPU shares the machine's RAM, which is paged out unless it is wired."""

    def __init__(self, recommended: int) -> None:
        """`recommended` is the most that macOS lets be wired."""
        self._recommended = recommended

    def wire(self, most: int) -> int:
        """Set MLX's wired limit; before macOS 15 it ignores that."""
        return int(mx.set_wired_limit(min(most, self._recommended)))


def device_memory(kind: Literal["cpu", "metal", "cuda"], recommended: int | None) -> DeviceMemory:
    """The allocator of a kind of device."""
    return MetalMemory(recommended) if kind == "metal" and recommended is not None else PlainMemory()


class Residence:
    """Keeps the budget's memory wired while lanes run, and gives everything back that is only held to be fast when none
    does. Written by `MLXBackend`. Without a budget nothing is wired.
    """

    def __init__(self, device: DeviceMemory, budget: Budget | None = None) -> None:
        self._device = device
        self._budget = budget
        self._before: int | None = None
        """The wired limit while it rests; None while it does."""
        if budget is not None:
            device.limit(budget.total, int(_CACHED * budget.scratch))

    def run(self) -> None:
        """A round is about to run. Idempotent."""
        if self._before is None and self._budget is not None:
            self._before = self._device.wire(self._budget.total)

    def prefilled(self) -> None:
        """A round with prefill chunks is over, whose buffers no decode round will need."""
        self._device.clear()

    def rest(self) -> None:
        """Nothing runs until the next `run`. Idempotent."""
        if self._before is not None:
            self._device.wire(self._before)
            self._before = None
        self._device.give_back()

    def use(self) -> MemoryUse:
        """What is held now."""
        return self._device.use()
