"""The target of a distillation: loaded and checked as for serving, with the taps that its drafter will read."""

from pathlib import Path

import mlx.core as mx
import msgspec

from backends.mlx import heap
from backends.mlx.backend import MLXBackend
from backends.mlx.build import build_backend, try_taps
from backends.mlx.drafts.attach import identity_of, read_eagle
from backends.mlx.drafts.eagle import Eagle, EagleShape
from backends.mlx.drafts.files import DrafterError, DrafterHeader
from backends.mlx.drafts.target import Borrowed, borrow
from backends.mlx.load import Loaded, load_folder, locate
from backends.mlx.pull import Progress
from backends.mlx.runtime import DtypePolicy
from backends.mlx.seam import install_head
from backends.mlx.taps import Tap, Taps

_HEAD_DIMS = (128, 64, 32, 16, 8)


class Subject(msgspec.Struct, frozen=True):
    """A model and what of it a drafter needs."""

    backend: MLXBackend
    loaded: Loaded
    parts: Borrowed
    shape: EagleShape
    """The measures of a drafter that suits it."""

    def header(self, acceptance: tuple[float, ...], trained: str) -> DrafterHeader:
        """What its drafter's file says."""
        weights, tokenizer = identity_of(self.loaded)
        return DrafterHeader(
            shape=self.shape,
            target=weights,
            target_name=self.loaded.name,
            tokenizer=tokenizer,
            acceptance=acceptance,
            trained=trained,
        )

    def started(self, file: Path) -> tuple[DrafterHeader, Eagle]:
        """A drafter of this target that training can go on from, in float32.

        Raises DrafterError for a file that `serve` would refuse, and for one with other measures than a new one.
        """
        header, network, _ = read_eagle(file, self.loaded, self.parts, mx.float32)
        if header.shape != self.shape:
            raise DrafterError(f"the drafter {file} has other measures than a new one for {self.loaded.name}")
        return header, network


def load_subject(reference: str, home: Path, dtype: DtypePolicy, progress: Progress, device: str) -> Subject:
    """As `build.load_backend` loads a model, without bounds. Raises LoadError, BorrowError and TapError."""
    heap.keep_freed()
    loaded = load_folder(*locate(reference, home, progress), dtype, progress)
    progress("check", 0, None)
    head = install_head(loaded.model)
    backend, forward = build_backend(loaded, head, device)
    parts = borrow(loaded.model)
    shape = suiting(parts.dims, len(loaded.model.layers))
    try_taps(forward, Taps(loaded.model, head, shape.taps))
    return Subject(backend, loaded, parts, shape)


def suiting(dims: int, layers: int) -> EagleShape:
    """One layer as wide as the target, that reads it after a third, two thirds, and all of its layers."""
    head_dim = next(size for size in _HEAD_DIMS if (dims % size == 0 and dims // size >= 4) or size == _HEAD_DIMS[-1])
    heads = max(1, dims // head_dim)
    kv_heads = next(heads // share for share in (4, 3, 2, 1) if heads % share == 0)
    taps: tuple[Tap, ...] = tuple(dict.fromkeys(max(0, layers * third // 3 - 1) for third in (1, 2)))
    return EagleShape(
        dims=dims,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=-(-dims * 8 // 3 // 64) * 64,
        taps=(*taps, "head"),
        window=512,
    )
