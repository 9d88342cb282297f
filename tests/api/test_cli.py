"""The command line: where models live, what is listed, what is refused, what the doctor says."""

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from api import doctor
from api.cli import app, drafter_of, home_folder
from api.doctor import (
    Finding,
    look_at_drafter,
    look_at_grammar,
    look_at_model,
    look_at_port,
    look_at_socket,
)
from api.launch import Launch, UsageError, announce, make_backend, refuse_contradictions, settings_of
from api.progress import display_on
from api.server import Outcome
from api.service import ServedModel
from api.sockets import Listeners
from api.text import load_tokenizer
from backends.base import Budget, KVQuantization
from backends.fake import FakeBackend
from backends.mlx.runtime import MemoryLimit, describe_device
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


# ---- a draft model


def test_a_limit_for_each_key_needs_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\nmellon\n")
    with pytest.raises(UsageError, match="--max-requests-per-key"):
        settings_of(launch(max_requests_per_key=2))
    assert settings_of(launch(max_requests_per_key=2, api_key_file=keys)).max_requests_per_key == 2


def test_the_doors_limits_are_those_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Launch] = []
    monkeypatch.setattr("api.launch.serve", lambda launch, _console: told.append(launch) or Outcome())
    flags = {
        "--max-lanes": "3",
        "--max-queue": "5",
        "--request-seconds": "7.5",
        "--write-seconds": "8.5",
        "--head-seconds": "9.5",
        "--max-connections": "11",
    }
    assert run("serve", "--backend", "fake", *(word for pair in flags.items() for word in pair)).exit_code == 0
    settings = settings_of(told[0])
    assert (settings.max_open, settings.max_connections) == (8, 11)
    assert (settings.request_seconds, settings.write_seconds, settings.head_seconds) == (7.5, 8.5, 9.5)


def test_memory_is_a_size_or_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Launch] = []
    monkeypatch.setattr("api.launch.serve", lambda launch, _console: told.append(launch) or Outcome())
    for flags in ((), ("--memory", "6GB"), ("--memory", "62.5%"), ("--memory", "1 KiB")):
        assert run("serve", "--backend", "fake", *flags).exit_code == 0
    shares = [MemoryLimit(), MemoryLimit(6_000_000_000), MemoryLimit(share=0.625), MemoryLimit(1024)]
    assert [launch.memory for launch in told] == shares
    for wrong in ("0%", "101%", "all", "-1", "%"):
        assert run("serve", "--backend", "fake", f"--memory={wrong}").exit_code == 2
    assert len(told) == 4


def test_the_memory_limit_and_the_largest_round_reach_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.mlx import build
    from backends.mlx.warmup import LargestRound

    loaded = []
    monkeypatch.setattr(build, "load_backend", lambda *_, **named: loaded.append((named["memory"], named["largest"])))
    console, limit = Console(file=io.StringIO()), MemoryLimit(10_000)
    engine = EngineConfig(max_lanes=3, round_rows=40, draft_tokens=5)
    with closing(display_on(console)) as display:
        make_backend(launch(backend="mlx", model="big", memory=limit, engine=engine), display, console)()
        assert loaded == [(limit, LargestRound(rows=40, lanes=3, drafts=5))]
        budgets = [make_backend(launch(memory=told), display, console)().info.budget for told in (limit, MemoryLimit())]
    assert budgets == [Budget(10_000, 0, 0), None]


def test_a_draft_model_that_could_not_draft_is_refused(tmp_path: Path) -> None:
    mlx, fake = launch(backend="mlx", draft_model="small"), launch(draft_model="small")
    refuse_contradictions(mlx)
    refuse_contradictions(launch())
    with pytest.raises(UsageError, match=r"--backend fake .* --draft-model"):
        refuse_contradictions(fake)
    with pytest.raises(UsageError, match=r"--draft-tokens 0 .* --draft-model"):
        refuse_contradictions(launch(backend="mlx", draft_model="small", engine=EngineConfig(draft_tokens=0)))
    unbindable = str(tmp_path / "absent" / "server.sock")
    result = run("serve", "--backend", "fake", "--port", "0", "--uds", unbindable, "--draft-model", "small")
    assert result.exit_code == 1, "before anything is bound"
    assert "--draft-model" in result.output


@pytest.mark.parametrize("drafter", [Path("d.safetensors"), "mtp"])
def test_a_drafter_that_could_not_draft_is_refused(drafter: object) -> None:
    refuse_contradictions(launch(backend="mlx", drafter=drafter))
    for fields, says in (
        ({"backend": "fake"}, "without --drafter"),
        ({"backend": "mlx", "engine": EngineConfig(draft_tokens=0)}, "without --drafter"),
        ({"backend": "mlx", "draft_model": "small"}, "name one of them"),
    ):
        with pytest.raises(UsageError, match=says):
            refuse_contradictions(launch(drafter=drafter, **fields))
    for nothing in ("auto", None):
        refuse_contradictions(launch(drafter=nothing, engine=EngineConfig(draft_tokens=0)))


def test_drafters_are_named_by_a_file_or_by_how_they_are_found() -> None:
    assert [drafter_of(text) for text in ("auto", "mtp", "none", "a/b")] == ["auto", "mtp", None, Path("a/b")]


