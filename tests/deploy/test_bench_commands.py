"""The subcommands from end to end, with a stand-in for the daemon whose speed is known."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deploy.bench.__main__ import SUBCOMMANDS, app
from deploy.bench.servers import Command, free_port, running

STUB = Path(__file__).with_name("stub_paceline.py")


def bench(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "paceline"
    path.write_text(f"#!{sys.executable}\n{STUB.read_text()}")
    path.chmod(0o755)
    return path


def drafting(program: Path, tmp_path: Path, *words: object) -> tuple[int, dict[str, Any]]:
    done = bench("drafting", tmp_path, "--paceline", program, "--pairs", 2, "--max-tokens", 40, "--json", *words)
    facts = json.loads(done.stdout)
    assert isinstance(facts, dict)
    return done.exit_code, facts


def test_every_subcommand_explains_itself() -> None:
    for name, _ in SUBCOMMANDS:
        done = bench(name, "--help")
        assert done.exit_code == 0
        assert name in ("all", "record", "picture") or "--json" in done.stdout


def test_drafting_sees_that_drafts_pay(program: Path, tmp_path: Path) -> None:
    exit_code, facts = drafting(program, tmp_path, "--only", "copying", "--clients", 1, "--clients", 4)
    assert exit_code == 0
    assert [(bound["clients"], bound["bound"]) for bound in facts["bounds"]] == [(1, 1.8), (4, 1.8)]
    assert all(1.8 < bound["measured"]["median"] < 8 for bound in facts["bounds"])
    assert facts["agreement"] == {"requests": 10, "failed": 0, "other_count": 0, "other_text": 0, "errors": []}
    assert [side["name"] for side in facts["sides"]] == ["copying drafting", "copying no drafts"] * 2
    assert [side["summary"]["tokens"] for side in facts["sides"]] == [80, 80, 320, 320]


def test_a_scenario_may_have_two_claims_and_all_are_played_on_the_same_servers(program: Path, tmp_path: Path) -> None:
    _, facts = drafting(program, tmp_path, "--clients", 8, "--pairs", 1)
    claims = [(bound["claim"].partition(":")[0], bound["bound"]) for bound in facts["bounds"]]
    assert claims == [
        ("ordinary", 0.98),
        ("copying", 1.5),
        ("editing with a prediction", 1.5),
        ("half copying, half ordinary", 1.2),
        ("half copying, half ordinary", 0.95),
    ]
    assert facts["agreement"]["requests"] == 4 * 8
    assert len(facts["sides"]) == 4 * 2


def test_agents_take_several_turns(program: Path, tmp_path: Path) -> None:
    _, facts = drafting(program, tmp_path, "--only", "agents", "--pairs", 1)
    assert [(bound["clients"], bound["bound"]) for bound in facts["bounds"]] == [(4, 1.2)]
    assert facts["agreement"]["requests"] == 16


def test_drafting_does_not_accept_another_text(program: Path, tmp_path: Path) -> None:
    exit_code, facts = drafting(program, tmp_path, "--only", "copying", "--clients", 1, "--arg", "--lie")
    assert exit_code == 1
    assert facts["agreement"]["other_text"] == 2


def test_drafting_does_not_accept_a_ratio_below_its_bound(program: Path, tmp_path: Path) -> None:
    """Neither side pauses for less, so neither is faster."""
    exit_code, facts = drafting(without_pauses(program), tmp_path, "--only", "copying", "--clients", 1)
    assert exit_code == 1
    assert facts["bounds"][0]["measured"]["median"] < 1.8
    assert facts["agreement"]["other_text"] == 0


@pytest.mark.parametrize("words", [("--only", "copy"), ("--only", "agents", "--clients", "3")])
def test_drafting_plays_no_other_scenarios(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = bench("drafting", tmp_path, *words)
    assert done.exit_code == 2
    assert "no scenario" in done.stderr


def without_pauses(program: Path) -> Path:
    program.write_text(program.read_text().replace("PAUSE_S = 0.001 if DRAFTS else 0.004", "PAUSE_S = 0.003"))
    return program


def test_a_server_that_does_not_start_ends_the_bench_with_exit_code_2(program: Path, tmp_path: Path) -> None:
    done = bench("drafting", tmp_path, "--paceline", program, "--arg", "--broken")
    assert done.exit_code == 2
    assert "cannot load the model" in done.stderr


def test_fake_reports_processor_time_a_token(program: Path) -> None:
    words = ("--streams", 4, "--max-tokens", 50, "--repeats", 2, "--json")
    done = bench("fake", "--paceline", program, *words)
    facts = json.loads(done.stdout)
    assert facts["tokens_per_event"]["median"] == 1.0
    assert (facts["summary"]["tokens"], facts["summary"]["errors"]) == (400, 0)
    assert 0 <= facts["bound"]["measured"]["median"] < 5000
    ceilings = {"bound": 60, "engine": 1}
    within = all(facts[name]["measured"]["median"] <= ceiling for name, ceiling in ceilings.items())
    assert done.exit_code == (0 if within else 1)


def test_load_drives_a_server_that_is_there() -> None:
    port = free_port()
    with running(
        Command("stub", (sys.executable, str(STUB), "serve", "--port", str(port)), port), ready_s=20
    ) as server:
        words = ("--clients", 2, "--requests", 5, "--max-tokens", 6)
        done = bench("load", "--url", server.url, *words, "--json")
        facts = json.loads(done.stdout)
        assert (done.exit_code, facts["summary"]["tokens"], facts["summary"]["errors"]) == (0, 30, 0)
        assert len(facts["records"]) == 5
        assert "tokens/s" in bench("load", "--url", server.url, *words).stdout


@pytest.mark.parametrize(
    ("url", "complaint"),
    [("localhost", "want http"), (f"http://127.0.0.1:{free_port()}", "cannot list the models")],
    ids=["no url", "nobody there"],
)
def test_load_refuses_what_it_cannot_drive(url: str, complaint: str) -> None:
    done = bench("load", "--url", url)
    assert done.exit_code == 2
    assert complaint in done.stderr
