"""The real process: its banner, its signals, its exit status, the socket it leaves behind or not."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    def verify(self, *windows, **masks):
        print("stuck", flush=True)
        return super().verify(*windows, **masks)

backends.fake.FakeBackend = Stuck
from api.cli import main
main()
"""
STUCK = [sys.executable, "-c", PATCHED, *PROGRAM[3:]]
"""Its first forward never ends; it says when it has begun."""
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
def process(*flags: str | Path, program: Sequence[str] = PROGRAM) -> Iterator[Served]:
    command = [*program, *map(str, flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, preexec_fn=heeds_signals) as started:
        drained = threading.Thread(target=lambda: started.stderr and started.stderr.read())
        drained.start()
        try:
            yield Served(started)
        finally:
            started.kill()
            drained.join(PATIENCE)


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
        "import time, backends.fake; backends.fake.FakeBackend = lambda: time.sleep(60); "
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
