"""A drafter on disk: one safetensors file, whose metadata say what it is, whose it is, and what its bytes add up to.

It belongs to one target: drafts for another would be as wrong as they are useless. A damaged file is told from a whole
one by its checksum, so that a drafter works as it did when it was trained, or not at all.
"""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from backends.mlx.drafts.eagle import EagleShape

_FORMAT = "paceline drafter 1"
Arrays = Mapping[str, npt.NDArray[np.generic]]


class DrafterError(RuntimeError):
    """A drafter that cannot be used; the message names it and says why."""


class _Versioned(msgspec.Struct, frozen=True):
    """What the headers of all formats have."""

    format: str = _FORMAT


class DrafterHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of its drafter."""

    format: str = _FORMAT
    kind: str = "eagle"
    shape: EagleShape
    target: str
    """The weights' identity (see `fingerprint`)."""
    target_name: str
    """For people."""
    tokenizer: str
    """Of the tokens' spellings, 32 hexadecimal digits."""
    acceptance: tuple[float, ...] = ()
    """By position, the share of greedy drafts that were right where those before them were, on texts held out."""
    trained: str = ""
    """How it was made, for people."""
    checksum: str = ""


def save_drafter(file: Path, header: DrafterHeader, arrays: Arrays) -> None:
    """Write it whole or not at all; `arrays` are the network's parameters by name, and `ids`."""
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}  # others are saved as they lie
    header = msgspec.structs.replace(header, checksum=_checksum(header, arrays))
    unfinished = file.with_suffix(".unfinished")
    save_file(arrays, unfinished, metadata={"drafter": msgspec.json.encode(header).decode()})
    unfinished.replace(file)


def read_header(file: Path) -> DrafterHeader:
    """What a file is, without its numbers. Raises DrafterError."""
    try:
        with safe_open(file, "np") as opened:
            return _header(file, opened.metadata())
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"the drafter {file} cannot be read: {error}") from None


def load_drafter(file: Path) -> tuple[DrafterHeader, dict[str, npt.NDArray[np.generic]]]:
    """All of it. Raises DrafterError for a file that is damaged or none of ours."""
    try:
        with safe_open(file, "np") as opened:
            header = _header(file, opened.metadata())
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"the drafter {file} cannot be read: {error}") from None
    if _checksum(header, arrays) != header.checksum:
        raise DrafterError(f"the drafter {file} is damaged: what it holds is not what was saved")
    return header, arrays


def find_drafter(folders: Iterator[Path], target: str) -> Path | None:
    """The first drafter for a target's weights; files that cannot be read are passed over."""
    for folder in folders:
        for file in sorted(folder.glob("*.safetensors")):
            try:
                header = read_header(file)
            except DrafterError:
                continue
            if header.target == target:
                return file
    return None


def _header(file: Path, metadata: Mapping[str, str] | None) -> DrafterHeader:
    told = (metadata or {}).get("drafter")
    if told is None:
        raise DrafterError(f"{file} is no drafter of Paceline's")
    try:
        known = msgspec.json.decode(told, type=_Versioned).format
        if known != _FORMAT:
            raise DrafterError(f"the drafter {file} has the format {known!r}; known is {_FORMAT!r}")
        return msgspec.json.decode(told, type=DrafterHeader)
    except (ValueError, RecursionError) as error:  # msgspec's own are ValueErrors
        raise DrafterError(f"the drafter {file} says what it is in a way that is not understood: {error}") from None


def _checksum(header: DrafterHeader, arrays: Arrays) -> str:
    """Of all that a file holds but itself."""
    hashed = blake2b(msgspec.json.encode(msgspec.structs.replace(header, checksum="")), digest_size=16)
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        hashed.update(f"{name} {array.dtype} {array.shape}".encode())
        hashed.update(array.data)
    return hashed.hexdigest()
