"""Shows how far the loading of a model has come: bars on a terminal, plain lines elsewhere.

Told from whichever thread loads. Knows nothing of what is loaded.
"""

from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_LINE_EVERY = 0.25
"""The share of a stage after which a plain line is due."""
_TITLES = {
    "fetch": "fetching",
    "verify": "verifying",
    "convert": "converting",
    "load": "loading",
    "check": "checking",
    "warm up": "warming up",
}
_IN_BYTES = frozenset({"fetch", "verify", "load"})


class Display(Protocol):
    """Implemented by `Bars` and `Lines`."""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """`done` of `total` (None: not known) of a stage; any thread may call."""
        ...

    def close(self) -> None:
        """Leave the console to others. Idempotent."""
        ...


def display_on(console: Console) -> Display:
    """What suits the console."""
    return Bars(console) if console.is_terminal else Lines(console)


class Bars:
    """One bar per stage."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._stages: dict[str, TaskID] = {}
        self._progress.start()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Move the stage's bar."""
        if stage not in self._stages:
            self._stages[stage] = self._progress.add_task(_TITLES.get(stage, stage), amount="")
        self._progress.update(self._stages[stage], completed=done, total=total, amount=amount(stage, done, total))

    def close(self) -> None:
        """Take the bars away."""
        self._progress.stop()


class Lines:
    """A line when a stage begins, at each quarter, and at its end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._due: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Print if a line is due."""
        share = done / total if total else 0.0
        if share < self._due.get(stage, 0.0):
            return
        self._due[stage] = (share // _LINE_EVERY + 1) * _LINE_EVERY
        self._console.print(f"{_TITLES.get(stage, stage)} {amount(stage, done, total)}".rstrip(), highlight=False)

    def close(self) -> None:
        """Nothing is left on a plain console."""


def amount(stage: str, done: int, total: int | None) -> str:
    """In words: `12 of 93 MB`, `30 of 272`, or nothing where there is nothing to tell yet."""
    if total is None:
        return megabytes(done) if done else ""
    if stage in _IN_BYTES:
        return f"{done / 1e6:.0f} of {megabytes(total)}"
    return f"{done} of {total}"


def megabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 10**10 else f"{count / 1e6:.0f} MB"
