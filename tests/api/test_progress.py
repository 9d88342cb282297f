"""What is shown while a model is loaded."""

import io

from rich.console import Console

from api.progress import Bars, Lines, amount, display_on, megabytes


def test_off_a_terminal_there_are_few_plain_lines() -> None:
    output = io.StringIO()
    display = display_on(Console(file=output, width=200))
    assert isinstance(display, Lines)
    display("fetch", 0, None)
    for done in range(101):
        display("load", done * 1_000_000, 100_000_000)
    display.close()
    assert output.getvalue().splitlines() == [
        "fetching",
        "loading 0 of 100 MB",
        "loading 25 of 100 MB",
        "loading 50 of 100 MB",
        "loading 75 of 100 MB",
        "loading 100 of 100 MB",
    ]


def test_on_a_terminal_there_are_bars_which_go_away() -> None:
    output = io.StringIO()
    display = display_on(Console(file=output, force_terminal=True, width=200))
    assert isinstance(display, Bars)
    display("convert", 3, 272)
    display("convert", 272, 272)
    display.close()
    display.close()
    assert "converting" in output.getvalue()
    assert "272 of 272" in output.getvalue()


def test_amounts_are_in_the_stages_own_unit() -> None:
    assert amount("fetch", 12_000_000, 93_000_000) == "12 of 93 MB"
    assert amount("convert", 3, 272) == "3 of 272"
    assert amount("fetch", 0, None) == ""
    assert amount("fetch", 5_000_000, None) == "5 MB"
    assert megabytes(25_300_000_000) == "25.3 GB"
