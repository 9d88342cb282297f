"""A drafter is trained on the real model by the command, and the real server drafts with it and says the same."""

import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.serving import PATIENCE, PROGRAM, Served, serving

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def drafter(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hardly trained: it drafts a lot of nonsense."""
    folder = tmp_path_factory.mktemp("distilled")
    words = [PROGRAM, "distill", smollm2, "--count", "8", "--answer", "8", "--epochs", "1", "--self-asked", "0"]
    words += ["--lanes", "8", "--drafted", "512", "--folder", folder / "run", "--out", folder / "drafter.safetensors"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=10 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "held out: acceptance by position" in done.stdout
    return folder / "drafter.safetensors"


def say(served: Served, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True} | fields
    response = httpx2.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


PROMPTS = ("The sea is", "Write a list of three colours:\n", "def add(a, b):\n")


def test_what_a_drafter_drafts_changes_no_answer(smollm2: Path, drafter: Path) -> None:
    asked = [(prompt, fields) for prompt in PROMPTS for fields in ({}, {"temperature": 1.0, "seed": 5, "top_p": 0.9})]
    with serving(smollm2, "--drafter", "none") as served:
        plain = [say(served, prompt, **fields) for prompt, fields in asked]
    with serving(smollm2, "--drafter", str(drafter), "--no-pace") as served:
        drafted = [say(served, prompt, **fields) for prompt, fields in asked]
    for one, other in zip(plain, drafted, strict=True):
        assert one["choices"][0]["text"] == other["choices"][0]["text"]
        assert "drafter" not in str(one["usage"])
    assert any("drafter" in str(each["usage"]) for each in drafted)


def test_a_damaged_drafter_is_refused_in_a_line(smollm2: Path, drafter: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.safetensors"
    content = bytearray(drafter.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    done = subprocess.run(
        [PROGRAM, "serve", smollm2, "--port", "0", "--drafter", damaged],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    assert "is damaged" in done.stderr
    assert "Traceback" not in done.stderr
