"""Multi-token-prediction layers draft what their definition says of the kept text alone, from weights as they are
published; what they draft changes no answer; and weights that are not whole are refused.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest

from backends.mlx.backend import MLXBackend
from backends.mlx.build import build_forward
from backends.mlx.drafts.attach import attach_mtp
from backends.mlx.drafts.eagle import parameters_of
from backends.mlx.drafts.files import DrafterError
from backends.mlx.drafts.mtp import MTPNetwork, find_mtp, mtp_network
from backends.mlx.drafts.reading import MOST_UNREAD, ReadingDrafter
from backends.mlx.drafts.target import Borrowed, borrow
from backends.mlx.features import Features
from backends.mlx.load import Loaded, load_folder
from backends.mlx.runtime import DtypePolicy
from backends.mlx.seam import HeadRows, install_head
from backends.mlx.verify import Forward
from engine.config import EngineConfig
from scheduler.draft import Draft, DraftAsk, DraftSource
from scheduler.request import Request, Sampling
from tests.backends.mlx.architectures import ARCHITECTURES, VOCABULARY, tiny_model
from tests.backends.mlx.handfed import HandFed
from tests.backends.mlx.mtp_reference import (
    Floats,
    PlainMTP,
    Weights,
    apart,
    centred,
    fused,
    glm_names,
    joined_latent,
    narrowed,
    parameters,
    qwen_names,
    random_mtp,
)
from tests.backends.mlx.serving import INFO, CheckedDrafts, Served, prompt_of, serve_with, submissions
from tests.backends.mlx.tiny_models import write_folder, write_json
from tests.backends.mlx.windows import GREEDY

pytestmark = pytest.mark.usefixtures("calm")

ATTENTION = mx.fast.scaled_dot_product_attention
DIMS, LAYERS = 64, 2
KINDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "glm4_moe", "deepseek_v3", "glm4_moe_lite")
NUMBERED = ("glm4_moe", "deepseek_v3", "glm4_moe_lite")
"""Whose layer has the number behind the model's last."""
TIED = {"tie_word_embeddings": True}
"""As small models of Qwen3.5 are."""

each_kind = pytest.mark.parametrize("kind", KINDS)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def silent(stage: str, done: int, total: int | None) -> None:
    """Nobody is told."""


def plain_model(kind: str) -> nn.Module:
    """Mlx-lm's own, into which nothing of ours was installed."""
    return tiny_model(kind, seed=1, **(TIED if kind == "qwen3_5" else {}))


def config_of(kind: str) -> dict[str, Any]:
    config = {"model_type": kind, **copy.deepcopy(ARCHITECTURES[kind])}
    if kind == "qwen3_5":
        config["text_config"] |= TIED
    return config


def mtp_of(kind: str, model: nn.Module) -> PlainMTP:
    """A random one for a model."""
    named = parameters(model)
    (embeddings,) = (weight for name, weight in named.items() if name.endswith("embed_tokens.weight"))
    head = next((weight for name, weight in named.items() if name.endswith("lm_head.weight")), embeddings)
    return random_mtp(tiny_model(kind, seed=2).layers[-1], embeddings, head, seed=3)


def published_model(kind: str, model: nn.Module) -> Weights:
    """Its weights as its makers would publish them."""
    weights = parameters(model)
    if kind in NUMBERED:
        return joined_latent(apart(weights))
    if kind == "qwen3_next":
        return centred(apart(weights))
    renamed = {
        name.replace("language_model.model.", "model.language_model.").removeprefix("language_model."): weight
        for name, weight in weights.items()
    }
    return centred(fused(renamed))


def published_mtp(kind: str, mtp: PlainMTP) -> Weights:
    """And those of its multi-token-prediction layer."""
    return joined_latent(apart(glm_names(mtp, LAYERS))) if kind in NUMBERED else centred(apart(qwen_names(mtp)))


