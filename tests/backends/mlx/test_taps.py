"""Taps note of every row what mlx-lm's own layers make of it in a text of its own; nobody else notices them."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from backends.mlx.build import paths, prepare, try_taps
from backends.mlx.seam import HeadRows, install_head
from backends.mlx.taps import Tap, TapError, Taps
from backends.mlx.verify import Draws, Forward, Verified
from scheduler.round import Window
from tests.backends.mlx.architectures import VOCABULARY, tiny_model
from tests.backends.mlx.reading_reference import WholeTexts
from tests.backends.mlx.serving import prompt_of
from tests.backends.mlx.windows import chunk, decode

pytestmark = pytest.mark.usefixtures("calm")

NEAR = 1e-4
TAPS: tuple[Tap, ...] = (1, "head", 0)
PLAIN_LLAMA: dict[str, Any] = {"layer_types": ["full_attention"] * 2, "sliding_window": None}


class Tapped(msgspec.Struct, frozen=True):
    """A model with all seams, its head, and the same model on each of its paths, the packed one first."""

    model: nn.Module
    head: HeadRows
    forwards: list[Forward]

    @classmethod
    def of(cls, model: nn.Module, taps: Sequence[Tap] = ()) -> "Tapped":
        head = install_head(model)
        forwards = paths(model, prepare(model), attention=mx.fast.scaled_dot_product_attention, head=head)
        for forward in forwards:
            forward.taps = Taps(model, head, taps) if taps else None
        return cls(model, head, forwards)


def made(name: str) -> nn.Module:
    """Llamas here see everything, so that they have a padded path."""
    return tiny_model(name, **PLAIN_LLAMA) if name == "llama" else tiny_model(name)


@cache
def whole(name: str) -> WholeTexts:
    return WholeTexts(made(name))


@cache
def tapped(name: str) -> Tapped:
    return Tapped.of(made(name), TAPS)


@cache
def untapped(name: str) -> Tapped:
    return Tapped.of(made(name))


# Packed rows come first and padded ones last; of recurrent models the first path pads lanes inside of their modules.
SERVED = [("llama", 0), ("llama", 1), ("qwen3", 0), ("qwen3", 1), ("gemma3_text", 0)]
SERVED += [(name, path) for name in ("qwen3_next", "mamba2") for path in (0, 1)]
each_path = pytest.mark.parametrize(("name", "path"), SERVED)


class Lane(msgspec.Struct):
    """A text of which the first tokens are cached."""

    slot: int
    tokens: tuple[int, ...]
    cached: int = 0


def window_of(lane: Lane, rows: int, drafted: int) -> Window:
    """A chunk, or a decode window with a draft, of which some tokens may be those that the text has."""
    if not drafted:
        return chunk(lane.slot, lane.tokens[lane.cached : lane.cached + rows], lane.cached)
    right = lane.tokens[lane.cached + 1 : lane.cached + drafted]
    return decode(lane.slot, lane.tokens[: lane.cached + 1], (*right, 5))


def check(verified: Verified, windows: Sequence[Window], lanes: Sequence[Lane], texts: WholeTexts) -> None:
    """Fail unless every row of every window holds what the text has there."""
    assert verified.tapped is not None
    hidden = np.array(verified.tapped.hidden)
    for index, (window, lane) in enumerate(zip(windows, lanes, strict=True)):
        first = verified.tapped.firsts[index]
        fed = (*lane.tokens[: window.start], *window.tokens, *window.draft)
        expected = texts.features(fed, TAPS)[window.start :]
        assert np.abs(hidden[first : first + window.rows] - expected).max() <= NEAR * max(1.0, float(expected.std()))


@each_path
@settings(max_examples=12)
@given(data=st.data())
def test_every_row_of_ragged_windows_is_noted(name: str, path: int, data: st.DataObject) -> None:
    """Chunks and drafts side by side in any order, some rejected; and every logit is what it is without taps."""
    forward, other = tapped(name).forwards[path], untapped(name).forwards[path]
    forward.reset()
    other.reset()
    lanes = [Lane(slot, prompt_of(slot, 90, VOCABULARY)) for slot in range(4)]
    for _ in range(3):
        order = data.draw(st.permutations(lanes))[: data.draw(st.integers(1, 4))]
        sizes = [(data.draw(st.sampled_from([1, 2, 7, 20])), data.draw(st.sampled_from([0, 0, 1, 4]))) for _ in order]
        windows = [window_of(lane, *size) for lane, size in zip(order, sizes, strict=True)]
        verified, plain = forward.run(windows, None), other.run(windows, None)
        assert (verified.sampled, plain.tapped) == (plain.sampled, None)
        if plain.logits is not None:
            assert verified.logits is not None
            assert np.array_equal(np.array(verified.logits), np.array(plain.logits))
        check(verified, windows, order, whole(name))
        ends = [data.draw(st.integers(window.start + window.real, window.end)) for window in windows]
        ends = [min(end, window.end - 1) if window.draft else end for end, window in zip(ends, windows, strict=True)]
        kept = {lane.slot: end for lane, end in zip(order, ends, strict=True)}
        for each in (forward, other):
            each.keep(kept)
        for lane in order:
            lane.cached = kept[lane.slot]


@pytest.mark.parametrize(("name", "path"), [("llama", 0), ("llama", 1)])
def test_rows_that_carry_a_draw_are_noted_too(name: str, path: int) -> None:
    forward = tapped(name).forwards[path]
    forward.reset()
    lanes = [Lane(slot, prompt_of(slot, 9 + slot, VOCABULARY)) for slot in range(3)]
    forward.run([chunk(lane.slot, lane.tokens[:-1]) for lane in lanes], None)
    windows = [decode(lane.slot, lane.tokens) for lane in lanes]
    drawn = Draws(mx.array([40, 41, 42]), {0: 2, 1: 0, 2: 1})
    carried = [msgspec.structs.replace(window, start=window.end, tokens=(), carried=True) for window in windows]
    forward.run(windows, None)
    verified = forward.run(carried, drawn)
    for lane, token in zip(lanes, (42, 40, 41), strict=True):
        lane.tokens = (*lane.tokens, token)
    fed = [msgspec.structs.replace(each, tokens=lane.tokens[-1:]) for each, lane in zip(carried, lanes, strict=True)]
    check(verified, fed, lanes, whole(name))


# ---- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tap", [-1, 2, 100])
def test_a_layer_that_is_not_there_is_refused(tap: int) -> None:
    model = made("llama")
    with pytest.raises(TapError, match=rf"no layer {tap} .* has 2"):
        Taps(model, HeadRows(), (0, tap))
    assert not any(hasattr(layer, "tap") for layer in model.layers), "nothing is tapped by halves"


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    with pytest.raises(TapError, match=r"no layer 0 .* has 0"):
        Taps(nn.Linear(2, 2), HeadRows(), (0,))


def refuses(forward: Forward, tap: Tap) -> bool:
    try:
        with pytest.raises(TapError, match=f"past the tap {tap!r}"):
            forward.run([chunk(0, (1, 2, 3))], None)
    finally:
        forward.reset()
    return True


@pytest.mark.parametrize("path", [0, 1])
def test_a_forward_that_goes_past_a_layer_is_refused(path: int) -> None:
    """Also one that went by it before."""
    there = Tapped.of(made("llama"), TAPS)
    there.forwards[path].run([chunk(0, (1, 2, 3))], None)
    left = there.model.layers.pop()
    assert refuses(there.forwards[path], 1)
    there.model.layers.append(left)
    there.forwards[path].run([chunk(0, (1, 2, 3))], None)


@pytest.mark.parametrize("path", [0, 1])
def test_a_forward_that_goes_past_the_head_is_refused(path: int) -> None:
    there = Tapped.of(made("llama"), TAPS)
    there.forwards[path].run([chunk(0, (1, 2, 3))], None)
    there.model.lm_head = there.model.lm_head.head
    assert refuses(there.forwards[path], "head")


def test_layers_that_pass_on_several_hidden_states_of_a_token_are_refused() -> None:
    """Which of them a row's are could not be told."""
    there = Tapped.of(made("gemma3n"), (0,))
    with pytest.raises(TapError, match="at the tap 0 there is more than one"):
        there.forwards[0].run([chunk(0, (1, 2, 3))], None)


