"""What a service manager hears, on a real socket of its own: in order, no more than is new, and in time."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.notify import Notifier, Standing, Supervision, supervision_of

LOADING = Standing("loading", "loading m", True)
SERVING = Standing("serving", "serving 0 requests, 0 waiting", True)
ENDING = Standing("ending", "draining 0 requests", True)
EXTENDED = "EXTEND_TIMEOUT_USEC=60000000"


class Ear:
    """The manager's end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        """The lines that came since the last call."""
        lines = []
        while True:
            try:
                lines += self.socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return lines


@contextmanager
def listening(address: str) -> Iterator[Ear]:
    ear = Ear(address)
    try:
        yield ear
    finally:
        ear.socket.close()
        if address.startswith("/"):
            Path(address).unlink()


@pytest.fixture(params=["file", "abstract"])
def ear(request: pytest.FixtureRequest, socket_folder: Path) -> Iterator[Ear]:
    name = f"{socket_folder.name}-{abs(hash(request.node.name)) % 10**8}"
    with listening(str(socket_folder / name) if request.param == "file" else f"@{name}") as ear:
        yield ear


def test_a_life_is_told_in_order_and_each_thing_once(ear: Ear) -> None:
    notifier = Notifier(Supervision(ear.address))
    notifier.report(LOADING, 0.0)
    assert ear.heard() == ["STATUS=loading m", EXTENDED]
    notifier.report(LOADING, 0.1)
    assert ear.heard() == []
    notifier.report(SERVING, 0.2)
    assert ear.heard() == ["READY=1", "STATUS=serving 0 requests, 0 waiting"]
    notifier.report(SERVING, 60.0)
    assert ear.heard() == []
    notifier.report(ENDING, 60.1)
    assert ear.heard() == ["STOPPING=1", "STATUS=draining 0 requests", EXTENDED]
    notifier.close()
    notifier.report(SERVING, 61.0)
    assert ear.heard() == []


def test_a_long_load_and_a_long_drain_keep_asking_for_time(ear: Ear) -> None:
    for standing in (LOADING, ENDING):
        notifier = Notifier(Supervision(ear.address))
        heard = []
        for second in range(100):
            notifier.report(standing, float(second))
            heard += [second] if EXTENDED in ear.heard() else []
        gaps = [later - earlier for earlier, later in pairwise(heard)]
        assert heard[0] == 0
        assert max(gaps) <= 60 / 2
        notifier.close()


def test_a_busy_server_tells_its_numbers_once_a_second_and_the_newest_in_the_end(ear: Ear) -> None:
    notifier = Notifier(Supervision(ear.address))
    for place in range(40):
        notifier.report(Standing("serving", f"serving {place} requests, 0 waiting", True), place / 10)
    said = [line for line in ear.heard() if line.startswith("STATUS=")]
    assert len(said) == 4
    notifier.report(Standing("serving", "serving 39 requests, 0 waiting", True), 9.0)
    assert ear.heard() == ["STATUS=serving 39 requests, 0 waiting"]
    notifier.close()


@given(seconds=st.floats(0.01, 600), late=st.lists(st.floats(0, 1), min_size=50, max_size=50))
def test_the_watchdog_hears_of_a_living_server_within_half_its_time(seconds: float, late: list[float]) -> None:
    """However late each call comes within the interval that the notifier asks for."""
    with listening("@paceline-watchdog") as ear:
        notifier = Notifier(Supervision(ear.address, seconds))
        now, pinged = 0.0, [0.0]
        for lateness in late:
            notifier.report(SERVING, now)
            pinged += [now] if "WATCHDOG=1" in ear.heard() else []
            now += notifier.interval * lateness
        notifier.close()
    gaps = [later - earlier for earlier, later in zip(pinged, [*pinged[1:], now], strict=True)]
    assert max(gaps) <= seconds / 2 * 1.000001
    assert len(pinged) <= 2 + now / (seconds / 4), "more often than it has to"


def test_the_watchdog_hears_nothing_of_a_server_that_is_stuck(ear: Ear) -> None:
    notifier = Notifier(Supervision(ear.address, 10.0))
    for second in range(60):
        notifier.report(Standing("serving", "s", False), float(second))
    assert "WATCHDOG=1" not in ear.heard()
    notifier.report(SERVING, 60.0)
    assert "WATCHDOG=1" in ear.heard()
    notifier.close()


def test_without_a_watchdog_nobody_is_pinged(ear: Ear) -> None:
    notifier = Notifier(Supervision(ear.address))
    notifier.report(SERVING, 0.0)
    assert "WATCHDOG=1" not in ear.heard()
    assert notifier.interval == float("inf")
    notifier.close()


def test_what_could_not_be_sent_is_sent_later(socket_folder: Path) -> None:
    address = str(socket_folder / "late")
    notifier = Notifier(Supervision(address))
    notifier.report(SERVING, 0.0)
    with listening(address) as ear:
        notifier.report(SERVING, 0.1)
        assert ear.heard() == ["READY=1", "STATUS=serving 0 requests, 0 waiting"]
    notifier.close()


def test_a_status_is_one_line_whatever_a_model_is_called(ear: Ear) -> None:
    notifier = Notifier(Supervision(ear.address))
    notifier.report(Standing("serving", "loading a\nSTOPPING=1", True), 0.0)
    assert ear.heard() == ["READY=1", "STATUS=loading a STOPPING=1"]
    notifier.close()


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, Supervision()),
        ({"NOTIFY_SOCKET": "/run/n"}, Supervision("/run/n")),
        ({"NOTIFY_SOCKET": "@n"}, Supervision("@n")),
        ({"NOTIFY_SOCKET": "vsock:2:1"}, Supervision()),
        ({"NOTIFY_SOCKET": "n"}, Supervision()),
        ({"WATCHDOG_USEC": "1000000"}, Supervision()),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1500000"}, Supervision("/n", 1.5)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "7"}, Supervision("/n", 1.5)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "8"}, Supervision("/n")),
    ],
)
def test_the_environment_is_read_as_systemd_means_it(environment: dict[str, str], told: Supervision) -> None:
    assert supervision_of(environment, 7) == told


@pytest.mark.parametrize("value", ["", "0", "-1", "1s", "1.5", "²"])
def test_a_time_that_is_none_is_told(value: str) -> None:
    with pytest.raises(ValueError, match="WATCHDOG_USEC"):
        supervision_of({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": value}, 7)
