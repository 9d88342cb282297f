"""How much of a round prefill gets: what the time between two tokens leaves it while others decode; never nothing."""

import pytest

from scheduler.cost import RoundShape
from scheduler.pace import Headlong
from scheduler.request import Request
from scheduler.round import Acceptance, LaneResult
from scheduler.scheduler import Limits, Scheduler


class Priced(Headlong):
    """A machine on which a round of so many rows takes a tenth of a second; of fewer where the text is long."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def rows_within(self, seconds: float, beside: RoundShape, start: int) -> int:
        assert seconds == 0.1
        assert not beside.wide
        return max(0, self._rows - beside.rows - start // 10)


def chunk_rows(rows_within: int, *, decoding: int, inter_token: float = 0.1, draft_tokens: int = 0) -> int:
    """The rows of a newcomer's first chunk, beside lanes that decode."""
    scheduler = Scheduler(Limits(8, 64, draft_tokens, inter_token), Priced(rows_within))
    for lane in range(decoding):
        scheduler.submit(Request(f"decodes {lane}", (1,), 50), 0.0)
    scheduler.submit(Request("reads", tuple(range(500)), 50), 0.0)
    planned = scheduler.plan(0.0)
    assert planned is not None
    assert sum(window.samples for window in planned.windows) == decoding
    (chunk,) = (window for window in planned.windows if not window.samples)
    return chunk.rows


@pytest.mark.parametrize(
    ("rows_within", "decoding", "rows"),
    [(40, 1, 39), (40, 4, 36), (1000, 1, 63), (18, 1, 17), (9, 1, 8), (8, 1, 8), (1, 7, 8)],
)
def test_while_others_decode_a_round_stays_short(rows_within: int, decoding: int, rows: int) -> None:
    assert chunk_rows(rows_within, decoding=decoding) == rows


def test_alone_or_without_a_limit_prefill_takes_all_that_there_is() -> None:
    assert chunk_rows(20, decoding=0) == 64
    assert chunk_rows(20, decoding=4, inter_token=0.0) == 60


def test_the_further_a_prompt_is_read_the_fewer_rows_it_gets() -> None:
    scheduler = Scheduler(Limits(8, 64, 0, 0.1), Priced(40))
    scheduler.submit(Request("decodes", (1,), 50), 0.0)
    scheduler.submit(Request("reads", tuple(range(500)), 50), 0.0)
    assert [_play(scheduler)["reads"] for _ in range(3)] == [39, 36, 32]


def test_the_shortest_prompt_is_read_first_beside_a_quarter_for_the_eldest() -> None:
    scheduler = Scheduler(Limits(8, 64, 0), Headlong())
    for name, length in (("eldest", 500), ("long", 200), ("short", 11)):
        scheduler.submit(Request(name, tuple(range(length)), 50, owner=name), 0.0)
    assert _play(scheduler) == {"short": 10, "long": 38, "eldest": 16}


def test_drafts_and_prefill_share_by_halves() -> None:
    assert chunk_rows(1000, decoding=4, draft_tokens=2) == 60 - 8
    assert chunk_rows(1000, decoding=4, draft_tokens=20) == 30


def sibling_starts(*, cuttable: bool, ahead: int) -> tuple[int, int | None]:
    """Where a younger sibling is fed from, and whom it copies; the older one is `ahead` tokens behind the prompt."""
    scheduler = Scheduler(Limits(2, 64, 0, cuttable=cuttable), Headlong())
    prompt = tuple(range(20))
    scheduler.submit(Request("older", prompt, 50), 0.0)
    for _ in range(1 + ahead):
        _play(scheduler)
    scheduler.submit(Request("younger", prompt, 50), 0.0)
    planned = scheduler.plan(0.0)
    assert planned is not None
    (window,) = (each for each in planned.windows if each.request_id == "younger")
    return window.start, window.copies


def _play(scheduler: Scheduler) -> dict[str, int]:
    """One round; who was fed how many rows."""
    planned = scheduler.plan(0.0)
    assert planned is not None
    results = [
        LaneResult(window, Acceptance((7,), 0) if window.samples else None, window.end) for window in planned.windows
    ]
    scheduler.commit(results, 0.0)
    return {window.request_id: window.rows for window in planned.windows}


def test_caches_that_cannot_be_cut_are_copied_only_where_they_stand() -> None:
    assert sibling_starts(cuttable=True, ahead=3) == (19, 0)
    assert sibling_starts(cuttable=True, ahead=0) == (19, 0)
    assert sibling_starts(cuttable=False, ahead=0) == (19, 0)
    assert sibling_starts(cuttable=False, ahead=1) == (0, None)
