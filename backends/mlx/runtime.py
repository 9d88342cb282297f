"""The machine under MLX: which BLAS computes its float32 products on Linux, which device, which dtype.

Owns the order of loading: the PyPI wheel of MLX for Linux links the reference BLAS, about 40 times slower than
OpenBLAS, and OpenBLAS wins only if its symbols are in the process before `mlx.core` is. So this module imports MLX
inside functions alone, and `load_blas` is called before anything else of `backends.mlx` is imported. Must not know
models, files of models, or the environment.
"""

import ctypes
import ctypes.util
import importlib.metadata
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from backends.mlx.cgroups import memory_limit

if TYPE_CHECKING:
    import mlx.core as mx

BlasChoice = Literal["auto", "openblas", "reference"]
BlasName = Literal["accelerate", "openblas", "reference"]
DtypePolicy = Literal["auto", "float32", "bfloat16", "float16", "checkpoint"]
Dtype = Literal["float32", "bfloat16", "float16", "checkpoint"]

_FORTRAN = "libgfortran.so.5"
"""What cmeel-openblas needs of the system, and a bare Linux lacks."""


class BlasError(RuntimeError):
    """The BLAS that was asked for cannot be had in this process."""


class Blas(msgspec.Struct, frozen=True):
    """The BLAS in use for MLX's products on the CPU."""

    name: BlasName
    config: str = ""
    """OpenBLAS's own description: version, build options, processor kernel."""
    threads: int | None = None
    path: str | None = None
    problem: str | None = None
    """Under "auto": why OpenBLAS is not in use, and what would help."""


class BlasProbe(msgspec.Struct, frozen=True):
    """A measured float32 product, [256, 576] by [576, 1536].

    The reference BLAS gives 6 to 8 GFLOP/s whatever the processor's width; OpenBLAS gives 200 and more on two idle
    cores, and still 15 to 40 on two that others keep busy.
    """

    seconds: float
    gflops: float


class MemoryLimit(msgspec.Struct, frozen=True):
    """What the process may hold in memory: so many bytes, or a share of what there is."""

    bytes: int | None = None
    share: float = 0.75
    """Of what the device recommends to use, or else of RAM."""

    def of(self, device: "Device") -> int:
        """In bytes."""
        if self.bytes is not None:
            return self.bytes
        return int(self.share * (device.recommended_bytes or device.memory_bytes))


class Device(msgspec.Struct, frozen=True):
    """What MLX computes on."""

    kind: Literal["cpu", "metal", "cuda"]
    name: str
    memory_bytes: int
    """RAM of the machine, as far as the process may use it."""
    recommended_bytes: int | None
    """The most that the device recommends to use; None where it does not say (CPU)."""


def load_blas(choice: BlasChoice = "auto") -> Blas:
    """Make OpenBLAS's symbols global, so that MLX, imported afterwards, uses it. Idempotent; nothing to do on macOS.

    "auto" takes OpenBLAS where it can and otherwise says in `problem` why not; "openblas" insists; "reference" keeps
    what MLX's wheel links. Raises BlasError when "openblas" cannot be had (not found, not loadable, or MLX was
    imported first) and when "reference" is asked for in a process that holds OpenBLAS already; ValueError for
    another choice.
    """
    if choice not in get_args(BlasChoice):
        raise ValueError(f"BLAS must be one of {', '.join(get_args(BlasChoice))}, not {choice!r}")
    if sys.platform == "darwin":
        return Blas(name="accelerate")
    loaded = _loaded_openblas()
    if choice == "reference":
        if loaded is not None:
            raise BlasError(f"OpenBLAS is already loaded ({loaded.path}); the reference BLAS needs a new process")
        return Blas(name="reference")
    if loaded is not None:
        return loaded
    try:
        return _load_openblas()
    except BlasError as error:
        if choice == "openblas":
            raise
        return Blas(name="reference", problem=str(error))


def set_blas_threads(threads: int) -> None:
    """Let OpenBLAS use so many threads from its next product on; call only where `load_blas` found OpenBLAS."""
    ctypes.CDLL(None).openblas_set_num_threads(threads)


def choose_dtype(policy: DtypePolicy, device: Device) -> Dtype:
    """The dtype to compute in; "checkpoint" keeps every tensor as it was stored, quantized ones too.

    "auto" is float32 on a CPU, where quantized and half products are scalar code and linear in the rows, and the
    checkpoint's own on a GPU. Raises ValueError for another policy.
    """
    if policy not in get_args(DtypePolicy):
        raise ValueError(f"dtype must be one of {', '.join(get_args(DtypePolicy))}, not {policy!r}")
    if policy != "auto":
        return policy
    return "float32" if device.kind == "cpu" else "checkpoint"


