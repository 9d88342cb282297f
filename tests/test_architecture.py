"""The house: imports run one way, the scheduler is pure, only the MLX rooms know MLX, and few read the environment."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("scheduler", "backends", "engine", "api")
"""Each folder may import from itself and from those before it."""
OTHERS = ("deploy", "tests")
"""First-party too, and to the right of everything."""
MLX = frozenset({"mlx", "mlx_lm", "mlx_vlm"})
IMPURE = frozenset({"mlx", "mlx_lm", "asyncio", "anyio", "time", "os", "socket", "pathlib", "threading"})
ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})


def python_files(folder: Path) -> list[Path]:
    files = sorted(folder.rglob("*.py"))
    assert files, f"no Python files in {folder}: was it renamed?"
    return files


def package_of(root: Path, file: Path) -> list[str]:
    return list(file.relative_to(root).parent.parts)


def imports(root: Path, file: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a file imports, wherever in it that stands."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = package_of(root, file)
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = [*base, *(node.module.split(".") if node.module else [])]
            yield from ((node.lineno, ".".join([*prefix, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"} and node.args:
            name = node.args[0]
            assert isinstance(name, ast.Constant), f"{file}:{node.lineno}: an import by a computed name"
            yield node.lineno, str(name.value)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def found(root: Path, files: list[Path], forbidden: frozenset[str]) -> list[str]:
    """Imports whose first name is forbidden, as `file:line: name`."""
    return [
        f"{file.relative_to(root)}:{line}: {name}"
        for file in files
        for line, name in imports(root, file)
        if name.partition(".")[0] in forbidden
    ]


def wrong_arrows(root: Path, folder: str) -> list[str]:
    to_the_right = ORDER[ORDER.index(folder) + 1 :]
    return found(root, python_files(root / folder), frozenset({*to_the_right, *OTHERS}))


def environment_reads(file: Path) -> list[int]:
    """Lines that name `os.environ` or one of its functions, or import one."""
    lines = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        named = isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT
        taken = isinstance(node, ast.ImportFrom) and any(alias.name in ENVIRONMENT for alias in node.names)
        if named or taken:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("folder", ORDER)
def test_imports_run_one_way(folder: str) -> None:
    assert wrong_arrows(ROOT, folder) == []


def test_the_scheduler_is_pure() -> None:
    assert found(ROOT, python_files(ROOT / "scheduler"), IMPURE) == []


def test_the_api_never_touches_a_tensor() -> None:
    assert found(ROOT, python_files(ROOT / "api"), MLX) == []


def test_the_engine_knows_no_tensors() -> None:
    assert found(ROOT, python_files(ROOT / "engine"), MLX) == []


@pytest.mark.parametrize("name", ["base.py", "fake.py", "noise.py"])
def test_these_rooms_of_the_backends_know_no_mlx(name: str) -> None:
    file = ROOT / "backends" / name
    assert found(ROOT, [file], MLX) == []
    reached = [imported for _, imported in imports(ROOT, file) if imported.startswith("backends.mlx")]
    assert reached == []


def test_the_environment_is_read_in_api_and_the_engines_config_alone() -> None:
    allowed = {*python_files(ROOT / "api"), ROOT / "engine" / "config.py"}
    everywhere = [file for folder in ORDER for file in python_files(ROOT / folder)]
    reads = {file: lines for file in everywhere if file not in allowed and (lines := environment_reads(file))}
    assert reads == {}


# ---- the walker itself -----------------------------------------------------------------------------------------------

PLANTED = {
    "plain": "import engine.loop",
    "second of two": "import json, api.cli",
    "renamed": "import backends.fake as honest",
    "from": "from engine.loop import Loop",
    "from the folder itself": "from api import cli",
    "lazy": "def f():\n    from engine.loop import Loop\n    return Loop",
    "in a method": "class A:\n    def f(self):\n        import api.app",
    "only for types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from engine.client import Generation",
    "in a try": "try:\n    import backends.mlx.load\nexcept ImportError:\n    pass",
    "by name": "import importlib\nimportlib.import_module('engine.loop')",
    "by the builtin": "loop = __import__('engine.loop')",
    "relative, up and over": "from ..engine import loop",
    "relative, up to the top": "from .. import api",
    "installing": "from deploy import render",
    "testing": "import tests.conftest",
}


@pytest.mark.parametrize("nested", [False, True], ids=["at the top", "nested"])
@pytest.mark.parametrize("source", PLANTED.values(), ids=PLANTED.keys())
def test_the_walker_sees_a_planted_import(tmp_path: Path, source: str, nested: bool) -> None:
    room = tmp_path / "scheduler" / "attic" if nested else tmp_path / "scheduler"
    room.mkdir(parents=True)
    if nested:
        source = source.replace("from ..", "from ...")
    (tmp_path / "scheduler" / "innocent.py").write_text("import heapq\nfrom scheduler.lane import Lane\n")
    assert wrong_arrows(tmp_path, "scheduler") == []
    (room / "planted.py").write_text(source)
    assert len(wrong_arrows(tmp_path, "scheduler")) == 1


def test_the_walker_lets_the_right_arrows_pass(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "loop.py").write_text(
        "import scheduler.lane\nfrom backends.base import Backend\nfrom . import thread\n"
        "from .client import Generation\nfrom collections import api, engine\nimport apiary, enginework\n"
    )
    assert wrong_arrows(tmp_path, "engine") == []


@pytest.mark.parametrize("forbidden", sorted(IMPURE))
def test_the_walker_sees_impurity(tmp_path: Path, forbidden: str) -> None:
    file = tmp_path / "scheduler.py"
    for source in (
        f"import {forbidden}",
        f"def f():\n    from {forbidden}.core import x",
        f"import {forbidden}.core as x",
    ):
        file.write_text(source)
        assert len(found(tmp_path, [file], IMPURE)) == 1, source


@pytest.mark.parametrize(
    "source",
    [
        "import os\nhome = os.environ['HOME']",
        "import os\ndef f():\n    return os.getenv('HOME')",
        "from os import environ",
        "from os import path, getenv as g",
        "import os as system\nsystem.environ.get('HOME')",
    ],
)
def test_the_walker_sees_a_read_of_the_environment(tmp_path: Path, source: str) -> None:
    file = tmp_path / "a.py"
    file.write_text(source)
    assert len(environment_reads(file)) == 1


def test_an_empty_folder_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "api").mkdir()
    with pytest.raises(AssertionError, match="no Python files"):
        wrong_arrows(tmp_path, "api")
