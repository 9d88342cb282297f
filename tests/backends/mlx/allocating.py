"""What an action holds in memory."""

from collections.abc import Callable

import mlx.core as mx


def allocated(action: Callable[[], object]) -> int:
    """The most bytes that were held during an action beyond what was held before; evaluated work only."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    action()
    mx.synchronize()
    return max(0, mx.get_peak_memory() - before)