def write_weights(folder: Path, weights: Weights, config: dict[str, Any], file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / file), weights)
    write_json(folder / "config.json", config)
    return folder


class Target(msgspec.Struct, frozen=True):
    """A model that was loaded from a checkpoint, with all that a drafter needs of it, and the oracle."""

    loaded: Loaded
    head: HeadRows
    borrowed: Borrowed
    plain: nn.Module
    mtp: PlainMTP
    published: Weights
    """Of its multi-token-prediction layer."""

    def network(self, folder: Path | None = None) -> MTPNetwork:
        """From the folder's weights, or as if the model had come out of another one."""
        return mtp_network(self.within(folder or self.loaded.folder), self.borrowed)

    def within(self, folder: Path) -> Loaded:
        return dataclasses.replace(self.loaded, folder=folder)

    def hidden(self, tokens: Sequence[int]) -> Floats:
        """What the head reads of a text, `[tokens, dims]`."""
        states = self.plain.model(mx.array([tokens]))
        return np.array(states[0]).astype(np.float64)


def made(root: Path, kind: str) -> Target:
    plain = plain_model(kind)
    mtp = mtp_of(kind, plain)
    published = published_mtp(kind, mtp)
    folder = write_weights(root / kind, published_model(kind, plain), config_of(kind))
    # Mlx-lm knows layer 61 of DeepSeek's to be none of the model's, whose last one has another number here.
    file = "mtp.safetensors" if kind == "deepseek_v3" else "model-mtp.safetensors"
    write_weights(folder, published, config_of(kind), file)
    loaded = load_folder(kind, folder, "float32", silent)
    head = install_head(loaded.model)
    return Target(loaded, head, borrow(loaded.model), plain, mtp, published)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    """Made when they are first asked for."""
    found: dict[str, Target] = {}
    root = tmp_path_factory.mktemp("checkpoints")

    def target(kind: str) -> Target:
        if kind not in found:
            found[kind] = made(root, kind)
        return found[kind]

    return target


Targets = Callable[[str], Target]


# ---- drafts ----------------------------------------------------------------------------------------------------------


def reader_of(network: MTPNetwork, mtp: PlainMTP) -> HandFed:
    features = Features(None)
    drafter = ReadingDrafter(network, features, ATTENTION)
    return HandFed(drafter, features, mtp.check, width=DIMS, vocabulary=VOCABULARY, budgets=(3, 4, 5))


SAMPLINGS = (GREEDY, Sampling(1.0, 5), Sampling(0.8, 6, top_p=0.8), Sampling(1.0, 7, repetition_penalty=1.3))
LENGTHS = (2, 37, 9, 20)


@each_kind
def test_ragged_lanes_draft_what_each_drafts_alone_and_what_the_definition_says(kind: str, targets: Targets) -> None:
    target = targets(kind)
    network = target.network()
    together = reader_of(network, target.mtp)
    lanes = [together.join(slot, length, SAMPLINGS[slot]) for slot, length in enumerate(LENGTHS)]
    drafts = together.propose(*lanes)
    assert len({token for draft in drafts for token in draft.tokens}) >= 6, "varied enough to prove something"
    for slot, length in enumerate(LENGTHS):
        alone = reader_of(network, target.mtp)
        assert alone.propose(alone.join(slot, length, SAMPLINGS[slot])) == [drafts[slot]]


@each_kind
def test_after_rejections_it_drafts_as_if_it_had_seen_the_kept_text_only(kind: str, targets: Targets) -> None:
    """Lanes keep none, some or all of their drafts, then tokens that were not drafted; some sit a round out."""
    target = targets(kind)
    network = target.network()
    reader = reader_of(network, target.mtp)
    lanes = [reader.join(slot, length, SAMPLINGS[slot]) for slot, length in enumerate(LENGTHS)]
    for turn, accepted in enumerate(((0, 1, 3, 2), (3, 0, 1, 0), (1, 2, 0, 3))):
        asked = [lane for lane in lanes if (lane.slot + turn) % 4]
        drafts = reader.propose(*asked)
        for lane, draft in zip(asked, drafts, strict=True):
            kept = draft.tokens[: accepted[lane.slot]]
            reader.go_on(lane, (*kept, *prompt_of(turn, 1 + lane.slot % 2, VOCABULARY)))
    drafts = reader.propose(*lanes)
    for lane, draft in zip(lanes, drafts, strict=True):
        fresh = reader_of(network, target.mtp)
        fresh.told_at_once(lane)
        assert fresh.propose(lane) == [draft]


