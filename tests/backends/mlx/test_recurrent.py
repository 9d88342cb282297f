"""States of recurrent layers: exactly those of the kept tokens after every round (contract rules 15, 16 and 18)."""

import random
from functools import cache
from itertools import product
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from backends.mlx.build import build_forward, load_backend
from backends.mlx.caches.recurrent import RecurrentCache
from backends.mlx.owners import install_owners
from backends.mlx.verify import PackedForward
from engine.config import EngineConfig
from scheduler.request import Request, Sampling
from tests.backends.mlx.architectures import ARCHITECTURES, VOCABULARY, tiny_model
from tests.backends.mlx.serving import OracleDrafts, greedy, prompt_of, serve, solo, submissions
from tests.backends.mlx.tiny_models import write_folder
from tests.backends.mlx.windows import chunk, decode

pytestmark = pytest.mark.usefixtures("calm")

NAMES = ("mamba", "mamba2", "qwen3_next", "lfm2", "rwkv7", "recurrent_gemma", "falcon_h1", "baichuan_m1")
each_model = pytest.mark.parametrize("name", NAMES)


@cache
def reference(name: str) -> nn.Module:
    return tiny_model(name)


@cache
def served(name: str) -> PackedForward:
    forward = build_forward(tiny_model(name), VOCABULARY, name)
    assert isinstance(forward, PackedForward)
    return forward


State = list[list[np.ndarray]]


def state_alone(name: str, tokens: tuple[int, ...]) -> State:
    """Per recurrent cache, what mlx-lm's own holds after exactly these tokens."""
    caches = make_prompt_cache(reference(name))
    mx.eval(reference(name)(mx.array([tokens]), cache=caches))
    flat = [part for each in caches for part in (each.caches if isinstance(each, CacheList) else [each])]
    return [[np.array(array[0]) for array in each.cache] for each in flat if isinstance(each, ArraysCache)]


def state_of(forward: PackedForward, slot: int) -> State:
    return [
        [np.array(row.batch[row.row]) for row in cache.state(slot) if row is not None] for cache in forward._recurrent
    ]


