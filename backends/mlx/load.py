"""Loads a model with mlx-lm: an installed name, a folder or a hub repository becomes evaluated weights.

Owns where a reference leads, the dtype in which weights are held, and what the outside must know of a model (its
context length, end-of-sequence tokens, sampling defaults). Runs no code out of a model's folder. Must not know
lanes, caches or the tokenizer's work. Everything is made and evaluated on the calling thread.
"""

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import MODEL_REMAPPING, load_model

from backends.mlx.pull import CATALOGUE, Progress, models_folder
from backends.mlx.runtime import Dtype, DtypePolicy, choose_dtype, describe_device

UNBOUNDED_CONTEXT = 1 << 20
"""The context length of a model that names none (a purely recurrent one)."""

_HUB_FILES = [
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]
"""What mlx-lm fetches, without `*.py`: a model brings no code."""

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "model_max_length")
_NO_LIMIT = 10**9
"""transformers writes an absurdly large `model_max_length` where a tokenizer has none."""
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class LoadError(RuntimeError):
    """A model that cannot be loaded; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, evaluated, in evaluation mode."""

    model: Module
    config: dict[str, Any]
    """config.json as mlx-lm completed it."""
    folder: Path
    name: str
    """The hub repository, or the folder's own name."""
    dtype: str
    """What its weights are held in: "float32", "float16", "4-bit float16", ..."""
    parameter_bytes: int
    context_length: int
    """The most tokens, prompt and completion together."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    """Width of a row of logits."""
    generation_defaults: dict[str, float]
    """Sampling settings of generation_config.json, only what it names."""


def load(reference: str, home: Path, dtype_policy: DtypePolicy, progress: Progress) -> Loaded:
    """Load a model by its name under `home/models`, its folder, or its hub repository, in this order.

    `progress` is told ("fetch", 0, None) before a hub download and ("load", bytes done, bytes in all) after every
    layer. Raises LoadError where nothing is found, where the folder is incomplete or damaged, and for a model type
    that mlx-lm does not know or that wants code of its own; ValueError for an unknown dtype policy.
    """
    return load_folder(*locate(reference, home, progress), dtype_policy, progress)


def load_folder(name: str, folder: Path, dtype_policy: DtypePolicy, progress: Progress) -> Loaded:
    """Load the model in a folder, to be called `name`. `progress` and errors as for `load`."""
    dtype = choose_dtype(dtype_policy, describe_device())
    model, config = _build(name, folder)
    if dtype != "checkpoint":
        _dequantize(model)
        _cast(model, dtype)
    parameter_bytes = _evaluate(model, progress)
    arguments = getattr(model, "args", None)
    settings = (*_parts(config), {} if arguments is None else vars(arguments))
    return Loaded(
        model=model,
        config=config,
        folder=folder,
        name=name,
        dtype=_dtype_label(model, dtype),
        parameter_bytes=parameter_bytes,
        context_length=_context_length((*settings, _read_json(folder / "tokenizer_config.json"))),
        eos_token_ids=_eos_token_ids(folder),
        vocab_size=_vocab_size(name, settings),
        generation_defaults=_generation_defaults(folder),
    )


# Where a reference leads


def locate(reference: str, home: Path, progress: Progress) -> tuple[str, Path]:
    """A reference's name and folder; hub repositories are downloaded, or taken from the hub's cache.

    Raises LoadError where nothing is found.
    """
    if re.fullmatch(r"\w[\w.-]*", reference) and (models_folder(home) / reference).is_dir():
        return reference, models_folder(home) / reference
    path = Path(reference).expanduser()
    if path.is_dir():
        return path.resolve().name, path
    if any(model.name == reference for model in CATALOGUE):
        raise LoadError(f"{reference} is not installed yet: pull it first")
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", reference) is None:
        raise LoadError(f"{reference!r} is neither an installed model, nor a folder, nor a hub repository (owner/name)")
    progress("fetch", 0, None)
    try:
        return reference, Path(snapshot_download(reference, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise LoadError(f"{reference} is no folder and cannot be had from the hub: {error}") from error


# Building


def _build(name: str, folder: Path) -> tuple[Module, dict[str, Any]]:
    """mlx-lm's model with its weights, not yet evaluated, and its configuration."""
    if not (folder / "config.json").is_file():
        raise LoadError(f"{name}: there is no config.json in {folder}")
    config = _read_json(folder / "config.json")
    _refuse_unservable(name, config)
    _refuse_damaged_weights(name, folder)
    try:
        model, completed = load_model(folder, lazy=True, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        # Fault boundary: configuration and weights are the user's, and mlx-lm raises whatever they trip over.
        raise LoadError(f"{name}: mlx-lm cannot build a {config['model_type']!r} model from it: {error}") from error
    return model, completed


def _refuse_unservable(name: str, config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if config.get("model_file") is not None:
        raise LoadError(f"{name}: it wants to run its own code ({config['model_file']}), which is never done")
    if not isinstance(model_type, str) or re.fullmatch(r"\w[\w-]*", model_type) is None:
        raise LoadError(f"{name}: config.json has no usable model_type: {model_type!r}")
    module = MODEL_REMAPPING.get(model_type, model_type)
    if importlib.util.find_spec(f"mlx_lm.models.{module}") is None:
        raise LoadError(f"{name}: model type {model_type!r} is unknown to mlx-lm")


def _refuse_damaged_weights(name: str, folder: Path) -> None:
    """Read the header of every weights file; MLX compares it with the file's length."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise LoadError(f"{name}: there is no model*.safetensors in {folder}")
    for file in files:
        try:
            mx.load(str(file), format="safetensors")
        except (RuntimeError, ValueError) as error:
            raise LoadError(f"{name}: {file.name} is damaged or incomplete: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} is not a JSON object")
    return value


# Dtype


_PLAIN_LAYERS: dict[type, Callable[[tuple[int, ...]], Module]] = {
    QuantizedLinear: lambda shape: Linear(shape[1], shape[0], bias=False),
    QuantizedEmbedding: lambda shape: Embedding(shape[0], shape[1]),
    QuantizedSwitchLinear: lambda shape: SwitchLinear(shape[2], shape[1], shape[0], bias=False),
    QuantizedMultiLinear: lambda shape: MultiLinear(shape[2], shape[1], shape[0]),
}
"""The layer that computes the same from a weight of this shape. Keyed by the exact class: a subclass may compute
something else, and stays quantized, which is right, if slow."""


def _dequantize(model: Module) -> None:
    """Replace every quantized layer by its plain one, in float32; a layer that is used twice stays one layer."""
    plain: dict[int, Module] = {}
    replaced = []
    for path, module in model.named_modules():
        if type(module) in _PLAIN_LAYERS:
            if id(module) not in plain:
                plain[id(module)] = _plain_layer(module)
            replaced.append((path, plain[id(module)]))
    if replaced:
        model.update_modules(tree_unflatten(replaced))
        model.eval()


def _plain_layer(module: Module) -> Module:
    weight = _dequantized_weight(module)
    layer = _PLAIN_LAYERS[type(module)](weight.shape)
    layer.weight = weight
    if "bias" in module:
        layer.bias = module.bias
    return layer


def _dequantized_weight(module: Module) -> mx.array:
    """The layer's weight in float32, computed in float32: half-precision scales would round every product."""
    scales, biases = module.scales, module.get("biases")
    if module.mode == "affine" and biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(
        module.weight,
        scales,
        biases,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        global_scale=module.get("global_scale"),
        dtype=mx.float32,
    )


def _cast(model: Module, dtype: Dtype) -> None:
    """Cast floating parameters; in half precision those that the model wants in full are left alone."""
    target: mx.Dtype = getattr(mx, dtype)
    may_narrow: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _: True)

    def converted(path: str, parameter: mx.array) -> mx.array:
        floating = mx.issubdtype(parameter.dtype, mx.floating)
        return parameter.astype(target) if floating and (target == mx.float32 or may_narrow(path)) else parameter

    model.update(tree_map_with_path(converted, model.parameters()))


def _dtype_label(model: Module, dtype: Dtype) -> str:
    """The dtype held, "4-bit float16" and the like for a checkpoint kept as it is."""
    if dtype != "checkpoint":
        return dtype
    sizes: Counter[str] = Counter()
    for _, array in _parameters(model):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[str(array.dtype).removeprefix("mlx.core.")] += array.nbytes
    bits = Counter(module.bits for module in model.modules() if hasattr(module, "bits"))
    floating = sizes.most_common(1)[0][0] if sizes else "uint8"
    return f"{bits.most_common(1)[0][0]}-bit {floating}" if bits else floating


def _parameters(model: Module) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))


