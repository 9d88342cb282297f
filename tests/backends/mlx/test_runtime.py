import ctypes
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from backends.mlx import runtime
from backends.mlx.runtime import Device, DtypePolicy, choose_dtype, describe_device, load_blas, probe_blas

ROOT = Path(runtime.__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="the order of loading matters on Linux only")

CPU = Device(kind="cpu", name="any", memory_bytes=1, recommended_bytes=None)
METAL = Device(kind="metal", name="any", memory_bytes=1, recommended_bytes=1)

REFUSE_OPENBLAS = """
import ctypes
real = ctypes.CDLL
def cdll(name, *rest, **named):
    if name is not None and "openblas" in str(name):
        raise OSError(f"{name}: cannot be opened, says the test")
    return real(name, *rest, **named)
ctypes.CDLL = cdll
"""

LACK_FORTRAN_ONCE = """
import ctypes
real, refused = ctypes.CDLL, []
def cdll(name, *rest, **named):
    if name is not None and "openblas" in str(name) and not refused:
        refused.append(name)
        raise OSError("libgfortran.so.5: cannot open shared object file: No such file or directory")
    return real(name, *rest, **named)
ctypes.CDLL = cdll
"""


def in_new_process(script: str) -> str:
    """What a script prints in a Python of its own, where nothing is loaded yet."""
    prelude = "import sys\nfrom backends.mlx.runtime import *\nfrom backends.mlx.runtime import BlasError\n"
    done = subprocess.run([sys.executable, "-c", prelude + script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_module_imports_no_mlx() -> None:
    assert in_new_process("print([name for name in sys.modules if name.split('.')[0] == 'mlx'])") == "[]"


@linux
def test_openblas_is_described_and_loaded_once() -> None:
    printed = in_new_process(
        "blas = load_blas('openblas')\n"
        "import mlx.core\n"
        "assert load_blas('openblas') == load_blas('auto') == blas\n"
        "print(blas.name, blas.config, blas.threads, blas.path, blas.problem, sep='|')"
    )
    name, config, threads, path, problem = printed.split("|")
    assert (name, problem) == ("openblas", "None")
    assert config.startswith("OpenBLAS 0.")
    assert int(threads) >= 1
    assert "openblas" in Path(path).name


@linux
def test_openblas_makes_products_fast() -> None:
    # Measured 30 times as fast on idle cores and still twice as fast where others keep every core busy.
    fast = in_new_process("load_blas('openblas')\nprint(probe_blas(repeats=40).gflops)")
    slow = in_new_process("load_blas('reference')\nprint(probe_blas(repeats=5).gflops)")
    assert float(fast) > 1.5 * float(slow)


@linux
def test_after_mlx_openblas_is_refused_and_auto_says_why() -> None:
    printed = in_new_process(
        "import mlx.core\n"
        "blas = load_blas('auto')\n"
        "print(blas.name, blas.problem)\n"
        "try:\n    load_blas('openblas')\n"
        "except BlasError as error:\n    print(error)"
    )
    auto, insisted = printed.splitlines()
    assert auto == f"reference {insisted}"
    assert "mlx.core was imported before OpenBLAS" in insisted


@linux
def test_without_openblas_auto_goes_on_and_says_what_failed() -> None:
    printed = in_new_process(
        REFUSE_OPENBLAS + "blas = load_blas()\n"
        "print(blas.name, blas.problem)\n"
        "try:\n    load_blas('openblas')\n"
        "except BlasError as error:\n    print(error)"
    )
    auto, insisted = printed.splitlines()
    assert auto == f"reference {insisted}"
    assert insisted.startswith("no usable OpenBLAS: ")


@linux
def test_the_fortran_runtime_of_mlxs_wheel_is_lent_where_the_system_has_none() -> None:
    printed = in_new_process(
        LACK_FORTRAN_ONCE + "print(load_blas('openblas').name, len(refused))\n"
        "real('libgfortran.so.5')._gfortran_concat_string and print('lent')"
    )
    assert printed.splitlines() == ["openblas 1", "lent"]


@linux
def test_reference_loads_nothing_and_cannot_undo_openblas() -> None:
    printed = in_new_process(
        "print(load_blas('reference').name)\n"
        "load_blas('openblas')\n"
        "try:\n    load_blas('reference')\n"
        "except BlasError as error:\n    print(error)"
    )
    name, error = printed.splitlines()
    assert name == "reference"
    assert "needs a new process" in error


def test_macos_brings_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)
    assert [load_blas(choice).name for choice in ("auto", "openblas", "reference")] == ["accelerate"] * 3


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="BLAS must be one of auto, openblas, reference, not 'mkl'"):
        load_blas("mkl")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dtype must be one of .*, not 'int8'"):
        choose_dtype("int8", CPU)  # type: ignore[arg-type]


def test_auto_is_float32_on_a_cpu_and_the_checkpoints_own_on_a_gpu() -> None:
    assert choose_dtype("auto", CPU) == "float32"
    assert choose_dtype("auto", METAL) == "checkpoint"
    for policy in set(get_args(DtypePolicy)) - {"auto"}:
        assert choose_dtype(policy, CPU) == choose_dtype(policy, METAL) == policy


def test_the_device_is_described() -> None:
    device = describe_device()
    assert device.name
    assert device.memory_bytes > 1 << 28
    assert (device.recommended_bytes is None) == (device.kind == "cpu")


def test_the_probe_counts_operations_per_second() -> None:
    probe = probe_blas(repeats=1)
    assert probe.gflops == pytest.approx(2 * 256 * 576 * 1536 / probe.seconds / 1e9)
