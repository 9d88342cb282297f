"""The renderer: strict about names, and no value changes the meaning of the file it goes into."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from api.units import TEMPLATES, RenderError, Template, fill

ROOT = Path(__file__).parents[2]


def template_of(tmp_path: Path, text: str) -> Template:
    path = tmp_path / "template"
    path.write_text(text)
    return Template(path, str.upper, lambda words: "|".join(words))


def test_placeholders_are_replaced_and_words_are_split_as_in_a_shell(tmp_path: Path) -> None:
    template = template_of(tmp_path, "a=@NAME@\nb=@ARGS@ @NAME@\n")
    assert fill(template, {"NAME": "x", "ARGS": "one 'two three'"}) == "a=X\nb=one|two three X\n"


def test_a_marked_line_is_kept_only_when_its_name_is_given(tmp_path: Path) -> None:
    template = template_of(tmp_path, "a\n#?USER user=@USER@\n#?USER sandbox=yes\n")
    assert fill(template, {}) == "a\n"
    assert fill(template, {"USER": "me"}) == "a\nuser=ME\nsandbox=yes\n"


def test_a_missing_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="needs a value for NAME"):
        fill(template_of(tmp_path, "@NAME@\n"), {})


def test_an_optional_line_wants_its_other_names_as_well(tmp_path: Path) -> None:
    template = template_of(tmp_path, "#?USER @USER@ @GROUP@\n")
    with pytest.raises(RenderError, match="needs a value for GROUP"):
        fill(template, {"USER": "me"})


def test_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="has no placeholder NAMES"):
        fill(template_of(tmp_path, "@NAME@\n"), {"NAME": "x", "NAMES": "y"})


@pytest.mark.parametrize("value", ["a\nExecStartPre=/bin/true", "a\rb", "a\0b"])
def test_a_control_character_is_an_error(tmp_path: Path, value: str) -> None:
    with pytest.raises(RenderError, match="control character"):
        fill(template_of(tmp_path, "@NAME@\n"), {"NAME": value})


def test_words_with_an_open_quote_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="ARGS"):
        fill(template_of(tmp_path, "@ARGS@\n"), {"ARGS": "it's"})


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_template_names_its_placeholders_in_its_header(name: str) -> None:
    text = TEMPLATES[name].path.read_text()
    header, *_ = re.split(r"^(?:\[Unit\]|<plist .*|global:)$", text, maxsplit=1, flags=re.MULTILINE)
    assert header != text
    explained = set(re.findall(r"(?<![@\w])[A-Z][A-Z_]+(?![@\w])", header))
    used = set(re.findall(r"@([A-Z_]+)@|^#\?([A-Z_]+) ", text, re.MULTILINE))
    assert used
    assert {first or second for first, second in used} <= explained


def run_render(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.render", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_line_prints_the_file() -> None:
    done = run_render("prometheus", "--set", "ADDRESS=127.0.0.1:8321")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == fill(TEMPLATES["prometheus"], {"ADDRESS": "127.0.0.1:8321"})


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["prometheus"], "needs a value for ADDRESS"),
        (["prometheus", "--set", "ADDRESS=a:1", "--set", "NAME=x"], "no placeholder NAME"),
        (["prometheus", "--set", "ADDRESS"], "wants NAME=VALUE"),
        (["prometheus", "--set", "ADDRESS=a:1", "--set", "ADDRESS=b:1"], "ADDRESS is set twice"),
        (["grafana"], "no template 'grafana'"),
    ],
)
def test_the_command_line_refuses_with_exit_code_2(words: list[str], complaint: str) -> None:
    done = run_render(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
