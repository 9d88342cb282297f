"""What half an hour is held against: one end for every request, an error for every bad one, memory that stays flat."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.bench.__main__ import app
from deploy.bench.arrivals import Due
from deploy.bench.client import Exchange, Target
from deploy.bench.everything import IN_PAIRS
from deploy.bench.pairs import target_of
from deploy.bench.servers import Server, ServerError, free_port
from deploy.bench.serving import Subject
from deploy.bench.soak import Scene, capacity_of, perform, play
from deploy.bench.soak_account import (
    FLAT,
    End,
    Outcome,
    Sample,
    complaint_of,
    judge,
    memory_of,
    spread_over,
    tally,
)
from deploy.bench.soak_requests import (
    BAD_SHARE,
    MOST_SCHEMAS,
    SHARES,
    Ask,
    Kind,
    Script,
    bad_requests,
    small_schemas,
)
from deploy.bench.wire import Arrival, Ends
from tests.api.servers import running
from tests.deploy.streams import HEAD, answer, delta, event

T = TypeVar("T")

TARGET = Target("127.0.0.1", 80, "m")
SCRIPT = Script(TARGET, Subject(None, Path()).tokens, small_schemas(Path("none")), 7)
GOOD = answer("a", tokens=1)
ERROR = json.dumps({"error": {"message": "no", "type": "t", "param": None, "code": None}}).encode()
WHOLE = json.dumps({"choices": [{"finish_reason": "stop", "text": "a"}], "usage": {}}).encode()


def run_on_uvloop(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def response(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def judged(kind: Kind, data: bytes, failure: str | None = None) -> Outcome:
    arrivals = (Arrival(1.0, data),) if data else ()
    return judge(Ask(kind, "it", b""), Exchange(0.0, 1.0, arrivals, failure))


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "data", "end"),
    [
        (Kind.PLAIN, HEAD + GOOD, End.FINISHED),
        (Kind.CONSTRAINED, HEAD + GOOD, End.FINISHED),
        (Kind.WHOLE, response(200, WHOLE), End.FINISHED),
        (Kind.DEADLINE, response(504, ERROR), End.FINISHED),
        (Kind.DEADLINE, HEAD + delta("a") + event({"error": {"message": "late"}}), End.FINISHED),
        (Kind.PLAIN, response(429, ERROR), End.REFUSED),
        (Kind.BAD, response(429, ERROR), End.REFUSED),
        (Kind.CONSTRAINED, response(503, ERROR), End.REFUSED),
        (Kind.BAD, response(400, ERROR), End.REJECTED),
        (Kind.BAD, response(405, ERROR), End.REJECTED),
        (Kind.LEAVING, HEAD + delta("a"), End.LEFT),
        (Kind.UNREAD, b"", End.LEFT),
    ],
)
def test_a_request_ends_as_its_kind_should(kind: Kind, data: bytes, end: End) -> None:
    assert judged(kind, data) == Outcome(kind, end)


@pytest.mark.parametrize(
    ("kind", "data", "complaint"),
    [
        (Kind.PLAIN, HEAD + delta("a"), "0 finish reasons"),
        (Kind.PLAIN, HEAD + GOOD + GOOD, "2 finish reasons"),
        (Kind.PLAIN, HEAD + GOOD + delta("b"), "1 events behind the end"),
        (Kind.PLAIN, HEAD + delta("a") + event({"error": {"message": "broken"}}), "ended with an error"),
        (Kind.PLAIN, response(500, ERROR), "HTTP 500: no"),
        (Kind.PLAIN, response(400, ERROR), "HTTP 400: no"),
        (Kind.PLAIN, response(504, ERROR), "HTTP 504: no"),
        (Kind.PLAIN, response(429, b"busy"), "not understood"),
        (Kind.PLAIN, b"", "without an answer"),
        (Kind.PLAIN, b"nonsense\r\n\r\n", "not understood"),
        (Kind.WHOLE, response(200, b'{"choices": [], "usage": {}}'), "without a choice"),
        (Kind.WHOLE, response(200, b'{"choices": [{"finish_reason": null}], "usage": {}}'), "not understood"),
        (Kind.WHOLE, response(200, WHOLE)[:-5], "not understood"),
        (Kind.BAD, HEAD + GOOD, "was served"),
        (Kind.BAD, response(500, ERROR), "HTTP 500"),
        (Kind.BAD, response(400, b"<html>"), "not understood"),
    ],
)
def test_any_other_end_is_a_fault(kind: Kind, data: bytes, complaint: str) -> None:
    outcome = judged(kind, data)
    assert outcome.end is End.FAULT
    assert complaint in str(outcome.complaint)
    assert str(outcome.complaint).startswith("it: ")


def test_one_that_hangs_is_a_fault_whatever_came_before() -> None:
    assert judged(Kind.PLAIN, HEAD + GOOD, "timed out after 600 s").complaint == "it: timed out after 600 s"
    assert judged(Kind.BAD, b"", "timed out after 600 s").end is End.FAULT


counts = st.integers(0, 2)


@given(st.builds(Ends, counts, counts, counts, counts), st.booleans())
def test_exactly_one_end_is_right(ends: Ends, may_fail: bool) -> None:
    whole = ends == Ends(1, 0, 1, 0)
    failed = ends == Ends(0, 1, 0, 0)
    assert (complaint_of(ends, may_fail=may_fail) is None) == (whole or (failed and may_fail))


def test_kinds_are_counted_by_their_ends() -> None:
    fine, wrong = Outcome(Kind.PLAIN, End.FINISHED), Outcome(Kind.BAD, End.FAULT, "was served")
    assert tally([fine, fine, wrong]) == {(Kind.PLAIN, End.FINISHED): 2, (Kind.BAD, End.FAULT): 1}


# ---- memory ----------------------------------------------------------------------------------------------------------


def samples(*resident: float, full_from: int = 0) -> list[Sample]:
    """One every second of as many seconds."""
    return [
        Sample(float(at), int(1000 * each), 100.0 if at >= full_from else 0.0, 0, 1, 0)
        for at, each in enumerate(resident)
    ]


def test_memory_may_grow_until_the_caches_are_full_and_not_after_that() -> None:
    filling = [0.5 + at / 60 for at in range(30)]
    flat = memory_of(samples(*filling, *[1.0] * 70), 100.0, 100.0)
    assert (flat.ratio.median, flat.begin, flat.filled_at) == (1.0, pytest.approx(100 / 3), 0.0)
    leaking = memory_of(samples(*filling, *[1.0 + at / 1000 for at in range(70)]), 100.0, 100.0)
    assert leaking.ratio.median > FLAT
    assert leaking.ratio.low < leaking.ratio.median == leaking.ratio.high


def test_memory_that_is_given_back_in_between_is_no_leak() -> None:
    resting = memory_of(samples(*[1.0, 0.7] * 50), 100.0, 100.0)
    assert (resting.ratio.median, resting.ratio.low) == (1.0, 0.7)
    begun_at_rest = memory_of(samples(*[0.7] * 40, *[1.0] * 60), 100.0, 100.0)
    assert begun_at_rest.ratio.median == 1.0


def test_it_is_compared_from_when_the_prefix_cache_was_full_if_that_is_later() -> None:
    grown = samples(*[1.0] * 50, *[2.0] * 50, full_from=50)
    late = memory_of(grown, 100.0, 100.0)
    assert (late.filled_at, late.begin, late.ratio.median) == (50.0, 50.0, 1.0)
    too_late = memory_of(samples(*[1.0] * 100, full_from=95), 100.0, 100.0)
    assert (too_late.filled_at, too_late.begin) == (95.0, pytest.approx(70.0))
    never = memory_of(samples(*[1.0] * 100, full_from=200), 100.0, 100.0)
    assert (never.filled_at, never.begin) == (None, pytest.approx(100 / 3))


def test_without_samples_nothing_is_proven() -> None:
    with pytest.raises(ValueError, match="too few"):
        memory_of(samples(1.0, 1.0), 100.0, 100.0)


@given(st.integers(0, 300))
def test_ten_samples_are_shown_from_the_first_to_the_last(count: int) -> None:
    taken = samples(*[1.0] * count)
    shown = spread_over(taken, 10)
    assert len(shown) == min(count, 10)
    assert [sample.at for sample in shown] == sorted({sample.at for sample in shown})
    if count:
        assert (shown[0], shown[-1]) == (taken[0], taken[-1])


# ---- what is sent ----------------------------------------------------------------------------------------------------


def body_of(ask: Ask) -> dict[str, Any]:
    decoded = msgspec.json.decode(ask.request.partition(b"\r\n\r\n")[2])
    assert isinstance(decoded, dict)
    return decoded


def test_all_kinds_come_in_their_shares_and_chance_depends_on_the_seed_and_the_number_only() -> None:
    due = Due(0.0, 40, 12)
    asks = [SCRIPT.good(number, due) for number in range(1000)]
    found = Counter(ask.kind for ask in asks)
    assert sum(SHARES.values()) == pytest.approx(1.0)
    assert set(found) == set(SHARES) == set(Kind) - {Kind.BAD}
    assert all(abs(found[kind] / 1000 - share) < 0.05 for kind, share in SHARES.items())
    bad = [SCRIPT.bad(number) for number in range(1000)]
    assert abs(sum(ask is not None for ask in bad) / 1000 - BAD_SHARE) < 0.05
    assert SCRIPT.good(500, due) == asks[500]
    other = Script(TARGET, Subject(None, Path()).tokens, small_schemas(Path("none")), 8)
    assert [other.good(number, due).kind for number in range(50)] != [ask.kind for ask in asks[:50]]


def test_lengths_are_those_that_are_due_and_half_of_the_prompts_begin_as_others_do() -> None:
    asks = [SCRIPT.plain(number, Due(0.0, 300, 12)) for number in range(40)]
    bodies = [body_of(ask) for ask in asks]
    assert {len(body["prompt"]) for body in bodies} == {300}
    assert all((body["max_tokens"], body["ignore_eos"], body["stream"]) == (12, True, True) for body in bodies)
    heads = Counter(tuple(body["prompt"][:128]) for body in bodies)
    assert len(heads) < 40
    assert sum(often for often in heads.values() if often > 1) > 10
    assert len({tuple(body["prompt"]) for body in bodies}) == 40
    short = body_of(SCRIPT.plain(1, Due(0.0, 1, 1)))
    assert len(short["prompt"]) == 1


def test_each_kind_asks_for_what_it_is() -> None:
    by_kind = {ask.kind: ask for ask in (SCRIPT.good(number, Due(0.0, 40, 12)) for number in range(300))}
    assert body_of(by_kind[Kind.WHOLE])["stream"] is False
    assert not by_kind[Kind.WHOLE].streams
    assert body_of(by_kind[Kind.CONSTRAINED])["response_format"]["json_schema"]["schema"] in small_schemas(Path("none"))
    deadline = body_of(by_kind[Kind.DEADLINE])
    assert deadline["max_tokens"] == 10**9
    assert 0.5 <= deadline["timeout"] <= 2.5
    assert 1 <= by_kind[Kind.LEAVING].reads < 12
    assert by_kind[Kind.UNREAD].held_s >= 1


def test_a_dozen_small_schemas_are_taken_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "schemas.jsonl"
    made = [{"type": "object", "properties": {"x" * size: {"type": "null"}}} for size in range(30, 0, -1)]
    path.write_text("".join(json.dumps({"schema": schema}) + "\n" for schema in [*made, {"enum": [1]}]))
    assert small_schemas(path) == made[::-1][:MOST_SCHEMAS]
    path.write_text(json.dumps({"schema": {"enum": [1]}}))
    assert small_schemas(path) == small_schemas(tmp_path / "none")


def test_bad_requests_are_all_different() -> None:
    bad = bad_requests(TARGET)
    assert len({ask.name for ask in bad}) == len({ask.request for ask in bad}) == len(bad) > 15
    assert {ask.kind for ask in bad} == {Kind.BAD}


# ---- play ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """The real server over the pseudo-model, in this process, with clients that have little patience."""
    with running() as server:
        address = Server("paceline", "127.0.0.1", server.port, os.getpid(), "fake")
        tokens = Subject(None, Path()).tokens
        script = Script(target_of(address), tokens, small_schemas(Path("none")), 7, (0.01, 0.1))
        yield Scene(address, script, 30.0)


def test_the_server_serves_every_due_request_and_refuses_the_bad_ones(scene: Scene) -> None:
    dues = [Due(place / 100, 40, 8) for place in range(120)]
    outcomes, seen, faults = run_on_uvloop(play(scene, dues, 1.2))
    bad = sum(scene.script.bad(number) is not None for number in range(120))
    assert [outcome.complaint for outcome in outcomes if outcome.complaint] == faults == []
    assert len(outcomes) == 120 + bad
    counts = tally(outcomes)
    assert {kind for kind, _ in counts} == set(Kind)
    assert {(kind, end) for kind, end in counts if end is not End.FINISHED} == {
        (Kind.BAD, End.REJECTED),
        (Kind.LEAVING, End.LEFT),
        (Kind.UNREAD, End.LEFT),
    }
    assert counts[Kind.BAD, End.REJECTED] == bad
    assert seen[0].resident > 1 << 20


def test_every_bad_request_is_the_clients_fault(scene: Scene) -> None:
    async def each() -> list[Outcome]:
        return [judge(ask, await perform(scene, ask)) for ask in bad_requests(scene.target)]

    outcomes = run_on_uvloop(each())
    assert [outcome.complaint for outcome in outcomes if outcome.end is not End.REJECTED] == []


def test_what_a_server_can_do_is_measured_by_requests_that_finish(scene: Scene) -> None:
    assert run_on_uvloop(capacity_of(scene, [Due(0.0, 40, 8)], 0.3)) > 1


def nobody() -> Scene:
    server = Server("nobody", "127.0.0.1", free_port(), 0, "m")
    return Scene(server, Script(target_of(server), Subject(None, Path()).tokens, [{}], 7, (0.01, 0.1)), 5.0)


def test_a_server_that_is_not_there_is_a_fault_of_every_request_and_of_the_metrics() -> None:
    outcomes, seen, faults = run_on_uvloop(play(nobody(), [Due(0.0, 9, 3)] * 20, 0.1))
    assert {outcome.end for outcome in outcomes} == {End.FAULT, End.LEFT}
    assert all("connect" in str(outcome.complaint) for outcome in outcomes if outcome.end is End.FAULT)
    assert seen == []
    assert len(faults) == 1
    assert "metrics" in faults[0]


def test_nothing_is_measured_of_a_server_that_fails() -> None:
    with pytest.raises(ServerError, match="while the capacity was measured"):
        run_on_uvloop(capacity_of(nobody(), [Due(0.0, 9, 3)], 0.05))


def test_it_takes_too_long_to_belong_to_all_benchmarks_and_says_what_it_cannot_serve() -> None:
    assert "soak" not in IN_PAIRS
    done = CliRunner().invoke(app, ["soak"])
    assert done.exit_code == 2
    assert "want a folder with a model, or --backend fake" in done.stderr


@pytest.mark.slow
def test_it_plays_from_end_to_end_over_the_pseudo_model() -> None:
    """So short a run has too few samples to compare, which it says; nothing else is wrong."""
    done = CliRunner().invoke(app, ["soak", "--backend", "fake", "--minutes", "0.1", "--measure", "1", "--json"])
    facts = json.loads(done.stdout)
    assert [fault for fault in facts["faults"] if "samples of memory are too few" not in fault] == []
    assert done.exit_code == 1
    assert sum(count["requests"] for count in facts["counts"]) > 10
    assert any("0 lanes gave way" in note for note in facts["notes"])