def test_a_lane_that_left_gives_its_seat_back(targets: Targets) -> None:
    target = targets("qwen3_5")
    reader = reader_of(target.network(), target.mtp)
    for lane in [reader.join(slot, 10, GREEDY) for slot in range(3)]:
        reader.propose(lane)
        reader.drafter.forget(str(lane.slot))
    assert isinstance(reader.drafter, ReadingDrafter)
    assert reader.drafter.store.arrays() == []


# ---- weights ---------------------------------------------------------------------------------------------------------


def same(first: MTPNetwork, second: MTPNetwork) -> bool:
    one, other = parameters_of(first.module), parameters_of(second.module)
    return one.keys() == other.keys() and all(mx.array_equal(one[name], other[name]) for name in one)


@each_kind
def test_what_is_read_is_what_mlx_lm_would_have_of_its_own_layer(kind: str, targets: Targets) -> None:
    target = targets(kind)
    found = parameters_of(target.network().module)
    layer = {name.removeprefix("layer."): array for name, array in found.items() if name.startswith("layer.")}
    expected = parameters(target.mtp.layer)
    assert layer.keys() == expected.keys()
    for name, array in layer.items():
        assert np.allclose(np.array(array), np.array(expected[name]), atol=1e-6), name


def test_experts_may_be_published_in_one_array(targets: Targets, tmp_path: Path) -> None:
    target = targets("qwen3_5_moe")
    folder = write_weights(tmp_path, centred(fused(qwen_names(target.mtp))), {})
    assert same(target.network(folder), target.network())


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_eight_bits_are_widened_by_their_blocks(kind: str, targets: Targets, tmp_path: Path) -> None:
    target = targets(kind)
    narrow, meant = narrowed(target.published)
    assert sum(name.endswith("_scale_inv") for name in narrow) > 8
    found = target.network(write_weights(tmp_path / "narrow", narrow, {}))
    assert same(found, target.network(write_weights(tmp_path / "meant", meant, {})))
    assert not same(found, target.network())


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_as_they_were_published_they_may_lie_beside_a_model_that_was_converted(
    kind: str, targets: Targets, tmp_path: Path
) -> None:
    write_weights(tmp_path, {"model.layers.0.linear_attn.conv1d.weight": mx.zeros((1, 4, 1))}, {})
    write_weights(tmp_path, targets(kind).published, {}, "mtp.safetensors")
    assert same(targets(kind).network(tmp_path), targets(kind).network())


@pytest.mark.parametrize(("shape", "gain"), [((1, 1, 4), 1.5), ((1, 4, 1), 0.5)])
def test_one_is_added_to_norms_where_the_models_convolutions_are_as_they_were_published(
    shape: tuple[int, ...], gain: float, targets: Targets, tmp_path: Path
) -> None:
    weights = {
        name: mx.full(weight.shape, 0.5) if "norm" in name else weight
        for name, weight in targets("qwen3_5").published.items()
    }
    write_weights(tmp_path, weights, {})
    write_weights(tmp_path, {"model.layers.0.linear_attn.conv1d.weight": mx.zeros(shape)}, {}, "model-2.safetensors")
    read = parameters_of(targets("qwen3_5").network(tmp_path).module)
    norms = {name: set(np.array(array).tolist()) for name, array in read.items() if "norm" in name}
    assert len(norms) == 7
    assert all(gains == {gain} for gains in norms.values())


