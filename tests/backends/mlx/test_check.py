"""A model is served on a path on which its lanes agree with single sequences, or refused with the reason."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import pytest

from backends.mlx.build import build_forward
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


# ---- models of mlx-lm that go wrong ----------------------------------------------------------------------------------


def test_gemma2_which_mixes_up_as_many_lanes_as_kv_heads_is_refused() -> None:
    """Its masks have a rank too few: it raises at 3 lanes, and at 2, with 2 KV heads, it diverges silently."""
    with pytest.raises(LoadError, match=r"tiny-gemma: .*PaddedForward: at 2 lanes, logits differ"):
        build_forward(random_model("gemma2"), VOCABULARY, "tiny-gemma")


def test_a_model_that_raises_for_several_lanes_is_refused_on_both_paths() -> None:
    with pytest.raises(LoadError, match=r"PackedForward: .*PaddedForward: "):
        build_forward(random_model("gpt_bigcode"), VOCABULARY, "tiny-bigcode")


def test_a_model_without_the_seam_takes_the_padded_path_and_is_right() -> None:
    """gemma2 brings its own attention; with as many KV heads as heads its masks happen to be right."""
    model = random_model("gemma2", num_key_value_heads=4)
    forward = build_forward(model, VOCABULARY, "gemma2")
    assert isinstance(forward, PaddedForward)
    assert_served_as_alone(forward, random_model("gemma2", num_key_value_heads=4))


def assert_served_as_alone(forward: Forward, model: nn.Module) -> None:
    requests = [
        greedy(str(lane), prompt_of(80 + lane, length, VOCABULARY), 20) for lane, length in enumerate((9, 250, 33))
    ]
    served = serve(forward, submissions(requests, every=3), EngineConfig(max_lanes=3, round_rows=80))
    assert [served.tokens[each.request_id] for each in requests] == [solo(model, each).tokens for each in requests]


@pytest.mark.parametrize(
    ("kind", "config", "cache"),
    [
        ("llama", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, "RotatingKVCache"),
        ("mamba", {}, "ArraysCache"),
        ("gemma3_text", {"sliding_window": 16, "sliding_window_pattern": 2}, "RotatingKVCache"),
    ],
)
def test_models_with_other_caches_are_refused_by_the_name_of_the_cache(
    kind: str, config: dict[str, Any], cache: str
) -> None:
    with pytest.raises(LoadError, match=rf"^tiny: its layers cache in {cache}; only full attention"):
        build_forward(random_model(kind, **config), VOCABULARY, "tiny")


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

    def __init__(self, inner: Forward, change: Callable[[Window], Window]) -> None:
        self._inner = inner
        self._change = change

    def run(self, windows: Sequence[Window], carried: Draws | None) -> Verified:
        return self._inner.run([self._change(window) for window in windows], carried)

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
