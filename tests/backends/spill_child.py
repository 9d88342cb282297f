"""A process with a spill of its own, for `test_spill.py`: it does as it is told, and says what it has done.

    python -m tests.backends.spill_child DIRECTORY NAMESPACE [DIE_AT]

Told `write NUMBER` it writes that piece, and kills itself at the fault point DIE_AT; `remove NUMBER` removes it. It
ends, and closes its spill, with its input.
"""

import os
import signal
import sys
import threading
from hashlib import blake2b, shake_128
from pathlib import Path

from backends.spill import Spill
from scheduler.pieces import Key, Piece, root_of

PATIENCE = 30.0
META = b"\x00meta\xff"


def key_of(number: int) -> Key:
    return blake2b(number.to_bytes(4, "little"), digest_size=16).digest()


def piece(number: int) -> Piece:
    """Pieces hang under each other, number 0 under the root."""
    parent = key_of(number - 1) if number else root_of("here")
    return Piece(key_of(number), parent, 64 * number, 64 * (number + 1))


def content(number: int) -> bytes:
    """More than two slices."""
    return shake_128(b"%d" % number).digest((5 << 19) + number)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(directory: str, namespace: str, die_at: str = "") -> None:
    def faults(point: str) -> None:
        if point == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()

    spill = Spill(Path(directory), namespace, most_bytes=1 << 30, bytes_per_second=0, warn=say, faults=faults)
    say("writable" if spill.stats.writable else "read only")
    for line in sys.stdin:
        word, number = line.split()
        if word == "write":
            data = content(int(number))
            assert spill.write(piece(int(number)), META, [memoryview(data)], lambda _written: None)
        else:
            spill.remove([key_of(int(number))])
        assert spill.flush(PATIENCE)
        say(f"{word} {number}")
    spill.close(PATIENCE)


if __name__ == "__main__":
    main(*sys.argv[1:])
