"""Replays against sums done by hand, and what holds whatever was recorded."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from api.text import ByteTokenizer
from backends.fake import FakeBackend
from deploy.bench.__main__ import app
from deploy.bench.policies import FixedDepth, Oracle
from deploy.bench.prompts import editing_prompts, mixed_prompts
from deploy.bench.record import SWEEP, serve, sweep
from deploy.bench.recording import LaneRecord, RecordedCosts, Recording, RoundRecord, write_recording
from deploy.bench.replay import OFF, Played, play, policies
from scheduler.cost import RoundShape
from scheduler.draft import Draft, DraftAsk
from scheduler.pace import LaneOffers, Offer

OUTPUT = (11, 12, 13, 14, 15, 16)
ONE = LaneRecord("one", (1,), OUTPUT)
ROUNDS = (
    RoundRecord(RoundShape(1, False, 0), 0.010, served=False),
    RoundRecord(RoundShape(2, False, 0), 0.012, served=False),
    RoundRecord(RoundShape(1, True, 0), 0.010, served=False),
    RoundRecord(RoundShape(11, True, 0), 0.060, served=False),
)
"""Plain rounds take 10 and 12 ms; a wide one takes 5 ms more for every further row."""
PLAIN = RoundShape(0, False, 0)


class Guesses:
    """A source that knows the answer, but for what is wrong in it: `wrong` are places in an output."""

    name = "guesses"
    costly = False

    def __init__(self, texts: Sequence[LaneRecord], wrong: frozenset[int] = frozenset()) -> None:
        self._texts = {str(place): lane.output for place, lane in enumerate(texts)}
        self._wrong = wrong

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask, self._texts[ask.request_id]) for ask in asks]

    def _draft(self, ask: DraftAsk, output: Sequence[int]) -> Draft:
        done = len(ask.tokens) - ask.prompt
        places = range(done, min(done + ask.budget, len(output)))
        tokens = tuple(0 if place in self._wrong else output[place] for place in places)
        return Draft(tokens, (0,) * len(tokens))

    def forget(self, request_id: str) -> None:
        pass


def played(
    name: str, lanes: Sequence[LaneRecord] = (ONE,), *, wrong: frozenset[int] = frozenset(), clients: int = 1
) -> Played:
    recording = Recording(clients, tuple(lanes), ROUNDS)
    costs = RecordedCosts(ROUNDS)
    return play(recording, costs, name, policies(recording, costs)[name], sources=[Guesses(lanes, wrong)])


def test_without_drafts_every_token_is_a_round() -> None:
    off = played(OFF)
    assert (off.tokens, off.drafted, off.accepted, len(off.rounds)) == (6, 0, 0, 6)
    assert off.seconds == pytest.approx(0.060)
    assert off.tokens_per_s == pytest.approx(100)


def test_two_right_drafts_make_three_tokens_of_a_round() -> None:
    """Two rounds of three rows, at 20 ms each."""
    two = played("fixed 2")
    assert [each.shape.rows for each in two.rounds] == [3, 3]
    assert (two.tokens, two.drafted, two.accepted) == (6, 4, 4)
    assert two.seconds == pytest.approx(0.040)


def test_a_draft_is_at_most_what_is_left_minus_one() -> None:
    """Five drafts and the bonus are the whole answer: one round of six rows, 35 ms."""
    eight = played("fixed 8")
    assert [each.drafted for each in eight.rounds] == [5]
    assert eight.seconds == pytest.approx(0.035)


def test_wrong_drafts_cost_their_rows() -> None:
    """The second token is never guessed. Rounds of 3 rows emit 2, 3 and 1 tokens, the last one without a draft."""
    two = played("fixed 2", wrong=frozenset({1}))
    assert [each.shape.rows for each in two.rounds] == [3, 3, 1]
    assert (two.drafted, two.accepted) == (4, 3)
    assert two.seconds == pytest.approx(0.020 + 0.020 + 0.010)


def test_who_knows_what_comes_drafts_only_that() -> None:
    """One right token before the wrong one: 2 tokens in 15 ms beat 1 in 10. Then four are left: 4 tokens in 25 ms."""
    oracle = played("oracle", wrong=frozenset({1}))
    assert [each.drafted for each in oracle.rounds] == [1, 3]
    assert oracle.drafted == oracle.accepted == 4
    assert oracle.seconds == pytest.approx(0.015 + 0.025)


def test_who_knows_that_nothing_comes_true_drafts_nothing() -> None:
    every = frozenset(range(len(OUTPUT)))
    assert played("oracle", wrong=every).rounds == played(OFF, wrong=every).rounds


def test_the_planner_learns_to_draft_and_to_leave_it() -> None:
    long = LaneRecord("long", (1,), tuple(range(2, 202)))
    off = played(OFF, [long])
    assert played("pace", [long]).tokens_per_s > 1.3 * off.tokens_per_s
    hopeless = frozenset(range(200))
    assert played("pace", [long], wrong=hopeless).tokens_per_s > 0.9 * off.tokens_per_s
    assert played("fixed 8", [long], wrong=hopeless).tokens_per_s < 0.3 * off.tokens_per_s


def test_lanes_share_rounds_and_the_next_one_comes_when_one_ends() -> None:
    """Two at a time: 6 rounds of two lanes (12 ms), then 6 of one (10 ms)."""
    lanes = [LaneRecord(name, (1,), OUTPUT) for name in ("a", "b", "c")]
    off = played(OFF, lanes, clients=2)
    assert off.tokens == 18
    assert [each.lanes for each in off.rounds] == [2] * 6 + [1] * 6
    assert off.seconds == pytest.approx(6 * 0.012 + 6 * 0.010)


words = st.lists(st.integers(0, 5), min_size=1, max_size=30).map(tuple)
prompts_and_outputs = st.lists(st.tuples(words, words), min_size=1, max_size=6)


@settings(max_examples=40)
@given(prompts_and_outputs, st.integers(1, 4), st.sampled_from(["fixed 0", "fixed 2", "fixed 8", "pace", "oracle"]))
def test_whatever_is_drafted_all_tokens_come_and_time_is_that_of_the_rounds(
    texts: list[tuple[tuple[int, ...], tuple[int, ...]]], clients: int, policy: str
) -> None:
    lanes = tuple(LaneRecord(str(place), *text) for place, text in enumerate(texts))
    recording = Recording(clients, lanes, ROUNDS)
    costs = RecordedCosts(ROUNDS)
    one, other = (play(recording, costs, policy, policies(recording, costs)[policy]) for _ in range(2))
    assert one == other
    assert one.tokens == sum(len(output) for _, output in texts)
    assert one.accepted <= one.drafted
    assert one.seconds == pytest.approx(sum(costs.seconds(each.shape) for each in one.rounds))
    assert one.rounds[-1].ended_at == one.seconds
    if policy == "oracle":
        assert one.accepted == one.drafted


def offers(request_id: str, cached: int, *drafts: tuple[int, ...], budget: int = 8) -> LaneOffers:
    made = tuple(Offer(f"source {place}", Draft(draft, (0,) * len(draft))) for place, draft in enumerate(drafts))
    return LaneOffers(request_id, cached, made, budget)


def test_a_fixed_depth_takes_the_first_offer_while_there_is_room() -> None:
    lanes = [offers("a", 5, (1, 2, 3), (7,)), offers("b", 5), offers("c", 5, (4, 5, 6), budget=1), offers("d", 5, (9,))]
    chosen = FixedDepth(2).choose(lanes, PLAIN, 3)
    assert {name: choice.draft.tokens for name, choice in chosen.items()} == {"a": (1, 2), "c": (4,)}
    assert FixedDepth(0).choose(lanes, PLAIN, 99) == {}
    assert FixedDepth(2).would_draft(lanes)
    assert not FixedDepth(2).would_draft([lanes[1]])
    assert not FixedDepth(0).would_draft(lanes)


def test_the_oracle_takes_the_source_that_is_right_for_longest() -> None:
    oracle = Oracle(lambda _request_id, _cached: (1, 2, 3, 4), RecordedCosts(ROUNDS))
    lanes = [offers("a", 0, (1, 9, 9, 9), (1, 2, 3, 9)), offers("b", 0, (9,))]
    chosen = oracle.choose(lanes, PLAIN, 99)
    assert {name: (choice.source, choice.draft.tokens) for name, choice in chosen.items()} == {
        "a": ("source 1", (1, 2, 3))
    }
    assert oracle.choose(lanes, PLAIN, 0) == {}


def test_the_oracle_leaves_what_does_not_pay() -> None:
    dear = [RoundRecord(RoundShape(1, False, 0), 0.010), RoundRecord(RoundShape(2, True, 0), 0.021)]
    oracle = Oracle(lambda _request_id, _cached: (1, 2, 3, 4), RecordedCosts(dear))
    assert oracle.choose([offers("a", 0, (1,))], PLAIN, 99) == {}


def test_what_the_engine_served_is_played_to_the_token() -> None:
    recording = serve(FakeBackend(), ByteTokenizer(), [*mixed_prompts()[1:2], *editing_prompts()[:2]], 2, 80)
    assert [lane.name for lane in recording.lanes] == ["ordinary-1", "editing-1", "editing-2"]
    assert [len(lane.expected) > 100 for lane in recording.lanes] == [False, True, True]
    assert len(recording.lanes[0].output) <= 54
    assert sum(len(lane.output) for lane in recording.lanes) > 24
    costs = RecordedCosts(recording.rounds)
    off = play(recording, costs, OFF, policies(recording, costs)[OFF])
    assert off.tokens == sum(len(lane.output) for lane in recording.lanes)
    assert max(each.shape.rows for each in off.rounds) == max(each.shape.rows for each in recording.rounds)


def test_a_sweep_times_plain_and_wide_rounds_and_leaves_nothing_behind() -> None:
    backend = FakeBackend()
    timed = list(sweep(backend))
    shapes = {(each.shape.rows, each.shape.wide) for each in timed}
    assert shapes == {(lanes * (1 + drafts), drafts > 0) for lanes, drafts in SWEEP}
    assert not any(each.served for each in timed)
    assert backend.lanes == {}


def test_the_command_compares_all_policies(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write_recording(path, Recording(1, (LaneRecord("x", (5, 6, 7, 8), (5, 6, 7, 8) * 10),), ROUNDS))
    done = CliRunner().invoke(app, ["replay", str(path), "--json"])
    facts = json.loads(done.stdout)
    assert [each["policy"] for each in facts] == ["fixed 0", "fixed 2", "fixed 4", "fixed 8", "pace", "oracle"]
    assert facts[0]["ratio"] == 1.0
    assert facts[-1]["ratio"] == max(each["ratio"] for each in facts) > 1.3
    assert {each["tokens"] for each in facts} == {40}
    assert "over drafting off" in CliRunner().invoke(app, ["replay", str(path)]).stdout


def test_the_command_refuses_what_is_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("x")
    for command in ("replay", "picture"):
        done = CliRunner().invoke(app, [command, str(path)])
        assert done.exit_code == 2
        assert "line 1" in done.stderr
