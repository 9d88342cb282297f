"""A long prompt among lanes that stream: which times count as beside it, and who must come first."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import uvloop
from typer.testing import CliRunner

from deploy.bench.__main__ import app
from deploy.bench.client import Record
from deploy.bench.everything import IN_PAIRS
from deploy.bench.long_prompt import SHORT_ONES, STREAMS, Repeat, Scene, arrive, bounds_of, repeat_of, told_of
from deploy.bench.prefix_asking import Answer
from deploy.bench.servers import Server, ServerError
from deploy.bench.serving import Subject
from tests.deploy.streams import DONE, HEAD, Script, Speaker, delta, speaking, usage

T = TypeVar("T")

RECORD = Record("p", 10.0, 14.0, 12.0, 13.0, (), 4, 1500, 4, 0.25, "text", "length", None)
LONG = Answer(RECORD, 0)
SHORT = Answer(replace(RECORD, started_at=10.05, first_at=11.0), 0)
REPEAT = Repeat([0.05] * 100, [0.2] * 100, LONG, (SHORT, SHORT))


def run_on_uvloop(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def arriving(script: Script, length: int = 300) -> tuple[Repeat, Speaker]:
    async def both() -> tuple[Repeat, Speaker]:
        async with speaking(script) as speaker:
            server = Server("stub", speaker.target.host, speaker.target.port, 0, "m")
            return await arrive(Scene(server, Subject(None, Path()), 20.0, 0.2), "test", length, 3), speaker

    return run_on_uvloop(both())


def test_the_growth_of_the_slowest_and_the_order_are_told() -> None:
    assert REPEAT.grown_ms == pytest.approx(150.0)
    assert REPEAT.order == pytest.approx(0.5)
    late = Answer(replace(SHORT.record, first_at=12.5), 0)
    assert replace(REPEAT, short=(SHORT, late)).order == pytest.approx(1.25)
    with pytest.raises(ValueError, match="no two events"):
        _ = replace(REPEAT, beside=[]).grown_ms


def test_bounds_are_of_medians_and_each_can_be_missed() -> None:
    slow = replace(REPEAT, beside=[0.31] * 100)
    behind = replace(REPEAT, short=(Answer(replace(SHORT.record, first_at=12.5), 0),))
    assert [bound.holds for bound in bounds_of([REPEAT, slow, REPEAT], 250.0)] == [True, True]
    assert [bound.holds for bound in bounds_of([slow, slow, REPEAT], 250.0)] == [False, True]
    assert [bound.holds for bound in bounds_of([REPEAT, behind, behind], 250.0)] == [True, False]
    assert [bound.holds for bound in bounds_of([REPEAT], 149.0)] == [False, True]


def test_people_are_told_what_was_cached_that_should_not_be() -> None:
    assert not any("cached" in line for line in told_of(1500, [REPEAT]))
    assert any("64 tokens were cached" in line for line in told_of(1500, [replace(REPEAT, long=Answer(RECORD, 64))]))


def test_times_before_the_arrival_and_until_the_first_token_are_told_apart() -> None:
    """Events of one stream at 7, 8, 9, 9.5, 11, 12.5 and 13; the long one is sent at 10 and answered at 12."""
    stream = replace(RECORD, first_at=7.0, gaps_s=(1.0, 1.0, 0.5, 1.5, 1.5, 0.5))
    other = replace(RECORD, first_at=8.5, gaps_s=(0.25,))
    silent = replace(RECORD, first_at=None, gaps_s=())
    repeat = repeat_of([stream, other, silent], 8.0, LONG, (SHORT,))
    assert repeat == Repeat([1.0, 0.5, 0.25], [1.5, 1.5], LONG, (SHORT,))


def test_lanes_stream_then_the_long_one_comes_and_the_short_ones_behind_it() -> None:
    answered = 0
    all_short_ones = asyncio.Event()

    async def script(number: int, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        writer.write(HEAD)
        while number < STREAMS:
            writer.write(delta("a"))
            await asyncio.sleep(0.005)
        if number == STREAMS:
            await all_short_ones.wait()
        writer.write(delta("a") + delta("", "length") + usage(4) + DONE)
        await writer.drain()
        answered += 1
        if answered == SHORT_ONES:
            await asyncio.sleep(0.02)  # so that what was written is read first
            all_short_ones.set()

    repeat, speaker = arriving(script)
    bodies = [msgspec.json.decode(body) for _, _, body in speaker.requests]
    assert len(bodies) == STREAMS + 1 + SHORT_ONES
    assert ["messages" in body for body in bodies] == [True] * STREAMS + [False] * (1 + SHORT_ONES)
    assert [len(body["prompt"]) for body in bodies[STREAMS:]] == [300] + [20] * SHORT_ONES
    prompts = [tuple(body["prompt"][:8]) for body in bodies[STREAMS:]]
    assert len(set(prompts)) == len(prompts), "none is spared by the prefix cache"
    assert len(repeat.alone) > STREAMS
    assert len(repeat.beside) >= STREAMS
    assert repeat.order < 1


def test_lanes_that_end_too_early_prove_nothing() -> None:
    async def script(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + delta("a") + delta("", "length") + usage(1) + DONE)

    with pytest.raises(ServerError, match=r"a lane ended before .*: length after 1 tokens"):
        arriving(script)


def test_a_newcomer_that_fails_is_an_error() -> None:
    async def script(number: int, writer: asyncio.StreamWriter) -> None:
        if number >= STREAMS:
            writer.write(b"HTTP/1.1 400 Bad\r\nContent-Length: 5\r\n\r\nwrong")
            return
        writer.write(HEAD)
        while True:
            writer.write(delta("a"))
            await asyncio.sleep(0.01)

    with pytest.raises(ServerError, match="HTTP 400: wrong"):
        arriving(script)


def test_it_belongs_to_all_benchmarks_and_says_what_it_cannot_serve() -> None:
    assert "long-prompt" in IN_PAIRS
    done = CliRunner().invoke(app, ["long-prompt"])
    assert done.exit_code == 2
    assert "want a folder with a model, or --backend fake" in done.stderr


@pytest.mark.slow
def test_it_plays_from_end_to_end_over_the_pseudo_model() -> None:
    words = ["long-prompt", "--backend", "fake", "--pairs", "1", "--alone", "0.2", "--longer", "3000", "--json"]
    done = CliRunner().invoke(app, words)
    facts = msgspec.json.decode(done.stdout)
    assert done.exit_code == 0
    assert [bound["bound"] for bound in facts["bounds"]] == [250.0, 1.0]
    assert [note.partition(":")[0] for note in facts["notes"][:4]] == ["1500 tokens"] * 2 + ["3000 tokens"] * 2
