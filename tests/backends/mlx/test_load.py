import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from backends.mlx import load as load_module
from backends.mlx.load import UNBOUNDED_CONTEXT, Loaded, LoadError, load
from backends.mlx.runtime import DtypePolicy
from tests.backends.mlx.tiny_models import TINY_CONFIG, parameters, stored_weights, write_folder, write_json

AFFINE = {"group_size": 32, "bits": 4}
TOKENS = [[5, 80, 33, 7, 90, 41]]

MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e4}
QWEN2 = {"model_type": "qwen2", "rope_theta": 1e4, "tie_word_embeddings": False}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rope_theta": 1e4,
}


def ignore(stage: str, done: int, total: int | None) -> None:
    """A progress callback that nobody looks at."""


def loaded(folder: Path, policy: DtypePolicy = "float32") -> Loaded:
    return load(str(folder), folder / "no-home", policy, ignore)


def dtypes(model: nn.Module) -> set[mx.Dtype]:
    return {array.dtype for array in parameters(model).values()}


# Dtype


def test_on_a_cpu_auto_dequantizes_in_float32(tmp_path: Path) -> None:
    written = write_folder(tmp_path, quantization=AFFINE)
    model = loaded(tmp_path, "auto" if mx.default_device() == mx.cpu else "float32")
    assert model.dtype == "float32"
    assert dtypes(model.model) == {mx.float32}
    plain = dict(model.model.named_modules())
    for path, layer in written.named_modules():
        if hasattr(layer, "bits"):
            scales, biases = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
            expected = mx.dequantize(layer.weight, scales, biases, group_size=32, bits=4)
            assert type(plain[path]) in (nn.Linear, nn.Embedding)
            assert mx.array_equal(plain[path].weight, expected).item()


@pytest.mark.parametrize("config", [{}, MIXTRAL, QWEN2, DEEPSEEK_V3], ids=["llama", "mixtral", "qwen2", "deepseek_v3"])
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_a_dequantized_model_computes_what_the_quantized_one_does(
    tmp_path: Path, config: dict[str, Any], mode: str
) -> None:
    written = write_folder(tmp_path, config, mx.float32, {"group_size": 32, "bits": 4, "mode": mode})
    model = loaded(tmp_path).model
    assert not [path for path, module in model.named_modules() if hasattr(module, "bits")]
    expected, logits = written(mx.array(TOKENS)), model(mx.array(TOKENS))
    assert (mx.std(expected) > 1e-3).item()
    assert mx.allclose(logits, expected, rtol=1e-4, atol=1e-5).item()


def test_biases_survive(tmp_path: Path) -> None:
    write_folder(tmp_path, QWEN2, quantization=AFFINE)
    weights = stored_weights(tmp_path)
    path = "model.layers.1.self_attn.q_proj.bias"
    weights[path] = mx.arange(weights[path].size).astype(mx.float16)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    bias = loaded(tmp_path).model.model.layers[1].self_attn.q_proj.bias
    assert mx.array_equal(bias, mx.arange(bias.size).astype(mx.float32)).item()