def test_what_was_noted_is_taken_once() -> None:
    there = Tapped.of(made("llama"))
    taps = Taps(there.model, there.head, TAPS)
    there.forwards[0].run([chunk(0, (1, 2, 3))], None)
    assert taps.take().shape == (3, 3 * 64)
    with pytest.raises(TapError, match="past the tap 1"):
        taps.take()


# ---- nobody notices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({name for name, _ in SERVED}))
def test_a_tapped_layer_answers_as_before(name: str) -> None:
    there = untapped_again(name)
    layers = list(there.model.layers)
    classes, said = [type(layer) for layer in layers], [repr(layer) for layer in layers]
    attributes = [{name: getattr(layer, name) for name in vars(layer)} for layer in layers]
    known = [set(dir(layer)) for layer in layers]
    weights = dict(tree_flatten(there.model.parameters()))
    Taps(there.model, there.head, (0, 1, "head"))
    assert all(before is after for before, after in zip(layers, there.model.layers, strict=True))
    for layer, own in zip(layers, classes, strict=True):
        assert isinstance(layer, own)
        assert type(layer) is not own
        assert (type(layer).__name__, type(layer).__module__) == (own.__name__, own.__module__)
    assert [repr(layer) for layer in layers] == said
    assert [{name: getattr(layer, name) for name in vars(layer)} for layer in layers] == attributes
    assert [set(dir(layer)) - {"tap"} for layer in layers] == known
    after = dict(tree_flatten(there.model.parameters()))
    assert after.keys() == weights.keys()
    assert all(after[name] is weights[name] for name in weights)


