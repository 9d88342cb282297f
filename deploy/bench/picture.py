"""`picture`: draws what the planner knows and does, from a recording that is replayed under it.

Three charts: what rounds cost by its table, how often the guesses of each source came true by mark, and how many rows
it chose round by round.
"""

from pathlib import Path
from typing import Annotated

import typer

from deploy.bench.options import say
from deploy.bench.recording import RecordedCosts, Recording, RecordingError, read_recording
from deploy.bench.replay import Played, play, warmed
from deploy.bench.svg import Chart, Series, document
from scheduler.cost import ROWS, RoundShape
from scheduler.pace import Pace

PICTURE = Path(__file__).with_name("pace.svg")
_MOST_ROWS = 128
"""Where the chart of costs ends, in rows."""


def picture(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `record` wrote.")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The SVG file to write.")] = PICTURE,
) -> None:
    """Draw cost table, survival and chosen rows of a replay under the planner."""
    try:
        recording = read_recording(file)
    except RecordingError as error:
        say(f"picture: {error}")
        raise typer.Exit(2) from None
    out.write_text(draw_picture(recording), encoding="utf-8")


def draw_picture(recording: Recording) -> str:
    """The SVG document."""
    costs = RecordedCosts(recording.rounds)
    pace = warmed(Pace(), recording)
    played = play(recording, costs, "pace", lambda _backend: pace)
    return document([_costs(costs, pace), _survival(pace), _rows(played)])


def _costs(costs: RecordedCosts, pace: Pace) -> Chart:
    """Each kind as far as it was measured, and no further than drafts go."""
    series = []
    for wide, kind in ((False, "plain"), (True, "wide")):
        measured = tuple((float(rows), price * 1e3) for rows, price in costs.points[wide] if rows <= _MOST_ROWS)
        cells = [rows for rows in ROWS if measured and rows <= measured[-1][0]]
        table = tuple((float(rows), pace.costs.seconds(RoundShape(rows, wide, 0)) * 1e3) for rows in cells)
        series += [
            Series(f"{kind}, by the table", table, dashed=wide, colour=int(wide)),
            Series(f"{kind}, measured", measured, dots=True, colour=int(wide)),
        ]
    return Chart("What a round costs, attention apart", "rows of the round", "ms", tuple(series))


def _survival(pace: Pace) -> Chart:
    by_source: dict[str, list[tuple[float, float]]] = {}
    for (source, mark), chance in sorted(pace.survival.table().items()):
        by_source.setdefault(source, []).append((float(mark), chance))
    series = tuple(Series(source, tuple(points)) for source, points in by_source.items())
    return Chart("How often a guess comes true", "mark: confidence of the source", "chance", series, y_most=1.0)


def _rows(played: Played) -> Chart:
    decoding = [each for each in played.rounds if each.lanes]
    lanes = tuple((float(place), float(each.lanes)) for place, each in enumerate(decoding))
    rows = tuple((float(place), float(each.lanes + each.drafted)) for place, each in enumerate(decoding))
    series = (Series("lanes and drafts", rows), Series("lanes", lanes))
    return Chart("Rows of decoding lanes", "round", "rows", series)
