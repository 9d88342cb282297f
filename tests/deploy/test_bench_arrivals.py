"""Traffic keeps its shape when it is stretched, and is there without a record."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.bench.arrivals import RECORDS, Due, drawn_arrivals, read_arrivals, stretched, traffic

times = st.lists(st.floats(0, 1e6), min_size=1, max_size=20).map(sorted)


def record(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(("seconds,prompt_tokens,output_tokens", *rows)) + "\n")
    return path


@given(times, st.integers(0, 60), st.floats(0.1, 1e4))
def test_as_many_as_asked_for_come_in_the_time_in_their_order(at: list[float], count: int, seconds: float) -> None:
    dues = [Due(moment, 1 + place, 1) for place, moment in enumerate(at)]
    spread = stretched(dues, count, seconds)
    assert [due.prompt for due in spread] == [1 + place % len(dues) for place in range(count)]
    moments = [due.at for due in spread]
    assert moments == sorted(moments)
    assert all(0 <= moment <= seconds * (1 + 1e-9) for moment in moments)
    if len(set(at)) > 1 and count >= len(at):
        assert math.isclose(moments[-1], seconds)


def test_bursts_stay_bursts() -> None:
    dues = [Due(at, 1, 1) for at in (5.0, 5.1, 5.2, 15.0)]
    assert [due.at for due in stretched(dues, 4, 100.0)] == pytest.approx([0.0, 1.0, 2.0, 100.0])


def test_a_record_is_read_and_clipped(tmp_path: Path) -> None:
    dues = read_arrivals(record(tmp_path / "a.csv", "2.5,4808,10", "0.000,374,44"))
    assert dues == (Due(0.0, 374, 44), Due(2.5, 4808, 10))
    assert [due.clipped(512, 16) for due in dues] == [Due(0.0, 374, 16), Due(2.5, 512, 10)]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "seconds,prompt_tokens,output_tokens\nx,1,2\n"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.csv"):
        read_arrivals(path)


def test_all_records_take_part_alike(tmp_path: Path) -> None:
    first = record(tmp_path / "a.csv", "0,1,1", "1,1,1", "2,1,1")
    second = record(tmp_path / "b.csv", "0,2,1", "5,2,1")
    mixed = traffic(7, 60.0, 0, (first, second))
    assert [due.prompt for due in mixed].count(1) == 4
    assert [due.prompt for due in mixed].count(2) == 3
    assert [due.at for due in mixed] == sorted(due.at for due in mixed)


def test_without_a_record_traffic_is_drawn_by_the_seed(tmp_path: Path) -> None:
    nothing = (tmp_path / "none.csv",)
    drawn = traffic(1000, 500.0, 3, nothing)
    assert drawn == traffic(1000, 500.0, 3, nothing) != traffic(1000, 500.0, 4, nothing)
    assert drawn[-1].at == pytest.approx(500.0)
    gaps = [later.at - earlier.at for earlier, later in pairwise(drawn)]
    beyond_mean = sum(gap > 0.5 for gap in gaps) / len(gaps)
    assert 0.32 < beyond_mean < 0.42, "exponential: a share of 1/e is longer than the mean"
    assert min(due.prompt for due in drawn) >= 1
    assert traffic(0, 500.0, 3, nothing) == []
    assert len({due.prompt for due in drawn_arrivals(100, 0)}) > 50


@pytest.mark.skipif(not all(path.exists() for path in RECORDS), reason="the shared records are not here")
def test_the_shared_records_are_records() -> None:
    assert [len(read_arrivals(path)) for path in RECORDS] == [2000, 2000]
