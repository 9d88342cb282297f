"""From records to numbers to text: percentiles of one run, ratios over interleaved pairs, tables, JSON.

Pure apart from `show`, which prints. A ratio is the median over pairs of runs, with the smallest and the largest beside
it; a bound holds when the median reaches it.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from deploy.bench.client import Record, Run


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a list of seconds; None where the list was empty."""

    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One or more runs in numbers. Rates in tokens a second, of requests without error; times in seconds.

    `tokens_per_s` counts from the first request's start to the last one's end. `decode_per_s` counts what came after
    each request's first event, from the earliest of those events to the end of the last token of all.
    """

    clients: int
    requests: int
    errors: int
    tokens: int
    tokens_per_s: float
    decode_per_s: float
    ttft: Percentiles
    gaps: Percentiles


@dataclass(frozen=True, slots=True)
class Spread:
    """What several repeats gave."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}..{self.high:.3f})"


@dataclass(frozen=True, slots=True)
class Bound:
    """A claim and what was measured for it. `at_most` turns the bound into an upper one."""

    claim: str
    clients: int
    measured: Spread
    bound: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """Whether the median lies on the right side of the bound."""
        return self.measured.median <= self.bound if self.at_most else self.measured.median >= self.bound


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` (0 to 1) of `values` lie, interpolated between neighbours; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def percentiles(values: Sequence[float]) -> Percentiles:
    """The usual three."""
    return Percentiles(percentile(values, 0.5), percentile(values, 0.9), percentile(values, 0.99))


def summarise(*runs: Run) -> Summary:
    """The numbers of one run; or of several alike, their rates by median and their times pooled."""
    records = [record for run in runs for record in run.records]
    good_of_runs = [[record for record in run.records if record.error is None] for run in runs]
    good = [record for of_run in good_of_runs for record in of_run]
    return Summary(
        clients=runs[0].clients,
        requests=len(records),
        errors=len(records) - len(good),
        tokens=sum(record.tokens for record in good),
        tokens_per_s=statistics.median(_tokens_per_s(of_run) for of_run in good_of_runs),
        decode_per_s=statistics.median(_decode_per_s(of_run) for of_run in good_of_runs),
        ttft=percentiles([record.ttft_s for record in good if record.ttft_s is not None]),
        gaps=percentiles([gap for record in good for gap in record.gaps_s]),
    )


def _tokens_per_s(records: Sequence[Record]) -> float:
    if not records:
        return 0.0
    seconds = max(record.ended_at for record in records) - min(record.started_at for record in records)
    return sum(record.tokens for record in records) / seconds if seconds > 0 else 0.0


def _decode_per_s(records: Sequence[Record]) -> float:
    spans = [
        (record.first_at, record.last_at)
        for record in records
        if record.first_at is not None and record.last_at is not None
    ]
    if not spans:
        return 0.0
    seconds = max(last for _, last in spans) - min(first for first, _ in spans)
    return sum(record.decoded for record in records) / seconds if seconds > 0 else 0.0


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Of pairs that ran one right after the other, so that what slows the machine slows both sides of a pair.

    A side that produced nothing is an error, not a ratio: raises ValueError.
    """
    if not ours or any(rate <= 0 for rate in (*ours, *theirs)):
        raise ValueError("a run produced no tokens, so there is nothing to compare")
    return spread([our / their for our, their in zip(ours, theirs, strict=True)])


def summary_table(title: str, rows: Sequence[tuple[str, Summary]]) -> Table:
    """One line a run or side. Milliseconds, and tokens a second."""
    columns = ("", "clients", "requests", "errors", "tokens", "tokens/s", "decode/s", *_TIME_COLUMNS)
    table = new_table(title, columns)
    for name, summary in rows:
        table.add_row(
            name,
            *(str(count) for count in (summary.clients, summary.requests, summary.errors, summary.tokens)),
            f"{summary.tokens_per_s:.1f}",
            f"{summary.decode_per_s:.1f}",
            *_milliseconds(summary.ttft),
            *_milliseconds(summary.gaps),
        )
    return table


_TIME_COLUMNS = ("TTFT p50", "p90", "p99", "ITL p50", "p90", "p99")


def _milliseconds(times: Percentiles) -> tuple[str, ...]:
    return tuple("-" if time is None else f"{time * 1e3:.1f}" for time in (times.p50, times.p90, times.p99))


def bound_table(title: str, bounds: Sequence[Bound]) -> Table:
    """One line a claim, with whether it holds."""
    table = new_table(title, ("claim", "clients", "median (min..max)", "bound", "holds"))
    for bound in bounds:
        sign = "<=" if bound.at_most else ">="
        verdict = "yes" if bound.holds else "NO"
        table.add_row(bound.claim, str(bound.clients), str(bound.measured), f"{sign} {bound.bound:g}", verdict)
    return table


def new_table(title: str, columns: Sequence[str]) -> Table:
    """Without rows; all columns but the first are flush right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def first_errors(records: Sequence[Record], count: int = 3) -> list[str]:
    """What went wrong, for people."""
    wrong = [f"{record.prompt}: {record.error}" for record in records if record.error is not None]
    return wrong[:count]


def show(tables: Sequence[Table], notes: Sequence[str], facts: Any, *, as_json: bool) -> None:
    """Print the tables and notes for people, or `facts` (frozen records, lists, dicts) as JSON for programs."""
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode() + "\n")
        return
    console = Console(width=140, highlight=False, markup=False)
    for table in tables:
        console.print(table)
    for note in notes:
        console.print(note)
