"""What memory is spent on, for those who watch."""

import msgspec

from backends.base import Backend
from engine.prefix import PrefixCache


class MemoryReport(msgspec.Struct, frozen=True):
    """Bytes. What is planned with: `budget`, of which `weights` and `scratch` are set aside, and `lanes` and `prefix`
    are held now. What the device's allocator measures: `active`, `peak` and `buffer_cache`. 0 where nothing is known.
    """

    budget: int
    weights: int
    scratch: int
    lanes: int
    prefix: int
    active: int
    peak: int
    buffer_cache: int


def report(backend: Backend, prefix: PrefixCache | None) -> MemoryReport:
    """As it stands between two rounds. On the engine thread."""
    budget, use = backend.info.budget, backend.use()
    return MemoryReport(
        budget=budget.total if budget else 0,
        weights=budget.weights if budget else backend.info.parameter_bytes,
        scratch=budget.scratch if budget else 0,
        lanes=backend.memory.held,
        prefix=prefix.reuse.used if prefix is not None else 0,
        active=use.active if use else 0,
        peak=use.peak if use else 0,
        buffer_cache=use.buffer_cache if use else 0,
    )
