"""What lies in a namespace's folder when it is opened: by its headers alone, in an order in which it can be told."""

from collections.abc import Sequence

import msgspec

from backends.spill_folder import PARTIAL, Folder
from backends.spill_format import DamagedError
from scheduler.pieces import Piece


class Found(msgspec.Struct, frozen=True):
    """A file that is there."""

    piece: Piece
    size: int
    """Of the file, in bytes."""


class Scan(msgspec.Struct, frozen=True):
    """What is there, and what is not to be used."""

    found: list[Found] = []
    damaged: int = 0
    unreadable: int = 0
    """For an error of the disk."""


def scan(folder: Folder) -> Scan:
    """Leftovers of writes and damaged files are removed if the folder's lock is taken. Raises OSError."""
    seen: list[tuple[int, Found]] = []
    damaged = unreadable = 0
    for listed in folder.listing():
        try:
            if not listed.name.endswith(PARTIAL):
                head = folder.find(listed.name)
                seen.append((listed.used, Found(head.piece, head.file_bytes)))
            elif folder.writable:
                folder.remove(listed.name)
        except DamagedError:
            damaged += 1
        except OSError as error:
            unreadable += not isinstance(error, FileNotFoundError)  # whoever holds the lock may have removed it
    return Scan(parents_first(seen), damaged, unreadable)


def parents_first(seen: Sequence[tuple[int, Found]]) -> list[Found]:
    """From pairs of last use and file: oldest first, but whatever hangs under another stands behind it."""
    oldest_first = sorted(seen, key=lambda each: (each[0], each[1].piece.end, each[1].piece.key))
    waiting = {found.piece.key: found for _, found in oldest_first}
    ordered: list[Found] = []
    for key in list(waiting):
        line: list[Found] = []
        above = waiting.pop(key, None)
        while above is not None:
            line.append(above)
            above = waiting.pop(above.piece.parent, None)
        ordered += reversed(line)
    return ordered
