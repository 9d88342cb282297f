"""From a drafter's file to a drafter of a loaded target, or the reason why it cannot be one."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from backends.mlx.drafts.eagle import Eagle, EagleNetwork, parameters_of
from backends.mlx.drafts.files import DrafterError, DrafterHeader, find_drafter, load_drafter
from backends.mlx.drafts.folders import Attached, attach_folder
from backends.mlx.drafts.mtp import mtp_network
from backends.mlx.drafts.reading import MOST_UNREAD, ReadingDrafter
from backends.mlx.drafts.target import Borrowed, BorrowError, borrow
from backends.mlx.exponential import Attention
from backends.mlx.features import Features
from backends.mlx.fingerprint import weights_identity
from backends.mlx.load import Loaded, tokenizer_identity
from backends.mlx.seam import HeadRows
from backends.mlx.taps import TapError, Taps
from backends.mlx.verify import Forward

Parameters = dict[str, npt.NDArray[np.generic]]


def drafter_folders(home: Path) -> Iterator[Path]:
    """Where drafters are looked for: what the user trained, then what comes with the program."""
    yield home / "drafters"
    yield Path(__file__).parent / "heads"


def identity_of(loaded: Loaded) -> tuple[str, str]:
    """Of its weights, and of its tokenizer: what a drafter's file is held against."""
    return weights_identity(loaded.folder), tokenizer_identity(loaded.folder)


def find_own(loaded: Loaded, home: Path) -> Path | None:
    """The file of a drafter for a model, if there is one."""
    return find_drafter(drafter_folders(home), weights_identity(loaded.folder))


def attach(file: Path | None, loaded: Loaded, head: HeadRows, forward: Forward, attention: Attention) -> Attached:
    """A drafter that reads what the taps note, once the forward has them: of a file, of a folder that others published,
    or, for None, the one that came with the model. `head` is the target's own. Raises DrafterError.
    """
    if file is None:
        return attach_mtp(loaded, head, attention)
    if file.is_dir():
        return attach_folder(file, loaded, head, forward, attention)
    return attach_file(file, loaded, head, attention)


def attach_file(file: Path, loaded: Loaded, head: HeadRows, attention: Attention) -> Attached:
    """The drafter in a file of our own.

    Raises DrafterError for a file that is damaged, or that was made for other weights, another tokenizer or layers that
    the target has not.
    """
    try:
        target = borrow(loaded.model)
        header, network, ids = read_eagle(file, loaded, target, target.embedding(mx.array([0])).dtype)
        taps = Taps(loaded.model, head, header.shape.taps)
    except (BorrowError, TapError) as error:
        raise DrafterError(f"the drafter {file} does not fit {loaded.name}: {error}") from None
    features = Features(MOST_UNREAD)
    reading = EagleNetwork(network, header.shape, target, ids)
    return ReadingDrafter(reading, features, attention), taps, features


def read_eagle(
    file: Path, loaded: Loaded, target: Borrowed, dtype: mx.Dtype
) -> tuple[DrafterHeader, Eagle, npt.NDArray[np.uint32]]:
    """What a file of our own holds: its header, the network, evaluated, and the tokens that it drafts.

    Raises DrafterError as `attach_file` does.
    """
    header, arrays = load_drafter(file)
    _refuse_others(file, header, loaded)
    ids = _ids(file, arrays, target)
    network = Eagle(header.shape)
    _fill(file, network, header, arrays, target, dtype)
    return header, network, ids


def attach_mtp(loaded: Loaded, head: HeadRows, attention: Attention) -> Attached:
    """The drafter that came with the model, in its own folder (see `mtp`). Raises DrafterError where there
    is none, or none that fits the model.
    """
    try:
        network = mtp_network(loaded, borrow(loaded.model))
        taps = Taps(loaded.model, head, network.taps)
    except (BorrowError, TapError) as error:
        raise DrafterError(f"{loaded.name} cannot be drafted for by a layer of its own: {error}") from None
    features = Features(MOST_UNREAD)
    return ReadingDrafter(network, features, attention), taps, features


def _refuse_others(file: Path, header: DrafterHeader, loaded: Loaded) -> None:
    if header.kind != "eagle":
        raise DrafterError(f"the drafter {file} is of a kind that is not known: {header.kind!r}")
    weights, tokenizer = identity_of(loaded)
    if header.target != weights:
        raise DrafterError(f"the drafter {file} was made for the weights of {header.target_name}, not {loaded.name}")
    if header.tokenizer != tokenizer:
        raise DrafterError(f"the drafter {file} was made for another tokenizer than that of {loaded.name}")


def _ids(file: Path, arrays: Parameters, target: Borrowed) -> npt.NDArray[np.uint32]:
    """The tokens that it drafts."""
    ids = arrays.pop("ids", np.zeros(0, np.uint32))
    fine = ids.dtype == np.uint32 and ids.ndim == 1 and ids.size > 0
    if not fine or np.any(np.diff(ids.astype(np.int64)) <= 0) or ids[-1] >= target.vocabulary:
        raise DrafterError(f"the drafter {file} drafts tokens that its target has not")
    return ids.astype(np.uint32)


def _fill(
    file: Path, network: Eagle, header: DrafterHeader, arrays: Parameters, target: Borrowed, dtype: mx.Dtype
) -> None:
    """Give the network its parameters."""
    wanted = {name: tuple(value.shape) for name, value in parameters_of(network).items()}
    found = {name: value.shape for name, value in arrays.items()}
    if header.shape.dims != target.dims or wanted != found:
        odd = sorted(wanted.items() ^ found.items())[:1]
        raise DrafterError(f"the drafter {file} has other measures than it says, or than its target: {odd}")
    network.load_weights([(name, mx.array(value).astype(dtype)) for name, value in arrays.items()])
    mx.eval(parameters_of(network))
