"""A Gemma 4 assistant drafts what its description says of the kept text alone, out of the target's own lanes, whatever
became of its last drafts and whoever drafts beside it.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.mlx.caches.sight import Sight
from backends.mlx.drafts.assistant import Assistant
from scheduler.draft import Draft, DraftAsk
from scheduler.request import Sampling
from tests.backends.draws import samplings
from tests.backends.mlx.allocating import allocated
from tests.backends.mlx.architectures import SLIDING_WINDOW, VOCABULARY
from tests.backends.mlx.assistant.reference import (
    DENSE,
    GROUPED,
)
from tests.backends.mlx.assistant.targets import (
    CONFIGS,
    SAMPLINGS,
    TARGETS,
    Lane,
    Table,
    Targets,
)
from tests.backends.mlx.serving import prompt_of
from tests.backends.mlx.windows import GREEDY, chunk, decode

pytestmark = pytest.mark.usefixtures("calm")

each_config = pytest.mark.parametrize("config", CONFIGS)
LENGTHS = (2, 70, 9, 40)
WARM = SAMPLINGS[1]


# ---- together and alone ----------------------------------------------------------------------------------------------


@each_config
@pytest.mark.parametrize("name", TARGETS)
def test_ragged_lanes_draft_what_each_drafts_alone_and_what_the_description_says(
    name: str, config: str, targets: Targets, folders: dict[str, Path]
) -> None:
    target = targets(name)
    texts = [prompt_of(10 + slot, length, VOCABULARY) for slot, length in enumerate(LENGTHS)]
    budgets = [3, 5, 4, 6]
    table = Table(target, folders[config], CONFIGS[config])
    lanes = [table.join(slot, text, SAMPLINGS[slot]) for slot, text in enumerate(texts)]
    drafts = table.propose(*lanes, budgets=budgets)
    assert len({token for draft in drafts for token in draft.tokens}) >= 8, "varied enough to prove something"
    assert table.propose(*lanes[::-1], budgets=budgets[::-1]) == drafts[::-1]
    for slot, text in enumerate(texts):
        table = Table(target, folders[config], CONFIGS[config])
        assert table.propose(table.join(slot, text, SAMPLINGS[slot]), budgets=budgets[slot:]) == [drafts[slot]]


def test_a_long_text_is_drafted_for_beside_a_short_one(targets: Targets, folders: dict[str, Path]) -> None:
    """Lanes of two capacity classes, one of which moves to the other while it grows."""
    table = Table(targets("shared"), folders["dense"], DENSE)
    lanes = [table.join(slot, prompt_of(20 + slot, length, VOCABULARY), GREEDY) for slot, length in enumerate((250, 9))]
    for turn in range(4):
        drafts = table.propose(*lanes)
        table.round(*((lane, draft.tokens, turn % 3, (5, 6, 7)) for lane, draft in zip(lanes, drafts, strict=True)))
    assert len(lanes[0].tokens) > 256
    table.propose(*lanes)


# ---- rollback --------------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(data=st.data())
def test_no_company_and_no_history_changes_a_draft(
    targets: Targets, folders: dict[str, Path], data: st.DataObject
) -> None:
    """Random sampling, budgets and acceptance; lanes that join, leave and sit a round out."""
    config = data.draw(st.sampled_from(sorted(CONFIGS)))
    table = Table(targets(data.draw(st.sampled_from(sorted(TARGETS)))), folders[config], CONFIGS[config])
    lanes: list[Lane] = []
    for turn in range(data.draw(st.integers(2, 6), "turns")):
        if len(lanes) < 4 and (not lanes or data.draw(st.booleans(), "joins")):
            prompt = prompt_of(turn, data.draw(st.sampled_from([2, 5, 17, 30, 70]), "prompt"), VOCABULARY)
            lanes.append(table.join(turn, prompt, data.draw(samplings(VOCABULARY))))
        if len(lanes) > 1 and data.draw(st.booleans(), "leaves"):
            table.leave(lanes.pop(data.draw(st.integers(0, len(lanes) - 1))))
        asked = [lane for lane in lanes if data.draw(st.integers(0, 3), "asked")]
        budgets = [data.draw(st.integers(1, 6), "budget") for _ in asked] or [1]
        proposed = table.propose(*asked, budgets=budgets)
        drafts = {lane.slot: draft.tokens for lane, draft in zip(asked, proposed, strict=True)}
        played = []
        for lane in lanes:
            draft = drafts.get(lane.slot) or tuple(data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=4)))
            accepted = data.draw(st.integers(0, len(draft)), "accepted")
            others = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3), "others")
            played.append((lane, draft, accepted, others))
        table.round(*played)
    table.propose(*lanes)


@each_config
def test_after_rejections_it_drafts_as_if_the_kept_text_had_been_all(
    config: str, targets: Targets, folders: dict[str, Path]
) -> None:
    table = Table(targets("shared"), folders[config], CONFIGS[config])
    lanes = [table.join(slot, prompt_of(30 + slot, 5 + 20 * slot, VOCABULARY), SAMPLINGS[slot]) for slot in range(4)]
    for turn in range(4):
        drafts = table.propose(*lanes, budgets=[5])
        accepted = [(turn + slot) % 3 * 2 for slot in range(4)]
        table.round(
            *(
                (lane, (*draft.tokens[:kept], *(9, 8, 7, 6, 5)[kept:]), kept, (11 + turn,))
                for lane, draft, kept in zip(lanes, drafts, accepted, strict=True)
            )
        )
    stands = table.propose(*lanes)
    fresh = Table(targets("shared"), folders[config], CONFIGS[config])
    again = [fresh.join(lane.slot, lane.tokens, lane.sampling) for lane in lanes]
    for lane, other in zip(lanes, again, strict=True):
        other.prompt = lane.prompt
    assert fresh.propose(*again) == stands


def test_past_the_targets_sliding_window_nothing_is_seen(targets: Targets, folders: dict[str, Path]) -> None:
    """Over many rounds, round its rings and round again, with rejected drafts in many places of them."""
    table = Table(targets("shared"), folders["dense"], DENSE)
    lane, other = (table.join(slot, prompt_of(40 + slot, 12, VOCABULARY), GREEDY) for slot in range(2))
    for turn in range(24):
        drafts = table.propose(lane, other, budgets=[1 + 5 * turn % 9, 2])
        tokens = (*drafts[0].tokens, 1, 2, 3, 4)
        table.round((lane, tokens, turn % 5, (turn,)), *([(other, (7, 8), 0, (turn,))] if turn % 4 == 0 else []))
    assert len(lane.tokens) > 12 + Sight(window=SLIDING_WINDOW).span > len(other.tokens) + SLIDING_WINDOW


def test_only_tokens_of_the_best_groups_are_drafted(targets: Targets, folders: dict[str, Path]) -> None:
    """However warm the draw is; of a bias towards another one nothing comes."""
    table = Table(targets("shared"), folders["grouped"], GROUPED)
    biased = Sampling(1.0, 3, logit_bias=tuple((token, 50.0) for token in range(0, VOCABULARY, 9)))
    lanes = [table.join(slot, prompt_of(50, 20, VOCABULARY), Sampling(50.0, slot)) for slot in range(6)]
    lanes.append(table.join(6, prompt_of(50, 20, VOCABULARY), biased))
    drafts = table.propose(*lanes, budgets=[1])
    cached = table.plain.target.cached(lanes[0].tokens[:-1])
    logits = table.plain.logits(table.plain.output(lanes[0].tokens[-1], cached.hidden, cached, 19))
    assert sum(logits > -1e9) == GROUPED["centroid_intermediate_top_k"] * VOCABULARY // GROUPED["num_centroids"]
    said = [draft.tokens[0] for draft in drafts]
    assert len(set(said)) > 3
    assert all(logits[token] > -1e9 for token in said)


# ---- lanes that cannot be drafted for --------------------------------------------------------------------------------


def test_a_lane_that_cannot_be_drafted_for_harms_nobody(targets: Targets, folders: dict[str, Path]) -> None:
    """One that was never computed, one in the midst of its prompt, one that nothing may be drafted for, one of a single
    token, one whose seat is gone.
    """
    table = Table(targets("shared"), folders["dense"], DENSE)
    fine, half, gone = (table.join(slot, prompt_of(60 + slot, 20, VOCABULARY), WARM) for slot in range(3))
    table.backend.release(gone.slot)
    longer = msgspec.structs.replace(half.ask(4), tokens=(*half.tokens, 5, 6))
    shorter = msgspec.structs.replace(half.ask(4), tokens=half.tokens[:-1])
    strangers = [DraftAsk("stranger", (1, 2, 3), 3, 4), DraftAsk("single", (1,), 1, 4)]
    for other in (longer, shorter, half.ask(0), gone.ask(4), *strangers):
        assert table.drafter.propose([other]) == [Draft()]
        drafts = table.drafter.propose([other, fine.ask(4), other])
        assert (drafts[0], drafts[2]) == (Draft(), Draft())
        table.plain.check(drafts[1], fine.ask(4))
    table.propose(half, fine)
    assert table.drafter.propose([]) == []


def test_nothing_is_used_up_by_a_draft(targets: Targets, folders: dict[str, Path]) -> None:
    table = Table(targets("shared"), folders["dense"], DENSE)
    lane = table.join(0, prompt_of(70, 30, VOCABULARY), SAMPLINGS[3])
    assert table.propose(lane) == table.propose(lane)


def test_a_slot_that_is_given_to_another_request_is_the_others(targets: Targets, folders: dict[str, Path]) -> None:
    """Also what is counted for penalties."""
    table = Table(targets("shared"), folders["dense"], DENSE)
    for turn in range(3):
        lane = table.join(0, prompt_of(80 + turn, 20 - turn, VOCABULARY), SAMPLINGS[3])
        table.propose(lane)
        table.leave(lane)
        table.leave(lane)
        assert table.features.of("0") is None
        assert table.drafter.propose([lane.ask(4)]) == [Draft()]


def test_a_lane_may_have_its_beginning_of_a_sibling(targets: Targets, folders: dict[str, Path]) -> None:
    """It was never computed for it; but it is cached."""
    table = Table(targets("shared"), folders["dense"], DENSE)
    text = prompt_of(95, 40, VOCABULARY)
    sibling = table.join(0, text, GREEDY)
    late = Lane(1, (*text[:-1], 5, 6, 7), GREEDY, 42)
    table.feed(1, late.tokens, len(text) - 1, copies=0)
    table.propose(late, sibling)


def test_a_lane_that_moved_to_another_slot_is_drafted_for_there(targets: Targets, folders: dict[str, Path]) -> None:
    """It was preempted, and another one sits where it was."""
    table = Table(targets("shared"), folders["dense"], DENSE)
    lane = table.join(0, prompt_of(90, 20, VOCABULARY), GREEDY)
    table.backend.release(0)
    table.join(0, prompt_of(91, 30, VOCABULARY), GREEDY)
    for start, end in ((0, 10), (10, 19)):
        window = msgspec.structs.replace(chunk(5, lane.tokens[start:end], start), request_id="again")
        table.backend.verify([window]).read()
        table.backend.keep({5: end})
    ask = msgspec.structs.replace(lane.ask(4), request_id="again")
    table.plain.check(table.drafter.propose([ask])[0], ask)


class Failing(nn.Module):
    """A network that fails once when its turn comes. Written by the drafter."""

    def __init__(self, network: Assistant, after: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.network = network
        self.after = after

    def __call__(self, *args: Any) -> mx.array:
        self.after -= 1
        if self.after == -1:
            raise MemoryError("no room")
        return self.network(*args)

    def logits(self, outputs: mx.array) -> mx.array:
        return self.network.logits(outputs)

    def carried(self, outputs: mx.array) -> mx.array:
        return self.network.carried(outputs)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_behind_a_call_that_failed_the_next_one_is_right(
    after: int, targets: Targets, folders: dict[str, Path]
) -> None:
    table = Table(targets("shared"), folders["dense"], DENSE)
    network: Any = Failing(table.drafter.network, after)
    table.drafter.network = network
    lanes = [table.join(slot, prompt_of(100 + slot, 30, VOCABULARY), SAMPLINGS[slot]) for slot in range(3)]
    with pytest.raises(MemoryError):
        table.propose(*lanes)
    drafts = table.propose(*lanes)
    table.round(*((lane, draft.tokens, 2, (5,)) for lane, draft in zip(lanes, drafts, strict=True)))
    table.propose(*lanes)


# ---- what is borrowed ------------------------------------------------------------------------------------------------


def test_no_view_of_the_targets_buffers_outlives_a_call(targets: Targets, folders: dict[str, Path]) -> None:
    """Else the target's next write would copy them: at 4,096 positions more than all that a round needs otherwise."""
    table = Table(targets("shared"), folders["dense"], DENSE)
    reach = 4000
    windows = [msgspec.structs.replace(chunk(slot, (1, 2, 3)), reach=reach) for slot in range(8)]
    table.backend.verify(windows).read()
    table.backend.keep({})
    lanes = [Lane(slot, (1, 2, 3, 4), WARM, 4) for slot in range(8)]
    plane = table.backend.memory.held / 4

    def step() -> None:
        """Anew at the same place."""
        windows = [msgspec.structs.replace(decode(lane.slot, lane.tokens), reach=reach) for lane in lanes]
        table.backend.verify(windows).read()
        table.backend.keep({lane.slot: 3 for lane in lanes})

    step()
    table.propose(*lanes)
    assert allocated(step) < plane / 4
    view = targets("shared").forward.store.layers[1].keys[4096][:1]
    mx.eval(view)
    assert allocated(step) > plane / 4, "the measure sees a copy"
    del view