def assert_same(found: State, expected: State) -> None:
    assert [len(each) for each in found] == [len(each) for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape
            assert np.abs(a.astype(np.float64) - b).max(initial=0) <= 1e-4 * max(1.0, np.abs(b).max(initial=0))


@each_model
def test_after_every_mixture_each_state_is_that_of_the_kept_tokens(name: str) -> None:
    """Drafts of 3, 5 and 4 tokens, of which a lane keeps none, some or all; then once more upon what was kept."""
    forward = served(name)
    prompts = [prompt_of(40 + lane, length, VOCABULARY) for lane, length in enumerate((31, 9, 40))]
    drafts = [prompt_of(50 + lane, length, VOCABULARY) for lane, length in enumerate((3, 5, 4))]
    for mixture in product((0, 2, None), repeat=3):
        kept = [
            (*prompts[lane], *drafts[lane][: len(drafts[lane]) if some is None else some])
            for lane, some in enumerate(mixture)
        ]
        forward.run([chunk(lane, prompts[lane][:-1]) for lane in range(3)], None)
        forward.keep({})
        forward.run([decode(lane, prompts[lane], drafts[lane]) for lane in (2, 0, 1)], None)
        forward.keep({lane: len(tokens) for lane, tokens in enumerate(kept)})
        for lane, tokens in enumerate(kept):
            assert_same(state_of(forward, lane), state_alone(name, tokens))
        again = [(*tokens, 7) for tokens in kept]
        forward.run([decode(lane, again[lane], (8, 9)) for lane in range(3)], None)
        forward.keep({lane: len(again[lane]) + lane for lane in range(3)})
        for lane, tokens in enumerate(again):
            assert_same(state_of(forward, lane), state_alone(name, (*tokens, *(8, 9)[:lane])))
        forward.reset()


@each_model
def test_a_window_that_is_taken_back_whole_leaves_the_state_from_before(name: str) -> None:
    forward = served(name)
    prompt = prompt_of(3, 20, VOCABULARY)
    forward.run([chunk(0, prompt[:-1])], None)
    forward.keep({})
    before = state_of(forward, 0)
    forward.run([decode(0, prompt, (1, 2, 3))], None)
    forward.keep({0: len(prompt) - 1})
    assert_same(state_of(forward, 0), before)
    assert_same(before, state_alone(name, prompt[:-1]))
    forward.reset()


def test_a_new_lane_in_an_old_slot_begins_anew_also_when_it_is_taken_back_to_nothing() -> None:
    forward = served("qwen3_next")
    first, second = prompt_of(4, 12, VOCABULARY), prompt_of(5, 8, VOCABULARY)
    forward.run([chunk(0, first)], None)
    forward.keep({})
    forward.run([chunk(0, second)], None)
    forward.keep({0: 0})
    forward.run([chunk(0, second)], None)
    forward.keep({})
    assert_same(state_of(forward, 0), state_alone("qwen3_next", second))
    forward.reset()


def test_a_hybrid_speculates_for_200_rounds_and_never_feeds_a_token_twice() -> None:
    """Three in ten drafted tokens are right. No lane ever catches up: a window is one token and its draft."""
    requests = [greedy(f"long-{lane}", prompt_of(lane, 10 + lane, VOCABULARY), 260) for lane in range(3)]
    answers = {each.request_id: (*each.prompt, *solo(reference("qwen3_next"), each).tokens) for each in requests}
    luck = random.Random(7)

    def plan(lane: int, turn: int) -> tuple[int, int]:
        right = 0
        while right < 4 and luck.random() < 0.3:
            right += 1
        return 4, right

    config = EngineConfig(max_lanes=3, round_rows=64, draft_tokens=4)
    source = OracleDrafts(answers, VOCABULARY, plan)
    played = serve(served("qwen3_next"), submissions(requests), config, [source])
    for request in requests:
        assert (*request.prompt, *played.tokens[request.request_id]) == answers[request.request_id]
    windows = [[each for each in one.windows if each.samples] for one in played.rounds]
    assert sum(any(each.draft for each in one) for one in windows) >= 150
    assert len(windows) >= 180
    assert all(each.real == 1 and each.rows <= 5 for one in windows for each in one)


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text"])
@pytest.mark.parametrize("lanes", [4, 2])
def test_siblings_copy_a_state_that_stands_where_they_begin_or_prefill_themselves(name: str, lanes: int) -> None:
    """Where caches cannot be cut, those that are admitted later find their sibling gone on."""
    prompt = prompt_of(90, 60, VOCABULARY)
    family = [Request(f"choice-{choice}", prompt, 14 + 4 * choice, Sampling(1.0, 3, choice)) for choice in range(4)]
    forward = served(name)
    assert not forward.cuttable
    played = serve(forward, submissions(family), EngineConfig(max_lanes=lanes, round_rows=70, draft_tokens=0))
    for request in family:
        assert played.tokens[request.request_id] == solo(reference(name), request).tokens
    windows = [window for one in played.rounds for window in one.windows]
    assert sum(window.copies is not None for window in windows) == lanes - 1
    assert sum(window.rows for window in windows if not window.samples) == (len(prompt) - 1) * (5 - lanes)


def test_a_hybrid_that_was_loaded_and_warmed_up_serves_right(tmp_path: Path) -> None:
    """From its folder, as the server does it: rounds that are timed at load leave nothing unsettled."""
    folder = tmp_path / "hybrid"
    model = write_folder(folder, {"model_type": "qwen3_5"} | ARCHITECTURES["qwen3_5"], dtype=mx.float32)
    backend = load_backend(str(folder), tmp_path, "float32", lambda *_: None, "here")
    assert not backend.info.cuttable
    assert len(backend.info.timed_rounds) >= 3
    requests = [greedy(f"lane-{lane}", prompt_of(lane, 9 + 30 * lane, VOCABULARY), 30) for lane in range(3)]
    answers = {each.request_id: (*each.prompt, *solo(model, each).tokens) for each in requests}
    source = OracleDrafts(answers, VOCABULARY, lambda lane, turn: (3, (lane + turn) % 4))
    config = EngineConfig(max_lanes=3, round_rows=40, draft_tokens=4)
    played = serve(backend._forward, submissions(requests, every=2), config, [source])
    for request in requests:
        assert (*request.prompt, *played.tokens[request.request_id]) == answers[request.request_id]


# ---- what must not happen --------------------------------------------------------------------------------------------


def test_a_window_that_begins_elsewhere_than_the_state_is_a_fault() -> None:
    forward = served("mamba")
    prompt = prompt_of(1, 12, VOCABULARY)
    forward.run([chunk(0, prompt[:5])], None)
    forward.keep({})
    with pytest.raises(RuntimeError, match="a window from 7 on a state after 5 tokens"):
        forward.run([chunk(0, prompt[7:], start=7)], None)
    forward.reset()


def test_a_draft_cannot_be_cut_behind_the_next_round() -> None:
    forward = served("mamba")
    prompt = prompt_of(1, 12, VOCABULARY)
    forward.run([chunk(0, prompt[:5])], None)
    forward.keep({})
    forward.run([decode(0, prompt[:6], (1, 2))], None)
    forward.run([chunk(0, prompt[6:], start=8)], None)
    with pytest.raises(RuntimeError, match="after the next round had begun"):
        forward.keep({0: 6})
    forward.reset()


def test_a_state_is_nobodys_outside_of_its_module() -> None:
    states = RecurrentCache(2)
    with pytest.raises(RuntimeError, match="read outside"):
        _ = states[0]
    with pytest.raises(RuntimeError, match="written outside"):
        states[0] = mx.zeros((1, 2))


def test_nothing_is_held_for_lanes_that_left() -> None:
    forward = served("mamba")
    for slot in range(3):
        forward.run([chunk(slot, prompt_of(slot, 6, VOCABULARY))], None)
        forward.keep({})
    assert forward.buffers()
    for slot in range(3):
        forward.release(slot)
    assert forward.buffers() == []


@each_model
def test_calls_of_others_are_as_they_were(name: str) -> None:
    model = tiny_model(name)
    tokens = mx.array([prompt_of(2, 20, VOCABULARY), prompt_of(3, 20, VOCABULARY)])
    before = np.array(model(tokens[:1]))
    install_owners(model)
    install_owners(model)
    assert np.array_equal(np.array(model(tokens[:1])), before)
