"""What tells a model's weights from all others, without reading all of them.

Configuration and headers are read whole; of each weights file, besides its length and the time of its last change,
samples spread over it. A file that was changed has another time, one that was exchanged other samples; a model that was
merely copied anew is another one too, which costs a cache and never an answer.
"""

from hashlib import blake2b
from pathlib import Path

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_HEADER_BYTES = 1 << 20
"""More of a header is left to the samples."""


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
