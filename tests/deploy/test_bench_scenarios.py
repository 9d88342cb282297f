"""What drafting is measured on: the work, the lanes and the bounds."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from deploy.bench.client import Load, Record, Run
from deploy.bench.drafting import by_position
from deploy.bench.pairs import WARM_UP, Plan
from deploy.bench.prefix_asking import Scrape
from deploy.bench.prompts import agent_prompts, copying_prompts, editing_prompts, mixed_prompts, roleplay_prompts
from deploy.bench.scenarios import SCENARIOS, Scenario, lane_rate, scenario_named
from deploy.bench.texts import EDITS, PASSAGES, TASK_WORDS, TASKS


def test_every_bound_and_lane_count() -> None:
    bounds = {scenario.name: [dict(claim.floors) for claim in scenario.claims] for scenario in SCENARIOS}
    assert bounds == {
        "ordinary": [{1: 1.15, 4: 1.1, 8: 0.98}],
        "copying": [{1: 1.8, 4: 1.8, 8: 1.5}],
        "editing": [{1: 1.8, 4: 1.8, 8: 1.5}],
        "mixed": [{8: 1.2}, {8: 0.95}],
        "agents": [{4: 1.2}],
    }
    assert all(scenario.levels == tuple(claim.floors) for scenario in SCENARIOS for claim in scenario.claims)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_two_requests_of_a_run_are_alike(scenario: Scenario) -> None:
    prompts = scenario.prompts()
    for level in scenario.levels:
        count = level * scenario.per_client
        for pair in range(9):
            drawn = [prompts[(pair * count + place) % len(prompts)] for place in range(count)]
            assert len({prompt.text for prompt in drawn}) == count


def test_what_is_expected_of_an_edit_lacks_a_sentence_and_has_another_word() -> None:
    for passage, edit, prompt in zip(PASSAGES, EDITS, editing_prompts(), strict=True):
        assert len(re.findall(rf"\b{edit.old}\b", passage)) == 1
        assert edit.new not in passage
        edited = passage.replace(edit.old, edit.new)
        assert prompt.text.endswith(edited)
        assert edit.old in prompt.expected
        sentences, expected = passage.split(". "), prompt.expected.split(". ")
        assert expected == sentences[:3] + sentences[4:]
        assert prompt.sources == ("prediction",)
    assert all(prompt.expected == "" and prompt.sources is None for prompt in copying_prompts())


def test_half_of_the_mixed_lanes_copy() -> None:
    prompts = mixed_prompts()
    kinds = [prompt.name.partition("-")[0] for prompt in prompts]
    assert kinds == ["copying", "ordinary"] * (len(prompts) // 2)
    assert {(kind, prompt.max_tokens) for kind, prompt in zip(kinds, prompts, strict=True)} == {
        ("copying", None),
        ("ordinary", 54),
    }
    for start in range(0, len(prompts) - 8, 8):
        assert len({prompt.text for prompt in prompts[start : start + 8]}) == 8


def test_ordinary_work_is_writing_reasoning_and_roleplay() -> None:
    kinds = Counter(prompt.name.partition("-")[0] for prompt in scenario_named("ordinary").prompts())
    assert set(kinds) == {"ordinary", "roleplay"}
    assert kinds["roleplay"] == len(roleplay_prompts()) >= 6
    assert all(prompt.messages[0].role == "system" for prompt in roleplay_prompts())


def test_a_run_of_agents_is_one_shape_of_task_and_holds_nothing_to_copy_from() -> None:
    scenario = scenario_named("agents")
    prompts = agent_prompts()
    count = max(scenario.levels) * scenario.per_client
    assert len(prompts) == count * len(TASKS)
    assert len({words.thing for words in TASK_WORDS}) == len(TASK_WORDS) == count
    for run in range(len(TASKS)):
        of_run = prompts[run * count : (run + 1) * count]
        assert len({prompt.name.rpartition("-")[0] for prompt in of_run}) == 1
        assert len({prompt.text for prompt in of_run}) == count
    assert all(prompt.sources == ("suffix",) for prompt in prompts)
    assert all(len(prompt.text.split()) < 40 for prompt in prompts)
    assert not any(sign in prompt.text for prompt in prompts for sign in ("```", "def ", "self", "return", "{", "\n"))


def test_the_rate_of_a_lane_is_that_of_the_requests_that_are_named() -> None:
    """10 tokens of which 8 came in the 4 s behind the first event; another kind of lane does not count."""
    record = Record("ordinary-1", 0.0, 6.0, 1.0, 5.0, (), 10, 3, 5, 0.2, "x", "length", None)
    slow = replace(record, last_at=9.0)
    other = replace(record, prompt="copying-1", last_at=2.0)
    broken = replace(record, first_at=None, last_at=None, error="gone")
    assert lane_rate(Run(2, (record, other, broken)), "ordinary") == pytest.approx(2.0)
    assert lane_rate(Run(2, (record, slow)), "ordinary") == pytest.approx(16 / 12)
    assert lane_rate(Run(2, (record, other))) == pytest.approx(16 / 5)
    assert lane_rate(Run(1, (broken,))) == 0.0


def test_every_turn_of_a_keyed_plan_has_a_key_of_its_own() -> None:
    load = Load(1, 8)
    plans = [Plan((), (1, 4), 3, 1, load, name, keyed=True) for name in ("ordinary", "copying")]
    keys = [key for plan in plans for key in plan.keys if key != WARM_UP]
    assert len(set(keys)) == len(keys) == 12
    assert all(WARM_UP in plan.keys for plan in plans)
    assert all(re.fullmatch(r"[a-z0-9-]+", key) for key in keys)


def test_there_is_no_other_scenario() -> None:
    with pytest.raises(KeyError):
        scenario_named("copy")


def test_what_was_drafted_and_accepted_is_told_by_position() -> None:
    text = "".join(
        f'paceline_spec_decode_num_{what}_tokens_per_pos_total{{source="{source}",position="{place}"}} {count}\n'
        for source, what, place, count in (
            ("suffix", "draft", 0, 5),
            ("suffix", "accepted", 0, 3),
            ("drafter", "draft", 1, 7),
            ("drafter", "draft", 0, 9),
            ("drafter", "accepted", 0, 4),
            ("drafter", "accepted", 1, 2),
        )
    )
    assert by_position(Scrape(text, "server")) == [
        "drafter: drafted 9 7, accepted 4 2 by position",
        "suffix: drafted 5, accepted 3 by position",
    ]
    assert by_position(Scrape("", "server")) == []
