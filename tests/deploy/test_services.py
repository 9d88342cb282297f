"""The service files, filled, as the programs that read them see them: systemd, launchd's format, promtool."""

import getpass
import inspect
import os
import plistlib
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from api.cli import serve
from deploy.render import TEMPLATES, fill

DRAIN_SECONDS = float(inspect.signature(serve).parameters["drain_seconds"].default)

UNIT = {"COMMAND": sys.executable, "ARGS": "model --port 8321", "HOME": "/tmp", "WANTED_BY": "default.target"}  # noqa: S108
SYSTEM_UNIT = UNIT | {"WANTED_BY": "multi-user.target", "USER": getpass.getuser()}
BACK_OFF = {"RESTART_STEPS": "6", "RESTART_MAX_DELAY": "60"}
AWKWARD = "model 'a b' --stop '50% of \"it\"' '$HOME' '\\n' '' 'c;d'"


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def verify(tmp_path: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    unit = tmp_path / "paceline.service"
    unit.write_text(text)
    command = [tool("systemd-analyze"), "verify", *flags, str(unit)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def systemd_version() -> int:
    shown = subprocess.run([tool("systemd-analyze"), "--version"], capture_output=True, text=True, check=True)
    return int(shown.stdout.split()[1].split(".")[0])


def settings(text: str, section: str) -> dict[str, str]:
    """The settings of one section of a unit; fails when a key stands twice."""
    parser = RawConfigParser(delimiters=("=",), comment_prefixes=("#",), strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text)
    return dict(parser[section])


def duration(text: str) -> float:
    """A bare number of seconds, the only way that the template writes one."""
    return float(text)


@pytest.mark.parametrize(("values", "flags"), [(SYSTEM_UNIT, ()), (UNIT, ("--user",))], ids=["system", "user"])
@pytest.mark.parametrize("arguments", [UNIT["ARGS"], AWKWARD], ids=["plain", "awkward"])
def test_systemd_finds_nothing_to_say(
    tmp_path: Path, values: dict[str, str], flags: tuple[str, ...], arguments: str
) -> None:
    done = verify(tmp_path, fill(TEMPLATES["systemd"], values | {"ARGS": arguments}), *flags)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_systemd_would_have_said_something(tmp_path: Path) -> None:
    """The check above can fail: an unknown setting and a missing program are both reported."""
    unit = fill(TEMPLATES["systemd"], UNIT)
    assert "FooBar" in verify(tmp_path, unit.replace("[Service]", "[Service]\nFooBar=1"), "--user").stderr
    assert verify(tmp_path, unit.replace(sys.executable, "/no/such/program"), "--user").returncode != 0


def test_a_growing_back_off_is_there_for_a_systemd_that_knows_it(tmp_path: Path) -> None:
    text = fill(TEMPLATES["systemd"], UNIT | BACK_OFF)
    service = settings(text, "Service")
    assert (service["RestartSteps"], service["RestartMaxDelaySec"]) == ("6", "60")
    said = verify(tmp_path, text, "--user").stderr.splitlines()
    if systemd_version() >= 254:
        assert said == []
    else:
        assert len(said) == 2
        assert all("RestartSteps" in line or "RestartMaxDelaySec" in line for line in said)


@pytest.mark.parametrize("values", [SYSTEM_UNIT, UNIT], ids=["system", "user"])
def test_systemd_restarts_failures_gives_up_in_the_end_and_waits_for_the_drain(values: dict[str, str]) -> None:
    text = fill(TEMPLATES["systemd"], values)
    service = settings(text, "Service")
    assert service["Type"] == "exec"
    assert service["Restart"] == "on-failure"
    assert service["KillSignal"] == "SIGTERM"
    assert duration(service["TimeoutStopSec"]) >= DRAIN_SECONDS + 10
    assert service["UMask"] == "0077"
    assert service["NoNewPrivileges"] == "yes"
    assert service["RuntimeDirectory"] == "paceline"
    unit = settings(text, "Unit")
    burst, interval = int(unit["StartLimitBurst"]), duration(unit["StartLimitIntervalSec"])
    assert burst * duration(service["RestartSec"]) < interval, "a crash loop would never reach its limit"


def test_the_system_service_is_sandboxed_but_keeps_devices_and_run_time_kernels() -> None:
    service = settings(fill(TEMPLATES["systemd"], SYSTEM_UNIT), "Service")
    assert service["User"] == getpass.getuser()
    assert service["ProtectSystem"] == "full"
    assert service["PrivateTmp"] == "yes"
    assert service.keys().isdisjoint({"PrivateDevices", "ProtectClock", "DevicePolicy", "MemoryDenyWriteExecute"})


def test_the_user_service_asks_for_nothing_that_needs_root() -> None:
    text = fill(TEMPLATES["systemd"], UNIT)
    service = settings(text, "Service")
    assert service.keys().isdisjoint({"User", "ProtectSystem", "PrivateTmp", "CapabilityBoundingSet"})
    assert settings(text, "Install")["WantedBy"] == "default.target"


def test_systemd_is_given_each_argument_as_it_was_meant() -> None:
    words = fill(TEMPLATES["systemd"], UNIT | {"ARGS": AWKWARD})
    (start,) = [line for line in words.splitlines() if line.startswith("ExecStart=")]
    assert start.endswith(r'"model" "a b" "--stop" "50%% of \"it\"" "$$HOME" "\\n" "" "c;d"')


def agent(arguments: str) -> dict[str, Any]:
    values = {
        "COMMAND": "/opt/a & b/paceline",
        "ARGS": arguments,
        "HOME": "/Users/me/<models>",
        "LOGS": "/Users/me/logs",
    }
    loaded = plistlib.loads(fill(TEMPLATES["launchd"], values).encode())
    assert isinstance(loaded, dict)
    return loaded


def test_launchd_starts_the_very_command_with_its_home() -> None:
    loaded = agent("model --port 8321 'a <b> & c'")
    assert loaded["Label"] == "dev.paceline"
    command = ["/opt/a & b/paceline", "serve", "model", "--port", "8321", "a <b> & c"]
    assert loaded["ProgramArguments"] == command
    assert loaded["EnvironmentVariables"] == {"PACELINE_HOME": "/Users/me/<models>"}
    assert agent("")["ProgramArguments"] == command[:2]


def test_launchd_restarts_failures_only_slowly_and_waits_for_the_drain() -> None:
    loaded = agent("model")
    assert loaded["KeepAlive"] == {"SuccessfulExit": False}
    assert loaded["ThrottleInterval"] >= 10
    assert loaded["ExitTimeOut"] >= DRAIN_SECONDS + 10
    assert loaded["RunAtLoad"] is True
    assert loaded["Umask"] == 0o077
    assert {Path(loaded["StandardOutPath"]).parent, Path(loaded["StandardErrorPath"]).parent} == {
        Path("/Users/me/logs")
    }


def check_config(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "prometheus.yml"
    path.write_text(text)
    command = [tool("promtool"), "check", "config", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def scrape(text: str) -> dict[str, Any]:
    (job,) = yaml.safe_load(text)["scrape_configs"]
    assert isinstance(job, dict)
    return job


def test_prometheus_takes_the_configuration_without_a_key(tmp_path: Path) -> None:
    text = fill(TEMPLATES["prometheus"], {"ADDRESS": "[::1]:8321"})
    assert "authorization" not in scrape(text)
    assert scrape(text)["static_configs"] == [{"targets": ["[::1]:8321"]}]
    assert scrape(text)["metrics_path"] == "/metrics"
    assert check_config(tmp_path, text).returncode == 0


def test_prometheus_carries_a_key_from_a_file(tmp_path: Path) -> None:
    key = tmp_path / 'a "key"'
    key.write_text("secret")
    text = fill(TEMPLATES["prometheus"], {"ADDRESS": "127.0.0.1:8321", "KEY_FILE": str(key)})
    assert scrape(text)["authorization"] == {"type": "Bearer", "credentials_file": str(key)}
    assert check_config(tmp_path, text).returncode == 0


def test_promtool_would_have_said_something(tmp_path: Path) -> None:
    text = fill(TEMPLATES["prometheus"], {"ADDRESS": "127.0.0.1:8321", "KEY_FILE": str(tmp_path / "absent")})
    assert check_config(tmp_path, text).returncode != 0
    assert check_config(tmp_path, text.replace("scrape_configs", "scrape_config")).returncode != 0
