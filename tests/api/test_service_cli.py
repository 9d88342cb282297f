"""`paceline service`: its files, what systemctl and launchctl are told, and that a dry run changes nothing.

The two programs are stand-ins on PATH that write down what they are told, and fail where a test says so.
"""

import os
import plistlib
import shlex
import stat
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli import app

STUB = """#!/bin/sh
if [ "$1" = --version ]; then echo "systemd {version} ({version}.1)"; exit 0; fi
echo "$(basename "$0") $*" >> {record}
case " $* " in *" {fails} "*) exit 3;; esac
"""


class Machine:
    """A home of its own, and stand-ins for the programs that keep services running."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.record = folder / "told"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.command = self.bin / "paceline"
        self.command.write_text("#!/bin/sh\n")
        self.command.chmod(0o755)
        self.units = folder / "config" / "systemd" / "user"
        self.agent = folder / "home" / "Library" / "LaunchAgents" / "dev.paceline.plist"
        (folder / "home").mkdir()
        self.answers()
        monkeypatch.setenv("HOME", str(folder / "home"))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        monkeypatch.setenv("PACELINE_HOME", str(folder / "models"))
        monkeypatch.setenv("PATH", f"{self.bin}:/usr/bin:/bin")
        monkeypatch.setattr(sys, "argv", [str(self.command)])

    def answers(self, fails: str = "never", version: int = 252) -> None:
        """From now on, every command with the word `fails` in it fails."""
        for name in ("systemctl", "launchctl"):
            stub = self.bin / name
            stub.write_text(STUB.format(version=version, record=self.record, fails=fails))
            stub.chmod(0o755)

    def told(self) -> list[str]:
        """The commands since the last call."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        self.record.unlink(missing_ok=True)
        return lines

    def files(self) -> set[Path]:
        """Everything that was written."""
        return {path for path in self.folder.rglob("*") if path.is_file() and path.parent != self.bin}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(sys, "platform", "linux")
    return Machine(tmp_path, monkeypatch)


def paceline(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["service", *words])
    assert result.exit_code == status, result.output
    return result.output


def settings(path: Path, section: str) -> dict[str, str]:
    parser = RawConfigParser(delimiters=("=",), comment_prefixes=("#",), strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(path)
    return dict(parser[section])


# ---- systemd


def test_a_users_service_is_installed_started_asked_after_stopped_and_gone(machine: Machine) -> None:
    paceline("install", "--", "my model", "--port", "9000")
    unit = machine.units / "paceline.service"
    assert machine.files() - {machine.record} == {unit}
    assert stat.S_IMODE(unit.stat().st_mode) == 0o644
    service = settings(unit, "Service")
    start = shlex.split(service["ExecStart"])
    assert start == [
        *(str(machine.command), "serve", "--uds", "%t/paceline/paceline.sock"),
        *("my model", "--port", "9000"),
    ]
    assert service["Environment"] == f'"PACELINE_HOME={machine.folder / "models"}"'
    assert "User" not in service
    assert settings(unit, "Install")["WantedBy"] == "default.target"
    assert stat.S_IMODE((machine.folder / "models").stat().st_mode) == 0o700
    assert machine.told() == ["systemctl --user daemon-reload", "systemctl --user enable paceline.service"]

    for verb, commands in {
        "start": ["systemctl --user start paceline.service"],
        "status": ["systemctl --user status --no-pager paceline.service"],
        "stop": ["systemctl --user stop paceline.service"],
        "uninstall": ["systemctl --user disable --now paceline.service", "systemctl --user daemon-reload"],
    }.items():
        paceline(verb)
        assert machine.told() == commands
    assert machine.files() == set()


def test_with_a_socket_the_first_client_starts_the_service(machine: Machine) -> None:
    paceline("install", "--socket", "--", "--host", "::1", "--port", "9000")
    socket, unit = machine.units / "paceline.socket", machine.units / "paceline.service"
    assert "ListenStream=[::1]:9000" in socket.read_text().splitlines()
    assert settings(unit, "Unit")["Requires"] == "paceline.socket"
    assert settings(unit, "Service")["RuntimeDirectoryPreserve"] == "yes"
    assert machine.told()[1:] == [
        "systemctl --user disable paceline.service",
        "systemctl --user enable paceline.socket",
    ]
    paceline("start")
    paceline("stop")
    assert machine.told() == [
        "systemctl --user start paceline.socket",
        "systemctl --user stop paceline.socket paceline.service",
    ]
    paceline("install")
    assert machine.told()[0] == "systemctl --user disable --now paceline.socket"
    assert not socket.exists()
    paceline("install", "--socket")
    machine.told()
    paceline("uninstall")
    assert machine.told()[0] == "systemctl --user disable --now paceline.socket paceline.service"
    assert machine.files() == set()


def test_a_systemd_that_knows_growing_back_offs_is_told_one(machine: Machine) -> None:
    paceline("install")
    unit = machine.units / "paceline.service"
    assert "RestartSteps" not in settings(unit, "Service")
    machine.answers(version=254)
    paceline("install")
    assert settings(unit, "Service")["RestartSteps"] == "6"


def test_a_file_of_somebody_else_is_left_alone_unless_forced(machine: Machine) -> None:
    unit = machine.units / "paceline.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/my/own\n")
    assert "--force" in paceline("install", status=1)
    assert machine.told() == []
    assert "--force" in paceline("uninstall", status=1)
    assert unit.read_text() == "[Service]\nExecStart=/my/own\n"
    machine.told()
    paceline("install", "--force")
    assert "Written by paceline service install" in unit.read_text()
    paceline("install")
    unit.write_text("[Service]\n")
    paceline("uninstall", "--force")
    assert not unit.exists()


