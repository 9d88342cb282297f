"""Every text architecture of mlx-lm: its lanes get what they get alone, whatever is drafted, or it is refused.

`make test` plays one of each family, `make test-models` all of them. Contract rules 15 to 18.
"""

import re
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from backends.mlx.build import build_forward
from backends.mlx.caches.kinds import AttentionKind, Kind, ListKind, RecurrentKind, layer_kinds
from backends.mlx.load import LoadError
from backends.mlx.verify import Forward, PackedForward
from engine.config import EngineConfig
from scheduler.request import Request
from tests.backends.mlx.architectures import ARCHITECTURES, NOT_ON_CPU, VOCABULARY, tiny_model
from tests.backends.mlx.serving import (
    Agreement,
    OracleDrafts,
    Solo,
    greedy,
    prompt_of,
    serve,
    solo,
    submissions,
)
from tests.backends.mlx.windows import chunk, decode

pytestmark = pytest.mark.usefixtures("calm")

FAMILIES = (
    "llama",
    "gemma2",
    "gemma3_text",
    "gemma3n",
    "gemma4_text",
    "gpt_oss",
    "llama4",
    "deepseek_v3",
    "mamba",
    "mamba2",
    "qwen3_next",
    "lfm2",
    "rwkv7",
    "recurrent_gemma",
    "falcon_h1",
    "baichuan_m1",
)
"""What `make test` plays."""
REFUSED = {
    "deepseek_v32": "past the attention function",
    "glm_moe_dsa": "past the attention function",
    "deepseek_v41": "LayerCache",
    "minimax_m3_vl": "past the attention function",
    "phi3small": "past the attention function",
    "plamo3": "a mask of 17 positions over a cache of 16",
}
"""What cannot be served, and a part of the reason that is given."""

SERVED = [name for name in ARCHITECTURES if name not in REFUSED and name not in NOT_ON_CPU]


def row(name: str) -> object:
    return name if name in FAMILIES else pytest.param(name, marks=pytest.mark.models)


each_architecture = pytest.mark.parametrize("name", [row(name) for name in SERVED])


@cache
def reference(name: str) -> nn.Module:
    return tiny_model(name)


@cache
def served(name: str) -> Forward:
    return build_forward(tiny_model(name), VOCABULARY, name)


@cache
def alone(name: str, request: Request) -> Solo:
    return solo(reference(name), request)


def requests_of(name: str) -> list[Request]:
    """Shorter and longer than the windows of 16; one crosses a capacity class."""
    lengths = [(9, 40), (70, 36), (23, 40), (244, 24)]
    return [
        greedy(f"{name}-{place}", prompt_of(place, length, VOCABULARY), tokens)
        for place, (length, tokens) in enumerate(lengths)
    ]


def families(name: str) -> str:
    """In words, what its layers cache."""
    kinds = layer_kinds(reference(name))
    flat = [part for kind in kinds for part in (kind.parts if isinstance(kind, ListKind) else (kind,))]
    return ", ".join(sorted({_family(kind) for kind in flat} - {""}))


def _family(kind: Kind) -> str:
    match kind:
        case RecurrentKind():
            return "state"
        case AttentionKind(latent=True):
            return "latent"
        case AttentionKind(sight=sight):
            return "window" if sight.window else "chunk" if sight.chunk else "full"
        case _:
            return ""