def untapped_again(name: str) -> Tapped:
    """A model of one's own."""
    return Tapped.of(made(name))


def test_what_is_not_tapped_is_left_as_it_was() -> None:
    there = untapped_again("llama")
    before = [type(layer) for layer in there.model.layers]
    Taps(there.model, there.head, (1,))
    assert type(there.model.layers[0]) is before[0]
    assert not there.head.noting


def test_a_model_whose_taps_are_removed_is_as_before() -> None:
    there = untapped_again("llama")
    before = [type(layer) for layer in there.model.layers]
    taps = Taps(there.model, there.head, TAPS)
    there.forwards[0].run([chunk(0, (1, 2, 3))], None)
    for _ in range(2):
        taps.remove()
        assert [type(layer) for layer in there.model.layers] == before
        assert (there.head.noting, there.head.noted) == (False, None)


@pytest.mark.parametrize(("name", "taps", "fits"), [("llama", TAPS, True), ("gemma3n", (0,), False)])
def test_taps_that_a_forward_does_not_take_are_found_and_removed(name: str, taps: Sequence[Tap], fits: bool) -> None:
    there = Tapped.of(made(name))
    before = [type(layer) for layer in there.model.layers]
    forward = there.forwards[0]
    if fits:
        try_taps(forward, Taps(there.model, there.head, taps))
        assert forward.run([chunk(0, (1, 2, 3))], None).tapped is not None
    else:
        with pytest.raises(TapError):
            try_taps(forward, Taps(there.model, there.head, taps))
        assert forward.taps is None
        assert [type(layer) for layer in there.model.layers] == before
    assert not forward.store.groups.held or fits, "no lane is left behind"


def test_a_tapped_model_is_still_mlx_lms() -> None:
    """Its own generation, with its own caches, gives the same logits."""
    tokens = prompt_of(3, 20, VOCABULARY)
    logits = tapped("llama").model(mx.array([tokens]))
    assert np.abs(np.array(logits[0]) - whole("llama").logits(tokens)).max() <= NEAR


@pytest.mark.parametrize("path", [0, 1])
def test_installing_twice_gives_the_same(path: int) -> None:
    there = Tapped.of(made("llama"), TAPS)
    classes = [type(layer) for layer in there.model.layers]
    windows = [chunk(0, (1, 2, 3)), decode(1, (9,), (4, 5))]
    first = there.forwards[path].run(windows, None)
    there.forwards[path].taps = Taps(there.model, there.head, TAPS)
    assert [type(layer) for layer in there.model.layers] == classes, "no class is put over one that notes already"
    second = there.forwards[path].run(windows, None)
    assert first.tapped is not None
    assert second.tapped is not None
    assert first.tapped.firsts == second.tapped.firsts
    assert np.array_equal(np.array(first.tapped.hidden), np.array(second.tapped.hidden))
