"""What is served, by flags; and clients that go on for a while."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

from deploy.bench.serving import Subject, keep_asking

STUB = Path(__file__).with_name("stub_paceline.py")


def test_a_model_or_the_pseudo_model_is_served(tmp_path: Path) -> None:
    assert Subject.told(tmp_path, "mlx", tmp_path, ["--x"]) == Subject(tmp_path, tmp_path, ("--x",))
    assert Subject.told(None, "fake", tmp_path, None) == Subject(None, tmp_path)
    with pytest.raises(ValueError, match="not both"):
        Subject.told(tmp_path, "fake", tmp_path, None)
    with pytest.raises(ValueError, match="want a folder"):
        Subject.told(None, "mlx", tmp_path, None)


def test_prompts_are_of_tokens_that_the_model_has(tmp_path: Path) -> None:
    real, fake = Subject(tmp_path, tmp_path), Subject(None, tmp_path)
    assert all(1_000 <= token <= 40_000 for token in real.tokens(500, 1))
    assert all(32 <= token < 127 for token in fake.tokens(500, 1))
    for subject in (real, fake):
        assert len(subject.tokens(500, 1)) == 500
        assert subject.tokens(500, 1) == subject.tokens(500, 1)
        assert len({subject.tokens(64, seed) for seed in range(20)}) == 20


def test_a_daemon_is_told_its_flags_and_asked_by_its_name(tmp_path: Path) -> None:
    program = tmp_path / "paceline"
    program.write_text(f"#!{sys.executable}\n{STUB.read_text()}")
    program.chmod(0o755)
    with Subject(None, program, ("--last",)).daemon("--first") as server:
        told = Path(f"/proc/{server.pid}/cmdline")
        words = told.read_text().split("\0") if told.exists() else []
    assert server.model == "bench"
    if words:
        assert words[words.index("--backend") : words.index("--last") + 1] == [
            *("--backend", "fake", "--served-name", "bench", "--first", "--last")
        ]


def test_every_client_asks_on_until_the_time_is_up_and_what_is_under_way_ends() -> None:
    asked: list[tuple[int, int]] = []
    under_way = most = 0

    async def ask(client: int, turn: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        asked.append((client, turn))
        await asyncio.sleep(0.01)
        under_way -= 1
        return client

    async def run() -> list[int]:
        return await keep_asking(3, time.perf_counter() + 0.1, ask)

    ended = asyncio.run(run())
    assert (most, under_way, len(ended)) == (3, 0, len(asked))
    assert len(set(asked)) == len(asked) > 3
    for client in range(3):
        turns = [turn for each, turn in asked if each == client]
        assert turns == list(range(len(turns)))


def test_nobody_asks_when_the_time_is_up_already() -> None:
    async def ask(_client: int, _turn: int) -> None:
        raise AssertionError

    assert asyncio.run(keep_asking(3, time.perf_counter() - 1, ask)) == []
