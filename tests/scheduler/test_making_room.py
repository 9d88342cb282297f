"""Room is made before a round is planned, and what a round restores is for those that it feeds."""

from collections.abc import Sequence
from itertools import groupby

import pytest

from scheduler.admission import Pool
from scheduler.events import Finished
from scheduler.pace import Headlong
from scheduler.pieces import Chain
from scheduler.prefix import PrefixIndex
from scheduler.request import Request
from scheduler.reuse import Reuse
from scheduler.round import Drawn, LaneResult, Round
from scheduler.scheduler import Limits, Scheduler
from tests.scheduler.memory import PlainLanes, PlainShelf

BLOCK = 4


class Served:
    """A scheduler whose prefix cache has the beginnings of some texts."""

    def __init__(
        self,
        *known: Sequence[int],
        lanes: int = 2,
        pool: int | None = None,
        known_most: int = 1000,
        cuttable: bool = True,
    ) -> None:
        self.index = PrefixIndex(1000, block=BLOCK, checkpoints=not cuttable)
        self.reuse = Reuse(self.index, PlainShelf(self.index), "model")
        room = Pool(pool, PlainLanes(), self.reuse, known_most) if pool is not None else None
        self.scheduler = Scheduler(Limits(lanes, 64, 0, cuttable=cuttable), Headlong(), self.reuse, room)
        for text in known:
            chain = Chain(self.reuse.root(Request("", (0,), 1)), BLOCK)
            for piece in chain.grow(text, len(text)):
                assert self.index.insert(piece, BLOCK).granted

    def submit(self, name: str, *prompt: int, max_tokens: int = 20, priority: int = 0) -> None:
        self.scheduler.submit(Request(name, prompt, max_tokens, priority=priority), 0.0)

    def plan(self) -> Round:
        planned = self.scheduler.plan(0.0)
        assert planned is not None
        return planned

    def land(self, planned: Round) -> None:
        self.scheduler.restored(1, 0.0)
        results = [
            LaneResult(window, self.scheduler.accept(window, Drawn((7,))) if window.samples else None, window.end)
            for window in planned.windows
        ]
        self.scheduler.commit(results, 0.0)
        for store in self.scheduler.stores():
            self.index.insert(store.piece, store.piece.end - store.piece.start)


@pytest.mark.parametrize(("pool", "ahead"), [(4, False), (8, True)])
def test_no_round_is_planned_ahead_into_room_that_was_not_made(pool: int, ahead: bool) -> None:
    """A lane that has four tokens behind this round, and five behind the next."""
    served = Served(pool=pool, known_most=0)
    served.submit("a", 1, 2, 3)
    served.land(served.plan())
    flying = served.plan()
    assert (served.scheduler.plan_ahead(flying) is not None) == ahead


def test_a_lane_has_room_even_where_that_is_taken_by_what_it_was_to_be_given() -> None:
    served = Served(range(16), pool=32)
    served.submit("a", *range(20))
    planned = served.plan()
    assert planned.restores == ()
    assert [(window.start, window.rows) for window in planned.windows] == [(0, 19)]


def test_with_room_for_both_it_is_given_it() -> None:
    served = Served(range(16), pool=64)
    served.submit("a", *range(20))
    planned = served.plan()
    assert [piece.end for restore in planned.restores for piece in restore.pieces] == [4, 8, 12, 16]
    assert [(window.start, window.rows) for window in planned.windows] == [(16, 3)]


def test_the_youngest_gives_way_and_comes_back_before_all_that_wait() -> None:
    served = Served(pool=32)
    for name in ("old", "young"):
        served.submit(name, 1, 2, 3)
    served.land(served.plan())
    served.submit("urgent", 9, priority=-1)
    left: list[tuple[str, bool]] = []
    aboard: list[list[str]] = []
    for _ in range(60):
        planned = served.plan()
        served.land(planned)
        left += [(departure.request_id, departure.returns) for departure in served.scheduler.departures()]
        aboard.append([window.request_id for window in planned.windows])
        if len(left) == 4:
            break
    assert left == [("young", True), ("old", False), ("young", False), ("urgent", False)]
    assert [names for names, _ in groupby(aboard)] == [["old", "young"], ["old"], ["young"], ["urgent"]]


def test_a_round_that_tries_somebody_gives_those_that_pause_nothing() -> None:
    """Or they would be aboard of it, and whoever is tried alone were not."""
    served = Served(range(16), range(100, 116))
    served.submit("tried", *range(20))
    served.submit("pauses", *range(100, 120))
    assert served.scheduler.fail([served.plan()], "boom", 0.0) == []
    planned = served.plan()
    assert [window.request_id for window in planned.windows] == ["tried"]
    assert [restore.request_id for restore in planned.restores] == ["tried"]
    (event,) = served.scheduler.fail([planned], "boom", 0.0)
    assert isinstance(event, Finished)
    assert event.request_id == "tried"
    assert [restore.request_id for restore in served.plan().restores] == ["pauses"]


def test_what_a_donor_leaves_behind_is_restored_at_once() -> None:
    """Nobody is left with nothing to do and nothing to wait for."""
    served = Served(cuttable=False)
    served.submit("donor", *range(9))
    served.submit("waits", *range(9))
    served.land(served.plan())
    served.scheduler.cancel("donor", 0.0)
    for store in served.scheduler.stores():
        served.index.insert(store.piece, store.piece.end - store.piece.start)
    planned = served.plan()
    assert [restore.request_id for restore in planned.restores] == ["waits"]
    assert [(window.request_id, window.start) for window in planned.windows] == [("waits", 8)]
