"""One server for all tests that only talk to it, and a socket path that is short enough."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from engine.config import EngineConfig
from tests.api.servers import RunningServer, running


@pytest.fixture(scope="session")
def socket_folder() -> Iterator[Path]:
    """Unix socket paths end after about a hundred characters; pytest's own folders may be longer."""
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def server(socket_folder: Path) -> Iterator[RunningServer]:
    """On TCP and on a Unix socket; speaks the Parrot's text."""
    with running(uds=socket_folder / "shared.sock", engine=EngineConfig(draft_tokens=4)) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx2.Client]:
    with server.client() as client:
        yield client