def converted(folder: Path, quantization: dict[str, Any] | None) -> tuple[Path, PlainMTP]:
    """A Qwen3.5 as converters write it that keep the layer: norms and convolutions as mlx-lm has them."""
    model = plain_model("qwen3_5")
    mtp = mtp_of("qwen3_5", model)
    config = config_of("qwen3_5")
    weights = qwen_names(mtp)
    if quantization is not None:
        config["quantization"] = quantization
        projection = nn.Linear(2 * DIMS, DIMS, bias=False)
        projection.weight = weights.pop("mtp.fc.weight")
        packed = projection.to_quantized(**quantization)
        for part in (model, mtp.layer):
            nn.quantize(part, **quantization, class_predicate=lambda _, each: isinstance(each, nn.Linear))
        weights = qwen_names(mtp) | {f"mtp.fc.{name}": array for name, array in parameters(packed).items()}
        meant = mx.dequantize(packed.weight, packed.scales, packed.get("biases"), **quantization, dtype=mx.float32)
        mtp = msgspec.structs.replace(mtp, projection=np.array(meant).astype(np.float64))
    kept = {f"language_model.{name}": array for name, array in weights.items()}
    return write_weights(folder, parameters(model) | kept, config), mtp


@pytest.mark.parametrize(
    ("quantization", "policy", "quantized"),
    [
        (None, "checkpoint", False),
        ({"group_size": 32, "bits": 4}, "checkpoint", True),
        ({"group_size": 32, "bits": 4}, "float32", False),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, "checkpoint", True),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, "float32", False),
    ],
)
def test_a_converted_checkpoint_drafts_as_its_weights_say(
    quantization: dict[str, Any] | None, policy: DtypePolicy, quantized: bool, tmp_path: Path
) -> None:
    folder, mtp = converted(tmp_path / "converted", quantization)
    loaded = load_folder("converted", folder, policy, silent)
    install_head(loaded.model)
    assert find_mtp(loaded)
    network = mtp_network(loaded, borrow(loaded.model))
    assert any(isinstance(part, nn.QuantizedLinear) for part in network.module.modules()) == quantized
    reader = reader_of(network, mtp)
    reader.propose(*(reader.join(slot, length, SAMPLINGS[slot]) for slot, length in enumerate(LENGTHS)))


def test_in_half_precision_all_is_narrow_but_what_the_model_wants_in_full(targets: Targets) -> None:
    loaded = load_folder("half", targets("glm4_moe").loaded.folder, "float16", silent)
    install_head(loaded.model)
    network = mtp_network(loaded, borrow(loaded.model))
    wide = {name for name, array in parameters_of(network.module).items() if array.dtype == mx.float32}
    assert wide == {"layer.mlp.gate.e_score_correction_bias"}
    assert network.cached.shape.dtype == mx.float16


# ---- whose weights there are -----------------------------------------------------------------------------------------


@each_kind
def test_published_weights_are_found(kind: str, targets: Targets) -> None:
    assert find_mtp(targets(kind).loaded)


@each_kind
def test_a_model_without_them_has_none(kind: str, targets: Targets, tmp_path: Path) -> None:
    folder = write_weights(tmp_path, published_model(kind, targets(kind).plain), {})
    assert not find_mtp(targets(kind).within(folder))
    with pytest.raises(DrafterError, match="its folder holds none"):
        targets(kind).network(folder)


@pytest.mark.parametrize(("kind", "reason"), [("llama", "known for llama"), ("deepseek_v32", "known for deepseek_v32")])
def test_models_that_are_not_known_are_refused(kind: str, reason: str, targets: Targets, tmp_path: Path) -> None:
    """Even if there seems to be something."""
    write_folder(tmp_path, {"model_type": kind} | ARCHITECTURES[kind])
    loaded = load_folder(kind, tmp_path, "float32", silent)
    mx.save_safetensors(str(tmp_path / "mtp.safetensors"), targets("qwen3_next").published)
    install_head(loaded.model)
    assert not find_mtp(loaded)
    with pytest.raises(DrafterError, match=f"{kind}: .*{reason}"):
        mtp_network(loaded, borrow(loaded.model))


