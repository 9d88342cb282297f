"""What changes of a model's files changes its fingerprint, and nothing else does."""

import os
from pathlib import Path

import pytest

from backends.mlx.fingerprint import fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    header = b'{"weight": 1}'
    data = bytes(range(256)) * 4000
    for number in (1, 2):
        file = tmp_path / f"model-{number}.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + data)
        os.utime(file, ns=(10**18, 10**18))
    return tmp_path


def test_it_stays_while_nothing_changes(folder: Path) -> None:
    before = fingerprint(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("words")
    assert fingerprint(folder) == before


@pytest.mark.parametrize("place", [3, 15, 30, 500_000, -1])
def test_other_weights_are_another_model_whatever_their_times_say(folder: Path, place: int) -> None:
    """Wherever samples reach, that is at least one byte in sixteen kilobytes."""
    before = fingerprint(folder)
    file = folder / "model-2.safetensors"
    data = bytearray(file.read_bytes())
    size = len(data) // 64
    data[place] ^= 1
    for sample in range(64):
        data[sample * size] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(10**18, 10**18))
    assert fingerprint(folder) != before


def test_a_file_that_was_written_again_is_another_one(folder: Path) -> None:
    before = fingerprint(folder)
    os.utime(folder / "model-1.safetensors", ns=(10**18, 10**18 + 1))
    assert fingerprint(folder) != before


def test_another_configuration_and_fewer_files(folder: Path) -> None:
    before = fingerprint(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "rope_theta": 1}')
    changed = fingerprint(folder)
    (folder / "model-2.safetensors").unlink()
    assert len({before, changed, fingerprint(folder)}) == 3
