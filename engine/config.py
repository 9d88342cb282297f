"""What the engine is told at its start."""

from pathlib import Path

import msgspec

from backends.base import MOST_DRAFT_TOKENS


class PrefixConfig(msgspec.Struct, frozen=True):
    """How much of earlier texts is kept, and where."""

    ram_bytes: int = 2 << 30
    """What blocks may hold in memory; 0 keeps nothing."""
    ssd_bytes: int = 0
    """What files may take; 0 for none."""
    folder: Path | None = None
    """Where they lie; None for no files."""
    write_bytes_per_second: float = 100e6
    """How fast files are written at most; 0 for no limit."""


class EngineConfig(msgspec.Struct, frozen=True):
    """Settings of the engine; every one has a flag of `paceline serve`.

    Raises ValueError when `round_rows` could not give each lane its one row and a prefill one more.
    """

    max_lanes: int = 8
    """How many requests are served at once; more of them wait, first come, first served."""
    round_rows: int = 256
    """The most rows of one round: decode rows, drafts and prefill rows together."""
    draft_tokens: int = 8
    """The most tokens drafted for a lane in a round; 0 turns drafting off. How many pay is found out round by round."""
    paced: bool = True
    """Whether only drafts that pay are verified; else all that there are, for measurements."""
    itl_target: float = 0.25
    """How long a round may take while others decode, as far as prefill makes it long, in seconds; 0 for any time."""
    history_bytes: int = 64 << 20
    """How much memory the texts may take that later requests' drafts are made of; 0 for none."""
    prefix: PrefixConfig = PrefixConfig()
    fill_seconds: float = 1.0
    """How long a grammar may take for one round of one lane, before that lane is ended."""

    def __post_init__(self) -> None:
        if self.max_lanes < 1:
            raise ValueError("max_lanes must be at least 1")
        if self.round_rows <= self.max_lanes:
            raise ValueError("round_rows must be greater than max_lanes")
        if not 0 <= self.draft_tokens <= MOST_DRAFT_TOKENS:
            raise ValueError(f"draft_tokens must be from 0 to {MOST_DRAFT_TOKENS}")
        if self.itl_target < 0:
            raise ValueError("itl_target must not be negative")
        if self.history_bytes < 0:
            raise ValueError("history_bytes must not be negative")
        if self.fill_seconds <= 0:
            raise ValueError("fill_seconds must be positive")
