"""A block drafter guesses what its definition says of the kept text alone; what it guesses changes no answer; and one
that does not fit is refused.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest

from backends.mlx.backend import MLXBackend
from backends.mlx.build import build_forward, load_backend
from backends.mlx.drafts.attach import attach
from backends.mlx.drafts.block import MOST_CONTEXT, BlockDrafter
from backends.mlx.drafts.dflash import dflash_shape
from backends.mlx.drafts.files import DrafterError
from backends.mlx.features import Features
from backends.mlx.load import Loaded, LoadError, load_folder
from backends.mlx.seam import HeadRows, install_head
from backends.mlx.verify import Forward
from engine.config import EngineConfig
from scheduler.draft import Draft, DraftAsk, DraftSource
from scheduler.request import Request, Sampling
from tests.backends.mlx.architectures import ARCHITECTURES, VOCABULARY, tiny_model
from tests.backends.mlx.dflash_reference import EPS, Floats, PlainDFlash, published, random_dflash
from tests.backends.mlx.handfed import HandFed
from tests.backends.mlx.mtp_reference import parameters
from tests.backends.mlx.serving import INFO, CheckedDrafts, Served, prompt_of, serve_with, submissions
from tests.backends.mlx.tiny_models import write_json
from tests.backends.mlx.windows import GREEDY

pytestmark = pytest.mark.usefixtures("calm")

ATTENTION = mx.fast.scaled_dot_product_attention
DIMS, LAYERS, BLOCK, WINDOW = 64, 2, 6, 16
TAPS = (0, 1)

FULL: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": DIMS,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "rms_norm_eps": EPS,
    "rope_theta": 10000.0,
    "num_target_layers": LAYERS,
    "block_size": BLOCK,
    "dflash_config": {"block_size": BLOCK, "mask_token_id": VOCABULARY - 1, "target_layer_ids": list(TAPS)},
}
SLIDING = FULL | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOW}
KINDS: Mapping[str, dict[str, Any]] = {
    "both ways": FULL,
    "with windows": SLIDING,
    "windows both ways": SLIDING | {"is_causal": False},
    "one way": FULL | {"is_causal": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def silent(stage: str, done: int, total: int | None) -> None:
    """Nobody is told."""


class Target(msgspec.Struct, frozen=True):
    """A loaded model, and mlx-lm's own beside it."""

    loaded: Loaded
    head: HeadRows
    plain: nn.Module

    @property
    def forward(self) -> Forward:
        """A fresh one."""
        return build_forward(self.loaded.model, self.loaded.vocab_size, self.loaded.name, self.head)

    def drafter(self, kind: str, seed: int = 3) -> PlainDFlash:
        """A random one."""
        table = parameters(self.plain)["model.embed_tokens.weight"]
        return random_dflash(KINDS[kind], table, table, seed)

    def hidden(self, tokens: Sequence[int]) -> Floats:
        """What stands behind the tapped layers, `[tokens, taps * dims]`."""
        x = self.plain.model.embed_tokens(mx.array([tokens]))
        found = []
        for layer in self.plain.layers:
            x = layer(x, "causal", None)
            found.append(np.array(x[0]).astype(np.float64))
        return np.concatenate([found[tap] for tap in TAPS], axis=-1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    plain = tiny_model("qwen3", seed=1)
    write_folder(folder, parameters(plain), {"model_type": "qwen3", **copy.deepcopy(ARCHITECTURES["qwen3"])})
    loaded = load_folder("qwen3", folder, "float32", silent)
    return Target(loaded, install_head(loaded.model), plain)


def write_folder(folder: Path, weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))
    write_json(folder / "config.json", dict(config))
    return folder


# ---- guesses ---------------------------------------------------------------------------------------------------------


def reader_of(folder: Path, target: Target, plain: PlainDFlash) -> HandFed:
    drafter, _, features = attach(folder, target.loaded, HeadRows(), target.forward, ATTENTION)

    def check(draft: Draft, ask: DraftAsk, hidden: Floats) -> None:
        plain.check(draft, ask, hidden[-MOST_CONTEXT:])

    budgets = (3, BLOCK, 1, 2 * BLOCK)
    return HandFed(drafter, features, check, width=DIMS * len(TAPS), vocabulary=VOCABULARY, budgets=budgets)


