"""Lanes that give way and go on, with every family of caches: everyone gets what mlx-lm gives for them alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import mlx.nn as nn
import msgspec
import pytest

from backends import groups
from backends.base import Budget, Flight, KVQuantization, Masks, ModelInfo
from backends.groups import capacity_class
from backends.mlx.backend import MLXBackend, MLXFlight
from backends.mlx.blocks import LaneBlocks
from backends.mlx.build import build_forward, state_bytes
from backends.mlx.verify import Forward
from engine.config import EngineConfig
from engine.loop import Loop
from engine.messages import Message, Submit
from engine.prefix import PrefixCache
from scheduler.admission import LaneMemory
from scheduler.events import Finished, Tokens
from scheduler.pace import Headlong
from scheduler.request import FinishReason, Request
from scheduler.round import Window
from tests.backends.mlx.architectures import VOCABULARY, tiny_model
from tests.backends.mlx.random_models import random_model
from tests.backends.mlx.serving import (
    INFO,
    MOST_STEPS,
    Agreement,
    OracleDrafts,
    RecordingBackend,
    Solo,
    both_paths,
    greedy,
    prompt_of,
    solo,
)
from tests.backends.mlx.test_quantized import WIDE, rounded_caches, solo_with

BOUNDED = ("mamba", "mamba2", "rwkv7", "recurrent_gemma")
"""Whose lanes take as much at every length: states, and sliding windows."""
ROUNDED = {"quantized": KVQuantization(4, 32), "quantized from 20": KVQuantization(8, 32, 20)}
FAMILIES = (
    "llama",
    "gemma3_text",
    "llama4_text",
    "deepseek_v3",
    *BOUNDED,
    "qwen3_next",
    "falcon_h1",
    "baichuan_m1",
    *ROUNDED,
    "padded",
)
SMALLEST_CLASS, LONGEST = 32, 90
POSITION_BYTES = 512


@pytest.fixture(autouse=True, scope="module")
def _small_classes(calm: None) -> Iterator[None]:
    """Lanes of 32, 64, 128... positions: short texts outgrow them too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "SMALLEST_CLASS", SMALLEST_CLASS)
        yield


@cache
def reference(family: str) -> nn.Module:
    if family in ROUNDED:
        return random_model("llama", **WIDE)
    return random_model("llama") if family == "padded" else tiny_model(family)


@cache
def alone(family: str, request: Request) -> Solo:
    model = reference(family)
    if family in ROUNDED:
        return solo_with(rounded_caches(model, ROUNDED[family]), model, request)
    return solo(model, request)


@cache
def served(family: str) -> Forward:
    if family == "padded":
        return both_paths(random_model("llama")).padded
    if family in ROUNDED:
        return build_forward(random_model("llama", **WIDE), VOCABULARY, family, quantization=ROUNDED[family])
    forward = build_forward(tiny_model(family), VOCABULARY, family)
    forward.store.groups.lane_bytes = state_bytes(forward)
    return forward


def requests_of(family: str) -> list[Request]:
    """Each outgrows its class once or twice, but for the last, which is long from the start."""
    lengths = [(9, 60), (20, 60), (14, 55), (26, 60), (60, 20)]
    return [
        greedy(f"{family}-{place}", prompt_of(place, length, VOCABULARY), tokens)
        for place, (length, tokens) in enumerate(lengths)
    ]


class Lengthening:
    """Implements `LaneMemory`: as if these lanes took more with their length too, so that they must give way."""

    def __init__(self, memory: LaneMemory) -> None:
        self._memory = memory

    @property
    def held(self) -> int:
        return self._memory.held

    def needed(self, lengths: Mapping[int, int]) -> int:
        classes = [capacity_class(length) for length in lengths.values()]
        return self._memory.needed(lengths) + POSITION_BYTES * sum(classes)

    def limit(self, most: int) -> None:
        """They take what they take."""


class Tight(RecordingBackend):
    """Has room for its longest lane, and for half of that again; notes the most that was held. Written by the loop."""

    def __init__(self, backend: MLXBackend, memory: LaneMemory) -> None:
        super().__init__(backend)
        self._memory = memory
        self.pool = 3 * memory.needed({0: LONGEST}) // 2
        self.prefix: PrefixCache | None = None
        self.most_held = 0

    @property
    def info(self) -> ModelInfo:
        return msgspec.structs.replace(super().info, budget=Budget(self.pool, 0, 0))

    @property
    def memory(self) -> LaneMemory:
        return self._memory

    def verify(self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None) -> MLXFlight:
        flight = super().verify(windows, after, masks)
        blocks = self.prefix.reuse.used if self.prefix is not None else 0
        self.most_held = max(self.most_held, self._memory.held + blocks)
        return flight


def backend_of(family: str) -> Tight:
    forward = served(family)
    backend = MLXBackend(msgspec.structs.replace(INFO, cuttable=forward.cuttable), forward)
    return Tight(backend, Lengthening(backend.memory) if family in BOUNDED else backend.memory)


def play(loop: Loop) -> tuple[dict[str, tuple[int, ...]], dict[str, Finished]]:
    """What everybody is told, and their ends."""
    tokens: dict[str, tuple[int, ...]] = {}
    ends: dict[str, Finished] = {}
    for _ in range(MOST_STEPS):
        for event in loop.step():
            if isinstance(event, Tokens):
                tokens[event.request_id] = tokens.get(event.request_id, ()) + event.tokens
            else:
                assert event.request_id not in ends
                ends[event.request_id] = event
        if loop.idle:
            return tokens, ends
    raise AssertionError("the loop makes no progress")


def once(messages: list[Message]) -> Callable[[], list[Message]]:
    return lambda: [messages.pop(0) for _ in range(len(messages))]


@pytest.mark.parametrize(
    ("drafts", "cached"),
    [
        pytest.param(0, False, id="piped, computed again"),
        pytest.param(4, True, id="drafted, from the prefix cache"),
        pytest.param(4, False, id="drafted, computed again", marks=pytest.mark.slow),
        pytest.param(0, True, id="piped, from the prefix cache", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lane_that_gave_way_goes_on_with_the_same_tokens(
    family: str, drafts: int, cached: bool, agreement: Agreement
) -> None:
    backend = backend_of(family)
    requests = requests_of(family)
    answers = {each.request_id: (*each.prompt, *alone(family, each).tokens) for each in requests}
    source = OracleDrafts(answers, VOCABULARY, lambda lane, turn: (3, (lane + turn) % 4))
    blocks = LaneBlocks(served(family).store, served(family).regrouping, "test")
    prefix = PrefixCache(blocks, 1 << 30, None, 0, lambda _: None, block=8) if cached else None
    backend.prefix = prefix
    clock = iter(range(1 << 30))
    loop = Loop(
        backend,
        EngineConfig(max_lanes=4, round_rows=40, draft_tokens=drafts),
        sources=[source] if drafts else [],
        mailbox=once([Submit(request) for request in requests]),
        clock=lambda: float(next(clock)),
        pace=Headlong(),
        prefix=prefix,
    )
    told, ends = play(loop)
    for request in requests:
        agreement.check(request, told[request.request_id], alone(family, request))
        assert ends[request.request_id].reason is FinishReason.LENGTH
    assert loop.stats().preemptions >= 2
    assert backend.most_held <= backend.pool
    assert served(family).buffers() == [], "lanes left behind"
