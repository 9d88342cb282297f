"""Tiny Gemma 4 targets and assistants in folders, and lanes of theirs that are fed by hand."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec

from backends.mlx.backend import MLXBackend
from backends.mlx.build import build_forward
from backends.mlx.drafts.assistant_drafter import AssistantDrafter
from backends.mlx.drafts.folders import attach_folder
from backends.mlx.features import Features
from backends.mlx.load import Loaded, load_folder
from backends.mlx.seam import HeadRows, install_head
from backends.mlx.verify import Forward
from scheduler.draft import Draft, DraftAsk
from scheduler.request import Sampling
from tests.backends.mlx.architectures import ARCHITECTURES, tiny_model
from tests.backends.mlx.assistant.reference import (
    DENSE,
    GROUPED,
    Config,
    PlainAssistant,
    PlainTarget,
    random_assistant,
)
from tests.backends.mlx.serving import INFO
from tests.backends.mlx.tiny_models import parameters, write_json
from tests.backends.mlx.windows import GREEDY, chunk, decode

ATTENTION = mx.fast.scaled_dot_product_attention
Weights = dict[str, mx.array]
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "shared": ("gemma4_text", {}),
    "unshared": ("gemma4_text", {"num_kv_shared_layers": 0}),
    "experts": ("gemma4", {}),
}
"""Layers behind the second share its keys or that of the first; none does; and one with experts, whose full layers have
one key a position, which is the value too.
"""
CONFIGS = {"dense": DENSE, "grouped": GROUPED}
SAMPLINGS = (GREEDY, Sampling(1.0, 5), Sampling(0.8, 6, top_p=0.8), Sampling(1.0, 7, repetition_penalty=1.3))


def silent(stage: str, done: int, total: int | None) -> None:
    """Nobody is told."""


class Target(msgspec.Struct, frozen=True):
    """A model that was loaded from a checkpoint, the forward that serves it, and mlx-lm's own."""

    loaded: Loaded
    head: HeadRows
    forward: Forward
    plain: PlainTarget

    def attach(self, folder: Path) -> tuple[AssistantDrafter, Features]:
        """The drafter of a folder, which is fed by the forward from now on."""
        drafter, self.forward.taps, features = attach_folder(folder, self.loaded, self.head, self.forward, ATTENTION)
        assert isinstance(drafter, AssistantDrafter)
        return drafter, features


def write_target(folder: Path, kind: str, fields: Mapping[str, Any]) -> nn.Module:
    """A random one, as mlx-lm has it."""
    plain = tiny_model(kind, seed=1, **fields)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), parameters(plain))
    write_json(folder / "config.json", {"model_type": kind} | copy.deepcopy(ARCHITECTURES[kind]) | dict(fields))
    return plain


def write_assistant(folder: Path, config: Config = DENSE, weights: Weights | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), random_assistant(config) if weights is None else weights)
    write_json(folder / "config.json", config)
    return folder


class Targets:
    """All of them, each made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, Target] = {}

    def __call__(self, name: str) -> Target:
        if name not in self._known:
            folder = self._root / name
            plain = write_target(folder, *TARGETS[name])
            loaded = load_folder(name, folder, "float32", silent)
            head = install_head(loaded.model)
            forward = build_forward(loaded.model, loaded.vocab_size, name, head)
            self._known[name] = Target(loaded, head, forward, PlainTarget(plain))
        return self._known[name]


class Lane(msgspec.Struct):
    """A request as the engine would keep it: all but its newest token is cached."""

    slot: int
    tokens: tuple[int, ...]
    sampling: Sampling
    prompt: int

    def ask(self, budget: int) -> DraftAsk:
        return DraftAsk(str(self.slot), self.tokens, self.prompt, budget, sampling=self.sampling)


class Table:
    """Lanes of a target that are fed by hand; every draft is held against the description."""

    def __init__(self, target: Target, folder: Path, config: Config) -> None:
        target.forward.reset()
        self.drafter, self.features = target.attach(folder)
        self.backend = MLXBackend(INFO, target.forward)
        self.backend.features = self.features
        self.plain = PlainAssistant(config, random_assistant(config), target.plain)

    def join(self, slot: int, tokens: Sequence[int], sampling: Sampling) -> Lane:
        """Prefill all but the newest token."""
        if len(tokens) > 1:
            self.feed(slot, tokens, 0)
        return Lane(slot, tuple(tokens), sampling, len(tokens))

    def feed(self, slot: int, tokens: Sequence[int], start: int, copies: int | None = None) -> None:
        """What is not cached yet; what is before may be another lane's."""
        window = msgspec.structs.replace(chunk(slot, tokens[start:-1], start), copies=copies)
        self.backend.verify([window]).read()
        self.backend.keep({slot: window.end})

    def round(self, *turns: tuple[Lane, Sequence[int], int, Sequence[int]]) -> None:
        """Verify each lane's draft, keep so many tokens of it, and go on with some others, the last of which is new."""
        self.backend.verify([decode(lane.slot, lane.tokens, draft) for lane, draft, _, _ in turns]).read()
        self.backend.keep({lane.slot: len(lane.tokens) + accepted for lane, _, accepted, _ in turns})
        for lane, draft, accepted, others in turns:
            kept = len(lane.tokens) + accepted
            lane.tokens = (*lane.tokens, *draft[:accepted], *others)
            if len(others) > 1:
                self.feed(lane.slot, lane.tokens, kept)

    def propose(self, *lanes: Lane, budgets: Sequence[int] = (4,)) -> list[Draft]:
        """What is drafted for these lanes."""
        asks = [lane.ask(budgets[place % len(budgets)]) for place, lane in enumerate(lanes)]
        drafts = self.drafter.propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            self.plain.check(draft, ask)
        return drafts

    def leave(self, lane: Lane) -> None:
        self.drafter.forget(str(lane.slot))
        self.backend.release(lane.slot)