def held(reader: HandFed) -> list[mx.array]:
    """What its lanes take."""
    assert isinstance(reader.drafter, BlockDrafter)
    return reader.drafter.store.arrays()


SAMPLINGS = (
    GREEDY,
    Sampling(1.0, 5),
    Sampling(0.8, 6, top_p=0.8),
    Sampling(1.0, 7, repetition_penalty=1.3, presence_penalty=0.5),
)
LENGTHS = (2, 37, 9, 20)


@each_kind
def test_ragged_lanes_draft_what_each_drafts_alone_and_what_the_definition_says(
    kind: str, target: Target, tmp_path: Path
) -> None:
    plain = target.drafter(kind)
    folder = write_folder(tmp_path, published(plain), KINDS[kind])
    together = reader_of(folder, target, plain)
    lanes = [together.join(slot, length, SAMPLINGS[slot]) for slot, length in enumerate(LENGTHS)]
    drafts = together.propose(*lanes)
    assert [len(draft.tokens) for draft in drafts] == [3, BLOCK - 1, 1, BLOCK - 1]
    assert len({token for draft in drafts for token in draft.tokens}) >= 6, "varied enough to prove something"
    for slot, length in enumerate(LENGTHS):
        alone = reader_of(folder, target, plain)
        assert alone.propose(alone.join(slot, length, SAMPLINGS[slot])) == [drafts[slot]]


@each_kind
def test_after_rejections_it_drafts_as_if_it_had_seen_the_kept_text_only(
    kind: str, target: Target, tmp_path: Path
) -> None:
    """Lanes keep none, some or all of their drafts, then tokens that were not drafted; some sit a round out. Windows
    wrap meanwhile.
    """
    plain = target.drafter(kind)
    folder = write_folder(tmp_path, published(plain), KINDS[kind])
    reader = reader_of(folder, target, plain)
    lanes = [reader.join(slot, length, SAMPLINGS[slot]) for slot, length in enumerate(LENGTHS)]
    for turn, accepted in enumerate(((0, 1, 3, 2), (3, 0, 1, 0), (1, 5, 0, 5), (0, 5, 1, 5), (2, 5, 1, 5))):
        asked = [lane for lane in lanes if (lane.slot + turn) % 4]
        drafts = reader.propose(*asked)
        for lane, draft in zip(asked, drafts, strict=True):
            kept = draft.tokens[: accepted[lane.slot]]
            reader.go_on(lane, (*kept, *prompt_of(turn, 1 + 5 * (lane.slot % 2), VOCABULARY)))
    drafts = reader.propose(*lanes)
    for lane, draft in zip(lanes, drafts, strict=True):
        fresh = reader_of(folder, target, plain)
        fresh.told_at_once(lane)
        assert fresh.propose(lane) == [draft]


@each_kind
def test_a_long_text_that_nobody_drafted_for_begins_late(kind: str, target: Target, tmp_path: Path) -> None:
    plain = target.drafter(kind)
    reader = reader_of(write_folder(tmp_path, published(plain), KINDS[kind]), target, plain)
    lanes = [reader.join(slot, MOST_CONTEXT + length, GREEDY) for slot, length in enumerate((0, 1, 2, 70))]
    reader.propose(*lanes)
    for lane in lanes:
        reader.go_on(lane, (1,))
    drafts = reader.drafter.propose([reader.ask(lane) for lane in lanes])
    assert all(draft.tokens for draft in drafts)


def test_what_is_not_known_is_not_drafted_for(target: Target, tmp_path: Path) -> None:
    plain = target.drafter("both ways")
    reader = reader_of(write_folder(tmp_path, published(plain), FULL), target, plain)
    lane = reader.join(0, 8, GREEDY)
    unseen = DraftAsk("1", lane.tokens, 8, 3)
    ahead = msgspec.structs.replace(reader.ask(lane), tokens=(*lane.tokens, 1))
    assert reader.drafter.propose([unseen, ahead, msgspec.structs.replace(reader.ask(lane), budget=0)]) == [Draft()] * 3
    reader.propose(lane)
    assert reader.drafter.propose([reader.ask(lane)]) == [Draft()], "nothing came since"


