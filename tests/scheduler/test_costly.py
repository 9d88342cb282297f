"""What asking a source is thought to cost, by what its askings took."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.costly import CostlySource

TIMES = st.floats(0.001, 1.0)


def asked(*times: float, lanes: int = 1, depth: int = 1) -> CostlySource:
    source = CostlySource()
    for seconds in times:
        source.observe(lanes, depth, seconds)
    return source


def test_nothing_is_thought_before_it_was_asked() -> None:
    assert CostlySource().seconds(1, 4) == 0.0


@given(st.permutations([0.3, 0.006, 0.007]), st.integers(1, 6))
def test_a_first_asking_that_had_a_text_to_read_does_not_price_it_out(times: list[float], depth: int) -> None:
    assert asked(*times, depth=depth).seconds(1, depth) == pytest.approx(0.006)


@given(st.lists(TIMES, min_size=1, max_size=40))
def test_the_price_lies_among_what_was_seen(times: list[float]) -> None:
    price = asked(*times).seconds(1, 1)
    assert min(times) * 0.999 <= price <= max(times) * 1.001


@given(TIMES, TIMES)
def test_it_follows_a_machine_that_has_become_another(before: float, after: float) -> None:
    assert asked(*[before] * 10, *[after] * 200).seconds(1, 1) == pytest.approx(after, rel=0.05)


def test_one_hiccup_counts_as_three_times_what_was_expected() -> None:
    assert asked(*[0.01] * 5, 10.0).seconds(1, 1) == pytest.approx(0.012)


@given(st.integers(2, 8), st.integers(1, 8))
def test_a_deeper_asking_is_thought_to_cost_as_many_steps_as_long_as_no_other_was_seen(seen: int, wanted: int) -> None:
    assert asked(0.02 * seen, depth=seen).seconds(1, wanted) == pytest.approx(0.02 * wanted)


def test_before_a_further_step_was_timed_it_is_thought_to_cost_half_of_the_first() -> None:
    """Once, all were thought to cost as much as the first: where that is dear, none was ever drafted behind it."""
    assert asked(0.02).seconds(1, 3) == pytest.approx(0.04)


@given(st.lists(st.integers(1, 6), min_size=40, max_size=80), TIMES, st.floats(0.0, 1.0))
def test_askings_of_several_depths_tell_the_first_step_from_further_ones(
    depths: list[int], first: float, further: float
) -> None:
    source = CostlySource()
    for depth in [1, 2, *depths]:
        source.observe(1, depth, first + further * (depth - 1))
    for wanted in range(1, 8):
        assert source.seconds(1, wanted) == pytest.approx(first + further * (wanted - 1))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_it_follows_at_any_depth(depth: int) -> None:
    source = asked(*[0.01] * 10)
    for _ in range(200):
        source.observe(1, depth, 0.3)
    assert source.seconds(1, depth) == pytest.approx(0.3, rel=0.02)


def test_a_price_is_never_below_nothing() -> None:
    source = asked(0.001)
    for seconds in [*[1.0] * 9, *[0.0] * 300]:
        source.observe(1, 6, seconds)
    assert all(0 <= source.seconds(1, depth) < 0.01 for depth in range(1, 9))


def test_other_numbers_of_lanes_cost_what_the_nearest_does() -> None:
    source = CostlySource()
    source.observe(1, 1, 0.01)
    source.observe(6, 1, 0.05)
    assert [source.seconds(lanes, 1) for lanes in (1, 3, 4, 9)] == [0.01, 0.01, 0.05, 0.05]


def test_of_eight_askings_that_pay_one_goes_deeper() -> None:
    source = CostlySource()
    assert [source.paid() for _ in range(17)] == [*[0] * 7, 1, *[0] * 7, 1, 0]


def test_what_did_not_pay_is_tried_again_later_and_later_until_it_pays() -> None:
    source = CostlySource()
    waits = []
    for _ in range(6):
        waited = 0
        while not source.due:
            source.passed()
            waited += 1
        source.tried()
        waits.append(waited)
    assert waits == [0, 32, 64, 128, 256, 256]
    source.paid()
    waited = 0
    while not source.due:
        source.passed()
        waited += 1
    assert waited == 16
