"""Binding: one's own, nobody else's, and gone at exit. And sockets that somebody else has bound."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.launch import UsageError, own_addresses, settings_of
from api.sockets import BindError, Listeners, Passed, adopt, bind_tcp, bind_unix, is_answered, passed_of, tcp_address
from tests.api.test_cli import NOWHERE, launch


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


# ---- passed by a service manager


@pytest.mark.parametrize(
    ("environment", "passed"),
    [
        ({}, ()),
        ({"LISTEN_FDS": "2"}, ()),
        ({"LISTEN_PID": "8", "LISTEN_FDS": "2"}, ()),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "0"}, ()),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "2"}, (Passed(3, "unknown"), Passed(4, "unknown"))),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}, (Passed(3, "a"), Passed(4, "b"))),
        ({"LISTEN_PID": "8", "LISTEN_FDS": "x"}, ()),
    ],
)
def test_the_environment_is_read_as_systemd_means_it(environment: dict[str, str], passed: tuple[Passed, ...]) -> None:
    assert passed_of(environment, 7) == passed


@pytest.mark.parametrize(
    "more", [{}, {"LISTEN_FDS": "x"}, {"LISTEN_FDS": "-1"}, {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "a"}]
)
def test_an_environment_that_cannot_be_is_told(more: dict[str, str]) -> None:
    with pytest.raises(BindError, match="LISTEN_FD"):
        passed_of({"LISTEN_PID": "7", **more}, 7)


def given_away(bound: socket.socket) -> Passed:
    """Its descriptor alone, as a child of a service manager has it."""
    os.set_inheritable(bound.fileno(), True)
    bound.setblocking(True)
    return Passed(bound.detach(), "web")


@pytest.fixture
def tcp() -> Iterator[socket.socket]:
    with bind_tcp("127.0.0.1", 0) as bound:
        bound.listen()
        yield bound


def test_passed_sockets_are_served_and_left_alone_at_exit(tcp: socket.socket, path: Path) -> None:
    bound = bind_unix(path)
    kept = bound.dup()  # the manager's own
    address = tcp_address(tcp)
    with Listeners(None, 0, None, adopt([given_away(tcp), given_away(bound)])) as listeners:
        assert (listeners.addresses, listeners.paths) == ((address,), (str(path),))
        assert not any(os.get_inheritable(one.fileno()) or one.getblocking() for one in listeners.sockets)
        descriptors = [one.fileno() for one in listeners.sockets]
    assert is_answered(path)
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    kept.close()
    path.unlink()


def test_an_abstract_name_is_told_with_its_mark() -> None:
    bound = socket.socket(socket.AF_UNIX)
    bound.bind("\0paceline-abstract")
    bound.listen()
    with Listeners(None, 0, None, adopt([given_away(bound)])) as listeners:
        assert listeners.paths == ("@paceline-abstract",)


@pytest.mark.parametrize("kind", ["deaf", "datagram", "connected", "file", "none"])
def test_what_is_no_listening_stream_socket_is_refused(kind: str, tmp_path: Path) -> None:
    left, right = socket.socketpair()
    with left, right:
        descriptor = {
            "deaf": lambda: bind_tcp("127.0.0.1", 0).detach(),
            "datagram": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach(),
            "connected": lambda: left.dup().detach(),
            "file": lambda: os.open(tmp_path, os.O_RDONLY),
            "none": lambda: 10**6,
        }[kind]()
        with pytest.raises(BindError, match=f"passed socket web .descriptor {descriptor}."):
            adopt([Passed(descriptor, "web")])
        if kind == "file":
            os.close(descriptor)


@pytest.fixture
def unix(path: Path) -> Iterator[socket.socket]:
    with bind_unix(path) as bound:
        yield bound
    path.unlink()


def test_a_passed_socket_stands_in_for_its_kind_and_the_other_kind_has_to_be_asked_for(
    tcp: socket.socket, unix: socket.socket
) -> None:
    file = Path("/own.sock")
    told, presumed = launch(tcp_told=True), launch(tcp_told=False)
    with_file = launch(tcp_told=False, uds=file)
    assert own_addresses(presumed, []) == ("127.0.0.1", None)
    assert own_addresses(with_file, []) == ("127.0.0.1", file)
    assert own_addresses(told, [tcp]) == (None, None)
    assert own_addresses(with_file, [tcp]) == (None, file)
    assert own_addresses(presumed, [unix]) == (None, None)
    assert own_addresses(told, [unix]) == ("127.0.0.1", None)
    assert own_addresses(with_file, [unix]) == (None, None)
    assert own_addresses(launch(uds=file), [tcp, unix]) == (None, None)


@pytest.mark.parametrize("host", [NOWHERE, "::"])
def test_a_passed_socket_that_others_can_reach_needs_a_key(host: str, tmp_path: Path, unix: socket.socket) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret")
    with bind_tcp(host, 0) as bound:
        with pytest.raises(UsageError, match=f"passed socket on {host} .*--api-key-file"):
            settings_of(launch(), [bound])
        assert settings_of(launch(api_key_file=keys), [bound]).any_address
    assert settings_of(launch(host=NOWHERE, tcp_told=False), [unix]).api_keys == (), "nothing is bound there"
    with pytest.raises(UsageError, match="--host"):
        settings_of(launch(host=NOWHERE), [unix])
