"""The real process: its banner, its signals, its exit status, the socket it leaves behind or not; and what it says to
the service manager that started it, and takes from it.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api.servers import PATIENCE, eventually

PROGRAM = [sys.executable, "-c", "from api.cli import main; main()", "serve", "--backend", "fake", "--port", "0"]
PATCHED = """
import backends.fake
from tests.api.servers import Gated

class Stuck(Gated):
    def __init__(self, **_):
        super().__init__()

    def verify(self, *windows, **masks):
        print("stuck", flush=True)
        return super().verify(*windows, **masks)

backends.fake.FakeBackend = Stuck
from api.cli import main
main()
"""
STUCK = [sys.executable, "-c", PATCHED, *PROGRAM[3:]]
"""Its first forward never ends; it says when it has begun."""
ACTIVATE = """
import fcntl, os, sys
passed = [int(number) for number in sys.argv[1].split(",")]
for place, number in enumerate([fcntl.fcntl(number, fcntl.F_DUPFD, 100) for number in passed]):
    os.dup2(number, 3 + place)
    os.close(number)
told = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(passed)), "LISTEN_FDNAMES": ":".join("s" * len(passed))}
os.execve(sys.argv[2], sys.argv[2:], os.environ | told)
"""
"""Does what systemd does between fork and exec: the descriptors from 3 on, and whose they are."""
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


class Served:
    """A process and what its banner says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.banner: dict[str, str] = {}
        self.errors = ""
        """What it wrote to standard error, once it has ended."""
        assert process.stdout is not None
        for line in process.stdout:
            name, _, value = line.strip().partition(" ")
            self.banner[name] = value.strip()
            if name == "device":
                break
        assert self.banner.get("paceline") == "is ready", self.banner

    @property
    def url(self) -> str:
        return self.banner["url"]

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def wait_until_stuck(self) -> None:
        """Before that a cancel would still be seen in time."""
        assert self.process.stdout is not None
        assert "stuck" in (line.strip() for line in iter(self.process.stdout.readline, ""))