@pytest.mark.parametrize("flags", [(), ("--socket",), ("--system", "--account", "me", "--clients", "localhost")])
def test_a_dry_run_tells_every_file_and_command_and_changes_nothing(machine: Machine, flags: tuple[str, ...]) -> None:
    before = machine.files()
    output = paceline("install", "--dry-run", *flags, "--", "--port", "9000")
    system = "--system" in flags
    systemctl = "systemctl" if system else "systemctl --user"
    folder = Path("/etc/systemd/system") if system else machine.units
    assert f"# file {folder / 'paceline.service'}" in output
    assert '"--port" "9000"' in output
    assert (f"# file {folder / 'paceline.socket'}" in output) == ("--socket" in flags)
    assert output.rstrip().endswith(f"{systemctl} enable paceline.{'socket' if '--socket' in flags else 'service'}")
    for verb in ("start", "status", "stop", "uninstall"):
        assert systemctl in paceline(verb, "--dry-run", *flags[:1] if system else ())
    assert machine.files() == before
    assert machine.told() == []
    assert not machine.units.exists()


def test_what_a_dry_run_tells_is_what_is_done(machine: Machine) -> None:
    told = paceline("install", "--dry-run")
    paceline("install")
    unit = machine.units / "paceline.service"
    assert told == "\n".join(
        [f"# folder {machine.folder / 'models'}", f"# file {unit}", unit.read_text(), *machine.told(), ""]
    )


def test_a_system_service_runs_as_an_account_in_a_folder_of_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--account" in paceline("install", "--system", status=1)
    assert "--system" in paceline("install", "--account", "me", status=1)
    told = paceline("install", "--dry-run", "--system", "--account", "me")
    assert f'ReadWritePaths="-{machine.folder / "models"}"' in told
    assert "IPAddressDeny" not in told
    monkeypatch.delenv("PACELINE_HOME")
    told = paceline("install", "--dry-run", "--system", "--account", "me", "--clients", "localhost")
    assert 'Environment="PACELINE_HOME=/var/lib/paceline"' in told
    assert "# folder" not in told, "systemd makes it"
    assert "\nUser=me\n" in told
    assert "\nIPAddressDeny=any\nIPAddressAllow=localhost\n" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--no-such-flag"], "no-such-flag"),
        (["--port", "70000"], "65535"),
        (["--api-key-file", "keys"], "absolute path"),
        (["a", "b"], "unexpected"),
    ],
)
def test_words_that_serve_would_refuse_are_refused_before_anything_is_written(
    machine: Machine, words: list[str], said: str
) -> None:
    result = CliRunner().invoke(app, ["service", "install", "--", *words])
    assert result.exit_code != 0
    assert said in result.output
    assert machine.files() == set()