# ---- weights that do not do ------------------------------------------------------------------------------------------


def missing(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {each: array for each, array in weights.items() if each != name}


def changed(name: str, change: Callable[[mx.array], mx.array]) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name: change(weights[name])}


def added(name: str, shape: tuple[int, ...]) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name: mx.zeros(shape)}


QWEN, GLM = "mtp.layers.0.", f"model.layers.{LAYERS}."
MISFITS: dict[str, tuple[str, Callable[[Weights], Weights], str]] = {
    "no fc": ("qwen3_5", missing("mtp.fc.weight"), "mtp.fc.weight is missing"),
    "no norm": ("qwen3_5", missing("mtp.norm.weight"), "mtp.norm.weight is missing"),
    "no keys": (
        "qwen3_next",
        missing(f"{QWEN}self_attn.k_proj.weight"),
        r"mtp.layers.0.self_attn.k_proj.weight is mis",
    ),
    "one expert less": (
        "qwen3_next",
        missing(f"{QWEN}mlp.experts.1.up_proj.weight"),
        r"mtp.layers.0.mlp.switch_mlp.up_proj.weight has the shape \(3, 64, 64\) instead of \(4, 64, 64\)",
    ),
    "an odd expert": (
        "qwen3_5_moe",
        changed(f"{QWEN}mlp.experts.1.up_proj.weight", lambda array: array[1:]),
        "experts of layer.mlp.switch_mlp.up_proj.weight differ",
    ),
    "a narrow fc": (
        "qwen3_5",
        changed("mtp.fc.weight", lambda array: array[:, :DIMS]),
        r"mtp.fc.weight has the shape \(64, 64\) instead of \(64, 128\)",
    ),
    "another layer": (
        "qwen3_5",
        added("mtp.layers.1.self_attn.k_proj.weight", (32, 64)),
        "mtp.layers.1.self_attn.k_proj.weight belongs to no part",
    ),
    "eight bits": (
        "qwen3_5",
        added("mtp.fc.weight_scale_inv", (1, 1)),
        "mtp.fc.weight_scale_inv belongs to no part",
    ),
    "scales alone": ("qwen3_5", added("mtp.fc.scales", (64, 4)), "that could draft: "),
    "too many scales": ("qwen3_5", added("mtp.fc.scales", (64, 500)), "that could draft: "),
    "no scales": ("qwen3_5", added("mtp.fc.scales", (64, 0)), "that could draft: "),
    "no eh_proj": ("glm4_moe", missing(f"{GLM}eh_proj.weight"), "model.layers.2.eh_proj.weight is missing"),
    "no last norm": ("glm4_moe", missing(f"{GLM}shared_head.norm.weight"), "2.shared_head.norm.weight is missing"),
    "no experts": (
        "glm4_moe",
        lambda weights: {name: array for name, array in weights.items() if ".experts." not in name},
        "model.layers.2.mlp.switch_mlp.down_proj.weight is missing",
    ),
    "a wide output": (
        "glm4_moe",
        changed(f"{GLM}self_attn.o_proj.weight", lambda array: mx.concatenate([array, array])),
        r"model.layers.2.self_attn.o_proj.weight has the shape \(128, 64\) instead of \(64, 64\)",
    ),
    "quantized latent": (
        "deepseek_v3",
        added(f"{GLM}self_attn.kv_b_proj.scales", (64, 4)),
        r"layer.self_attn.kv_b_proj.scales is quantized",
    ),
    "no latent": ("deepseek_v3", missing(f"{GLM}self_attn.kv_b_proj.weight"), "2.self_attn.embed_q.weight is missing"),
    "odd latent": (
        "glm4_moe_lite",
        changed(f"{GLM}self_attn.kv_b_proj.weight", lambda array: array[1:]),
        "that could draft: ",
    ),
    "a bias more": ("glm4_moe", added(f"{GLM}self_attn.q_proj.bias", (64,)), "q_proj.bias belongs to no part"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_weights_that_are_not_whole_or_do_not_fit_are_refused(misfit: str, targets: Targets, tmp_path: Path) -> None:
    kind, change, reason = MISFITS[misfit]
    target = targets(kind)
    folder = write_weights(tmp_path, change(target.published), {})
    assert find_mtp(target.within(folder))
    with pytest.raises(DrafterError, match=f"^{kind} has no .*{reason}"):
        target.network(folder)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_refused(share: float, targets: Targets, tmp_path: Path) -> None:
    target = targets("glm4_moe")
    folder = write_weights(tmp_path, target.published, {}, "mtp.safetensors")
    assert same(target.network(folder), target.network())
    whole = (folder / "mtp.safetensors").read_bytes()
    (folder / "mtp.safetensors").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(DrafterError, match=r"glm4_moe .*mtp.safetensors is damaged or incomplete"):
        target.network(folder)
    assert not find_mtp(target.within(folder))


# ---- service ---------------------------------------------------------------------------------------------------------


def check_over(target: Target) -> Callable[[DraftAsk, Draft], None]:
    """Against the definition, over what mlx-lm makes of the whole text."""

    def check(ask: DraftAsk, draft: Draft) -> None:
        assert target.head.noted is None, "the drafter's own rows pass no tap of the target"
        if len(ask.tokens) == 1:
            assert draft == Draft(), "nothing of it is known"
        else:
            target.mtp.check(draft, ask, target.hidden(ask.tokens[:-1]))

    return check


def served(forward: Forward, *sources: DraftSource, features: Features | None = None, drafts: int = 3) -> Served:
    """Lanes of several lengths and ways to sample that come one after the other, in the real loop."""
    requests = [
        Request(str(slot), prompt_of(60 + slot, length, VOCABULARY), 12, SAMPLINGS[slot % len(SAMPLINGS)])
        for slot, length in enumerate((5, 23, 1, 12, MOST_UNREAD))
    ]
    backend = MLXBackend(INFO, forward)
    backend.features = features
    config = EngineConfig(max_lanes=3, round_rows=60, draft_tokens=drafts)
    return serve_with(backend, submissions(requests, every=2), config, sources)


def garbage(rng: np.random.Generator, size: float) -> Callable[[mx.array], mx.array]:
    return lambda array: mx.array((rng.normal(0, 1, array.shape) * size).astype(np.float32))


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "glm4_moe", "deepseek_v3"])
def test_drafts_are_right_in_service_and_change_no_answer(kind: str, targets: Targets, tmp_path: Path) -> None:
    """Nor do those of weights that are nonsense."""
    target = targets(kind)
    loaded = target.loaded
    forward = build_forward(loaded.model, loaded.vocab_size, loaded.name, target.head)
    plain = served(forward, drafts=0)
    assert {len(tokens) for tokens in plain.tokens.values()} == {12}
    drafter, forward.taps, features = attach_mtp(loaded, target.head, ATTENTION)
    checked = CheckedDrafts(drafter, check_over(target))
    answers = served(forward, checked, features=features)
    assert checked.wrong == []
    assert checked.drafts > 30
    assert answers.tokens == plain.tokens
    assert answers.drafted >= 40
    assert drafter.store is not None
    assert forward.buffers() == drafter.store.arrays() == [], "lanes left behind"
    for size in (1e4, np.nan):
        change = garbage(np.random.default_rng(0), size)
        folder = write_weights(tmp_path, {name: change(array) for name, array in target.published.items()}, {})
        drafter, forward.taps, features = attach_mtp(target.within(folder), target.head, ATTENTION)
        answers = served(forward, drafter, features=features)
        assert answers.tokens == plain.tokens
        assert answers.drafted >= 40