def test_no_drafter_is_looked_for_where_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.mlx import build

    sought: list[object] = []
    monkeypatch.setattr(build, "load_backend", lambda *_, **named: sought.append(named["drafter"]))
    console = Console(file=io.StringIO())
    with closing(display_on(console)) as display:
        for drafts in (8, 0):
            asked = launch(backend="mlx", model="big", engine=EngineConfig(draft_tokens=drafts))
            make_backend(asked, display, console)()
    assert sought == ["auto", None]


def test_the_draft_model_is_loaded_beside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.mlx import build, pull

    pulled, loaded = [], []
    monkeypatch.setattr(pull, "pull", lambda name, *_: pulled.append(name))
    monkeypatch.setattr(build, "load_backend", lambda *told, **named: loaded.append((told[0], named["draft_model"])))
    console = Console(file=io.StringIO())
    with closing(display_on(console)) as display:
        for draft_model in ("smollm2-135m", "folder", None):
            make_backend(launch(backend="mlx", model="big", draft_model=draft_model), display, console)()
    assert pulled == ["smollm2-135m"], "of the two, what is in the catalogue"
    assert loaded == [("big", "smollm2-135m"), ("big", "folder"), ("big", None)]


def test_how_keys_and_values_are_kept_reaches_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.mlx import build

    loaded = []
    monkeypatch.setattr(build, "load_backend", lambda *_, **named: loaded.append(named["quantization"]))
    console, how = Console(file=io.StringIO()), KVQuantization(4, 32, 100)
    with closing(display_on(console)) as display:
        make_backend(launch(backend="mlx", model="big", quantization=how), display, console)()
    assert loaded == [how]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--backend", "fake", "--kv-bits", "4"), "--kv-bits"),
        (("--kv-bits", "3"), "must be 4 or 8"),
        (("--kv-bits", "4", "--kv-group-size", "48"), "must be 32, 64 or 128"),
    ],
)
def test_keys_and_values_that_cannot_be_kept_so_are_refused_before_anything_is_bound(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    unbindable = str(tmp_path / "absent" / "server.sock")
    result = run("serve", "--port", "0", "--uds", unbindable, *words)
    assert result.exit_code == 1
    assert said in result.output


def test_the_banner_names_what_drafts() -> None:
    for drafter, line in (("small", "drafter  small"), (None, None)):
        info = msgspec.structs.replace(FakeBackend().info, drafter=drafter)
        model = ServedModel(info, load_tokenizer(info), None)
        written = io.StringIO()
        with Listeners("127.0.0.1", 0, None) as listeners:
            announce(Console(file=written), launch(), listeners, model)
        assert [each for each in written.getvalue().splitlines() if "drafter" in each] == ([line] if line else [])


def test_what_is_found_of_a_draft_model(home: Path, tmp_path: Path) -> None:
    model = install(home, "tiny")
    drafting = install(home, "tinier")
    assert not look_at_drafter("tiny", str(model), home).trouble, "itself, whatever its tokenizer is"
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    finding = look_at_drafter("tinier", "tiny", home)
    assert (finding.trouble, "no tokenizer.json" in finding.text) == (True, True)
    (drafting / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1, "b": 0}}}')
    assert "another vocabulary" in look_at_drafter("tinier", str(model), home).text
    (drafting / "tokenizer.json").write_text((model / "tokenizer.json").read_text())
    finding = look_at_drafter("tinier", "tiny", home)
    assert (finding.what, finding.trouble, str(drafting) in finding.text) == ("drafter", False, True)
    assert not look_at_drafter("owner/repo", "tiny", home).trouble
    assert look_at_drafter("nonsense", "tiny", home).trouble
    assert look_at_drafter(str(tmp_path), "tiny", home).trouble


def test_the_doctor_looks_at_the_draft_model_where_there_is_one(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    install(home, "tiny")
    looked: list[dict[str, object]] = []
    with monkeypatch.context() as patched:
        patched.setattr(doctor, "examine", lambda **told: looked.append(told) or ())
        run("doctor", "tiny", "--draft-model", "nonsense")
    assert (looked[0]["model"], looked[0]["draft_model"]) == ("tiny", "nonsense")
    findings = doctor.examine(
        model="tiny", home=home, host="127.0.0.1", port=0, uds=None, blas="auto", draft_model="nonsense"
    )
    assert [(each.what, each.trouble) for each in findings if each.what in ("model", "drafter")] == [
        ("model", False),
        ("drafter", True),
    ]


def test_both_models_must_fit_in_memory(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    install(home, "tiny")
    install(home, "tinier")
    machine = msgspec.structs.replace(describe_device(), memory_bytes=5_000_000)
    monkeypatch.setattr(doctor, "describe_device", lambda: machine)
    for draft_model, trouble in ((None, False), ("tiny", False), ("tinier", True)):
        findings = doctor.examine(
            model="tiny", home=home, host="127.0.0.1", port=0, uds=None, blas="auto", draft_model=draft_model
        )
        assert [finding.trouble for finding in findings if finding.what == "memory"] == [trouble]


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