def test_a_models_folder_is_no_relative_one(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(machine.folder)
    assert "absolute path" in paceline("install", "--", "home", status=1)
    paceline("install", "--", str(machine.folder / "home"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "models.lan"], "must be an address"),
        (["--port", "0"], "must be a port"),
        (["--uds", "/a.sock"], "without --uds"),
    ],
)
def test_what_systemd_cannot_listen_on_is_refused(machine: Machine, words: list[str], said: str) -> None:
    assert said in paceline("install", "--socket", "--", *words, status=1)


@pytest.mark.parametrize(
    ("host", "address"), [("localhost", "127.0.0.1:8321"), ("", "[::]:8321"), ("10.0.0.1", "10.0.0.1:8321")]
)
def test_systemd_listens_where_serve_would(machine: Machine, host: str, address: str) -> None:
    paceline("install", "--socket", "--", "--host", host)
    assert f"ListenStream={address}" in (machine.units / "paceline.socket").read_text().splitlines()


def test_without_systemctl_nothing_is_begun(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.bin / "systemctl").unlink()
    monkeypatch.setenv("PATH", str(machine.bin))
    for verb in ("install", "start"):
        assert "no systemctl on this machine" in paceline(verb, status=1)
    assert machine.files() == set()


def test_without_a_users_manager_that_is_said(machine: Machine) -> None:
    machine.answers(fails="--user")
    output = paceline("start", status=1)
    assert "systemctl --user start paceline.service has failed with status 3" in output
    assert "lingering" in output
    paceline("status")


def test_a_folder_that_may_not_be_written_is_told(machine: Machine) -> None:
    (machine.folder / "config").write_text("a file in the way")
    assert "cannot be" in paceline("install", status=1)
    assert machine.told() == []


def test_without_an_installed_command_there_is_nothing_to_install(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.setattr(sys, "executable", str(machine.folder / "python"))
    assert "is the package installed" in paceline("install", status=1)
    monkeypatch.setattr(sys, "executable", str(machine.bin / "python"))
    paceline("install")
    assert str(machine.command) in (machine.units / "paceline.service").read_text()


def test_the_installed_command_finds_its_templates_from_anywhere(machine: Machine) -> None:
    """In a process of its own, away from the checkout."""
    program = "import sys; sys.argv[0] = sys.argv.pop(1); from api.cli import main; main()"
    command = [sys.executable, "-c", program, str(machine.command), "service", "install", "--dry-run"]
    run = subprocess.run(command, cwd=machine.folder, env=os.environ, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert f'ExecStart="{machine.command}" serve' in run.stdout


# ---- launchd


@pytest.fixture
def mac(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(sys, "platform", "darwin")
    return machine


def test_an_agent_is_installed_started_asked_after_stopped_and_gone(mac: Machine) -> None:
    paceline("install", "--", "my model", "--port", "9000")
    assert mac.files() - {mac.record} == {mac.agent}
    agent = plistlib.loads(mac.agent.read_bytes())
    assert agent["ProgramArguments"] == [str(mac.command), "serve", "my model", "--port", "9000"]
    assert Path(agent["StandardErrorPath"]).parent.is_dir()
    domain = f"gui/{os.getuid()}"
    assert mac.told() == [f"launchctl enable {domain}/dev.paceline"]
    for verb, commands in {
        "start": [f"launchctl bootstrap {domain} {mac.agent}", f"launchctl kickstart {domain}/dev.paceline"],
        "status": [f"launchctl print {domain}/dev.paceline"],
        "stop": [f"launchctl bootout {domain}/dev.paceline"],
        "uninstall": [f"launchctl bootout {domain}/dev.paceline"],
    }.items():
        paceline(verb)
        assert mac.told() == commands
    assert mac.files() == set()


def test_an_agent_that_is_loaded_already_is_only_started(mac: Machine) -> None:
    mac.answers(fails="bootstrap")
    paceline("start")
    mac.answers(fails="kickstart")
    assert "has failed" in paceline("start", status=1)


def test_what_launchd_has_not_is_refused(mac: Machine) -> None:
    assert "systemd" in paceline("install", "--system", "--account", "me", status=1)
    assert "systemd" in paceline("install", "--socket", status=1)
    assert mac.files() == set()
