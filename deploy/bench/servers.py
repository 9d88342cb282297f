"""The servers of a comparison: child processes on free loopback ports, started, awaited, measured and stopped.

Owns their processes and logs. A server that dies or never gets ready is an error that quotes the end of its log.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from os import sysconf
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

_ROOT = Path(__file__).parents[2]
_LOG_TAIL = 2000


class ServerError(Exception):
    """A server did not start, or died."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running child. `model` is the name under which it serves its model."""

    name: str
    host: str
    port: int
    pid: int
    model: str

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a server. `model` None means: ask it."""

    name: str
    argv: tuple[str, ...]
    port: int
    model: str | None = None


def free_port() -> int:
    """A loopback port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def paceline(program: str, model: str | None, arguments: Sequence[str] = (), *, name: str = "paceline") -> Command:
    """`program` is the `paceline` command, `model` a folder or a name (None for a backend that needs none)."""
    port = free_port()
    models = [] if model is None else [model]
    prefix = (
        () if "--prefix-ssd" in arguments else ("--prefix-ssd", "0")
    )  # else what an earlier run left would be found
    argv = (program, "serve", *models, "--host", "127.0.0.1", "--port", str(port), *prefix, *arguments)
    return Command(name, argv, port)


def mlx_lm(folder: Path) -> Command:
    """mlx-lm's server; it serves its one model under a name of its own and would go and fetch any other."""
    port = free_port()
    argv = (sys.executable, "-m", "deploy.bench.mlx_lm_server", "--model", str(folder), "--host", "127.0.0.1")
    return Command("mlx-lm", (*argv, "--port", str(port), "--log-level", "ERROR"), port, "default_model")


@contextmanager
def running(command: Command, *, ready_s: float = 120.0, stop_s: float = 45.0) -> Iterator[Server]:
    """The server of `command`, ready to serve; stopped at the end (SIGTERM, then after `stop_s` SIGKILL)."""
    with TemporaryDirectory(prefix="paceline-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            child = subprocess.Popen(command.argv, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            _await_ready(command, child, log, time.monotonic() + ready_s)
            model = command.model or first_model("127.0.0.1", command.port)
            yield Server(command.name, "127.0.0.1", command.port, child.pid, model)
        finally:
            _stop(child, stop_s)


def _await_ready(command: Command, child: subprocess.Popen[bytes], log: Path, give_up_at: float) -> None:
    while not _healthy("127.0.0.1", command.port):
        exit_code = child.poll()
        if exit_code is None and time.monotonic() < give_up_at:
            time.sleep(0.1)
            continue
        what = "was not ready in time" if exit_code is None else f"ended with exit code {exit_code}"
        raise ServerError(f"{command.name} {what}; its log ends:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_bytes()[-_LOG_TAIL:].decode(errors="replace")


def _stop(child: subprocess.Popen[bytes], stop_s: float) -> None:
    child.terminate()
    try:
        child.wait(stop_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _get(host: str, port: int, path: str, key: str | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection(host, port, timeout=5.0)
    try:
        connection.request("GET", path, headers={} if key is None else {"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _healthy(host: str, port: int) -> bool:
    try:
        return _get(host, port, "/health")[0] == 200
    except (OSError, HTTPException):
        return False


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def first_model(host: str, port: int, base: str = "/v1", key: str | None = None) -> str:
    """The name of the first model that the server lists. Raises ServerError if there is none."""
    try:
        status, body = _get(host, port, f"{base}/models", key)
        models = msgspec.json.decode(body, type=_Models) if status == 200 else _Models([])
    except (OSError, HTTPException, msgspec.DecodeError) as error:
        raise ServerError(f"cannot list the models of {host}:{port}: {error}") from error
    if not models.data:
        raise ServerError(f"{host}:{port} lists no models (HTTP {status}); name one")
    return models.data[0].id


def processor_seconds(pid: int) -> float:
    """User and system time of the whole process so far, all threads, dead ones included."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        return stat_seconds(stat.read_text(), sysconf("SC_CLK_TCK"))
    shown = subprocess.run(["ps", "-o", "time=", "-p", str(pid)], check=True, capture_output=True, text=True)
    return clock_seconds(shown.stdout)


def resident_bytes(pid: int) -> int:
    """What a process holds in memory. Raises ServerError if it is no more."""
    status = Path(f"/proc/{pid}/status")
    try:
        shown = status.read_text() if status.exists() else _shown_by_ps(pid)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ServerError(f"process {pid} is gone: {error}") from error
    return status_bytes(shown)


def _shown_by_ps(pid: int) -> str:
    done = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], check=True, capture_output=True, text=True)
    return f"VmRSS: {done.stdout.strip()} kB\n"


def status_bytes(shown: str) -> int:
    """VmRSS of a /proc/PID/status. Raises ServerError for a process that has ended and was not waited for yet."""
    for line in shown.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ServerError("the process has ended")


def stat_seconds(line: str, ticks_per_second: int) -> float:
    """User + system time of a /proc/PID/stat line: fields 14 and 15, counted behind the name, which can be anything."""
    fields = line.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / ticks_per_second


def clock_seconds(shown: str) -> float:
    """The `[[days-]hours:]minutes:seconds` of ps."""
    days, _, clock = shown.strip().rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = seconds * 60.0 + float(part)
    return seconds + 86400.0 * int(days or 0)
