"""What tells a model's weights from all others, without reading all of them.

Configuration and headers are read whole; of each weights file, besides its length and the time of its last change,
samples spread over it. A file that was changed has another time, one that was exchanged other samples; a model that was
merely copied anew is another one too, which costs a cache and never an answer.
"""

import json
from collections.abc import Iterator
from hashlib import blake2b
from io import SEEK_END
from pathlib import Path
from typing import BinaryIO

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_HEADER_BYTES = 1 << 20
"""More of a header is left to the samples."""
_HEADER_MOST = 100 << 20
_TENSOR_BYTES = 64
_Tensor = tuple[str, str, tuple[int, ...], bytes]
"""Name, type, shape, and a few of its bytes."""


def fingerprint(folder: Path) -> str:
    """32 hexadecimal digits."""
    hashed = blake2b(digest_size=16)
    hashed.update((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("model*.safetensors")):
        told = file.stat()
        hashed.update(f"{file.name} {told.st_size} {told.st_mtime_ns}".encode())
        with file.open("rb") as weights:
            length = int.from_bytes(weights.read(8), "little")
            hashed.update(weights.read(min(length, _HEADER_BYTES)))
            for sample in range(_SAMPLES):
                weights.seek(told.st_size * sample // _SAMPLES)
                hashed.update(weights.read(_SAMPLE_BYTES))
    return hashed.hexdigest()


def weights_identity(folder: Path) -> str:
    """What tells a model's weights from all others wherever they lie: names, types and shapes of all tensors, and a few
    bytes of each; what is around them (times, headers, configuration) says nothing. 32 hexadecimal digits.

    Raises ValueError for files that are no safetensors.
    """
    tensors: list[_Tensor] = []
    for file in folder.glob("model*.safetensors"):
        try:
            with file.open("rb") as weights:
                tensors += _tensors(weights)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} has no header of safetensors: {error}") from None
    hashed = blake2b(digest_size=16)
    for tensor in sorted(tensors):
        hashed.update(repr(tensor).encode())
    return hashed.hexdigest()


def _tensors(weights: BinaryIO) -> Iterator[_Tensor]:
    """Whatever is wrong with the header comes out as an error of Python's own."""
    size = weights.seek(0, SEEK_END)
    weights.seek(0)
    length = int.from_bytes(weights.read(8), "little")
    if length > _HEADER_MOST:
        raise ValueError(f"it would have {length} bytes")
    for name, told in json.loads(weights.read(length)).items():
        if name != "__metadata__":
            first, end = (8 + length + offset for offset in told["data_offsets"])
            if not 8 + length <= first <= end <= size:
                raise ValueError(f"{name} lies outside of the file")
            yield name, told["dtype"], tuple(told["shape"]), _samples(weights, first, end)


def _samples(weights: BinaryIO, first: int, end: int) -> bytes:
    """Bytes from the beginning, the middle and the end of a tensor."""
    parts = []
    for place in (first, (first + end) // 2, max(first, end - _TENSOR_BYTES)):
        weights.seek(place)
        parts.append(weights.read(min(_TENSOR_BYTES, end - place)))
    return b"".join(parts)
