"""Targets and assistants, made once a file."""

from pathlib import Path

import pytest

from tests.backends.mlx.assistant.targets import CONFIGS, Targets, write_assistant


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("targets"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("assistants")
    return {name: write_assistant(root / name, config) for name, config in CONFIGS.items()}
