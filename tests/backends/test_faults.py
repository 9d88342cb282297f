"""A plan's faults strike when and whom it says, and what they do not strike is as if there were none."""

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.fake import FakeBackend
from backends.fault_plan import Fault, Hang, Keep, Nan, Plan, PlanError, Raise, Slow, SsdRead, SsdWrite, read_plan
from backends.faults import FaultyBackend, InjectedError, Trigger, disk_faults
from backends.spill import Content, Spill
from scheduler.pieces import Piece, root_of
from scheduler.request import Sampling
from scheduler.round import Window

COLD, WARM = Sampling(0.0), Sampling(1.0, 3)
PATIENCE = 20.0


def window(slot: int, tokens: Sequence[int], start: int = 0, **fields: Any) -> Window:
    settings: dict[str, Any] = {"samples": True, "sampling": COLD, "reach": start + len(tokens) + 9}
    return Window(slot, f"lane-{slot}", start, tuple(tokens), **(settings | fields))


def faulty(*faults: Fault, seed: int = 0) -> FaultyBackend:
    return FaultyBackend(FakeBackend(), Plan(faults, seed))


def plan_of(tmp_path: Path, text: str) -> Plan:
    path = tmp_path / "plan.json"
    path.write_text(text)
    return read_plan(path)


# ---- the plan --------------------------------------------------------------------------------------------------------