def test_the_checkpoints_own_types_are_kept_on_request(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", quantization=AFFINE)
    packed = loaded(tmp_path / "packed", "checkpoint")
    assert (packed.dtype, dtypes(packed.model)) == ("4-bit float16", {mx.uint32, mx.float16})
    write_folder(tmp_path / "plain", dtype=mx.bfloat16)
    plain = loaded(tmp_path / "plain", "checkpoint")
    assert (plain.dtype, dtypes(plain.model)) == ("bfloat16", {mx.bfloat16})
    assert plain.parameter_bytes == sum(array.nbytes for array in stored_weights(tmp_path / "plain").values())


@pytest.mark.parametrize("policy", ["float32", "bfloat16", "float16"])
def test_every_floating_parameter_is_cast(tmp_path: Path, policy: DtypePolicy) -> None:
    write_folder(tmp_path, quantization=AFFINE)
    model = loaded(tmp_path, policy)
    assert (model.dtype, dtypes(model.model)) == (policy, {getattr(mx, policy)})


def test_what_a_model_wants_in_full_precision_is_not_narrowed(tmp_path: Path) -> None:
    write_folder(tmp_path, DEEPSEEK_V3, mx.float32)
    gate = loaded(tmp_path, "bfloat16").model.model.layers[1].mlp.gate
    assert (gate.weight.dtype, gate.e_score_correction_bias.dtype) == (mx.bfloat16, mx.float32)


def test_progress_counts_bytes_layer_by_layer(tmp_path: Path) -> None:
    write_folder(tmp_path, quantization=AFFINE)
    told: list[tuple[str, int, int | None]] = []
    model = load(str(tmp_path), tmp_path, "float32", lambda *step: told.append(step))
    assert model.parameter_bytes == sum(4 * array.size for array in parameters(model.model).values())
    assert [stage for stage, _, _ in told] == ["load"] * 4
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert {total for _, _, total in told} == {model.parameter_bytes}
    assert told[-1] == ("load", model.parameter_bytes, model.parameter_bytes)


# What the outside must know


def test_facts_come_from_the_configuration(tmp_path: Path) -> None:
    write_folder(tmp_path / "some-model")
    model = loaded(tmp_path / "some-model")
    assert (model.name, model.folder) == ("some-model", tmp_path / "some-model")
    assert (model.vocab_size, model.context_length) == (96, 256)
    assert (model.eos_token_ids, model.generation_defaults) == ((7,), {})
    assert model.config["hidden_size"] == TINY_CONFIG["hidden_size"]
    assert not model.model.training


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        ({"eos_token_id": 7}, None, None, (7,)),
        ({"eos_token_id": 7}, {"eos_token_id": [3, 4]}, None, (3, 4)),
        ({"eos_token_id": 7}, {"eos_token_id": 0}, None, (0,)),
        ({"eos_token_id": 7}, {"temperature": 0.5}, None, (7,)),
        ({"eos_token_id": None}, None, {"eos_token": "<end>"}, (5,)),
        ({"eos_token_id": 7}, None, {"eos_token": {"content": "word"}}, (7, 6)),
        ({"eos_token_id": 5}, None, {"eos_token": "<end>"}, (5,)),
        ({"eos_token_id": 7}, None, {"eos_token": "<x>", "added_tokens_decoder": {"9": {"content": "<x>"}}}, (7, 9)),
        ({"eos_token_id": None}, None, {"eos_token": "nowhere"}, ()),
    ],
)
def test_end_of_sequence_tokens(
    tmp_path: Path,
    config: dict[str, Any],
    generation: dict[str, Any] | None,
    tokenizer: dict[str, Any] | None,
    expected: tuple[int, ...],
) -> None:
    write_folder(tmp_path, config)
    write_json(
        tmp_path / "tokenizer.json",
        {"added_tokens": [{"id": 5, "content": "<end>"}], "model": {"vocab": {"word": 6}}},
    )
    if generation is not None:
        write_json(tmp_path / "generation_config.json", generation)
    if tokenizer is not None:
        write_json(tmp_path / "tokenizer_config.json", tokenizer)
    assert loaded(tmp_path).eos_token_ids == expected


def test_only_named_sampling_defaults_are_taken(tmp_path: Path) -> None:
    write_folder(tmp_path)
    generation = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "eos_token_id": 7}
    write_json(tmp_path / "generation_config.json", generation)
    assert loaded(tmp_path).generation_defaults == {"temperature": 0.6, "top_k": 20.0}


@pytest.mark.parametrize(
    ("config", "tokenizer", "expected"),
    [
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 99}}, {}, 99),
        ({"max_position_embeddings": None}, {"model_max_length": 77}, 77),
        ({"max_position_embeddings": None}, {"model_max_length": 10**30}, UNBOUNDED_CONTEXT),
    ],
)
def test_the_context_length_is_found(
    tmp_path: Path, config: dict[str, Any], tokenizer: dict[str, Any], expected: int
) -> None:
    write_folder(tmp_path, config)
    write_json(tmp_path / "tokenizer_config.json", tokenizer)
    assert loaded(tmp_path).context_length == expected


def test_what_the_configuration_leaves_out_is_the_model_types_default(tmp_path: Path) -> None:
    write_folder(tmp_path, {"model_type": "phi", "vocab_size": 51200})
    left_out = ("vocab_size", "max_position_embeddings")
    config = {key: value for key, value in TINY_CONFIG.items() if key not in left_out}
    write_json(tmp_path / "config.json", config | {"model_type": "phi"})
    model = loaded(tmp_path)
    assert (model.vocab_size, model.context_length) == (51200, 2048)


