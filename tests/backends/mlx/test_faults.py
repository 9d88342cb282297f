"""NaN in one lane's logits goes through the real sampler: that lane is told, and nobody else draws otherwise."""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import MaskWords
from backends.fault_plan import Nan, Plan
from backends.faults import FaultyBackend
from backends.mlx.backend import MLXBackend
from scheduler.request import Sampling
from scheduler.round import Drawn, Window
from tests.backends.mlx.random_models import VOCABULARY, random_model
from tests.backends.mlx.serving import INFO, Paths, both_paths, prompt_of
from tests.backends.mlx.windows import chunk, decode

KINDS = [Sampling(0.0), Sampling(0.8, 3), Sampling(0.8, 3, top_p=0.9), Sampling(0.0, logprobs=2), Sampling(1.0, 1)]
TEXTS = [prompt_of(place, 5, VOCABULARY) for place in range(6)]


@cache
def paths() -> Paths:
    return both_paths(random_model("llama", seed=1))


class Masks:
    """The same mask for one window."""

    def __init__(self, index: int, rows: int) -> None:
        words = np.random.default_rng(5).integers(1, 2**31, (rows, VOCABULARY // 32)).astype(np.int32)
        self._words = {index: words}

    def wait(self) -> Mapping[int, MaskWords]:
        return self._words


def play(path: str, windows: Sequence[Window], plan: Plan, masks: Masks | None) -> tuple[list[Drawn], list[Drawn]]:
    """What is drawn in the round, and in another one over the same lanes."""
    forward = paths()[path]
    forward.reset()
    backend = FaultyBackend(MLXBackend(INFO, forward), plan)
    backend.verify([chunk(window.slot, TEXTS[window.slot][:-1]) for window in windows]).read()
    drawn = backend.verify(windows, masks=masks).read()
    return drawn, backend.verify(windows).read()


@settings(max_examples=25)
@given(
    lanes=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3)), min_size=1, max_size=5),
    path=st.sampled_from(["packed", "padded"]),
    masked=st.booleans(),
    data=st.data(),
)
def test_a_spoiled_lane_is_told_and_nobody_else_draws_otherwise(
    lanes: list[tuple[Sampling, int]], path: str, masked: bool, data: st.DataObject
) -> None:
    windows = [
        decode(slot, TEXTS[slot], prompt_of(slot, drafted, VOCABULARY), sampling)
        for slot, (sampling, drafted) in enumerate(lanes)
    ]
    windows.append(chunk(5, TEXTS[5], 4))
    struck = data.draw(st.integers(0, len(lanes) - 1))
    masks = Masks(0, 1 + lanes[0][1]) if masked else None
    spoiled, after = play(path, windows, Plan((Nan(request=str(struck), times=1),)), masks)
    plain, plain_after = play(path, windows, Plan(()), masks)
    assert spoiled[struck].error is not None
    assert len(spoiled[struck].tokens) == 1 + lanes[struck][1]
    for slot in {*range(len(windows))} - {struck}:
        assert spoiled[slot] == plain[slot]
    assert after == plain_after


@pytest.mark.parametrize("path", ["packed", "padded"])
def test_a_round_ahead_of_a_spoiled_one_can_be_launched(path: str) -> None:
    """It feeds on whatever token the broken row has."""
    forward = paths()[path]
    forward.reset()
    backend = FaultyBackend(MLXBackend(INFO, forward), Plan((Nan(request="0", times=1),)))
    first = backend.verify([decode(slot, TEXTS[slot][:1]) for slot in range(2)])
    carried = [
        Window(slot, str(slot), 1, (), samples=True, sampling=KINDS[0], reach=9, carried=True) for slot in range(2)
    ]
    second = backend.verify(carried, first)
    assert [drawn.error is not None for drawn in first.read()] == [True, False]
    assert second.read()[1].error is None
