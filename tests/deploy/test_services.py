"""The service files, filled, as the programs that read them see them: systemd, launchd's format, promtool."""

import getpass
import inspect
import os
import plistlib
import re
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import api.server
from api.cli import serve
from api.units import TEMPLATES, fill
from engine.config import EngineConfig, PrefixConfig
from tests.api.servers import running

DRAIN_SECONDS = float(inspect.signature(serve).parameters["drain_seconds"].default)

UNIT = {"COMMAND": sys.executable, "ARGS": "model --port 8321", "HOME": "/tmp", "WANTED_BY": "default.target"}  # noqa: S108
SYSTEM_UNIT = UNIT | {"WANTED_BY": "multi-user.target", "USER": getpass.getuser()}
SOCKET_UNIT = {"TCP": "127.0.0.1:8321"}
BACK_OFF = {"RESTART_STEPS": "6", "RESTART_MAX_DELAY": "60"}
AWKWARD = "model 'a b' --stop '50% of \"it\"' '$HOME' '\\n' '' 'c;d'"


LISTS = {"Environment", "SystemCallFilter", "After", "ListenStream"}


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def verify(tmp_path: Path, text: str, *flags: str, name: str = "paceline.service") -> subprocess.CompletedProcess[str]:
    unit = tmp_path / name
    unit.write_text(text)
    command = [tool("systemd-analyze"), "verify", *flags, str(unit)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def systemd_version() -> int:
    shown = subprocess.run([tool("systemd-analyze"), "--version"], capture_output=True, text=True, check=True)
    return int(shown.stdout.split()[1].split(".")[0])


def settings(text: str, section: str) -> dict[str, str]:
    """The settings of one section of a unit; fails when a key stands twice that is no list of systemd's."""
    keys = re.findall(r"^(\w+)=", text, re.MULTILINE)
    assert {key for key in keys if keys.count(key) > 1} <= LISTS
    parser = RawConfigParser(delimiters=("=",), comment_prefixes=("#",), strict=False)
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


@pytest.mark.parametrize(
    ("values", "more", "flags"),
    [(SYSTEM_UNIT, {"USER": SYSTEM_UNIT["USER"]}, ()), (UNIT, {}, ("--user",))],
    ids=["system", "user"],
)
def test_systemd_finds_nothing_to_say_of_a_socket_and_its_service(
    tmp_path: Path, values: dict[str, str], more: dict[str, str], flags: tuple[str, ...]
) -> None:
    (tmp_path / "paceline.service").write_text(fill(TEMPLATES["systemd"], values | {"SOCKET": "yes"}))
    text = fill(TEMPLATES["systemd-socket"], SOCKET_UNIT | more)
    done = verify(tmp_path, text, *flags, name="paceline.socket")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    assert (
        "ListenStreams"
        in verify(tmp_path, text.replace("SocketMode", "ListenStreams"), *flags, name="paceline.socket").stderr
    )


def test_the_sockets_are_the_owners_and_outlive_the_service() -> None:
    socket = settings(fill(TEMPLATES["systemd-socket"], {"USER": "me"}), "Socket")
    assert socket["SocketMode"] == "0600"
    assert socket["SocketUser"] == "me"
    assert socket["ListenStream"] == "%t/paceline/paceline.sock", "what serve is told, too"
    service = fill(TEMPLATES["systemd"], UNIT | {"SOCKET": "yes"})
    assert f"--uds {socket['ListenStream']} " in service
    assert settings(service, "Service")["RuntimeDirectoryPreserve"] == "yes"
    assert settings(service, "Unit")["Requires"] == "paceline.socket"
    assert "socket" not in settings(fill(TEMPLATES["systemd"], UNIT), "Unit").get("Requires", "")


def test_what_systemd_does_not_quote_is_taken_as_it_is() -> None:
    assert "ListenStream=a%%b" in fill(TEMPLATES["systemd-socket"], {"TCP": "a%b"}).splitlines()


def exposure(tmp_path: Path, values: dict[str, str]) -> float:
    unit = tmp_path / "paceline.service"
    unit.write_text(fill(TEMPLATES["systemd"], values))
    command = [tool("systemd-analyze"), "security", "--offline=true", "--no-pager", str(unit)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"Overall exposure level for .*: ([0-9.]+) ", said)
    assert found, said
    return float(found[1])


@pytest.mark.parametrize("more", [{}, {"CLIENTS": "localhost"}], ids=["any client", "local clients"])
def test_systemd_finds_the_system_service_well_sandboxed(tmp_path: Path, more: dict[str, str]) -> None:
    assert exposure(tmp_path, SYSTEM_UNIT | {"USER": "paceline"} | more) < 2.5
    assert exposure(tmp_path, UNIT) > 5, "the measure measures"


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
    assert service["Type"] == "notify"
    assert service["NotifyAccess"] == "main"
    assert duration(service["WatchdogSec"]) > api.server._STOP_SECONDS + api.server._CLOSE_SECONDS
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
    text = fill(TEMPLATES["systemd"], SYSTEM_UNIT)
    service = settings(text, "Service")
    assert [line for line in text.splitlines() if line.startswith("SystemCallFilter=")] == [
        "SystemCallFilter=@system-service",
        "SystemCallFilter=~@privileged",
    ]
    assert service["User"] == getpass.getuser()
    assert service["ProtectSystem"] == "strict"
    assert service["ProtectHome"] == "read-only"
    assert service["ReadWritePaths"] == f'"-{SYSTEM_UNIT["HOME"]}"'
    assert service["PrivateTmp"] == "yes"
    assert service.keys().isdisjoint({"PrivateDevices", "ProtectClock", "DevicePolicy", "MemoryDenyWriteExecute"})


def test_the_user_service_asks_for_nothing_that_needs_root() -> None:
    text = fill(TEMPLATES["systemd"], UNIT)
    service = settings(text, "Service")
    assert service.keys().isdisjoint({"User", "ProtectSystem", "PrivateTmp", "CapabilityBoundingSet", "IPAddressDeny"})
    assert service.keys().isdisjoint({"StateDirectory", "CacheDirectory", "SystemCallFilter", "PrivateUsers"})
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


# ---- what Prometheus records, and whom it wakes

RULES = Path(str(TEMPLATES["prometheus"].path)).with_name("paceline.rules.yml")
TESTS = RULES.with_name("paceline.rules.test.yml")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def promtool_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [tool("promtool"), "test", "rules", str(folder / TESTS.name)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_rules_are_named_in_the_configuration(tmp_path: Path) -> None:
    assert "rule_files" not in fill(TEMPLATES["prometheus"], {"ADDRESS": "127.0.0.1:8321"})
    text = fill(TEMPLATES["prometheus"], {"ADDRESS": "127.0.0.1:8321", "RULES": str(RULES)})
    assert yaml.safe_load(text)["rule_files"] == [str(RULES)]
    done = check_config(tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert f"{len(rules())} rules found" in done.stdout


def test_the_rules_pass_their_own_tests() -> None:
    done = promtool_tests(RULES.parent)
    assert done.returncode == 0, done.stdout + done.stderr


ALERTS = [rule["alert"] for rule in rules() if "alert" in rule]
THRESHOLD = re.compile(r"(?:[<>]=?|==) [0-9.]+")


@pytest.mark.parametrize("wrong", ["== 12345", ">= 0"], ids=["never", "always"])
@pytest.mark.parametrize("alert", ALERTS)
def test_their_tests_see_an_alert_whose_threshold_is_wrong(tmp_path: Path, alert: str, wrong: str) -> None:
    whole = yaml.safe_load(RULES.read_text())
    (rule,) = [rule for group in whole["groups"] for rule in group["rules"] if rule.get("alert") == alert]
    rule["expr"], replaced = THRESHOLD.subn(wrong, rule["expr"], count=1)
    assert replaced
    (tmp_path / RULES.name).write_text(yaml.safe_dump(whole))
    shutil.copy(TESTS, tmp_path)
    assert promtool_tests(tmp_path).returncode != 0


def test_every_rule_is_about_metrics_that_the_server_has(tmp_path: Path) -> None:
    prefix = PrefixConfig(1 << 20, 1 << 20, tmp_path)
    with running(engine=EngineConfig(prefix=prefix)) as server, server.client() as client:
        shown = set(re.findall(r"^# TYPE (\S+)", client.get("/metrics").text, re.MULTILINE))
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {
        name for rule in rules() for name in re.findall(r"\b(?:\w+:)?(?:paceline|process)_\w+(?::\w+)?", rule["expr"])
    }
    known = shown | recorded | {f"{name}_bucket" for name in shown} | {f"{name}_total" for name in shown}
    assert used - known == set()
    assert len(used) > 20
