"""The embedded model with many lanes at once: every request gets, token for token, what it gets alone in mlx-lm."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from mlx_lm.utils import load_tokenizer

from backends.mlx.build import build_forward
from backends.mlx.load import load
from backends.mlx.verify import Forward, PackedForward
from engine.config import EngineConfig
from scheduler.request import Request, Sampling
from tests.backends.mlx.serving import (
    Agreement,
    OracleDrafts,
    Solo,
    both_paths,
    greedy,
    one_blas_thread,
    serve,
    solo,
    submissions,
)

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

SHARED_PROMPTS = Path(__file__).parents[4] / "shared" / "data" / "prompts.jsonl"
OWN_PROMPTS = [
    "Describe a harbour town in the early morning, before the boats go out.",
    "Write a Python function that returns the n-th Fibonacci number, and explain each line.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Think step by step.",
    "List five ways to save water at home.",
    "Translate into French: The weather is lovely today, and we are going to the beach.",
    "Who was Ada Lovelace? Answer in three sentences.",
    "Continue: Once upon a time there was a lighthouse keeper who",
    "Correct the grammar: he don't knows where them books is.",
]
LANES, TOKENS, VOCABULARY = 7, 20, 49152
each_path = pytest.mark.parametrize("path", ["packed", "padded"])


class Served:
    """The model, its two forwards, the requests and their answers alone. Made once, before any seam is in."""

    def __init__(self, folder: Path) -> None:
        loaded = load(str(folder), folder.parents[1], "float32", lambda _stage, _done, _total: None)
        self.model = loaded.model
        self.requests = [
            greedy(f"real-{place}", prompt, TOKENS) for place, prompt in enumerate(_prompts(load_tokenizer(folder)))
        ]
        warm = [Sampling(0.8, seed=11), Sampling(1.2, seed=12), Sampling(0.8, seed=11, choice=1)]
        self.warm = [Request(f"warm-{place}", self.requests[0].prompt, 12, each) for place, each in enumerate(warm)]
        self.alone = {each.request_id: solo(self.model, each) for each in [*self.requests, *self.warm]}
        self.paths: dict[str, Forward] = {
            "packed": build_forward(self.model, VOCABULARY, "smollm2"),
            "padded": both_paths(self.model).padded,
        }
        assert isinstance(self.paths["packed"], PackedForward)

    def answer(self, request: Request) -> Solo:
        return self.alone[request.request_id]


def _prompts(tokenizer: Any) -> list[list[int]]:
    """Seven prompts of 20 to 265 tokens, chat template included; the last two come near and over a capacity class."""
    texts = OWN_PROMPTS
    if SHARED_PROMPTS.exists():
        lines = [json.loads(line) for line in SHARED_PROMPTS.read_text().splitlines()]
        texts = [line["turns"][0] for line in lines[:: len(lines) // LANES]][:LANES]
    chats = [cast(list[int], _chat(tokenizer, text))[-100:] for text in texts]
    long = [token for chat in chats for token in chat]
    return [*chats[: LANES - 2], long[:242], long[-265:]]


def _chat(tokenizer: Any, text: str) -> Any:
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Iterator[Served]:
    with one_blas_thread():
        yield Served(smollm2)


@each_path
def test_lanes_that_join_during_decoding_get_what_they_get_alone(
    served: Served, path: str, agreement: Agreement
) -> None:
    """Plain rounds, pipelined where nobody prefills; prefill chunks share rounds with decode windows."""
    arrivals = submissions(served.requests, every=2)
    run = serve(served.paths[path], arrivals, EngineConfig(max_lanes=6, round_rows=128))
    for request in served.requests:
        agreement.check(request, run.tokens[request.request_id], served.answer(request))
    assert run.stats.rounds["mixed"] >= 6
    assert sum(played.ahead for played in run.rounds) >= 8


def ragged(lane: int, turn: int) -> tuple[int, int]:
    """None, some or all right, lane by lane out of step; 1 to 6 drafted."""
    drafted = 1 + (turn + 2 * lane) % 6
    return drafted, (0, drafted // 2, drafted)[(turn + turn // 3 * lane + lane) % 3]


@each_path
def test_ragged_drafts_change_nothing(served: Served, path: str, agreement: Agreement) -> None:
    requests = served.requests
    answers = {each.request_id: (*each.prompt, *served.answer(each).tokens) for each in requests}
    config = EngineConfig(max_lanes=LANES, round_rows=200, draft_tokens=6)
    run = serve(served.paths[path], submissions(requests), config, [OracleDrafts(answers, VOCABULARY, ragged)])
    for request in requests:
        agreement.check(request, run.tokens[request.request_id], served.answer(request))
    (drafts,) = run.stats.drafts
    assert 0 < sum(drafts.accepted) < sum(drafts.drafted)
    mixtures = [
        {played.accepted(window) / len(window.draft) for window in played.windows if window.draft}
        for played in run.rounds
    ]
    assert sum({0.0, 1.0} < shares for shares in mixtures) >= 3, "none, some and all within one round"


def test_seeded_draws_are_the_same_alone_and_in_a_drafted_crowd(served: Served, agreement: Agreement) -> None:
    crowd = [*served.warm, *served.requests[:4]]
    answers = {each.request_id: (*each.prompt, *served.answer(each).tokens) for each in crowd}
    config = EngineConfig(max_lanes=LANES, round_rows=200, draft_tokens=4)
    run = serve(served.paths["packed"], submissions(crowd), config, [OracleDrafts(answers, VOCABULARY, ragged)])
    for request in crowd:
        agreement.check(request, run.tokens[request.request_id], served.answer(request))
    assert len({served.answer(each).tokens for each in served.warm}) == len(served.warm)
