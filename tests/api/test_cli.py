"""The command line: where models live, what is listed, what is refused, what the doctor says."""

import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from api import doctor
from api.cli import app, home_folder
from api.doctor import Finding, look_at_grammar, look_at_model, look_at_port, look_at_socket
from api.launch import Launch, UsageError, settings_of
from api.sockets import Listeners
from engine.config import EngineConfig
from tests.api.servers import RunningServer

NOWHERE = "0.0.0.0"  # noqa: S104


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty PACELINE_HOME, and logging as it was."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    logging.getLogger("uvicorn").setLevel(logging.NOTSET)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def install(home: Path, name: str) -> Path:
    """As much of a model as listing looks at."""
    folder = home / "models" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    (folder / "model.safetensors").write_bytes(b"x" * 2_000_000)
    return folder


def launch(**fields: object) -> Launch:
    told = {
        "model": "m",
        "home": Path("home"),
        "backend": "fake",
        "dtype": "auto",
        "blas": "auto",
        "host": "127.0.0.1",
        "port": 0,
        "uds": None,
        "api_key_file": None,
        "allowed_hosts": (),
        "served_name": None,
        "max_body_bytes": 1,
        "drain_seconds": 1.0,
        "engine": EngineConfig(),
    }
    return Launch(**{**told, **fields})  # type: ignore[arg-type]


def test_the_home_is_what_the_environment_says_else_the_platforms_cache(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert home_folder() == home
    monkeypatch.delenv("PACELINE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert home_folder() == Path("/cache/paceline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert home_folder() == Path.home() / ".cache" / "paceline"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert home_folder() == Path.home() / "Library" / "Caches" / "paceline"


def test_models_ls_lists_names_and_folders(home: Path) -> None:
    assert "no models" in run("models", "ls").output
    folder = install(home, "tiny")
    listed = run("models", "ls").output
    assert "tiny" in listed
    assert str(folder) in listed
    (told,) = json.loads(run("models", "ls", "--json").output)
    assert (told["name"], told["folder"]) == ("tiny", str(folder))
    assert told["bytes"] > 2_000_000


def test_models_ls_json_of_nothing_is_an_empty_list() -> None:
    assert json.loads(run("models", "ls", "--json").output) == []


def test_pulling_what_is_not_in_the_catalogue_fails_with_the_reason() -> None:
    result = run("models", "pull", "no-such-model")
    assert result.exit_code == 1
    assert "no-such-model" in result.output


def test_a_bind_that_others_can_reach_needs_a_key(tmp_path: Path) -> None:
    for host in (NOWHERE, "::", "", "192.168.1.5", "models.lan"):
        with pytest.raises(UsageError, match="--api-key-file"):
            settings_of(launch(host=host))
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    settings = settings_of(launch(host="models.lan", api_key_file=keys, allowed_hosts=("other",)))
    assert settings.api_keys == ("sesame",)
    assert settings.allowed_hosts == {"models.lan", "other"}
    assert not settings.any_address
    assert settings_of(launch(host=NOWHERE, api_key_file=keys)).any_address


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2", "LOCALHOST"])
def test_the_loopback_needs_none(host: str) -> None:
    assert settings_of(launch(host=host)).api_keys == ()


# ---- doctor


def test_the_doctor_exits_with_trouble_if_there_is_any(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding("port", "fine"), Finding("blas", "slow", trouble=True)]
    monkeypatch.setattr(doctor, "examine", lambda **_: findings)
    result = run("doctor")
    assert (result.exit_code, "slow" in result.output) == (1, True)
    monkeypatch.setattr(doctor, "examine", lambda **_: findings[:1])
    assert run("doctor").exit_code == 0


def test_one_look_that_fails_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(doctor, "look_at_device", lambda: 1 // 0)
    findings = doctor.examine(model="x", home=home, host="127.0.0.1", port=0, uds=None, blas="auto")
    by_name = {finding.what: finding for finding in findings}
    assert list(by_name) == ["blas", "device", "memory", "model", "grammar", "port"]
    assert by_name["device"].trouble
    assert not by_name["port"].trouble


def test_what_is_found_of_a_model(home: Path, tmp_path: Path) -> None:
    assert not look_at_model("smollm2-135m", home).trouble
    assert "pulls it" in look_at_model("smollm2-135m", home).text
    assert look_at_model("nonsense", home).trouble
    assert not look_at_model("owner/repo", home).trouble
    assert look_at_model(str(tmp_path), home).trouble
    folder = install(home, "tiny")
    assert not look_at_model(str(folder), home).trouble
    assert str(folder) in look_at_model("tiny", home).text


def test_the_grammar_engine_is_found_with_its_release(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    finding = look_at_grammar()
    assert not finding.trouble
    assert re.fullmatch(r"xgrammar \d+\.\d+\.\d+", finding.text)
    monkeypatch.setitem(sys.modules, "backends.grammar.xgrammar_core", None)
    findings = doctor.examine(model="x", home=home, host="127.0.0.1", port=0, uds=None, blas="auto")
    assert next(finding for finding in findings if finding.what == "grammar").trouble


def test_what_is_found_at_a_port(server: RunningServer) -> None:
    assert "Paceline" in look_at_port("127.0.0.1", server.port).text
    assert not look_at_port("127.0.0.1", server.port).trouble
    with Listeners("127.0.0.1", 0, None) as listeners:
        assert look_at_port("127.0.0.1", 0).text.endswith("free")
        listeners.sockets[0].listen()
        listeners.sockets[0].close()


def test_a_port_that_another_program_has_is_trouble(tmp_path: Path) -> None:
    import http.server
    import threading

    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        serving = threading.Thread(target=other.handle_request)
        serving.start()
        finding = look_at_port("127.0.0.1", other.server_port)
        serving.join()
    assert finding.trouble
    assert str(other.server_port) in finding.text


def test_what_is_found_at_a_socket(server: RunningServer, tmp_path: Path) -> None:
    assert server.uds is not None
    assert "listens" in look_at_socket(server.uds).text
    assert "free" in look_at_socket(tmp_path / "new.sock").text
    assert look_at_socket(tmp_path / "absent" / "new.sock").trouble
    (tmp_path / "file").touch()
    assert look_at_socket(tmp_path / "file").trouble
