"""Folders of Gemma 4 assistants are read as they are published; those that do not fit their target are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backends.base import KVQuantization
from backends.mlx.build import build_forward, load_backend, paths, prepare
from backends.mlx.drafts.assistant_drafter import AssistantDrafter
from backends.mlx.drafts.files import DrafterError
from backends.mlx.drafts.folders import attach_folder
from backends.mlx.load import LoadError, load_folder
from backends.mlx.runtime import MemoryLimit
from backends.mlx.seam import install_head
from engine.config import EngineConfig
from scheduler.request import Request
from tests.backends.mlx.architectures import VOCABULARY
from tests.backends.mlx.assistant.reference import (
    DENSE,
    FULL,
    GROUPED,
    SLIDING,
    TEXT,
    Config,
    PlainAssistant,
    random_assistant,
)
from tests.backends.mlx.assistant.targets import (
    ATTENTION,
    SAMPLINGS,
    Table,
    Targets,
    Weights,
    silent,
    write_assistant,
    write_target,
)
from tests.backends.mlx.serving import prompt_of, serve_with, submissions
from tests.backends.mlx.tiny_models import parameters, vocabulary, write_folder, write_json
from tests.backends.mlx.windows import GREEDY

pytestmark = pytest.mark.usefixtures("calm")


def test_a_folder_may_call_its_head_by_either_name_and_be_in_several_files(targets: Targets, tmp_path: Path) -> None:
    """Tables that no token is looked up in are passed over; and it may be an assistant of the unified kind."""
    target, weights = targets("shared"), random_assistant(DENSE)
    untied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    untied["model.embed_tokens.weight"] = mx.zeros((3, 3))
    folder = write_assistant(tmp_path, DENSE | {"model_type": "gemma4_unified_assistant"}, untied)
    mx.save_safetensors(str(folder / "model-2.safetensors"), {"lm_head.weight": untied.pop("lm_head.weight")})
    mx.save_safetensors(str(folder / "model.safetensors"), untied)
    table = Table(target, folder, DENSE)
    table.propose(table.join(0, prompt_of(1, 30, VOCABULARY), GREEDY))


@pytest.mark.parametrize("how", [{"group_size": 32, "bits": 8}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}])
def test_of_quantized_weights_the_numbers_that_they_mean_are_taken(
    how: dict[str, Any], targets: Targets, tmp_path: Path
) -> None:
    stored, meant = {}, {}
    for name, weight in random_assistant(DENSE).items():
        stored[name] = meant[name] = weight
        if weight.ndim == 2 and weight.shape[1] % 32 == 0:
            packed = mx.quantize(weight, **how)
            parts = zip(("weight", "scales", "biases"), packed, strict=False)
            stored |= {f"{name.removesuffix('weight')}{part}": array for part, array in parts}
            meant[name] = mx.dequantize(*packed, **how, dtype=mx.float32)
    assert any(name.endswith(".scales") for name in stored)
    target = targets("shared")
    table = Table(target, write_assistant(tmp_path, DENSE | {"quantization": how}, stored), DENSE)
    table.plain = PlainAssistant(DENSE, meant, target.plain)
    table.propose(*(table.join(slot, prompt_of(slot, 30, VOCABULARY), SAMPLINGS[slot]) for slot in range(4)))


def test_in_half_precision_it_computes_as_its_target(tmp_path: Path) -> None:
    """Loaded and warmed up as a server would do it, with a limit for memory."""
    write_target(tmp_path / "target", "gemma4_text", {})
    folder = write_assistant(tmp_path / "assistant", GROUPED)
    target = str(tmp_path / "target")
    memory = MemoryLimit(1 << 30)
    backend = load_backend(target, tmp_path, "float16", silent, "test", drafter=folder, memory=memory)
    (drafter,) = backend.drafters
    assert isinstance(drafter, AssistantDrafter)
    kinds = {name: array.dtype for name, array in parameters(drafter.network).items()}
    assert kinds.pop("masked_embedding.token_ordering") == mx.int32
    assert set(kinds.values()) == {mx.float16}
    assert backend.info.drafter == "assistant"
    requests = [Request(str(slot), prompt_of(slot, 9, VOCABULARY), 12, SAMPLINGS[slot]) for slot in range(4)]
    answers = serve_with(backend, submissions(requests), EngineConfig(max_lanes=3, draft_tokens=3))
    assert {len(tokens) for tokens in answers.tokens.values()} == {12}
    assert answers.drafted > 50


# ---- folders and targets that do not do ------------------------------------------------------------------------------


def text(**fields: Any) -> Config:
    return GROUPED | {"text_config": TEXT | fields}


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {each: array for each, array in weights.items() if each != name}


def changed(name: str, change: Callable[[mx.array], mx.array]) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name: change(weights[name])}


ORDERING = "masked_embedding.token_ordering"
QUERIES = "model.layers.2.self_attn.q_proj.weight"
WHOLE: Callable[[Weights], Weights] = dict
MISFITS: dict[str, tuple[Config, Callable[[Weights], Weights], str]] = {
    "another kind": (GROUPED | {"model_type": "llama"}, WHOLE, "no drafter that is known: it says that it is 'llama'"),
    "no kind": ({}, WHOLE, "it says that it is None"),
    "no kind at all": (GROUPED | {"model_type": [1]}, WHOLE, "no drafter that is known"),
    "no layers": (GROUPED | {"text_config": {}}, WHOLE, "missing required field"),
    "layers of numbers": (GROUPED | {"text_config": 3}, WHOLE, r"does not fit shared: .*text_config"),
    "another width": (GROUPED | {"backbone_hidden_size": 32}, WHOLE, "hidden states of 32 numbers, not 64"),
    "another vocabulary": (text(vocab_size=256), WHOLE, "its vocabulary has 256 tokens, not 128"),
    "a narrow window": (text(sliding_window=15), WHOLE, "see 15 positions, not 16"),
    "odd heads": (text(num_attention_heads=3), WHOLE, "its 3 heads cannot share 2"),
    "no heads": (text(num_attention_heads=0), WHOLE, "do not fit together"),
    "a layer too few": (text(num_hidden_layers=3), WHOLE, "do not fit together"),
    "a linear layer": (text(layer_types=["linear_attention"] * 4), WHOLE, "linear_attention"),
    "keys of its own": (text(num_kv_shared_layers=2), WHOLE, "would cache keys of their own"),
    "experts": (text(enable_moe_block=True), WHOLE, "have experts"),
    "another activation": (text(hidden_activation="silu"), WHOLE, "its activation is 'silu'"),
    "odd rotation": (
        text(rope_parameters={FULL: {"rope_type": "odd"}, SLIDING: {"rope_type": "default"}}),
        WHOLE,
        "Unsupported RoPE type odd",
    ),
    "groups of two sizes": (GROUPED | {"num_centroids": 24}, WHOLE, "not 24 groups of one size"),
    "too many groups": (GROUPED | {"centroid_intermediate_top_k": 17}, WHOLE, "more than there are"),
    "no queries": (GROUPED, without(QUERIES), f"{QUERIES} is missing"),
    "no table": (GROUPED, without("model.embed_tokens.weight"), "model.embed_tokens.weight is missing"),
    "no scalar": (GROUPED, without("model.layers.3.layer_scalar"), "model.layers.3.layer_scalar is missing"),
    "no ordering": (GROUPED, without(ORDERING), f"{ORDERING} is missing"),
    "no weights": (GROUPED, lambda _: {}, "its folder holds no weights"),
    "narrow queries": (
        GROUPED,
        changed(QUERIES, lambda array: array[:64]),
        rf"{QUERIES} has the shape \(64, 32\) instead of \(128, 32\)",
    ),
    "keys": (
        GROUPED,
        lambda weights: weights | {"model.layers.0.self_attn.k_proj.weight": mx.zeros((32, 32))},
        "no part",
    ),
    "a short table": (
        GROUPED,
        changed("model.embed_tokens.weight", lambda array: array[1:]),
        r"model.embed_tokens.weight has the shape \(127, 32\) instead of \(128, 32\)",
    ),
    "a token twice": (GROUPED, changed(ORDERING, lambda array: mx.maximum(array, 1)), "has not every token once"),
    "no whole numbers": (GROUPED, changed(ORDERING, lambda array: array + 0.5), "holds no whole numbers"),
    "no scales": (
        GROUPED,
        lambda weights: weights | {"pre_projection.scales": mx.zeros((32, 0))},
        "does not fit shared",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_folder_that_does_not_fit_is_refused(misfit: str, targets: Targets, tmp_path: Path) -> None:
    config, change, reason = MISFITS[misfit]
    folder = write_assistant(tmp_path, config, change(random_assistant(GROUPED)))
    with pytest.raises(DrafterError, match=rf"^(the drafter )?{folder} .*{reason}"):
        targets("shared").attach(folder)


@pytest.mark.parametrize("content", [None, "", "[]", "{", "[" * 100000])
def test_a_config_that_cannot_be_read_is_refused(content: str | None, targets: Targets, tmp_path: Path) -> None:
    folder = write_assistant(tmp_path)
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(DrafterError, match=rf"the drafter {folder} has "):
        targets("shared").attach(folder)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_refused(share: float, targets: Targets, tmp_path: Path) -> None:
    file = write_assistant(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(DrafterError, match=r"model.safetensors is damaged or incomplete"):
        targets("shared").attach(tmp_path)


def test_another_tokenizer_is_refused(targets: Targets, tmp_path: Path) -> None:
    """Where both say what theirs is."""
    target = targets("shared")
    folder = write_assistant(tmp_path / "assistant")
    ids = {token: place for place, token in enumerate(vocabulary()[:VOCABULARY])}
    other = {token: (place + 1) % VOCABULARY for token, place in ids.items()}
    for where, known in ((target.loaded.folder, ids), (folder, other)):
        write_json(where / "tokenizer.json", {"model": {"type": "BPE", "vocab": known, "merges": []}})
    try:
        with pytest.raises(DrafterError, match=r"assistant cannot draft for shared: another vocabulary"):
            target.attach(folder)
        write_json(folder / "tokenizer.json", {"model": {"type": "BPE", "vocab": ids, "merges": []}})
        target.attach(folder)
    finally:
        (target.loaded.folder / "tokenizer.json").unlink()


def test_targets_that_it_cannot_read_are_refused(targets: Targets, folders: dict[str, Path], tmp_path: Path) -> None:
    """Whose keys are quantized or lie in rectangles; and one of another family."""
    target = targets("shared")
    loaded, head = target.loaded, target.head
    for start in (0, 8):
        how = KVQuantization(bits=8, group_size=32, start=start)
        forward = build_forward(loaded.model, loaded.vocab_size, loaded.name, head, how)
        with pytest.raises(DrafterError, match=r"does not fit shared: .*are quantized"):
            attach_folder(folders["dense"], loaded, head, forward, ATTENTION)
    write_folder(tmp_path / "llama", {"vocab_size": VOCABULARY})
    llama = load_folder("llama", tmp_path / "llama", "float32", silent)
    head = install_head(llama.model)
    packed, padded = paths(llama.model, prepare(llama.model), attention=ATTENTION, head=head)
    with pytest.raises(DrafterError, match="served in rectangles"):
        attach_folder(folders["dense"], loaded, target.head, padded, ATTENTION)
    with pytest.raises(DrafterError, match=r"does not fit llama: .*for Gemma 4 only"):
        attach_folder(folders["dense"], llama, head, packed, ATTENTION)
    with pytest.raises(LoadError, match="for Gemma 4 only"):
        load_backend(str(tmp_path / "llama"), tmp_path, "float32", silent, "test", drafter=folders["dense"])