def describe_device() -> Device:
    """MLX's default device. Imports MLX, so it comes after `load_blas`."""
    import mlx.core as mx

    info = mx.device_info()
    kind: Literal["cpu", "metal", "cuda"] = "cpu"
    if mx.default_device().type == mx.DeviceType.gpu:
        kind = "metal" if mx.metal.is_available() else "cuda"
    recommended = info.get("max_recommended_working_set_size", info.get("total_memory"))
    return Device(
        kind=kind,
        name=str(info.get("device_name", kind)),
        memory_bytes=_memory_bytes(),
        recommended_bytes=None if kind == "cpu" or recommended is None else int(recommended),
    )


def _memory_bytes() -> int:
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = memory_limit(_text_of) if sys.platform == "linux" else None
    return installed if limit is None else min(installed, limit)


def _text_of(file: str) -> str | None:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError:
        return None


def probe_blas(repeats: int = 10) -> BlasProbe:
    """Time a float32 product on the CPU, best of `repeats` (at least 1) after one for warmth; up to 0.1 s each."""
    import mlx.core as mx

    left, right = mx.ones((256, 576)), mx.ones((576, 1536))
    mx.eval(left, right, mx.matmul(left, right, stream=mx.cpu))
    seconds = min(_seconds_of_product(left, right) for _ in range(repeats))
    return BlasProbe(seconds=seconds, gflops=2 * 256 * 576 * 1536 / seconds / 1e9)


def _seconds_of_product(left: "mx.array", right: "mx.array") -> float:
    import mlx.core as mx

    begin = time.perf_counter()
    mx.eval(mx.matmul(left, right, stream=mx.cpu))
    return time.perf_counter() - begin


# OpenBLAS


def _load_openblas() -> Blas:
    """Load the first OpenBLAS that can be had; BlasError tells what each candidate failed on."""
    if "mlx.core" in sys.modules:
        raise BlasError("mlx.core was imported before OpenBLAS was loaded; call load_blas first in a new process")
    failures: list[str] = []
    for library in _openblas_candidates():
        try:
            _open_globally(library)
        except OSError as error:
            failures.append(str(error))
            continue
        loaded = _loaded_openblas()
        if loaded is not None:
            return loaded
        failures.append(f"{library} does not define cblas_sgemm")
    reason = "; ".join(failures) or "neither the package cmeel-openblas nor a libopenblas of the system was found"
    raise BlasError(f"no usable OpenBLAS: {reason}. Install the system's OpenBLAS (Debian: libopenblas0)")


def _openblas_candidates() -> Iterator[str]:
    """The PyPI package's library, then the system's."""
    packaged = _file_of_package("cmeel-openblas", "libopenblas.so")
    if packaged is None:
        packaged = Path(sysconfig.get_path("platlib"), "cmeel.prefix", "lib", "libopenblas.so")
    if packaged.exists():
        yield str(packaged)
    system = ctypes.util.find_library("openblas")
    if system is not None:
        yield system


def _open_globally(library: str) -> None:
    """Load a library with global symbols; where only the Fortran runtime is missing, lend the one in MLX's wheel."""
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if _FORTRAN not in str(error) or not _lend_fortran():
            raise
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def _lend_fortran() -> bool:
    """Give the process a `libgfortran.so.5` out of MLX's CPU wheel; False where that wheel has none.

    The wheel carries the library under a name of its own (libgfortran-<hash>.so.5.0.0), and the loader looks for
    the name written inside a library, not for its file name. So a copy that bears the plain name is loaded from
    memory; nothing is written to disk.
    """
    fortran = _file_of_package("mlx-cpu", "libgfortran-*.so.5*")
    if sys.platform != "linux" or fortran is None:
        return False
    quadmath = _file_of_package("mlx-cpu", "libquadmath-*.so*")
    if quadmath is not None:
        ctypes.CDLL(str(quadmath), mode=ctypes.RTLD_GLOBAL)
    own_name = fortran.name.encode() + b"\0"
    image = fortran.read_bytes().replace(own_name, _FORTRAN.encode().ljust(len(own_name), b"\0"))
    descriptor = os.memfd_create(_FORTRAN)
    with os.fdopen(descriptor, "wb") as memory:
        memory.write(image)
        memory.flush()
        ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)
    return True


def _file_of_package(package: str, pattern: str) -> Path | None:
    """The first installed file of a PyPI package whose name matches."""
    try:
        files = importlib.metadata.files(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    found = next((file for file in files or () if fnmatch(file.name, pattern)), None)
    return None if found is None else Path(str(found.locate()))


class _SymbolInfo(ctypes.Structure):
    """`Dl_info` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _loaded_openblas() -> Blas | None:
    """The OpenBLAS whose `cblas_sgemm` is global in this process, whoever loaded it; None if there is none."""
    process = ctypes.CDLL(None)
    if not (hasattr(process, "cblas_sgemm") and hasattr(process, "openblas_get_config")):
        return None
    process.openblas_get_config.restype = ctypes.c_char_p
    info = _SymbolInfo()
    process.dladdr(ctypes.cast(process.cblas_sgemm, ctypes.c_void_p), ctypes.byref(info))
    return Blas(
        name="openblas",
        config=process.openblas_get_config().decode(),
        threads=int(process.openblas_get_num_threads()),
        path=info.file.decode() if info.file else None,
    )