# Evaluation


def _evaluate(model: Module, progress: Progress) -> int:
    """Evaluate the parameters one layer after the other, so that no more than one layer's sources are held beside
    them, and return their bytes.
    """
    parameters = _parameters(model)
    done, total = 0, sum(array.nbytes for _, array in parameters)
    for _, layer in groupby(parameters, key=lambda item: _layer_of(item[0])):
        arrays = [array for _, array in layer]
        mx.eval(arrays)
        done += sum(array.nbytes for array in arrays)
        progress("load", done, total)
    return total


def _layer_of(path: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`; outside of layers, the module."""
    layer = re.match(r"(.*?\.)?\w+\.\d+(?=\.)", path)
    return layer[0] if layer else path.rpartition(".")[0]


# What the outside must know


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The configuration, and that of its language model where it nests one."""
    yield config
    for key in ("text_config", "llm_config"):
        if isinstance(config.get(key), dict):
            yield config[key]


def _context_length(settings: Iterable[Mapping[str, Any]]) -> int:
    for part in settings:
        for key in _CONTEXT_KEYS:
            if isinstance(part.get(key), int) and 0 < part[key] < _NO_LIMIT:
                return int(part[key])
    return UNBOUNDED_CONTEXT


def _vocab_size(name: str, settings: Iterable[Mapping[str, Any]]) -> int:
    for part in settings:
        if isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    raise LoadError(f"{name}: config.json has no vocab_size, and its model type no default")


def _generation_defaults(folder: Path) -> dict[str, float]:
    generation = _read_json(folder / "generation_config.json")
    named = {key: generation.get(key) for key in _SAMPLING_KEYS}
    return {key: float(value) for key, value in named.items() if isinstance(value, int | float)}


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids of generation_config.json, or else of config.json, and the tokenizer's own (often the end of a turn)."""
    sources = (_read_json(folder / "generation_config.json"), *_parts(_read_json(folder / "config.json")))
    named = next((ids for part in sources if (ids := _ids(part.get("eos_token_id")))), [])
    return tuple(dict.fromkeys([*named, *_ids(_tokenizer_eos(folder))]))


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int)]


def _tokenizer_eos(folder: Path) -> int | None:
    """The id of tokenizer_config.json's `eos_token`, looked up among the added tokens and the vocabulary."""
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    eos = tokenizer_config.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    for token, added in tokenizer_config.get("added_tokens_decoder", {}).items():
        if added.get("content") == text:
            return int(token)
    tokenizer = _read_json(folder / "tokenizer.json")
    for added in tokenizer.get("added_tokens", []):
        if added.get("content") == text:
            return int(added["id"])
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    return vocabulary.get(text) if isinstance(vocabulary, dict) else None


# Whether two models speak the same tokens


def refuse_other_tokens(name: str, folder: Path, target_name: str, target_folder: Path) -> None:
    """Raise LoadError unless both folders' tokenizer.json have the same tokens under the same ids, and the same merges.

    How wide the models' logits are says nothing: they are often padded.
    """
    refused = f"{name} cannot draft for {target_name}"
    own, target = (_Tokens.read(each, refused) for each in (folder, target_folder))
    if own.ids != target.ids:
        token, known = min(own.ids.items() ^ target.ids.items(), key=lambda item: item[1])
        one, other = (name, target_name) if own.ids.get(token) == known else (target_name, name)
        raise LoadError(f"{refused}: another vocabulary (token {known} is {token!r} in {one}, but not in {other})")
    if own.merges != target.merges:
        raise LoadError(f"{refused}: another tokenizer (its merges differ)")


def tokenizer_identity(folder: Path) -> str:
    """What tells a folder's tokens, their ids and merges from all others; 32 hexadecimal digits. Raises LoadError."""
    tokens = _Tokens.read(folder, str(folder))
    told = repr((sorted(tokens.ids.items()), tokens.merges))
    return blake2b(told.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What a tokenizer.json says that tokens are."""

    ids: dict[str, int]
    """Added tokens included."""
    merges: tuple[str, ...]
    """Empty for a tokenizer that does not merge."""

    @classmethod
    def read(cls, folder: Path, refused: str) -> "_Tokens":
        """Raises LoadError, which begins with `refused`, where there is no usable file."""
        tokenizer = _read_json(folder / "tokenizer.json")
        model = tokenizer.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if not isinstance(model, dict) or not vocabulary:
            raise LoadError(f"{refused}: there is no tokenizer.json with a vocabulary in {folder}")
        if isinstance(vocabulary, list):  # Unigram: pieces and their scores, in the order of their ids
            vocabulary = {piece: place for place, (piece, _) in enumerate(vocabulary)}
        added = {each["content"]: each["id"] for each in tokenizer.get("added_tokens", [])}
        merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or [])
        return cls({**vocabulary, **added}, tuple(merges))
