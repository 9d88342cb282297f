"""Writes a float32 copy of a model folder, once: both servers of a comparison then load the very same weights.

On the CPU float32 is MLX's fast path, and Paceline goes there by itself; mlx-lm would serve quantized weights as they
are, far slower. Run as a program this module is the child that does the work, so that the bench never imports MLX.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from backends.mlx.runtime import load_blas

_ROOT = Path(__file__).parents[2]


class ConversionError(Exception):
    """The copy could not be written."""


def float32_copy(model: Path, cache: Path, *, timeout_s: float = 600.0) -> Path:
    """The float32 copy of the folder `model` below `cache`, written now if it is not there yet.

    It is named after the names, sizes and times of the model's files, so a changed model gets a new copy. Raises
    ConversionError, with the end of what the child said, when it cannot be written; nothing half-written is left.
    """
    files = sorted(path for path in model.iterdir() if path.is_file())
    stamp = "\n".join(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)
    digest = hashlib.sha256(f"{model.resolve()}\n{stamp}".encode()).hexdigest()[:16]
    copy = cache / f"{model.name}-float32-{digest}"
    if copy.exists():
        return copy
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = copy.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "deploy.bench.float32", str(model.resolve()), str(unfinished.resolve())]
    try:
        done = subprocess.run(command, cwd=_ROOT, timeout=timeout_s, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConversionError(f"cannot write a float32 copy of {model}:\n{done.stderr[-2000:]}")
        unfinished.rename(copy)
    except subprocess.TimeoutExpired as error:
        raise ConversionError(f"a float32 copy of {model} was not written in {timeout_s:.0f} s") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return copy


def _convert(source: str, destination: str) -> None:
    load_blas()
    from mlx_lm.convert import convert

    convert(source, destination, dtype="float32", dequantize=True)


if __name__ == "__main__":
    _convert(*sys.argv[1:])
