"""Settings that could not work are refused at the door."""

import pytest

from engine.config import EngineConfig


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_lanes": 0}, "max_lanes"),
        ({"max_lanes": 8, "round_rows": 8}, "round_rows"),
        ({"draft_tokens": -1}, "draft_tokens"),
        ({"draft_tokens": 32}, "draft_tokens"),
        ({"itl_target": -1}, "itl_target"),
        ({"history_bytes": -1}, "history_bytes"),
        ({"fill_seconds": 0}, "fill_seconds"),
    ],
)
def test_a_setting_that_cannot_work_is_named(settings: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} must"):
        EngineConfig(**settings)


def test_the_smallest_settings_that_work() -> None:
    config = EngineConfig(max_lanes=1, round_rows=2, draft_tokens=0)
    assert (config.max_lanes, config.round_rows, config.draft_tokens) == (1, 2, 0)
