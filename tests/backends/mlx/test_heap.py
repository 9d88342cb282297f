"""What the process keeps of its freed memory, seen from outside, in a process of its own."""

import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes
from backends.mlx import heap

def resident():
    with open("/proc/self/statm") as told:
        return int(told.read().split()[1]) * 4096

def use(pieces, size):
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    held = [libc.malloc(size) for _ in range(pieces)]
    for each in held:
        ctypes.memset(each, 1, size)
    for each in held:
        libc.free(each)

if {keeps} and not heap.keep_freed():
    print("elsewhere")
else:
    before = resident()
    use(20, 8 << 20)
    kept = resident() - before
    heap.give_back()
    print(kept >> 20, (resident() - before) >> 20)
"""


@pytest.mark.parametrize("keeps", [True, False])
def test_freed_memory_stays_until_it_is_given_back(keeps: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(keeps=keeps)], capture_output=True, text=True, check=True
    )
    if done.stdout.strip() == "elsewhere":
        pytest.skip("no glibc")
    kept, left = map(int, done.stdout.split())
    assert (kept >= 150) is keeps
    assert left <= 20
