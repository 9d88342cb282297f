"""What is measured when planner and source are: every lane's calls, and all of a history."""

from api.text import ByteTokenizer
from deploy.bench.overhead import LANES, Stopwatch, TimedPace, TimedSource, deciding_seconds, history_share, known_texts
from deploy.bench.recording import RecordedCosts
from deploy.bench.replay import play, warmed

RECORDING = known_texts(ByteTokenizer().encode, 0.1)


def test_the_texts_are_those_of_32_lanes_and_half_of_them_copy() -> None:
    assert len(RECORDING.lanes) == RECORDING.clients == LANES == 32
    copying = [lane for lane in RECORDING.lanes if lane.prompt[-len(lane.output) :] == lane.output]
    assert len(copying) == LANES // 2


def test_drafts_are_made_chosen_and_accepted_while_the_clock_runs() -> None:
    watch = Stopwatch()
    done = play(
        RECORDING,
        RecordedCosts(RECORDING.rounds),
        "pace",
        lambda _backend: warmed(TimedPace(watch), RECORDING),
        sources=[TimedSource(watch)],
    )
    assert done.tokens == sum(len(lane.output) for lane in RECORDING.lanes)
    assert done.accepted > done.tokens / 10
    assert watch.seconds > 0
    assert watch.lanes >= len(done.rounds)


def test_a_round_of_32_lanes_is_timed() -> None:
    assert 0 < deciding_seconds(RECORDING) < 1


def test_a_full_history_is_measured() -> None:
    """A good part of its cap and never more, though four times as much was said."""
    words = tuple(range(400))
    some, worst = history_share(words, 1 << 18), history_share((), 1 << 18)
    assert 0.2 < some <= worst <= 1
