"""`paceline serve` as a process of its own, seen from outside: for the tests of the whole."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

PROGRAM = Path(sys.executable).with_name("paceline")
PATIENCE = 200.0
MODEL = "smollm2-135m"


class Served:
    """A running `paceline serve`, seen from outside."""

    def __init__(self, child: "subprocess.Popen[bytes]", port: int, uds: Path) -> None:
        self.child = child
        self.uds = uds
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0)

    def metrics(self) -> dict[str, float]:
        """All samples by name; those that differ in labels only are added up."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx2.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    folder: Path, *flags: str, port: int | None = None, uds: Path | None = None, log: Path | None = None
) -> Iterator[Served]:
    """A server that is ready; stopped by SIGTERM, and its exit code checked, unless it was killed meanwhile. What it
    says goes to `log`.
    """
    with tempfile.TemporaryDirectory(prefix="pl") as scratch:
        port, uds, log = port or free_port(), uds or Path(scratch) / "s", log or Path(scratch) / "log"
        words = (PROGRAM, "serve", folder, "--port", str(port), "--uds", uds, "--drain-seconds", "5", *flags)
        with log.open("wb") as output:
            environment = os.environ | {"PACELINE_HOME": scratch}
            child = subprocess.Popen(words, stdout=output, stderr=output, env=environment)
        served = Served(child, port, uds)
        try:
            await_ready(served, log)
            yield served
        finally:
            served.client.close()
            if child.poll() is None:
                child.terminate()
                assert child.wait(PATIENCE) == 0, log.read_text()[-2000:]
                assert not uds.exists()


def await_ready(served: Served, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and served.child.poll() is None:
        try:
            if httpx2.get(f"{served.url}/health").status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail(f"not ready: {log.read_text()[-2000:]}")


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What a server's metrics grew by."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
