"""Binding: one's own, nobody else's, and gone at exit."""

import os
import socket
import stat
from pathlib import Path

import pytest

from api.sockets import BindError, Listeners, bind_tcp, is_answered


@pytest.fixture
def path(socket_folder: Path, request: pytest.FixtureRequest) -> Path:
    return socket_folder / f"{abs(hash(request.node.name)) % 10**8}.sock"


def leave_stale(path: Path) -> None:
    """What a server leaves that was killed."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


def test_a_unix_socket_is_its_owners_alone_and_gone_at_exit(path: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    with Listeners("127.0.0.1", 0, path):
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert is_answered(path)
        after = os.umask(mask)
        assert after == mask
    assert not path.exists()


def test_a_dead_servers_file_is_replaced(path: Path) -> None:
    leave_stale(path)
    assert not is_answered(path)
    with Listeners("127.0.0.1", 0, path):
        assert is_answered(path)


def test_a_living_servers_file_is_not_touched(path: Path) -> None:
    with Listeners("127.0.0.1", 0, path):
        with pytest.raises(BindError, match="another server"):
            Listeners("127.0.0.1", 0, path)
        assert is_answered(path)


def test_another_kind_of_file_is_not_touched(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(BindError, match="no socket"):
        Listeners("127.0.0.1", 0, path)
    assert path.read_text() == "precious"


def test_a_folder_that_is_not_there_is_told(path: Path) -> None:
    with pytest.raises(BindError, match="cannot listen"):
        Listeners("127.0.0.1", 0, path / "deeper.sock")


def test_a_path_too_long_for_a_socket_is_told(socket_folder: Path) -> None:
    with pytest.raises(BindError, match="cannot listen"):
        Listeners("127.0.0.1", 0, socket_folder / ("x" * 200))


def test_at_exit_a_successors_file_stays(path: Path) -> None:
    with Listeners("127.0.0.1", 0, path):
        path.unlink()
        path.write_text("a successor's")
    assert path.read_text() == "a successor's"


def test_closing_twice_is_closing_once(path: Path) -> None:
    listeners = Listeners("127.0.0.1", 0, path)
    listeners.close()
    leave_stale(path)
    listeners.close()
    assert path.exists()


def test_a_port_in_use_is_told_with_its_number() -> None:
    with Listeners("127.0.0.1", 0, None) as listeners:
        listeners.sockets[0].listen()
        with pytest.raises(BindError, match=f"port {listeners.port}"):
            bind_tcp("127.0.0.1", listeners.port)


def test_a_name_that_is_none_is_told() -> None:
    with pytest.raises(BindError, match=r"no\.such\.name\.invalid"):
        bind_tcp("no.such.name.invalid", 0)


def test_a_port_that_cannot_be_had_leaves_no_socket_file(path: Path) -> None:
    with Listeners("127.0.0.1", 0, None) as listeners:
        listeners.sockets[0].listen()
        with pytest.raises(BindError):
            Listeners("127.0.0.1", listeners.port, path)
        assert not path.exists()
