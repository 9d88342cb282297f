"""A model is served on a path on which its lanes agree with single sequences, or refused with the reason."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import pytest
from mlx_lm.models.cache import CacheList, ConcatenateKVCache, KVCache, RotatingKVCache

from backends.mlx.build import build_forward, prepare
from backends.mlx.build import paths as paths_of
from backends.mlx.check import Disagreement, check_lanes
from backends.mlx.load import LoadError
from backends.mlx.verify import Draws, Forward, PackedForward, PaddedForward, Verified
from engine.config import EngineConfig
from scheduler.round import Window
from tests.backends.mlx.random_models import VOCABULARY, random_model
from tests.backends.mlx.serving import Paths, both_paths, greedy, prompt_of, serve, solo, submissions

KV_HEADS = 4
each_path = pytest.mark.parametrize("path", ["packed", "padded"])


def check(model: nn.Module, forward: Forward) -> None:
    check_lanes(model, forward, vocabulary=VOCABULARY, kv_heads=KV_HEADS)


def llama_paths() -> Paths:
    return both_paths(random_model("llama", num_key_value_heads=KV_HEADS))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "phi3"])
def test_models_that_keep_their_lanes_apart_take_the_packed_path(kind: str) -> None:
    forward = build_forward(random_model(kind), VOCABULARY, kind)
    assert isinstance(forward, PackedForward)
    assert forward.buffers() == []


@each_path
def test_a_right_model_passes_and_leaves_no_lane(path: str) -> None:
    paths = llama_paths()
    check(paths.model, paths[path])
    assert paths[path].buffers() == []


# ---- models that are refused, or take the padded path ----------------------------------------------------------------


def assert_served_as_alone(forward: Forward, model: nn.Module) -> None:
    requests = [
        greedy(str(lane), prompt_of(80 + lane, length, VOCABULARY), 20) for lane, length in enumerate((9, 250, 33))
    ]
    served = serve(forward, submissions(requests, every=3), EngineConfig(max_lanes=3, round_rows=80))
    assert [served.tokens[each.request_id] for each in requests] == [solo(model, each).tokens for each in requests]


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (ConcatenateKVCache(), "ConcatenateKVCache"),
        (CacheList(KVCache(), ConcatenateKVCache()), "ConcatenateKVCache"),
        (RotatingKVCache(16, keep=4), "RotatingKVCache that keeps its first 4 positions"),
    ],
)
def test_a_cache_of_no_known_family_is_refused_by_its_name(made: object, named: str) -> None:
    model = random_model("llama")
    model.make_cache = lambda: [made for _ in model.layers]
    with pytest.raises(LoadError, match=rf"^tiny: its layers cache in a {named}, which cannot be served yet"):
        build_forward(model, VOCABULARY, "tiny")


def test_a_window_that_its_cache_does_not_keep_is_refused() -> None:
    """The model asks for a mask of 17 positions, and keeps 16: what it says depends on how its prompt was cut."""
    model = random_model("llama", layer_types=["sliding_attention", "full_attention"], sliding_window=17)
    model.make_cache = lambda: [RotatingKVCache(16), KVCache()]
    with pytest.raises(LoadError, match="a mask of 17 positions over a cache of 16"):
        build_forward(model, VOCABULARY, "tiny")
    model.make_cache = lambda: [KVCache(), KVCache()]
    with pytest.raises(LoadError, match="a mask of 17 positions over a cache of all"):
        build_forward(model, VOCABULARY, "tiny")


class Peeking(nn.Module):
    """A layer's attention that looks at what is cached besides attending it, as one that chooses among keys does."""

    def __init__(self, inner: nn.Module, *, attends: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self._attends = attends

    def __call__(self, hidden: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if self._attends:
            out: mx.array = self.inner(hidden, mask, cache)
            return out if cache.keys is None else out + 0.0
        keys, _ = cache.update_and_fetch(*(hidden[:, None, :, :32].reshape(-1, 2, hidden.shape[1], 16),) * 2)
        return hidden * keys.mean()


@pytest.mark.parametrize("attends", [True, False])
def test_a_model_that_looks_at_cached_keys_by_itself_is_refused_on_packed_rows(attends: bool) -> None:
    """However short the texts are that it is tried on: beyond them it may choose among its keys."""
    model = random_model("llama")
    model.layers[1].self_attn = Peeking(model.layers[1].self_attn, attends=attends)
    packed = paths_of(model, prepare(model), attention=mx.fast.scaled_dot_product_attention)[0]
    with pytest.raises(ValueError, match="the model looks at cached keys past the attention function"):
        check(model, packed)


# ---- models that are broken on purpose -------------------------------------------------------------------------------


class LaneZeroRope(nn.Module):
    """Rotates all lanes by the position of the first."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rope = rope

    def __call__(self, rows: mx.array, offset: mx.array | int = 0) -> mx.array:
        first = offset if isinstance(offset, int) else offset.reshape(-1)[0]
        turned: mx.array = self.rope(rows, offset=first)
        return turned


class Mixed(nn.Module):
    """A feed-forward part whose input is spoilt by a function of all lanes, `[batch, length, dim]`."""

    def __init__(self, mlp: nn.Module, mix: Callable[[mx.array], mx.array]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mlp = mlp
        self._mix = mix

    def __call__(self, hidden: mx.array) -> mx.array:
        out: mx.array = self.mlp(self._mix(hidden))
        return out


def over_lanes(hidden: mx.array) -> mx.array:
    return hidden + 0.1 * hidden.mean(axis=0, keepdims=True)


def along_the_sequence(hidden: mx.array) -> mx.array:
    """Each position sees the one before it, as a convolution without a state would."""
    return hidden + 0.1 * mx.pad(hidden, [(0, 0), (1, 0), (0, 0)])[:, :-1]


@each_path
def test_positions_taken_from_one_lane_are_found(path: str) -> None:
    paths = llama_paths()
    for layer in paths.model.layers:
        layer.self_attn.rope = LaneZeroRope(layer.self_attn.rope)
    with pytest.raises(Disagreement, match="logits differ from a single lane's by"):
        check(paths.model, paths[path])
    assert paths[path].buffers() == []


@each_path
@pytest.mark.parametrize("mix", [over_lanes, along_the_sequence])
def test_mixing_outside_attention_is_found(path: str, mix: Callable[[mx.array], mx.array]) -> None:
    paths = llama_paths()
    paths.model.layers[1].mlp = Mixed(paths.model.layers[1].mlp, mix)
    with pytest.raises(Disagreement):
        check(paths.model, paths[path])


@pytest.mark.parametrize("lanes", [2, 3, KV_HEADS])
def test_a_fault_at_one_number_of_lanes_is_found(lanes: int) -> None:
    paths = llama_paths()

    def mix(hidden: mx.array) -> mx.array:
        return over_lanes(hidden) if hidden.shape[0] == lanes else hidden

    paths.model.layers[0].mlp = Mixed(paths.model.layers[0].mlp, mix)
    with pytest.raises(Disagreement, match=f"at {lanes} lanes"):
        check(paths.model, paths.padded)


def test_a_broken_model_is_refused_with_the_reasons_of_both_paths() -> None:
    model = random_model("llama")
    model.layers[0].self_attn.rope = LaneZeroRope(model.layers[0].self_attn.rope)
    with pytest.raises(LoadError, match=r"^broken: .*PackedForward: at 2 lanes.*PaddedForward: at 2 lanes"):
        build_forward(model, VOCABULARY, "broken")


class OwnAttention(nn.Module):
    """A llama layer's attention that calls the kernel itself and so goes past the seam."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner

    def __call__(self, hidden: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, length, _ = hidden.shape
        inner = self.inner
        queries, keys, values = (
            project(hidden).reshape(batch, length, -1, 16).transpose(0, 2, 1, 3)
            for project in (inner.q_proj, inner.k_proj, inner.v_proj)
        )
        offset = 0 if cache is None else cache.offset
        queries, keys = inner.rope(queries, offset=offset), inner.rope(keys, offset=offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=mask)
        projected: mx.array = inner.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))
        return projected


def own_attention() -> nn.Module:
    model = random_model("llama")
    for layer in model.layers:
        layer.self_attn = OwnAttention(layer.self_attn)
    return model


def test_a_model_that_goes_past_the_seam_falls_to_the_padded_path_and_is_right() -> None:
    """Its module has the seam's function, its layers do not call it: packed rows would see no past."""
    forward = build_forward(own_attention(), VOCABULARY, "own")
    assert isinstance(forward, PaddedForward)
    assert_served_as_alone(forward, random_model("llama"))


# ---- forwards that are broken on purpose -----------------------------------------------------------------------------


class BrokenForward:
    """A forward whose windows are changed on their way. Written by `check_lanes`."""

    recurrent = False
    cuttable = True

    def __init__(self, inner: Forward, change: Callable[[Window], Window]) -> None:
        self._inner = inner
        self._change = change

    def run(self, windows: Sequence[Window], carried: Draws | None) -> Verified:
        return self._inner.run([self._change(window) for window in windows], carried)

    def keep(self, kept: Mapping[int, int]) -> None:
        self._inner.keep(kept)

    def release(self, slot: int) -> None:
        self._inner.release(slot)

    def reset(self) -> None:
        self._inner.reset()

    def buffers(self) -> list[mx.array]:
        return self._inner.buffers()


def keeping_rejected_drafts() -> Callable[[Window], Window]:
    ends: dict[int, int] = {}

    def change(window: Window) -> Window:
        start = max(window.start, ends.get(window.slot, 0)) if window.start else 0
        ends[window.slot] = start + window.rows
        return msgspec.structs.replace(window, start=start)

    return change


def forgetting_a_token() -> Callable[[Window], Window]:
    def change(window: Window) -> Window:
        forgotten = 1 if window.start and window.slot == 1 else 0
        return msgspec.structs.replace(window, start=window.start - forgotten)

    return change


@each_path
@pytest.mark.parametrize("fault", [keeping_rejected_drafts, forgetting_a_token])
def test_a_forward_that_loses_count_is_found(path: str, fault: Callable[[], Callable[[Window], Window]]) -> None:
    paths = llama_paths()
    with pytest.raises(Disagreement):
        check(paths.model, BrokenForward(paths[path], fault()))


def test_a_refused_model_holds_no_memory() -> None:
    paths = llama_paths()

    def raising(hidden: mx.array) -> mx.array:
        raise RuntimeError("no such batch")

    paths.model.layers[1].mlp = Mixed(paths.model.layers[1].mlp, raising)
    for forward in (paths.packed, paths.padded):
        with pytest.raises(RuntimeError, match="no such batch"):
            check(paths.model, forward)
        assert forward.buffers() == []