# Where a reference leads


def test_an_installed_name_comes_before_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "home" / "models" / "tiny")
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    model = load("tiny", tmp_path / "home", "float32", ignore)
    assert (model.name, model.folder) == ("tiny", tmp_path / "home" / "models" / "tiny")


def test_a_hub_repository_is_fetched_without_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "snapshot")
    asked: list[tuple[str, list[str]]] = []

    def snapshot(repository: str, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(load_module, "snapshot_download", snapshot)
    told: list[tuple[str, int, int | None]] = []
    model = load("someone/tiny-1.5", tmp_path, "float32", lambda *step: told.append(step))
    assert (model.name, model.folder) == ("someone/tiny-1.5", tmp_path / "snapshot")
    assert told[0] == ("fetch", 0, None)
    [(repository, patterns)] = asked
    assert repository == "someone/tiny-1.5"
    assert not [pattern for pattern in patterns if pattern.endswith("py")]
    assert {"*.json", "model*.safetensors"} <= set(patterns)


def test_a_hub_that_does_not_answer_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repository: str, allow_patterns: list[str]) -> str:
        raise FileNotFoundError("no network, says the test")

    monkeypatch.setattr(load_module, "snapshot_download", snapshot)
    with pytest.raises(LoadError, match="someone/tiny is no folder and cannot be had from the hub: no network"):
        load("someone/tiny", tmp_path, "float32", ignore)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("smollm2-135m", "smollm2-135m is not installed yet: pull it first"),
        ("nothing", "'nothing' is neither an installed model, nor a folder, nor a hub repository"),
        ("/no/such/folder", "'/no/such/folder' is neither"),
        ("..", "there is no config.json in"),
    ],
)
def test_references_that_lead_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(LoadError, match=message.replace(".", r"\.")):
        load(reference, tmp_path / "home", "float32", ignore)


# What cannot be loaded


def test_an_incomplete_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"there is no config\.json in"):
        loaded(tmp_path)
    write_json(tmp_path / "config.json", TINY_CONFIG)
    with pytest.raises(LoadError, match=r"there is no model\*\.safetensors in"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "nonesuch"}, "model type 'nonesuch' is unknown to mlx-lm"),
        ({"model_type": "../llama"}, "no usable model_type: '../llama'"),
        ({"model_type": None}, "no usable model_type: None"),
        ({"model_type": "base"}, "cannot build a 'base' model"),
        ({"model_file": "code.py"}, r"wants to run its own code \(code.py\)"),
        ({"hidden_size": None}, "cannot build a 'llama' model"),
        ({"num_hidden_layers": 3}, "cannot build a 'llama' model from it: Missing 9 parameters"),
        ({"vocab_size": 97}, "cannot build a 'llama' model from it: .*shape"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_folder(tmp_path)
    (tmp_path / "code.py").write_text("raise SystemExit('it was run')")
    write_json(tmp_path / "config.json", TINY_CONFIG | config)
    with pytest.raises(LoadError, match=f"(?s){tmp_path.name}: .*{message}"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"), [("generation_config.json", "{"), ("tokenizer_config.json", "[]"), ("config.json", "nul")]
)
def test_json_that_is_none_is_named(tmp_path: Path, file: str, content: str) -> None:
    write_folder(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(LoadError, match=f"{file} is not"):
        loaded(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 300, -64])
def test_damaged_weights_are_named(tmp_path: Path, kept: int) -> None:
    write_folder(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(LoadError, match=r"model\.safetensors is damaged or incomplete"):
        loaded(tmp_path)


def test_an_unknown_dtype_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of"):
        load(str(tmp_path), tmp_path, "int8", ignore)  # type: ignore[arg-type]


def test_configuration_is_the_completed_one(tmp_path: Path) -> None:
    write_folder(tmp_path, quantization=AFFINE)
    assert loaded(tmp_path).config["quantization"] == AFFINE
    assert json.loads((tmp_path / "config.json").read_text())["quantization"] == AFFINE
