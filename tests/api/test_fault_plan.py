"""`--fault-plan`: the banner says so, the log says so, faults strike, and what is no plan is refused at the start."""

import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from api.launch import announce, with_faults
from api.service import ServedModel
from api.sockets import Listeners
from api.text import load_tokenizer
from backends.fake import FakeBackend
from backends.faults import FaultyBackend
from tests.api.servers import PATIENCE, running
from tests.api.test_cli import launch

PROGRAM = [sys.executable, "-c", "from api.cli import main; main()", "serve", "--backend", "fake", "--port", "0"]


def plan(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(text)
    return path


def test_the_banner_tells_of_faults_and_only_then(tmp_path: Path) -> None:
    info = FakeBackend().info
    model = ServedModel(info, load_tokenizer(info), None)
    path = plan(tmp_path, "{}")
    for told, expected in ((path, f"faults   INJECTED from {path}"), (None, "")):
        written = StringIO()
        with Listeners("127.0.0.1", 0, None) as listeners:
            announce(Console(file=written), launch(fault_plan=told), listeners, model)
        assert (expected in written.getvalue()) if expected else ("faults" not in written.getvalue())


def test_without_a_plan_the_backend_is_what_it_is(tmp_path: Path) -> None:
    assert with_faults(launch(), FakeBackend) is FakeBackend
    faulty = with_faults(launch(fault_plan=plan(tmp_path, '{"faults": []}')), FakeBackend)()
    assert isinstance(faulty, FaultyBackend)


def test_a_request_ends_by_a_fault_and_the_next_one_is_served(tmp_path: Path) -> None:
    path = plan(tmp_path, '{"faults": [{"kind": "nan", "after": 1, "times": 1}]}')
    with running(with_faults(launch(fault_plan=path), FakeBackend)) as server, server.client() as client:
        body = {"prompt": "abc", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
        first, second = (client.post("/v1/completions", json=body) for _ in range(2))
    assert first.status_code == 500
    assert "finite" in first.json()["error"]["message"]
    assert second.status_code == 200


@pytest.mark.parametrize("text", ['{"faults": [{"kind": "nan", "when": 3}]}', None])
def test_what_is_no_plan_is_refused_before_anything_is_bound(tmp_path: Path, text: str | None) -> None:
    path = plan(tmp_path, text) if text is not None else tmp_path / "none.json"
    done = subprocess.run([*PROGRAM, "--fault-plan", str(path)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert ("`when`" if text else "none.json") in done.stderr
    assert "is ready" not in done.stdout
