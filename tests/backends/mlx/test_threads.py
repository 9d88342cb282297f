"""How many BLAS threads: the measured faster way wins, and a change of the machine is noticed."""

from collections.abc import Callable
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from backends.mlx.threads import FIRST_PROBE, LAST_PROBE, SOON, BlasPace, ThreadChoice

ROWS = 8


def play(choice: ThreadChoice, cost: Callable[[int], float], rounds: int, rows: int = ROWS) -> list[int]:
    """Let a choice serve rounds whose time depends on their threads; what it chose."""
    chosen = []
    for _ in range(rounds):
        threads = choice.choose(rows)
        choice.observe(rows, threads, cost(threads))
        chosen.append(threads)
    return chosen


def idle(threads: int) -> float:
    return 0.04 / min(threads, 2)


def busy(threads: int) -> float:
    return 0.04 if threads == 1 else 0.4


def test_one_thread_needs_no_choice() -> None:
    assert set(play(ThreadChoice(1), busy, 3 * FIRST_PROBE)) == {1}


def test_on_an_idle_machine_all_threads_serve_and_probes_grow_rare() -> None:
    choice = ThreadChoice(2)
    play(choice, idle, 2000)
    late = play(choice, idle, 4 * LAST_PROBE)
    assert late.count(1) <= 5


def test_on_a_busy_machine_one_thread_serves() -> None:
    choice = ThreadChoice(4)
    play(choice, busy, 2000)
    assert play(choice, busy, 4 * LAST_PROBE).count(4) <= 5


def test_it_leaves_all_threads_within_two_rounds_of_a_neighbour_that_moved_in() -> None:
    choice = ThreadChoice(2)
    play(choice, idle, 100)
    assert play(choice, busy, FIRST_PROBE - 2)[2:].count(2) <= 2


def test_it_comes_back_when_the_neighbour_has_left() -> None:
    choice = ThreadChoice(2)
    play(choice, idle, 100)
    play(choice, busy, 3000)
    play(choice, idle, 2 * LAST_PROBE)
    assert play(choice, idle, 64).count(2) >= 60


def test_one_hiccup_is_over_soon() -> None:
    choice = ThreadChoice(2)
    play(choice, idle, 2000)
    play(choice, lambda _: 1.0, 1)
    assert play(choice, idle, 40).count(1) <= SOON + 1


def test_where_hiccups_are_frequent_all_threads_are_left_for_long() -> None:
    """Every sixth round of all threads takes ten times as long: one thread is faster in the mean, and serves."""
    choice = ThreadChoice(2)
    rounds = count()

    def often(threads: int) -> float:
        return idle(threads) * (10 if threads > 1 and next(rounds) % 6 == 5 else 1)

    play(choice, often, 2000)
    assert play(choice, often, 1000).count(2) <= 30


def test_a_few_hiccups_are_over_soon_however_rare_probes_had_become() -> None:
    choice = ThreadChoice(2)
    play(choice, idle, 2000)
    play(choice, busy, 3)
    play(choice, idle, SOON)
    assert play(choice, idle, 64).count(1) <= 3


def test_sizes_of_rounds_are_judged_apart() -> None:
    choice = ThreadChoice(2)
    play(choice, busy, 100, rows=1)
    play(choice, idle, 100, rows=64)
    assert choice.choose(rows=1) == 1
    assert choice.choose(rows=64) == 2


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 10)), max_size=300), st.integers(1, 64))
def test_only_all_or_one_is_ever_chosen(rounds: list[tuple[int, float]], most: int) -> None:
    choice = ThreadChoice(most)
    for rows, seconds in rounds:
        threads = choice.choose(rows)
        assert threads in {1, most}
        choice.observe(rows, threads, seconds)


def test_overlapping_rounds_are_timed_from_landing_to_landing_and_set_threads_when_they_begin() -> None:
    now = 0.0
    told: list[int] = []
    pace = BlasPace(2, told.append, lambda: now)
    first = pace.launch(ROWS)
    second = pace.launch(ROWS)
    now = 1.0
    first()
    assert told == [1], "the second round of a size is tried on one thread, from the moment it begins"
    now = 1.5
    second()
    pace.launch(ROWS)
    assert told == [1], "0.5 s on one thread beat 1 s on two"


def test_rounds_that_failed_are_forgotten() -> None:
    told: list[int] = []
    pace = BlasPace(2, told.append, lambda: 0.0)
    pace.launch(ROWS)
    pace.reset()
    pace.launch(ROWS)()
    pace.launch(ROWS)
    assert told == [1], "the round after the failed one was the first of its size to land"
