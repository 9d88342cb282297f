"""How much memory Linux's control groups leave to a process. Pure: what the files say is handed in.

A limit of any group above the process's own binds it, too. In a container the path that the kernel tells may lie
outside of what is mounted; then the files that are missing say nothing, and those of the groups above do.
"""

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

_UNLIMITED = 1 << 60
"""Version 1 says "no limit" with a number about as large as there are."""


def memory_limit(read: Callable[[str], str | None]) -> int | None:
    """Bytes that the process may use; None if nothing limits it. `read` returns a file's text, None if it has none."""
    told = [read(file) for file in limit_files(read("/proc/self/cgroup") or "")]
    limits = [limit for text in told if text is not None and (limit := parse_limit(text)) is not None]
    return min(limits, default=None)


def limit_files(groups: str) -> Iterator[str]:
    """The files that may limit a process's memory, of the text of its `/proc/<pid>/cgroup`."""
    for line in groups.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not path.startswith("/"):
            continue
        if not controllers:
            root, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            root, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        own = PurePosixPath(path)
        yield from (f"{root}{'' if group == group.parent else group}/{name}" for group in (own, *own.parents))


def parse_limit(text: str) -> int | None:
    """What one of these files says; None for no limit."""
    text = text.strip()
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None
