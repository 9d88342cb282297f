"""Collected texts on disk, in shards: each is written whole or not at all, and is what its prompts and seed make it."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from backends.mlx.distill.collect import Text


def write_shard(file: Path, texts: Iterable[Text]) -> None:
    """Replace or make a shard."""
    texts = list(texts)
    arrays = {
        "tokens": np.concatenate([text.tokens for text in texts]),
        "lengths": np.array([len(text.tokens) for text in texts], dtype=np.int32),
        "prompts": np.array([text.prompt for text in texts], dtype=np.int32),
        "features": np.concatenate([text.features for text in texts]),
        "scales": np.concatenate([text.scales for text in texts]),
        "greedy": np.array([text.greedy for text in texts]),
    }
    unfinished = file.with_suffix(".unfinished")
    save_file(arrays, unfinished)
    unfinished.replace(file)


def read_shard(file: Path) -> Iterator[Text]:
    """Its texts, in the order in which they ended. Raises ValueError for a damaged file."""
    try:
        with safe_open(file, "np") as shard:
            tokens, features, scales = (shard.get_tensor(name) for name in ("tokens", "features", "scales"))
            lengths, prompts, greedy = (shard.get_tensor(name).tolist() for name in ("lengths", "prompts", "greedy"))
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}): remove it, and its texts are collected again") from None
    first = row = 0
    for length, prompt, plain in zip(lengths, prompts, greedy, strict=True):
        rows = slice(row, row + length - 1)
        yield Text(tokens[first : first + length], prompt, features[rows], scales[rows], plain)
        first += length
        row += length - 1


def frequent(texts: Iterable[Text], most: int, vocabulary: int) -> npt.NDArray[np.uint32]:
    """The tokens that answers hold most often, ascending; of those that none holds the lowest, to make up `most`."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for text in texts:
        np.add.at(counts, text.tokens[text.prompt :], 1)
    chosen = np.argsort(-counts, kind="stable")[:most]
    return np.sort(chosen).astype(np.uint32)