def every_mixture(lane: int, turn: int) -> tuple[int, int]:
    """None, some or all of a ragged draft are right."""
    drafted = 2 + (turn + lane) % 4
    return drafted, (0, 1 + turn % (drafted - 1), drafted)[turn // 3**lane % 3]


@each_architecture
@pytest.mark.parametrize(("lanes", "drafts"), [(2, 5), (3, 5), (4, 0)])
def test_lanes_get_what_they_get_alone(
    name: str,
    lanes: int,
    drafts: int,
    agreement: Agreement,
    record_property: Callable[[str, object], None],
) -> None:
    """Two lanes are as many as there are KV heads; without drafts, rounds are pipelined."""
    served(name)
    record_property("families", families(name))
    requests = requests_of(name)
    answers = {request.request_id: (*request.prompt, *alone(name, request).tokens) for request in requests}
    config = EngineConfig(max_lanes=lanes, round_rows=60, draft_tokens=drafts)
    source = OracleDrafts(answers, VOCABULARY, every_mixture)
    played = serve(served(name), submissions(requests, every=3), config, [source])
    for request in requests:
        agreement.check(request, played.tokens[request.request_id], alone(name, request))
    if not drafts:
        assert sum(each.ahead for each in played.rounds) >= 10


@each_architecture
def test_what_lanes_say_is_varied(name: str) -> None:
    """Else equal answers would prove little."""
    said = [set(alone(name, request).tokens) for request in requests_of(name)]
    assert len(set.union(*said)) >= 20, said


@each_architecture
def test_after_every_mixture_a_lane_stands_where_its_kept_tokens_bring_it(name: str) -> None:
    """Three lanes keep 0, 2 or all 4 of their drafts; the next logits are those of the kept tokens fed alone."""
    forward = served(name)
    prompts = [prompt_of(40 + lane, length, VOCABULARY) for lane, length in enumerate((31, 10, 40))]
    drafts = [prompt_of(50 + lane, 4, VOCABULARY) for lane in range(3)]
    expected = {
        (lane, accepted): _next_logits(reference(name), (*prompts[lane], *drafts[lane][:accepted], 7 + lane))
        for lane in range(3)
        for accepted in (0, 2, 4)
    }
    for mixture in product((0, 2, 4), repeat=3):
        forward.run([chunk(lane, prompts[lane][:-1]) for lane in range(3)], None)
        forward.keep({})
        mx.eval(forward.run([decode(lane, prompts[lane], drafts[lane]) for lane in range(3)], None).logits)
        forward.keep({lane: len(prompts[lane]) + accepted for lane, accepted in enumerate(mixture)})
        behind = [
            decode(lane, (*prompts[lane], *drafts[lane][:accepted], 7 + lane)) for lane, accepted in enumerate(mixture)
        ]
        verified = forward.run(behind, None)
        forward.keep({})
        assert verified.logits is not None
        logits = np.array(verified.logits)
        for sampled in verified.sampled:
            wanted = expected[sampled.index, mixture[sampled.index]]
            spread = max(1.0, float(wanted.std()))
            assert np.abs(logits[sampled.first] - wanted).max() <= 1e-3 * spread, mixture
        forward.reset()


def _next_logits(model: nn.Module, tokens: tuple[int, ...]) -> np.ndarray:
    logits = model(mx.array([tokens]), cache=make_prompt_cache(model))
    return np.array(logits[0, -1])


@pytest.mark.models
@pytest.mark.parametrize("name", NOT_ON_CPU)
def test_what_this_machine_cannot_run_says_why(name: str, record_property: Callable[[str, object], None]) -> None:
    """A kernel for Metal, or code of mlx-lm's that does not run."""
    with pytest.raises(BaseException) as failure:
        build_forward(tiny_model(name), VOCABULARY, name)
    record_property("refused", str(failure.value))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.models) for name in REFUSED])
def test_what_cannot_be_served_is_refused_with_the_reason(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """The reason is what happens when it is tried nevertheless."""
    with pytest.raises(LoadError, match=REFUSED[name]) as refusal:
        build_forward(tiny_model(name), VOCABULARY, name)
    record_property("refused", str(refusal.value))


@pytest.mark.models
def test_nine_in_ten_are_served_and_every_module_of_mlx_lm_is_in_the_table() -> None:
    folder = Path(mlx_lm.models.__file__).parent
    defining = {
        path.stem
        for path in folder.glob("*.py")
        if re.search(r"^class Model\(|import Model$", path.read_text(), re.MULTILINE)
    }
    assert defining <= set(ARCHITECTURES)
    assert len(SERVED) >= 0.9 * len(ARCHITECTURES)


def test_the_packed_path_serves_all() -> None:
    assert all(isinstance(served(name), PackedForward) for name in FAMILIES)
