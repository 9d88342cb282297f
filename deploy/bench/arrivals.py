"""When requests come and how long they are: recorded traffic, stretched in time; or drawn, where there is no record.

The records are CSV files with the columns seconds, prompt_tokens and output_tokens. Real traffic comes in bursts, which
stretching keeps.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

_DATA = Path(__file__).parents[3] / "shared" / "data"
RECORDS = (_DATA / "arrivals_conv.csv", _DATA / "arrivals_code.csv")


@dataclass(frozen=True, slots=True)
class Due:
    """A request that is due `at` so many seconds after the first, and its lengths in tokens."""

    at: float
    prompt: int
    output: int

    def clipped(self, prompt: int, output: int) -> "Due":
        """No longer than this."""
        return replace(self, prompt=min(self.prompt, prompt), output=min(self.output, output))


def read_arrivals(path: Path) -> tuple[Due, ...]:
    """A record's requests, in order. Raises ValueError for a file that is none."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        dues = [Due(float(row["seconds"]), int(row["prompt_tokens"]), int(row["output_tokens"])) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is no record of arrivals: {error!r}") from error
    if not dues:
        raise ValueError(f"{path.name} holds no arrivals")
    return tuple(sorted(dues, key=lambda due: due.at))


def drawn_arrivals(count: int, seed: int) -> tuple[Due, ...]:
    """Independent ones, one a second on average, whose lengths spread as those of chats do: logarithmically."""
    draw = np.random.default_rng(seed)
    times = np.cumsum(draw.exponential(1.0, count))
    prompts, outputs = draw.lognormal(6.0, 1.1, count), draw.lognormal(4.0, 1.2, count)
    return tuple(
        Due(float(at), 1 + int(prompt), 1 + int(output))
        for at, prompt, output in zip(times, prompts, outputs, strict=True)
    )


def stretched(dues: Sequence[Due], count: int, seconds: float) -> list[Due]:
    """The first `count`, round and round if there are fewer, spread so that the last one is due after `seconds`."""
    begin = dues[0].at
    a_round = (dues[-1].at - begin) * (1 + 1 / len(dues))
    taken = [
        replace(dues[place % len(dues)], at=dues[place % len(dues)].at - begin + place // len(dues) * a_round)
        for place in range(count)
    ]
    span = taken[-1].at if taken else 0.0
    return [replace(due, at=due.at * seconds / span if span else 0.0) for due in taken]


def traffic(count: int, seconds: float, seed: int, records: Sequence[Path] = RECORDS) -> list[Due]:
    """So many requests in so long: as many of each record that there is, in the order of their times."""
    sources = [read_arrivals(path) for path in records if path.exists()] or [drawn_arrivals(max(1, count), seed)]
    shares = [count // len(sources) + (place < count % len(sources)) for place in range(len(sources))]
    mixed = [due for source, share in zip(sources, shares, strict=True) for due in stretched(source, share, seconds)]
    return sorted(mixed, key=lambda due: due.at)
