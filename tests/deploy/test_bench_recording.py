"""Recordings: written and read again, and what unseen rounds would have cost."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.bench.recording import (
    LaneRecord,
    RecordedCosts,
    Recording,
    RecordingError,
    RoundRecord,
    read_recording,
    write_recording,
)
from scheduler.cost import RoundShape


def cost(rows: int, seconds: float, *, wide: bool = True, attention: int = 0) -> RoundRecord:
    return RoundRecord(RoundShape(rows, wide, attention), seconds)


tokens = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=9).map(tuple)
lane_records = st.builds(
    LaneRecord, st.text(max_size=5), tokens, tokens, tokens | st.just(()), st.none() | st.just(("suffix",))
)
shapes = st.builds(RoundShape, st.integers(1, 99), st.booleans(), st.integers(0, 9999))
round_records = st.builds(RoundRecord, shapes, st.floats(1e-4, 1.0), st.booleans())


@given(st.integers(1, 9), st.lists(lane_records, min_size=1), st.lists(round_records, min_size=1))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, clients: int, lanes: list[LaneRecord], rounds: list[RoundRecord]
) -> None:
    path = tmp_path_factory.getbasetemp() / "recording.jsonl"
    recording = Recording(clients, tuple(lanes), tuple(rounds))
    write_recording(path, recording)
    assert read_recording(path) == recording


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "wants a head"),
        ('{"type":"recording","clients":1}', "wants a head, lanes and rounds"),
        ('{"type":"recording","clients":1}\n{"type":"lane"}', "line 2"),
        ("words", "line 1"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(RecordingError, match=complaint):
        read_recording(path)


@given(st.lists(round_records, min_size=1), shapes)
def test_every_round_has_a_price(rounds: list[RoundRecord], shape: RoundShape) -> None:
    assert RecordedCosts(rounds).seconds(shape) > 0


@given(st.dictionaries(st.integers(1, 64), st.floats(0.01, 1.0), min_size=1), st.booleans())
def test_a_recorded_round_costs_what_it_did_where_more_rows_cost_more(seconds: dict[int, float], wide: bool) -> None:
    rising = dict(zip(sorted(seconds), sorted(seconds.values()), strict=True))
    costs = RecordedCosts([cost(rows, time, wide=wide) for rows, time in rising.items()])
    for rows, time in rising.items():
        assert costs.seconds(RoundShape(rows, wide, 0)) == pytest.approx(time)


@given(st.lists(round_records, min_size=1), st.booleans(), st.integers(1, 99), st.integers(1, 99))
def test_more_rows_never_cost_less(rounds: list[RoundRecord], wide: bool, one: int, other: int) -> None:
    costs = RecordedCosts(rounds)
    few, many = (costs.seconds(RoundShape(rows, wide, 0)) for rows in sorted((one, other)))
    assert few <= many + 1e-9


def test_rounds_that_seem_cheaper_than_smaller_ones_share_a_mean_with_them() -> None:
    """Three of 2 rows at 20 ms and one of 3 rows at 12 ms: 18 ms for both."""
    costs = RecordedCosts([*[cost(2, 0.020)] * 3, cost(3, 0.012), cost(1, 0.010), cost(4, 0.040)])
    assert [point for _, point in costs.points[True]] == pytest.approx([0.010, 0.018, 0.018, 0.040])


def test_between_two_rounds_runs_a_line_and_behind_the_last_one_it_goes_on() -> None:
    costs = RecordedCosts([cost(2, 0.010), cost(6, 0.030), cost(1, 0.005, wide=False)])
    priced = {rows: costs.seconds(RoundShape(rows, True, 0)) for rows in (1, 2, 3, 4, 6, 8)}
    assert priced == pytest.approx({1: 0.010, 2: 0.010, 3: 0.015, 4: 0.020, 6: 0.030, 8: 0.040})
    assert costs.seconds(RoundShape(1, False, 0)) == pytest.approx(0.005)


def test_a_kind_that_was_never_seen_costs_what_the_other_does_and_of_one_round_each_row_its_share() -> None:
    costs = RecordedCosts([cost(4, 0.040, wide=False)])
    assert costs.seconds(RoundShape(4, True, 0)) == pytest.approx(0.040)
    assert costs.seconds(RoundShape(6, True, 0)) == pytest.approx(0.060)


def test_a_hiccup_does_not_count() -> None:
    costs = RecordedCosts([cost(4, 0.010), cost(4, 0.011), cost(4, 9.0)])
    assert costs.seconds(RoundShape(4, True, 0)) == pytest.approx(0.011)


def test_attention_has_its_price() -> None:
    """10 ms a round and 1 us a key, in rounds of two sizes."""
    rounds = [cost(rows, 0.010 * rows + keys * 1e-6, attention=keys) for rows in (1, 4) for keys in (1000, 2000, 4000)]
    costs = RecordedCosts(rounds)
    assert costs.attention == pytest.approx(1e-6)
    assert costs.seconds(RoundShape(4, True, 10_000)) == pytest.approx(0.050)


def test_where_sizes_were_swept_served_rounds_count_for_larger_ones_only() -> None:
    swept = [RoundRecord(RoundShape(rows, True, 0), 0.010 * rows, served=False) for rows in (1, 4)]
    costs = RecordedCosts([*swept, cost(2, 0.9), cost(8, 0.100), cost(1, 0.007, wide=False)])
    assert costs.points == {True: [(1, 0.010), (4, 0.040), (8, 0.100)], False: [(1, 0.007)]}


def test_without_a_round_there_is_no_price() -> None:
    with pytest.raises(RecordingError):
        RecordedCosts([])
