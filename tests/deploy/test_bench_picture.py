"""The picture: well-formed, everything inside its frame, and what it says is what was played."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.bench.__main__ import app
from deploy.bench.recording import LaneRecord, Recording, RoundRecord, write_recording
from deploy.bench.svg import Chart, Series, document, ticks
from scheduler.cost import RoundShape

SVG = "{http://www.w3.org/2000/svg}"
positive = st.floats(0, 1e6)
charts = st.builds(
    Chart,
    st.text("ab<&>\"'", max_size=5),
    st.text("ab<&>\"'", max_size=5),
    st.text("ab<&>\"'", max_size=5),
    st.lists(
        st.builds(
            Series,
            st.text("ab<&>\"'", max_size=5),
            st.lists(st.tuples(positive, positive), max_size=5).map(tuple),
            st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
)


def parsed(text: str) -> ET.Element:
    return ET.fromstring(text)  # noqa: S314 - our own text


@given(st.floats(1e-6, 1e9))
def test_ticks_are_round_numbers_that_reach_the_largest_value(most: float) -> None:
    marks = ticks(most)
    assert marks[0] == 0
    assert marks[-1] >= most * (1 - 1e-6)
    assert 3 <= len(marks) <= 7


def test_some_ticks() -> None:
    assert ticks(10) == [0, 2, 4, 6, 8, 10]
    assert ticks(1.0) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(43) == [0, 10, 20, 30, 40, 50]
    assert ticks(0) == [0, 1]


@given(st.lists(charts, min_size=1, max_size=3))
def test_any_charts_make_a_document_with_every_point_inside(made: list[Chart]) -> None:
    root = parsed(document(made, width=300, height=200))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert (width, height) == (300 * len(made), 200)
    for circle in root.iter(f"{SVG}circle"):
        assert 0 <= float(circle.attrib["cx"]) <= width
        assert 0 <= float(circle.attrib["cy"]) <= height
    for line in root.iter(f"{SVG}polyline"):
        for point in line.attrib["points"].split():
            x, y = point.split(",")
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height
    assert [text.text or "" for text in root.iter(f"{SVG}text") if text.attrib.get("font-weight")] == [
        chart.title for chart in made
    ]


def test_where_points_stand() -> None:
    """A line from the origin to the far corner of round axes spans the whole frame, and dots stand alone."""
    chart = Chart("t", "x", "y", (Series("line", ((0, 0), (10, 50))), Series("dots", ((5, 25),), dots=True)))
    root = parsed(document([chart], width=300, height=200))
    frame, line = (each.attrib["points"] for each in root.iter(f"{SVG}polyline"))
    corners = [tuple(map(float, corner.split(","))) for corner in frame.split()]
    ends = [tuple(map(float, end.split(","))) for end in line.split()]
    assert ends == [corners[1], (corners[2][0], corners[0][1])]
    dot = next(each for each in root.iter(f"{SVG}circle") if each.attrib["r"] == "2.5")
    assert float(dot.attrib["cx"]) == (ends[0][0] + ends[1][0]) / 2
    assert float(dot.attrib["cy"]) == (ends[0][1] + ends[1][1]) / 2


def test_the_command_draws_costs_survival_and_rows(tmp_path: Path) -> None:
    rounds = tuple(
        RoundRecord(RoundShape(rows, wide, 0), 0.01 + rows * 1e-4, served=False)
        for rows in (1, 2, 4, 8)
        for wide in (False, True)
        for _ in range(3)
    )
    recording, out = tmp_path / "r.jsonl", tmp_path / "pace.svg"
    write_recording(recording, Recording(1, (LaneRecord("x", (5, 6, 7, 8), (5, 6, 7, 8) * 10),), rounds))
    assert CliRunner().invoke(app, ["picture", str(recording), "--out", str(out)]).exit_code == 0
    words = [text.text for text in parsed(out.read_text()).iter(f"{SVG}text")]
    for word in ("ms", "rows of the round", "chance", "suffix", "wide, measured", "plain, by the table", "round"):
        assert word in words


def test_a_picture_stands_beside_the_benchmarks() -> None:
    text = (Path(__file__).parents[2] / "deploy" / "bench" / "pace.svg").read_text(encoding="utf-8")
    assert parsed(text).tag == f"{SVG}svg"
    assert "suffix" in text


@pytest.mark.parametrize("name", ["<b>", "a & b"])
def test_words_are_escaped(name: str) -> None:
    words = [text.text for text in parsed(document([Chart(name, name, name, ())])).iter(f"{SVG}text")]
    assert words.count(name) == 3
