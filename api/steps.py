"""What is done to a machine to install something, step by step: taken for real, or only told.

Owns files and child processes. Knows nothing of services.
"""

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class StepError(RuntimeError):
    """A step that cannot be taken; the message says why, and what would help."""


class Steps(Protocol):
    """Takes steps in the order of the calls. All raise StepError."""

    def need(self, program: str) -> None:
        """Nothing is to be begun where there is no such program."""
        ...

    def folder(self, path: Path) -> None:
        """Have a folder, the owner's alone if it is new."""
        ...

    def write(self, path: Path, text: str) -> None:
        """Have a file of this text, that everybody may read; the folder above it is made."""
        ...

    def remove(self, path: Path) -> None:
        """Have no such file."""
        ...

    def run(self, *command: str, may_fail: bool = False) -> None:
        """Have a program do something, to its end."""
        ...


class Take:
    """Takes them. A file that does not carry the writer's mark is somebody else's: it is left alone unless forced."""

    def __init__(self, mark: str, *, force: bool = False) -> None:
        self._mark = mark
        self._force = force

    def need(self, program: str) -> None:
        """Look for it on PATH."""
        if shutil.which(program) is None:
            raise StepError(f"there is no {program} on this machine")

    def folder(self, path: Path) -> None:
        """Folders above it are made as the umask says."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StepError(f"{path} cannot be made: {error.strerror}") from error

    def write(self, path: Path, text: str) -> None:
        """Atomically: a crash leaves the old file or the new one."""
        self._refuse_foreign(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", encoding="utf-8", delete=False) as file:
                try:
                    file.write(text)
                    file.flush()
                    os.fchmod(file.fileno(), 0o644)
                    os.fsync(file.fileno())
                    Path(file.name).replace(path)
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            raise StepError(f"{path} cannot be written: {error.strerror}") from error

    def remove(self, path: Path) -> None:
        """One that is not there is no matter."""
        self._refuse_foreign(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StepError(f"{path} cannot be removed: {error.strerror}") from error

    def run(self, *command: str, may_fail: bool = False) -> None:
        """What it says goes to our own output."""
        self.need(command[0])
        status = subprocess.run(command, check=False).returncode
        if status and not may_fail:
            raise StepError(f"{shlex.join(command)} has failed with status {status}")

    def _refuse_foreign(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            raise StepError(f"{path} cannot be read: {error.strerror}") from error
        if self._mark not in text and not self._force:
            raise StepError(f"{path} was written by somebody else; --force puts that aside")


class Tell:
    """Tells them, and changes nothing."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def need(self, program: str) -> None:
        """Nothing is begun here."""

    def folder(self, path: Path) -> None:
        """Say its name."""
        self._say(f"# folder {path}")

    def write(self, path: Path, text: str) -> None:
        """Say its name and all of it."""
        self._say(f"# file {path}\n{text}")

    def remove(self, path: Path) -> None:
        """Say its name."""
        self._say(f"rm -f {shlex.quote(str(path))}")

    def run(self, *command: str, may_fail: bool = False) -> None:
        """As one would type it."""
        self._say(shlex.join(command) + (" || true" if may_fail else ""))
