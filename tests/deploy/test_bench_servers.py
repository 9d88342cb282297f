"""Child servers: started on a free port, awaited, measured, stopped; a dead one is an error that says why."""

import mmap
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from deploy.bench.servers import (
    Command,
    Server,
    ServerError,
    clock_seconds,
    first_model,
    free_port,
    mlx_lm,
    paceline,
    processor_seconds,
    resident_bytes,
    running,
    stat_seconds,
    status_bytes,
)

STUB = Path(__file__).with_name("stub_paceline.py")


def stub(*arguments: str) -> Command:
    port = free_port()
    return Command("stub", (sys.executable, str(STUB), "serve", "--port", str(port), *arguments), port)


def alive(server: Server) -> bool:
    try:
        socket.create_connection((server.host, server.port), timeout=1).close()
    except OSError:
        return False
    return True


def test_a_server_runs_inside_the_block_only() -> None:
    with running(stub(), ready_s=20) as server:
        assert server.model == "stub"
        assert alive(server)
        os.kill(server.pid, 0)
    assert not alive(server)
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_a_server_is_stopped_when_the_block_fails() -> None:
    with pytest.raises(ZeroDivisionError), running(stub(), ready_s=20) as server:
        raise ZeroDivisionError
    assert not alive(server)


def test_a_server_that_dies_is_an_error_with_the_end_of_its_log() -> None:
    with (
        pytest.raises(ServerError, match=r"(?s)ended with exit code 1.*cannot load the model"),
        running(stub("--broken"), ready_s=20),
    ):
        pytest.fail("it never became ready")


def test_a_server_that_never_gets_ready_is_stopped() -> None:
    command = Command("sleeper", (sys.executable, "-c", "import time; time.sleep(60)"), free_port())
    started = time.perf_counter()
    with pytest.raises(ServerError, match="not ready in time"), running(command, ready_s=0.3):
        pytest.fail("it never became ready")
    assert time.perf_counter() - started < 10


def test_a_server_that_ignores_sigterm_is_killed() -> None:
    code = "import runpy, signal, sys; sys.argv = sys.argv[1:]; install = signal.signal\n"
    code += "signal.signal = lambda number, handler: install(number, signal.SIG_IGN)\n"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    port = free_port()
    command = Command("deaf", (sys.executable, "-c", code, str(STUB), "serve", "--port", str(port)), port)
    with running(command, ready_s=20, stop_s=0.2) as server:
        pass
    assert not alive(server)


def test_a_server_without_models_is_an_error() -> None:
    with pytest.raises(ServerError, match="cannot list the models"):
        first_model("127.0.0.1", free_port())


def test_what_is_started() -> None:
    command = paceline("/opt/paceline", "model", ("--draft-tokens", "6"), name="drafts")
    port = ("--port", str(command.port))
    none_left = ("--prefix-ssd", "0")
    words = ("/opt/paceline", "serve", "model", "--host", "127.0.0.1", *port)
    assert command.argv == (*words, *none_left, "--draft-tokens", "6")
    chosen = ("--prefix-ssd", "1GB")
    assert paceline("/opt/paceline", "model", chosen).argv[-2:] == chosen
    assert paceline("/opt/paceline", None).argv[:3] == ("/opt/paceline", "serve", "--host")
    peer = mlx_lm(Path("/models/m"))
    assert peer.argv[:5] == (sys.executable, "-m", "deploy.bench.mlx_lm_server", "--model", "/models/m")
    assert peer.model == "default_model"


def test_processor_time_is_user_and_system_time_of_the_process() -> None:
    before, own_before = processor_seconds(os.getpid()), time.process_time()
    while time.process_time() - own_before < 0.3:
        os.stat("/")  # noqa: PTH116
    assert processor_seconds(os.getpid()) - before == pytest.approx(0.3, abs=0.1)


def test_the_name_of_a_process_cannot_shift_its_times() -> None:
    line = "42 (a) R (x 1 2) S 1 42 42 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 1 0 100 200 300"
    assert stat_seconds(line, 100) == 3.0


@pytest.mark.parametrize(("shown", "seconds"), [(" 0:01.25\n", 1.25), ("01:02:03", 3723.0), ("2-00:00:01", 172801.0)])
def test_times_as_ps_shows_them(shown: str, seconds: float) -> None:
    assert clock_seconds(shown) == seconds


def test_what_a_process_holds_grows_with_what_it_takes() -> None:
    size = 64 << 20
    with mmap.mmap(-1, size) as fresh:  # what was freed before cannot serve it
        before = resident_bytes(os.getpid())
        for page in range(0, size, mmap.PAGESIZE):
            fresh[page] = 1
        assert resident_bytes(os.getpid()) - before > 0.9 * size
    assert status_bytes("Name:\tpython\nVmRSS:\t    1204 kB\n") == 1204 * 1024


def test_a_process_that_is_no_more_holds_nothing_to_be_told() -> None:
    with running(stub(), ready_s=20) as server:
        assert resident_bytes(server.pid) > 1 << 20
    with pytest.raises(ServerError):
        resident_bytes(server.pid)
    with pytest.raises(ServerError, match="has ended"):
        status_bytes("Name:\tpython\nState:\tZ (zombie)\n")
