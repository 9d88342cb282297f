"""Numbers out of records: percentiles, rates, ratios over pairs, verdicts."""

import json
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.bench.client import Record, Run
from deploy.bench.report import (
    Bound,
    Spread,
    bound_table,
    first_errors,
    percentile,
    ratios,
    show,
    spread,
    summarise,
    summary_table,
)

RECORD = Record(
    prompt="p",
    started_at=10.0,
    ended_at=14.0,
    first_at=11.0,
    last_at=14.0,
    gaps_s=(1.0, 1.0, 1.0),
    tokens=8,
    prompt_tokens=5,
    events=4,
    first_share=0.25,
    text="aabbccdd",
    finish_reason="length",
    error=None,
)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for share in (1, 50, 90, 99):
        assert percentile(values, share / 100) == pytest.approx(cuts[share - 1], abs=1e-6)


def test_the_edges_of_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert (percentile([2.0, 1.0], 0.0), percentile([2.0, 1.0], 1.0)) == (1.0, 2.0)


def test_the_rates_of_one_run() -> None:
    """Two requests that overlap: 16 tokens from 10 s to 16 s; 12 of them behind the first events, 11 s to 16 s."""
    later = replace(RECORD, started_at=12.0, first_at=13.0, last_at=16.0, ended_at=16.0)
    summary = summarise(Run(2, (RECORD, later)))
    assert (summary.clients, summary.requests, summary.errors, summary.tokens) == (2, 2, 0, 16)
    assert summary.tokens_per_s == pytest.approx(16 / 6)
    assert summary.decode_per_s == pytest.approx(12 / 5)
    assert summary.ttft.p50 == 1.0
    assert summary.gaps.p99 == 1.0


def test_a_first_event_of_several_tokens_is_not_counted_as_decoded() -> None:
    """Else a server that speculates would be credited with tokens for which the clock had not run."""
    assert RECORD.decoded == 6.0
    assert replace(RECORD, first_share=1.0).decoded == 0.0


def test_a_failed_request_is_counted_as_one_and_nothing_else() -> None:
    failed = replace(RECORD, tokens=99, started_at=0.0, ended_at=100.0, error="broken")
    summary = summarise(Run(2, (RECORD, failed)))
    assert (summary.requests, summary.errors, summary.tokens) == (2, 1, 8)
    assert summary.tokens_per_s == pytest.approx(2.0)
    assert first_errors([RECORD, failed]) == ["p: broken"]


def test_a_run_without_tokens_has_the_rate_nought() -> None:
    summary = summarise(Run(1, (replace(RECORD, error="broken"),)))
    assert (summary.tokens_per_s, summary.decode_per_s, summary.ttft.p50) == (0.0, 0.0, None)


def test_several_runs_give_the_median_rate_and_pooled_times() -> None:
    runs = [Run(1, (replace(RECORD, tokens=tokens, gaps_s=(tokens / 8,)),)) for tokens in (8, 80, 16)]
    summary = summarise(*runs)
    assert (summary.requests, summary.tokens, summary.tokens_per_s) == (3, 104, 4.0)
    assert summary.gaps.p50 == 2.0


def test_ratios_are_taken_pair_by_pair() -> None:
    """The machine slowed down for the second pair: that moves no ratio."""
    assert ratios([20.0, 10.0, 33.0], [10.0, 5.0, 11.0]) == Spread(2.0, 2.0, 3.0)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([0.0], [1.0]), ([1.0], [0.0]), ([1.0, 2.0], [1.0])])
def test_no_ratio_without_two_rates(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError):
        ratios(ours, theirs)


@pytest.mark.parametrize(
    ("median", "at_most", "holds"),
    [(1.1, False, True), (1.0999, False, False), (1.1, True, True), (1.1001, True, False)],
)
def test_a_bound_holds_when_the_median_reaches_it(median: float, at_most: bool, holds: bool) -> None:
    assert Bound("claim", 4, spread([0.5, median, 9.0]), 1.1, at_most).holds is holds


def test_tables_say_whether_the_bound_holds(capsys: pytest.CaptureFixture[str]) -> None:
    bounds = [
        Bound("faster", 4, Spread(1.05, 1.0, 1.2), 1.1),
        Bound("cheaper", 64, Spread(50, 40, 55), 60, at_most=True),
    ]
    table = summary_table("Runs", [("paceline", summarise(Run(1, (RECORD,))))])
    show([table, bound_table("Ratios", bounds)], ["one note"], {}, as_json=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["faster", "4", "1.050", "(1.000..1.200)", ">=", "1.1", "NO"] in lines
    assert ["cheaper", "64", "50.000", "(40.000..55.000)", "<=", "60", "yes"] in lines
    assert ["one", "note"] in lines
    milliseconds = ["1000.0"] * 6
    assert ["paceline", "1", "1", "0", "8", "2.0", "2.0", *milliseconds] in lines


def test_json_carries_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    show(
        [],
        ["not printed"],
        {"bound": Bound("faster", 4, Spread(1.2, 1.0, 1.3), 1.1), "records": [RECORD]},
        as_json=True,
    )
    facts = json.loads(capsys.readouterr().out)
    assert facts["bound"]["measured"] == {"median": 1.2, "low": 1.0, "high": 1.3}
    assert facts["records"][0]["text"] == "aabbccdd"