def test_lanes_that_left_give_their_seats_back_and_a_failure_all(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = target.drafter("both ways")
    reader = reader_of(write_folder(tmp_path, published(plain), FULL), target, plain)
    lanes = [reader.join(slot, 10, GREEDY) for slot in range(3)]
    for lane in lanes[1:]:
        reader.propose(lane)
        reader.drafter.forget(str(lane.slot))
    assert held(reader) == []

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr("backends.mlx.drafts.block.draw", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            reader.drafter.propose([reader.ask(lanes[0])])
    assert held(reader) == []
    reader.go_on(lanes[0], (1, 2))
    assert reader.drafter.propose([reader.ask(lanes[0])])[0].tokens


# ---- folders ---------------------------------------------------------------------------------------------------------

OWN = FULL["dflash_config"]
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "another model's": (FULL | {"hidden_size": 32}, "for a model of 2 layers of 32, and this has 2 of 64"),
    "a deeper model's": (FULL | {"num_target_layers": 36}, "for a model of 36 layers of 64, and this has 2 of 64"),
    "no measures": ({"architectures": ["DFlashDraftModel"]}, "hidden_size"),
    "a word": (FULL | {"num_attention_heads": "four"}, "num_attention_heads"),
    "no block": (
        {name: value for name, value in FULL.items() if name not in ("block_size", "dflash_config")},
        "block_size",
    ),
    "no room": (FULL | {"block_size": 1}, "do not fit together"),
    "no taps": (FULL | {"dflash_config": OWN | {"target_layer_ids": []}}, "do not fit together"),
    "odd heads": (FULL | {"num_key_value_heads": 3}, "do not fit together"),
    "unknown taps": (FULL | {"dflash_config": OWN | {"target_layer_ids": [0, 7]}}, "no layer 7"),
    "an unknown mask": (FULL | {"dflash_config": OWN | {"mask_token_id": VOCABULARY}}, "has no token"),
    "no window": (FULL | {"layer_types": ["full_attention", "sliding_attention"]}, "windows of no size"),
    "unknown layers": (FULL | {"layer_types": ["full_attention", "linear"]}, "kinds that are not known"),
    "too few kinds": (FULL | {"layer_types": ["full_attention"]}, "kinds that are not known"),
    "another activation": (FULL | {"hidden_act": "gelu"}, "gelu"),
    "the second generation": (FULL | {"architectures": ["DFlash2DraftModel"]}, "second generation"),
    "convolutions": (FULL | {"dflash_config": OWN | {"conv_kernel_size": 2}}, "second generation"),
    "no drafter": ({"architectures": ["LlamaForCausalLM"]}, "no drafter that is known: .*LlamaForCausalLM"),
    "another block": (FULL | {"intermediate_size": 128}, "mlp"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_folder_that_does_not_fit_is_refused(why: str, target: Target, tmp_path: Path) -> None:
    config, reason = REFUSED[why]
    folder = write_folder(tmp_path, published(target.drafter("both ways")), config)
    with pytest.raises(DrafterError, match=f"(?s){tmp_path}.*{reason}"):
        attach(folder, target.loaded, target.head, target.forward, ATTENTION)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff", b"{}"])
def test_a_folder_without_a_configuration_is_refused(content: bytes | None, target: Target, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(DrafterError, match=str(tmp_path)):
        attach(tmp_path, target.loaded, target.head, target.forward, ATTENTION)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_truncated_weights_are_refused(share: float, target: Target, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, published(target.drafter("both ways")), FULL)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(DrafterError, match="damaged or incomplete"):
        attach(folder, target.loaded, target.head, target.forward, ATTENTION)


def test_weights_that_are_not_there_are_named(target: Target, tmp_path: Path) -> None:
    weights = published(target.drafter("both ways"))
    del weights["layers.1.self_attn.k_norm.weight"]
    folder = write_folder(tmp_path, weights, FULL)
    with pytest.raises(DrafterError, match=r"layers.1.self_attn.k_norm.weight is missing"):
        attach(folder, target.loaded, target.head, target.forward, ATTENTION)


def test_a_configuration_may_say_it_in_several_ways() -> None:
    nested = {name: value for name, value in FULL.items() if name != "block_size"}
    flat = {name: value for name, value in FULL.items() if name != "dflash_config"}
    flat |= {"mask_token_id": VOCABULARY - 1, "target_layer_ids": list(TAPS)}
    newer = {name: value for name, value in FULL.items() if name != "rope_theta"}
    newer |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    assert dflash_shape(nested) == dflash_shape(flat) == dflash_shape(newer) == dflash_shape(FULL)
    scaled = dflash_shape(newer | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}})
    assert (scaled.rope_base, (scaled.rope_scaling or {})["factor"]) == (5e5, 2.0)


# ---- service ---------------------------------------------------------------------------------------------------------


def check_over(target: Target, plain: PlainDFlash) -> Callable[[DraftAsk, Draft], None]:
    """Against the definition, over what mlx-lm makes of the whole text."""

    def check(ask: DraftAsk, draft: Draft) -> None:
        if len(ask.tokens) == 1:
            assert draft == Draft(), "nothing of it is known"
        else:
            plain.check(draft, ask, target.hidden(ask.tokens[:-1]))

    return check


def served(forward: Forward, *sources: DraftSource, features: Features | None = None, drafts: int = 4) -> Served:
    """Lanes of several lengths and ways to sample that come one after the other, in the real loop."""
    requests = [
        Request(str(slot), prompt_of(60 + slot, length, VOCABULARY), 12, SAMPLINGS[slot % len(SAMPLINGS)])
        for slot, length in enumerate((5, 23, 1, 12, 40))
    ]
    backend = MLXBackend(INFO, forward)
    backend.features = features
    config = EngineConfig(max_lanes=3, round_rows=60, draft_tokens=drafts)
    return serve_with(backend, submissions(requests, every=2), config, sources)


def garbage(size: float) -> Callable[[mx.array], mx.array]:
    rng = np.random.default_rng(0)
    return lambda array: mx.array((rng.normal(0, 1, array.shape) * size).astype(np.float32))


@each_kind
def test_drafts_are_right_in_service_and_change_no_answer(kind: str, target: Target, tmp_path: Path) -> None:
    """Nor do those of weights that are nonsense."""
    loaded = target.loaded
    forward = target.forward
    plain = served(forward, drafts=0)
    assert {len(tokens) for tokens in plain.tokens.values()} == {12}
    known = target.drafter(kind)
    folder = write_folder(tmp_path / "whole", published(known), KINDS[kind])
    drafter, forward.taps, features = attach(folder, loaded, target.head, forward, ATTENTION)
    try:
        checked = CheckedDrafts(drafter, check_over(target, known))
        answers = served(forward, checked, features=features)
        assert checked.wrong == []
        assert checked.drafts > 20
        assert answers.tokens == plain.tokens
        assert answers.drafted >= 40
        assert drafter.store is not None
        assert forward.buffers() == drafter.store.arrays() == [], "lanes left behind"
        for size in (1e4, np.nan):
            weights = {name: garbage(size)(array) for name, array in published(known).items()}
            folder = write_folder(tmp_path / str(size), weights, KINDS[kind])
            drafter, forward.taps, features = attach(folder, loaded, target.head, forward, ATTENTION)
            answers = served(forward, drafter, features=features)
            assert answers.tokens == plain.tokens
            assert answers.drafted >= 40
    finally:
        assert forward.taps is not None
        forward.taps.remove()
        forward.taps = None


def test_a_model_is_loaded_with_one_or_says_why_not(target: Target, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "drafter", published(target.drafter("both ways")), FULL)
    model = str(target.loaded.folder)
    backend = load_backend(model, tmp_path, "float32", silent, "cpu", drafter=folder)
    assert backend.info.drafter == "drafter"
    (source,) = backend.drafters
    assert isinstance(source, BlockDrafter)
    (folder / "config.json").write_text(json.dumps(FULL | {"num_target_layers": 3}))
    with pytest.raises(LoadError, match="for a model of 3 layers"):
        load_backend(model, tmp_path, "float32", silent, "cpu", drafter=folder)