def test_a_plan_says_when_what_and_whom(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path,
        json.dumps(
            {
                "seed": 7,
                "faults": [
                    {"kind": "raise", "probability": 0.01},
                    {"kind": "nan", "marker": [80, 79], "request": "chat", "every": 50, "times": 3},
                    {"kind": "slow", "seconds": 0.5, "after": 100},
                    {"kind": "ssd_write", "error": "ENOSPC"},
                ],
            }
        ),
    )
    assert plan == Plan(
        (
            Raise(probability=0.01),
            Nan(marker=(80, 79), request="chat", every=50, times=3),
            Slow(seconds=0.5, after=100),
            SsdWrite(error="ENOSPC"),
        ),
        7,
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"faults": [{"kind": "raise", "likely": 1}]}', r"`likely`.*faults\[0\]"),
        ('{"faults": [], "sead": 1}', "`sead`"),
        ('{"faults": [{"kind": "raise", "seconds": 1}]}', "`seconds`"),
        ('{"faults": [{"kind": "ssd_read", "marker": [1]}]}', "`marker`"),
        ('{"faults": [{"kind": "explode"}]}', "explode"),
        ('{"faults": [{"kind": "slow"}]}', "`seconds`"),
        ('{"faults": [{"kind": "raise", "probability": 1.5}]}', r"<= 1.*probability"),
        ('{"faults": [{"kind": "raise", "marker": []}]}', "marker"),
        ('{"faults": [{"kind": "ssd_read", "error": "ENOTDIR"}]}', "ENOTDIR"),
        ("{", "plan.json"),
    ],
)
def test_what_is_no_plan_is_refused_and_the_message_names_it(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        plan_of(tmp_path, text)


# ---- when ------------------------------------------------------------------------------------------------------------


@given(
    after=st.integers(0, 6),
    every=st.integers(1, 5),
    times=st.none() | st.integers(1, 4),
    meant=st.lists(st.booleans(), max_size=40),
)
def test_a_fault_strikes_on_its_occasions(after: int, every: int, times: int | None, meant: list[bool]) -> None:
    trigger = Trigger(Raise(after=after, every=every, times=times), "0/0")
    struck = [place for place, anybody in enumerate(meant) if trigger.pull(anybody)]
    occasions = list(range(len(meant)))[after:][every - 1 :: every]
    assert struck == [place for place in occasions if meant[place]][:times]


def chances(seed: int, place: int, count: int = 20_000) -> list[bool]:
    trigger = Trigger(Raise(probability=0.02), f"{seed}/{place}")
    return [trigger.pull() for _ in range(count)]


def test_chance_is_the_seeds_the_places_and_the_occasions() -> None:
    assert chances(1, 0) == chances(1, 0)
    assert len({tuple(chances(seed, place)) for seed in (1, 2) for place in (0, 1)}) == 4
    assert 300 < sum(chances(1, 0)) < 500
    assert sum(first and second for first, second in zip(chances(1, 0), chances(1, 1), strict=True)) < 40


# ---- whom ------------------------------------------------------------------------------------------------------------


def test_a_marker_strikes_every_round_that_holds_its_lane() -> None:
    backend = faulty(Raise(marker=(66, 79, 79, 77)))
    backend.verify([window(0, b"xBO", samples=False), window(1, b"BOO")])
    with pytest.raises(InjectedError):
        backend.verify([window(0, b"OM", 3), window(1, b"?", 3)])
    with pytest.raises(InjectedError):
        backend.verify([window(0, b"!", 5)])
    backend.verify([window(1, b"m", 3)])
    backend.release(0)
    backend.verify([window(0, b"abc", samples=False)])


def test_what_stood_behind_a_windows_start_counts_no_more() -> None:
    backend = faulty(Raise(marker=(1, 2)))
    backend.verify([window(0, (5, 1, 9))])
    backend.verify([window(0, (3, 9), 1)])
    backend.verify([window(0, (1, 9), 2)])
    with pytest.raises(InjectedError):
        backend.verify([window(0, (2,), 3)])


def test_a_marker_is_not_seen_over_what_is_not_known() -> None:
    backend = faulty(Raise(marker=(1, 2)))
    flight = backend.verify([window(0, (5, 1))])
    piped = window(0, (), 2, carried=True)
    ahead = backend.verify([piped], flight)
    assert ahead.read() != flight.read()
    backend.verify([window(0, (2,), 3)])


def test_a_sibling_has_what_was_copied_to_it() -> None:
    backend = faulty(Raise(marker=(1, 2)))
    backend.verify([window(0, (5, 1), samples=False)])
    with pytest.raises(InjectedError):
        backend.verify([window(3, (2,), 2, copies=0)])


def test_a_request_strikes_its_own_lane() -> None:
    backend = faulty(Nan(request="ne-1"))
    drawn = backend.verify([window(0, (1, 2)), window(1, (1, 2)), window(2, (1, 2))]).read()
    assert [each.error is not None for each in drawn] == [False, True, False]


# ---- what they do ----------------------------------------------------------------------------------------------------


def test_without_faults_all_is_as_it_is() -> None:
    inner = FakeBackend()
    backend, plain = FaultyBackend(inner, Plan(())), FakeBackend()
    windows = [window(0, (1, 2, 3), draft=(4, 5)), window(1, (7,), sampling=WARM), window(2, (1,), samples=False)]
    assert backend.verify(windows).read() == plain.verify(windows).read()
    assert backend.keep({0: 4}) == {0: 4}
    assert (backend.info, backend.blocks, backend.memory, backend.drafters) == (
        inner.info,
        inner.blocks,
        inner.memory,
        inner.drafters,
    )
    assert backend.use() == inner.use()
    backend.rest()
    backend.release(0)
    assert set(inner.lanes) == {1, 2}
    backend.reset()
    assert inner.lanes == {}


@pytest.mark.parametrize("kind", ["raise", "allocation"])
def test_a_forward_that_cannot_be_started_computes_nothing(tmp_path: Path, kind: str) -> None:
    inner = FakeBackend()
    plan = plan_of(tmp_path, json.dumps({"faults": [{"kind": kind, "after": 1, "times": 1}]}))
    backend = FaultyBackend(inner, plan)
    backend.verify([window(0, (1, 2))])
    with pytest.raises(InjectedError, match=r"\[malloc\]" if kind == "allocation" else "forward"):
        backend.verify([window(0, (3,), 2)])
    assert inner.lanes[0].tokens == [1, 2]
    assert backend.verify([window(0, (3,), 2)]).read() == FakeBackend().verify([window(0, (1, 2, 3))]).read()


def test_a_flight_fails_when_it_is_read_and_only_then(tmp_path: Path) -> None:
    backend = FaultyBackend(FakeBackend(), plan_of(tmp_path, '{"faults": [{"kind": "raise_read", "times": 1}]}'))
    flight = backend.verify([window(0, (1, 2))])
    with pytest.raises(InjectedError):
        flight.read()
    assert len(backend.verify([window(0, (3,), 2)]).read()) == 1


def test_keep_fails_before_it_cuts() -> None:
    backend = faulty(Keep(every=2, marker=(9,)))
    backend.verify([window(0, (9,)), window(1, (8,))])
    assert backend.keep({0: 1}) == {0: 1}
    with pytest.raises(InjectedError):
        backend.keep({0: 1})
    assert backend.keep({0: 1}) == {0: 1}
    assert backend.keep({1: 1}) == {1: 1}


@given(
    lanes=st.lists(st.tuples(st.booleans(), st.sampled_from([COLD, WARM])), min_size=1, max_size=6),
    seed=st.integers(0, 50),
)
def test_nan_strikes_one_lane_that_draws_and_nobody_else(lanes: list[tuple[bool, Sampling]], seed: int) -> None:
    windows = [
        window(slot, (slot, 2), samples=samples, sampling=sampling, draft=(3,) if samples else ())
        for slot, (samples, sampling) in enumerate(lanes)
    ]
    backend = faulty(Nan(times=1), seed=seed)
    drawn, plain = backend.verify(windows).read(), FakeBackend().verify(windows).read()
    struck = [slot for slot, each in enumerate(drawn) if each.error is not None]
    assert len(struck) == any(samples for samples, _ in lanes)
    for slot, (each, other) in enumerate(zip(drawn, plain, strict=True)):
        assert len(each.tokens) == len(other.tokens)
        assert slot in struck or each == other
    again = [window(slot, (7,), 2, sampling=sampling) for slot, (_, sampling) in enumerate(lanes)]
    assert all(each.error is None for each in backend.verify(again).read()) or not struck


def test_a_backend_that_cannot_be_spoiled_is_refused_a_plan_with_nan() -> None:
    sound = FaultyBackend(FakeBackend(), Plan(()))
    with pytest.raises(ValueError, match="NaN"):
        FaultyBackend(sound, Plan((Nan(),)))


def test_a_slow_forward_is_waited_for_once_and_gives_what_it_gives() -> None:
    waits: list[float | None] = []
    backend = FaultyBackend(FakeBackend(), Plan((Slow(seconds=0.5), Hang(every=2))), wait=waits.append)
    windows = [window(0, (1, 2))]
    flights = [backend.verify(windows) for _ in range(2)]
    assert waits == []
    assert flights[0].read() == flights[0].read() == FakeBackend().verify(windows).read()
    assert waits == [0.5]
    flights[1].read()
    assert waits == [0.5, 0.5, None]


def test_all_that_is_injected_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline.faults"):
        backend = faulty(Nan(times=1), SsdRead(times=1))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        backend.verify([window(4, (1, 2))]).read()
        with pytest.raises(OSError):
            backend.disk("read")
    assert "nan, ssd_read" in caplog.messages[0]
    assert caplog.messages[1:] == ["injected: nan in round 1, slots [4]", "injected: ssd_read, EIO"]


# ---- the disk --------------------------------------------------------------------------------------------------------

PIECE = Piece(b"k" * 16, root_of("here"), 0, 64)


class Answer:
    """What a thread of the spill says. Written by that thread."""

    def __init__(self) -> None:
        self.told: list[bool | Content | None] = []
        self._came = threading.Semaphore(0)

    def __call__(self, told: bool | Content | None) -> None:
        self.told.append(told)
        self._came.release()

    def wait(self) -> bool | Content | None:
        assert self._came.acquire(timeout=PATIENCE)
        return self.told[-1]


def test_the_disk_fails_as_planned_and_leaves_nothing_behind(tmp_path: Path) -> None:
    backend = faulty(SsdWrite(error="ENOSPC", times=1), SsdRead(after=1, times=1))
    warned: list[str] = []
    spill = Spill(
        tmp_path,
        "here",
        most_bytes=1 << 20,
        bytes_per_second=0,
        retry_seconds=0,
        warn=warned.append,
        faults=disk_faults(backend),
    )
    answer = Answer()
    for good in (False, True):
        assert spill.write(PIECE, b"meta", [memoryview(b"data")], answer)
        assert answer.wait() is good
        assert spill.stats.files == int(good)
    assert "No space left" in warned[0]
    for good in (True, False, True):
        spill.read(PIECE.key, answer)
        assert (answer.wait() is not None) is good
    assert (spill.stats.failed_writes, spill.stats.failed_reads) == (1, 1)
    spill.close(PATIENCE)


def test_other_backends_have_sound_disks() -> None:
    for point in ("written", "read"):
        disk_faults(FakeBackend())(point)
        with pytest.raises(OSError):
            disk_faults(faulty(SsdWrite(), SsdRead()))(point)
