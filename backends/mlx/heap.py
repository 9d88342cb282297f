"""glibc's heap, from which MLX takes its arrays on the CPU.

By default glibc gives memory back to the system as soon as much of it is free, and takes it again page by page: a lane
that came cost its neighbours 0.2 to 0.5 s of page faults on a virtual machine (48,000 pages of 10 us each). Here the
process keeps what it had until it is told to give it back. Elsewhere (macOS, musl) nothing is done.
"""

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt(3)."""
_LARGEST_HEAP = 64 << 20
"""A thread's heap grows by pieces of this size, which are given back whole unless as much is asked to be kept."""


def keep_freed() -> bool:
    """From now on, for the whole process; whether that can be done here. Idempotent."""
    libc = _glibc()
    if libc is None:
        return False
    told = ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, _LARGEST_HEAP))
    return all(libc.mallopt(parameter, value) == 1 for parameter, value in told)


def give_back() -> bool:
    """Give all free pages to the system; whether that can be done here."""
    libc = _glibc()
    if libc is None:
        return False
    libc.malloc_trim(0)
    return True


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "gnu_get_libc_version") else None
