"""The signals that end the process, caught from before anything is bound that would have to be removed.

Owns what the first and the second one mean. Knows nothing of servers: whoever can end well says how.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """SIGTERM, SIGINT and SIGHUP, caught inside of a `with` block on the main thread. The first asks for the orderly
    end, and is kept until somebody can be asked; the second ends the process here and now, whatever it is at.
    """

    def __init__(self) -> None:
        self._count = 0
        self._on_first: Callable[[], None] | None = None
        self._on_second: Callable[[], None] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def listen(self, on_first: Callable[[], None], on_second: Callable[[], None]) -> None:
        """Call `on_first` at the first signal, at once if it has come already, perhaps twice; `on_second` before the
        process is left at the second.
        """
        self._on_first, self._on_second = on_first, on_second
        if self._count:
            on_first()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            if self._on_second is not None:
                self._on_second()
            os._exit(128 + number)
        if self._on_first is not None:
            self._on_first()
