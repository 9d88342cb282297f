"""The cost table learns any machine, guesses low where it has seen nothing, and follows a machine that slows down."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.cost import ROWS, CostTable, RoundShape

SHAPES = st.builds(RoundShape, st.integers(1, 3000), st.booleans(), st.integers(0, 10**6))
OFTEN = st.builds(RoundShape, st.sampled_from([1, 16, 256]), st.booleans(), st.integers(0, 10**5))


def taught(*rounds: tuple[int, bool, float], times: int = 5) -> CostTable:
    """A table that has seen rounds of so many rows, wide or not, that took so long."""
    table = CostTable()
    for _ in range(times):
        for rows, wide, seconds in rounds:
            table.observe(RoundShape(rows, wide, 0), seconds)
    return table


@given(rounds=st.lists(st.tuples(SHAPES, st.floats(0, 100)), max_size=60), asked=SHAPES)
def test_whatever_was_observed_prices_are_positive_finite_and_grow_with_rows(
    rounds: list[tuple[RoundShape, float]], asked: RoundShape
) -> None:
    table = CostTable()
    assert table.seconds(asked) == 0
    for shape, seconds in rounds:
        table.observe(shape, seconds)
    for wide in (False, True):
        prices = table.prices(wide=wide)
        assert prices == sorted(prices)
        assert all(0 < price < float("inf") for price in prices) if rounds else not any(prices)
    assert 0 < table.seconds(asked) < float("inf") if rounds else table.seconds(asked) == 0


def test_what_was_seen_is_remembered() -> None:
    table = taught((1, False, 0.04), (8, False, 0.06), (40, True, 0.12))
    assert table.seconds(RoundShape(1, False, 0)) == pytest.approx(0.04)
    assert table.seconds(RoundShape(8, False, 0)) == pytest.approx(0.06)
    assert table.seconds(RoundShape(40, True, 0)) == pytest.approx(0.12)


def test_a_cell_between_two_that_were_seen_is_thought_to_cost_what_the_smaller_one_does() -> None:
    """It may lie before a cliff or behind it: trying it once tells."""
    table = taught((8, True, 0.05), (64, True, 0.5))
    assert table.seconds(RoundShape(32, True, 0)) == pytest.approx(0.05)
    for _ in range(3):
        table.observe(RoundShape(32, True, 0), 0.3)
    assert table.seconds(RoundShape(32, True, 0)) == pytest.approx(0.3)


def test_behind_the_largest_that_was_seen_rows_go_on_as_they_did() -> None:
    table = taught((1, True, 0.04), (21, True, 0.06))
    assert table.seconds(RoundShape(256, True, 0)) == pytest.approx(0.06 + 0.02 / 21 * (256 - 22))


def test_plain_rounds_say_nothing_of_wide_ones_once_one_was_seen() -> None:
    table = taught((8, False, 0.06))
    assert table.seconds(RoundShape(8, True, 0)) == pytest.approx(0.06)
    table.observe(RoundShape(9, True, 0), 0.1)
    assert table.seconds(RoundShape(9, True, 0)) == pytest.approx(0.1)
    assert table.seconds(RoundShape(8, False, 0)) == pytest.approx(0.06)


def test_one_hiccup_is_no_price() -> None:
    table = taught((8, False, 0.06), times=10)
    table.observe(RoundShape(8, False, 0), 30.0)
    assert table.seconds(RoundShape(8, False, 0)) < 0.06 * 1.4


def test_the_price_of_attention_is_found_apart_from_that_of_rows() -> None:
    table = CostTable()
    for turn in range(300):
        attention = (turn % 7) * 5000
        table.observe(RoundShape(8, False, attention), 0.05 + 1e-6 * attention)
    assert table.seconds(RoundShape(8, False, 100_000)) == pytest.approx(0.15, rel=0.15)


def test_texts_that_grow_beside_a_first_measurement_too_low_are_not_taken_for_the_price_of_attention() -> None:
    table, rng = taught((4, False, 0.04), (12, True, 0.05), (32, True, 0.09), times=1), random.Random(1)
    for turn in range(300):
        rows = rng.choice((4, 4, 4, 12, 32))
        grown = 200 + turn % 88
        table.observe(RoundShape(rows, rows > 4, rows * grown), rng.uniform(0.9, 1.1) * (0.05 + 0.002 * rows))
    plain = table.seconds(RoundShape(4, False, 4 * 240))
    assert table.seconds(RoundShape(4, False, 4 * 2400)) < 2 * plain
    assert table.seconds(RoundShape(32, True, 32 * 240)) == pytest.approx(plain * 114 / 58, rel=0.15)


def test_a_machine_that_slows_down_slows_all_cells_down_not_only_those_that_are_used() -> None:
    table = taught((8, False, 0.06), (32, True, 0.12), times=10)
    for _ in range(100):
        table.observe(RoundShape(8, False, 0), 0.12)
    assert table.seconds(RoundShape(8, False, 0)) == pytest.approx(0.12, rel=0.1)
    assert table.seconds(RoundShape(32, True, 0)) > 0.15
    for _ in range(100):
        table.observe(RoundShape(8, False, 0), 0.06)
    assert table.seconds(RoundShape(32, True, 0)) == pytest.approx(0.12, rel=0.25)


@given(
    rounds=st.lists(st.tuples(OFTEN, st.floats(0.001, 1.0)), max_size=30),
    beside=st.builds(RoundShape, st.integers(0, 200), st.booleans(), st.integers(0, 10**5)),
    start=st.integers(0, 5000),
    limit=st.floats(0.0, 2.0),
)
def test_rows_within_a_time_are_the_most_that_fill_a_cell_and_take_no_longer(
    rounds: list[tuple[RoundShape, float]], beside: RoundShape, start: int, limit: float
) -> None:
    table = CostTable()
    for shape, seconds in rounds:
        table.observe(shape, seconds)

    def takes(rows: int) -> float:
        return table.seconds(RoundShape(beside.rows + rows, True, beside.attention + rows * (start + rows)))

    rows = table.rows_within(limit, beside, start)
    full = [total - beside.rows for total in ROWS if total > beside.rows]
    assert rows in {0, *full}
    assert not rows or takes(rows) <= limit, "what is said to fit does, by the best that is thought of it"


def test_rows_within_a_time_are_not_tried_out() -> None:
    """Others wait for the round: between two sizes that were seen a straight line is thought, behind the last the price
    of a row.
    """
    table = taught((8, True, 0.05), (64, True, 0.33))
    alone = RoundShape(0, False, 0)
    assert [table.rows_within(limit, alone, 0) for limit in (0.051, 0.131, 0.211, 0.331, 0.491, 0.651)] == [
        8,
        24,
        40,
        64,
        96,
        128,
    ]
    assert table.rows_within(0.04, alone, 0) == 0
    assert table.seconds(RoundShape(40, True, 0)) == pytest.approx(0.05), "drafts are tried out"


def test_rows_within_a_time_depend_on_what_is_beside_them_and_on_how_far_the_text_is() -> None:
    table = taught((8, True, 0.05), (64, True, 0.2), (256, True, 0.8))
    alone = RoundShape(0, False, 0)
    assert table.rows_within(0.351, alone, 0) == 112
    assert table.rows_within(0.351, RoundShape(50, False, 0), 0) == 62
    assert table.rows_within(0.001, RoundShape(8, False, 0), 0) == 0
    assert CostTable().rows_within(0.0, alone, 0) == ROWS[-1], "nothing is known of any round"
    for attention in range(0, 70_000, 1000):
        table.observe(RoundShape(64, True, attention), 0.2 + 1e-5 * attention)
    assert 0 < table.rows_within(0.25, alone, 1000) < table.rows_within(0.25, alone, 0)
