"""What stands in a file of the SSD tier: one piece's bytes, and enough to tell that they are the right ones.

    "PACELINE"  u32 version  u32 length of the header
    header      msgpack of `_Header`
    u32         crc32 of all above
    data
    u32         crc32 of the data, begun with the one above, so that data never passes for another header's

All numbers are little-endian. Knows open files, and nothing of names, folders or threads.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from io import FileIO

import msgspec
import numpy as np

from scheduler.pieces import Key, Piece

MAGIC = b"PACELINE"
VERSION = 1
"""Of all that is said above, and of `_Header`. What data and `meta` mean is the namespace's business."""
MOST_HEADER_BYTES = 1 << 20
SLICE_BYTES = 1 << 20
"""Written at once."""
_BEGINNING = struct.Struct("<8sII")
_SUM = struct.Struct("<I")


class DamagedError(Exception):
    """A file is not what a `write_file` made of this version."""


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: Key
    parent: Key
    start: int
    end: int
    checkpoint: bool
    namespace: str
    meta: bytes
    data_bytes: int


class Head(msgspec.Struct, frozen=True):
    """All that stands before a file's data."""

    piece: Piece
    namespace: str
    meta: bytes
    data_bytes: int
    encoded: bytes

    @property
    def crc(self) -> int:
        """What the data's checksum begins with."""
        return int(_SUM.unpack(self.encoded[-_SUM.size :])[0])

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return len(self.encoded) + self.data_bytes + _SUM.size


class Content(msgspec.Struct, frozen=True):
    """What was read."""

    piece: Piece
    meta: bytes
    data: memoryview
    """All bytes, one part behind the other, in memory of its own."""


def make_head(piece: Piece, namespace: str, meta: bytes, data_bytes: int) -> Head:
    """For a file to be written. Raises ValueError if names and `meta` are too long for a header."""
    header = msgspec.msgpack.encode(
        _Header(piece.key, piece.parent, piece.start, piece.end, piece.checkpoint, namespace, meta, data_bytes)
    )
    if len(header) > MOST_HEADER_BYTES:
        raise ValueError(f"a header of {len(header)} bytes, where {MOST_HEADER_BYTES} are the most")
    summed = _BEGINNING.pack(MAGIC, VERSION, len(header)) + header
    return Head(piece, namespace, meta, data_bytes, summed + _SUM.pack(zlib.crc32(summed)))


def write_file(file: FileIO, head: Head, parts: Sequence[memoryview], behind_slice: Callable[[int], None]) -> None:
    """All of a file. `parts` are contiguous, of any format. `behind_slice` is told how many bytes of data were written
    since it was last called; what it raises ends the writing. No view of a part is left behind in any case.
    """
    _write(file, head.encoded)
    crc = head.crc
    for part in parts:
        if part.nbytes:  # a view with a zero in its shape cannot be cast
            with part.cast("B") as data:
                crc = _write_part(file, data, crc, behind_slice)
    _write(file, _SUM.pack(crc))


def _write_part(file: FileIO, data: memoryview, crc: int, behind_slice: Callable[[int], None]) -> int:
    for start in range(0, data.nbytes, SLICE_BYTES):
        with data[start : start + SLICE_BYTES] as piece:
            crc = zlib.crc32(piece, crc)
            _write(file, piece)
            behind_slice(piece.nbytes)
    return crc


def _write(file: FileIO, data: bytes | memoryview) -> None:
    with memoryview(data) as view:
        written = 0
        while written < view.nbytes:
            with view[written:] as rest:
                written += file.write(rest)


def read_head(file: FileIO) -> Head:
    """From the beginning of a file, which stands behind it then. Raises DamagedError, OSError."""
    beginning = bytearray(_BEGINNING.size)
    _read(file, memoryview(beginning))
    magic, version, length = _BEGINNING.unpack(beginning)
    if magic != MAGIC:
        raise DamagedError("it does not begin as ours do")
    if version != VERSION:
        raise DamagedError(f"it is of version {version}, not {VERSION}")
    if length > MOST_HEADER_BYTES:
        raise DamagedError("its header is too long")
    rest = bytearray(length + _SUM.size)
    _read(file, memoryview(rest))
    encoded = bytes(beginning + rest)
    if _SUM.pack(zlib.crc32(encoded[: -_SUM.size])) != encoded[-_SUM.size :]:
        raise DamagedError("its header's checksum is wrong")
    try:
        header = msgspec.msgpack.decode(rest[:length], type=_Header)
    except msgspec.DecodeError as error:
        raise DamagedError(f"its header: {error}") from error
    piece = Piece(header.key, header.parent, header.start, header.end, header.checkpoint)
    return Head(piece, header.namespace, header.meta, header.data_bytes, encoded)


def read_data(file: FileIO, head: Head) -> memoryview:
    """All data, of a file that stands behind its head. Raises DamagedError, OSError."""
    whole = np.empty(head.data_bytes + _SUM.size, np.uint8).data  # a bytearray is zeroed first, under the GIL
    _read(file, whole)
    data = whole[: head.data_bytes]
    if _SUM.pack(zlib.crc32(data, head.crc)) != whole[head.data_bytes :]:
        raise DamagedError("its data's checksum is wrong")
    return data


def _read(file: FileIO, into: memoryview) -> None:
    done = 0
    while done < into.nbytes:
        count = file.readinto(into[done:])
        if not count:
            raise DamagedError("it ends too early")
        done += count
