"""What a crowd is held against: goodput of what finished, refusals, fairness; and that the refused come again."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.bench.__main__ import app
from deploy.bench.client import Exchange, Record
from deploy.bench.everything import IN_PAIRS
from deploy.bench.overload import (
    BEST,
    CROWD,
    LANES,
    Crowd,
    Tried,
    ask_on,
    bounds_of,
    crowd_of,
    delivered,
    jain,
    pause_after,
)
from deploy.bench.prompts import Prompt
from deploy.bench.servers import Server
from deploy.bench.wire import Arrival
from tests.deploy.streams import DONE, HEAD, Speaker, delta, speaking, usage

T = TypeVar("T")

RECORD = Record("p", 0.0, 5.0, 1.0, 4.0, (1.0, 1.0, 1.0), 8, 10, 4, 0.25, "text", "length", None)
"""Events at 1, 2, 3 and 4, of two tokens each."""
BUSY = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\nRetry-After: %d\r\n\r\n{}"


def run_on_uvloop(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def exchange(*data: bytes, began: float = 0.0, took: float = 1.0) -> Exchange:
    return Exchange(began, began + took, tuple(Arrival(began + took, each) for each in data), None)


def crowd(tokens: Sequence[int], refusals: Sequence[float] = (0.01,)) -> Crowd:
    """Keys that have got so many tokens each, in an interval of 10 s."""
    answers = {key: [replace(RECORD, tokens=count)] for key, count in zip(CROWD, tokens, strict=True)}
    return Crowd(0.0, 10.0, answers, refusals)


def test_only_what_came_in_the_interval_counts_and_nothing_of_what_failed() -> None:
    assert delivered(RECORD, 0.0, 10.0) == 8
    assert delivered(RECORD, 2.0, 4.0) == 4
    assert delivered(RECORD, 4.5, 10.0) == 0
    assert delivered(replace(RECORD, error="broken"), 0.0, 10.0) == 0
    assert delivered(replace(RECORD, first_at=None, gaps_s=(), events=0), 0.0, 10.0) == 0


shares = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=8)


@given(shares, st.floats(0.001, 1000))
def test_fairness_is_one_only_where_all_have_the_same_whatever_the_unit(got: list[float], unit: float) -> None:
    index = jain(got)
    assert 1 / len(got) - 1e-9 <= index <= 1 + 1e-9
    assert jain([unit * each for each in got]) == pytest.approx(index)
    assert jain([unit] * len(got)) == pytest.approx(1.0)


def test_fairness_of_one_that_has_all_and_of_none() -> None:
    assert jain([5, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([0, 0]) == 0.0
    assert jain([3, 1]) == pytest.approx(16 / 20)


@pytest.mark.parametrize(("told", "pause"), [(0, 0.0), (7, 7.0), (60, 10.0)])
def test_a_refused_client_comes_again_when_it_was_told_to_or_within_ten_seconds(told: int, pause: float) -> None:
    assert pause_after(exchange(BUSY % told)) == pause


def test_others_do_not_come_again() -> None:
    assert pause_after(exchange(HEAD, DONE)) is None
    assert pause_after(exchange(b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\n\r\n")) is None
    assert pause_after(exchange()) is None
    assert pause_after(exchange(b"HTTP/1.1 429 Too Many Requests\r\n\r\n")) == 1.0


def test_refusals_are_timed_to_their_last_byte_and_count_if_they_were_sent_in_the_interval() -> None:
    prompt = Prompt("p", ())
    answer = exchange(HEAD, delta("a"), delta("", "length") + usage(3) + DONE, began=6.0)
    early, late = exchange(BUSY % 1, began=1.0, took=0.2), exchange(BUSY % 1, began=5.0, took=0.3)
    tried = [Tried("key-a", prompt, (early, late, answer)), Tried("key-b", prompt, (late,))]
    told = crowd_of(tried, CROWD, 2.0, 8.0)
    assert told.refusals_s == pytest.approx([0.3, 0.3])
    assert {key: len(answers) for key, answers in told.answers.items()} == {**dict.fromkeys(CROWD, 0), "key-a": 1}
    assert told.goodput == 3 / 6.0
    assert told.errors == []


def test_bounds_are_of_pairs_and_each_can_be_missed() -> None:
    fine, best = crowd((10, 10, 10, 10)), crowd((10, 10, 10, 10), ())
    assert all(bound.holds for bound in bounds_of([best], [fine]))
    cases = [crowd((9, 9, 9, 9)), crowd((10, 10, 10, 10), [0.01] * 90 + [0.2] * 10), crowd((30, 10, 10, 10))]
    for missed, worse in enumerate(cases):
        assert [bound.holds for bound in bounds_of([best], [worse])] == [place != missed for place in range(3)]
    with pytest.raises(ValueError, match="nobody was refused"):
        bounds_of([best], [best])
    with pytest.raises(ValueError, match="no tokens"):
        bounds_of([best], [crowd((0, 0, 0, 0))])


def test_the_crowd_is_ten_times_the_lanes_and_its_keys_are_skewed() -> None:
    assert sum(BEST.values()) == LANES
    assert sum(CROWD.values()) == 10 * LANES
    assert max(CROWD.values()) == 10 * min(CROWD.values())
    assert "overload" in IN_PAIRS


def test_each_client_asks_anew_under_its_key_and_the_refused_ask_the_same_again() -> None:
    async def answering(number: int, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.005)
        writer.write(BUSY % 0 if number % 3 == 0 else HEAD + delta("a") + delta("", "length") + usage(2) + DONE)

    async def both() -> tuple[Crowd, Speaker]:
        async with speaking(answering) as speaker:
            server = Server("stub", speaker.target.host, speaker.target.port, 0, "m")
            return await ask_on(server, {"key-a": 2, "key-b": 1}, "test", 0.4, 10.0), speaker

    told, speaker = run_on_uvloop(both())
    assert speaker.most == 3
    assert told.errors == []
    assert told.refusals_s
    by_key: dict[str, list[bytes]] = {}
    for _, headers, body in speaker.requests:
        by_key.setdefault(headers["authorization"], []).append(body)
    assert set(by_key) == {"Bearer key-a", "Bearer key-b"}
    bodies = [body for asked in by_key.values() for body in asked]
    refused = len([number for number in range(len(bodies)) if number % 3 == 0])
    assert len(bodies) - len(set(bodies)) <= refused, "only who was refused asks the same again"
    assert len(set(bodies)) >= len(bodies) - refused
    assert all(32 <= msgspec.json.decode(body)["max_tokens"] <= 96 for body in bodies)


def test_what_cannot_be_served_is_told(tmp_path: Path) -> None:
    for words in ((), (str(tmp_path), "--backend", "fake")):
        done = CliRunner().invoke(app, ["overload", *words])
        assert done.exit_code == 2
        assert "want a folder with a model, or --backend fake" in done.stderr


@pytest.mark.slow
def test_it_plays_from_end_to_end_over_the_pseudo_model() -> None:
    words = ["overload", "--backend", "fake", "--pairs", "1", "--seconds", "2", "--json"]
    done = CliRunner().invoke(app, words)
    facts = msgspec.json.decode(done.stdout)
    assert (done.exit_code, facts["failed"]) == (0, 0)
    assert [side["clients"] for side in facts["sides"]] == [8, 80]
    assert facts["sides"][0]["refused"] == 0 < facts["sides"][1]["refused"]
    assert [bound["bound"] for bound in facts["bounds"]] == [0.95, 50.0, 0.95]