def heeds_signals() -> None:
    """Whatever the tests were started under: a server leaves alone what it was told to ignore, as by nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def process(
    *flags: str | Path, program: Sequence[str] = PROGRAM, pass_fds: Sequence[int] = (), **environment: str
) -> Iterator[Served]:
    command = [*program, *map(str, flags)]
    if pass_fds:
        command = [sys.executable, "-c", ACTIVATE, ",".join(map(str, pass_fds)), *command]
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pass_fds": pass_fds}
    settings["env"] = os.environ | environment
    with subprocess.Popen(command, **settings, text=True, preexec_fn=heeds_signals) as started:
        errors: list[str] = []
        drained = threading.Thread(target=lambda: errors.append(started.stderr.read() if started.stderr else ""))
        drained.start()
        served: Served | None = None
        try:
            served = Served(started)
            yield served
        finally:
            started.kill()
            drained.join(PATIENCE)
            if served is not None:
                served.errors = "".join(errors)


def stream_on(server: Served) -> socket.socket:
    """A stream under way whose client reads no further than its head."""
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    peer = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    body = httpx2.Request("POST", server.url, json=LONG).read()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    peer.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    assert peer.recv(1000).startswith(b"HTTP/1.1 200 OK")
    return peer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_process_well_and_removes_the_socket(socket_folder: Path, number: signal.Signals) -> None:
    path = socket_folder / f"signal-{number}.sock"
    with process("--uds", path) as server:
        assert server.banner["socket"] == str(path)
        assert server.banner["model"] == "fake"
        assert httpx2.get(server.url.replace("/v1", "/health")).json() == {"status": "ready"}
        server.process.send_signal(number)
        assert server.wait() == 0
    assert not path.exists()


def test_a_stream_under_way_is_finished_before_the_end() -> None:
    with process() as server, httpx2.stream("POST", f"{server.url}/chat/completions", json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        *_, last, blank = lines
        assert (last, blank) == ("data: [DONE]", "")
        assert server.wait() == 0


def test_a_client_that_does_not_read_cannot_hold_the_process_up() -> None:
    with process("--drain-seconds", "0.1") as server, stream_on(server):
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_second_signal_ends_it_at_once_and_removes_the_socket(socket_folder: Path) -> None:
    path = socket_folder / "second.sock"
    with process("--uds", path, program=STUCK) as server, stream_on(server):
        server.wait_until_stuck()
        server.process.send_signal(signal.SIGTERM)
        health = server.url.replace("/v1", "/health")
        eventually(lambda: httpx2.get(health).status_code == 503, "draining")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
    assert not path.exists()


def test_a_signal_while_loading_ends_the_process_well(socket_folder: Path) -> None:
    path = socket_folder / "loading.sock"
    patched = (
        "import time, backends.fake; backends.fake.FakeBackend = lambda **_: time.sleep(60); "
        "from api.cli import main; main()"
    )
    command = [sys.executable, "-c", patched, *PROGRAM[3:], "--uds", str(path)]
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started,
        httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path))) as client,
    ):
        try:
            eventually(path.exists, "the socket")
            assert client.get("http://any.host/health").json() == {"status": "loading"}
            started.terminate()
            assert started.wait(PATIENCE) == 0
        finally:
            started.kill()
    assert not path.exists()


def test_a_signal_between_binding_and_serving_ends_the_process_well(socket_folder: Path) -> None:
    """Once, the socket's file was left behind: nobody caught signals that early."""
    path = socket_folder / "early.sock"
    patched = """
import os, signal, api.launch
make_backend = api.launch.make_backend
def interrupted(launch, display, console):
    print("bound", launch.uds.exists(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    return make_backend(launch, display, console)
api.launch.make_backend = interrupted
from api.cli import main
main()
"""
    command = [sys.executable, "-c", patched, *PROGRAM[3:], "--uds", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ("bound True" in ended.stdout, ended.returncode) == (True, 0), ended.stderr
    assert not path.exists()


@pytest.mark.slow
def test_an_engine_that_is_stuck_is_left_behind_in_the_end(socket_folder: Path) -> None:
    path = socket_folder / "stuck.sock"
    with process("--uds", path, "--drain-seconds", "0", program=STUCK) as server, stream_on(server):
        server.wait_until_stuck()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 1
    assert not path.exists()


def test_a_killed_servers_socket_is_taken_over(socket_folder: Path) -> None:
    path = socket_folder / "killed.sock"
    with process("--uds", path) as server:
        server.process.kill()
        server.wait()
    assert path.exists()
    with process("--uds", path) as server:
        transport = httpx2.HTTPTransport(uds=str(path))
        with httpx2.Client(transport=transport) as client:
            assert client.get("http://any.host/health").json() == {"status": "ready"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),  # noqa: S104
        (["--host", "::"], "--api-key-file"),
        (["--api-key-file", os.devnull], "no API key"),
        (["--max-lanes", "8", "--round-rows", "8"], "round_rows"),
        (["--backend", "torch"], "--backend"),
        (["--uds", "/nowhere/at/all.sock"], "cannot listen"),
        (["--max-lanes", "0"], "max-lanes"),
        (["--history-bytes", "-1"], "history-bytes"),
        (["--fill-seconds", "0"], "fill_seconds"),
        (["--port", "70000"], "port"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_with_a_reason(flags: list[str], words: str) -> None:
    refused = subprocess.run([*PROGRAM, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode != 0
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_port_in_use_is_refused() -> None:
    with process() as server:
        port = server.url.rpartition(":")[2].partition("/")[0]
        refused = subprocess.run([*PROGRAM[:-1], port], capture_output=True, text=True, timeout=60, check=False)
        assert refused.returncode == 1
        assert port in refused.stderr


def test_the_fake_backend_and_help_never_import_mlx() -> None:
    for flags in (["--help"], ["serve", "--help"], ["serve", "--backend", "fake", "--host", "0.0.0.0"]):  # noqa: S104
        code = (
            "import sys; from api.cli import app; app(sys.argv[1:], standalone_mode=False); print(sorted(sys.modules))"
        )
        run = subprocess.run(
            [sys.executable, "-c", code, *flags], capture_output=True, text=True, timeout=60, check=False
        )
        assert "'mlx" not in run.stdout + run.stderr


# ---- a service manager


class Manager:
    """Hears what a service says, on a real datagram socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(PATIENCE)
        self.lines: list[str] = []

    def hears(self, line: str) -> None:
        """Wait for a line that begins so, from now on."""
        while True:
            fresh = self.socket.recv(4096).decode().splitlines()
            self.lines += fresh
            if any(said.startswith(line) for said in fresh):
                return

    def hears_no_more(self) -> None:
        """Take what has come so far."""
        self.socket.setblocking(False)
        with suppress(BlockingIOError):
            self.hears("no such line")


@pytest.fixture
def manager(socket_folder: Path) -> Iterator[Manager]:
    manager = Manager(socket_folder / "manager")
    yield manager
    manager.socket.close()
    manager.path.unlink()


def test_a_service_manager_hears_of_the_whole_life(manager: Manager) -> None:
    told = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "400000"}
    with process(**told) as server:
        manager.hears("READY=1")
        assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in manager.lines)
        for _ in range(3):
            manager.hears("WATCHDOG=1")
        server.process.send_signal(signal.SIGTERM)
        manager.hears("STOPPING=1")
        assert server.wait() == 0
    statuses = [line for line in manager.lines if line.startswith("STATUS=")]
    serving = "STATUS=serving 0 requests, 0 waiting"
    assert statuses == ["STATUS=loading smollm2-135m", serving, "STATUS=draining 0 requests"]
    assert manager.lines.index("READY=1") + 1 == manager.lines.index(serving)


def test_a_watchdog_of_another_process_is_not_fed(manager: Manager) -> None:
    told = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "100000", "WATCHDOG_PID": "1"}
    with process(**told) as server:
        manager.hears("READY=1")
        server.process.send_signal(signal.SIGTERM)
        manager.hears("STOPPING=1")
    assert "WATCHDOG=1" not in manager.lines


def test_a_model_that_cannot_be_loaded_is_told(manager: Manager) -> None:
    patched = "import backends.fake; backends.fake.FakeBackend = lambda **_: 1 // 0; from api.cli import main; main()"
    command = [sys.executable, "-c", patched, *PROGRAM[3:]]
    environment = os.environ | {"NOTIFY_SOCKET": str(manager.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    manager.hears("STOPPING=1")
    assert any(line.startswith("STATUS=the model could not be loaded") for line in manager.lines)
    assert "READY=1" not in manager.lines


def test_an_engine_that_is_stuck_ends_its_requests_and_the_process(manager: Manager, socket_folder: Path) -> None:
    path = socket_folder / "stalled.sock"
    told = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "200000"}
    with process("--uds", path, "--stall-seconds", "1", program=STUCK, **told) as server:
        with stream_on(server) as peer:
            server.wait_until_stuck()
            health = server.url.replace("/v1", "/health")
            manager.hears("STATUS=the engine is stuck")
            told_health = httpx2.get(health)
            assert (told_health.status_code, told_health.json()["status"]) == (503, "broken")
            answer = b"".join(iter(lambda: peer.recv(65536), b""))
        assert b"data: [DONE]" not in answer
        frame = answer.decode().strip().rpartition("data: ")[2].splitlines()[0]
        assert json.loads(frame)["error"]["type"] == "server_error"
        assert server.wait() == 1
    assert "in verify" in server.errors, "where it is stuck"
    manager.hears_no_more()
    stuck = next(place for place, line in enumerate(manager.lines) if line.startswith("STATUS=the engine is stuck"))
    assert "STOPPING=1" in manager.lines[: stuck + 1]
    assert "WATCHDOG=1" in manager.lines[:stuck]
    assert "WATCHDOG=1" not in manager.lines[stuck:]
    assert not path.exists()


def test_an_engine_that_is_stuck_holds_up_no_drain(socket_folder: Path) -> None:
    path = socket_folder / "stalled-drain.sock"
    flags = ("--uds", path, "--stall-seconds", "1", "--drain-seconds", "600")
    with process(*flags, program=STUCK) as server, stream_on(server):
        server.wait_until_stuck()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 1, "requests were lost"
    assert not path.exists()


def test_an_engine_may_take_as_long_as_it_likes_where_that_is_said(manager: Manager) -> None:
    told = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "200000"}
    with process("--stall-seconds", "0", program=STUCK, **told) as server, stream_on(server):
        server.wait_until_stuck()
        for _ in range(5):
            manager.hears("WATCHDOG=1")
        assert httpx2.get(server.url.replace("/v1", "/health")).json() == {"status": "ready"}
    assert "STOPPING=1" not in manager.lines


def test_passed_sockets_are_served_and_outlive_the_process(socket_folder: Path) -> None:
    path = socket_folder / "passed.sock"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()
        port = tcp.getsockname()[1]
        ignored = socket_folder / "ignored.sock"
        with process("--uds", ignored, pass_fds=[unix.fileno(), tcp.fileno()]) as server:
            assert server.banner["url"] == f"http://127.0.0.1:{port}/v1"
            assert server.banner["socket"] == str(path)
            assert httpx2.get(f"http://127.0.0.1:{port}/health").json() == {"status": "ready"}
            with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path))) as client:
                assert client.get("http://any.host/health").json() == {"status": "ready"}
            assert not ignored.exists()
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0
        with socket.socket(socket.AF_UNIX) as waits:
            waits.connect(str(path))  # in the backlog of a socket that is still there
    path.unlink()


def test_a_passed_unix_socket_alone_opens_no_port(socket_folder: Path) -> None:
    path = socket_folder / "alone.sock"
    presumed = [word for word in PROGRAM if word not in ("--port", "0")]
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()
        with process(program=presumed, pass_fds=[unix.fileno()]) as server:
            assert "url" not in server.banner
            assert server.banner["socket"] == str(path)
        with process(pass_fds=[unix.fileno()]) as server:
            assert httpx2.get(server.url.replace("/v1", "/health")).json() == {"status": "ready"}
    path.unlink()


def test_a_passed_socket_that_others_can_reach_needs_a_key() -> None:
    with socket.create_server(("0.0.0.0", 0)) as tcp:  # noqa: S104
        command = [sys.executable, "-c", ACTIVATE, str(tcp.fileno()), *PROGRAM]
        fcntl.fcntl(tcp.fileno(), fcntl.F_SETFD, 0)
        refused = subprocess.run(
            command, pass_fds=[tcp.fileno()], capture_output=True, text=True, timeout=60, check=False
        )
    assert refused.returncode == 1
    assert "--api-key-file" in refused.stderr
