"""Every sampling setting and a grammar, on tiny models: in a crowd with drafts of every kind, as alone in mlx-lm's own
cache with the sampler's definition in numpy (contract rules 4 to 7).
"""

from functools import cache

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from backends import reference
from backends.masks import Allowed
from engine.config import EngineConfig
from scheduler.events import TokenLogprob
from scheduler.request import Request, Sampling
from tests.backends.mlx.random_models import VOCABULARY, random_model
from tests.backends.mlx.serving import (
    NEAR_TIE,
    OracleDrafts,
    Paths,
    both_paths,
    prompt_of,
    serve,
    submissions,
)

pytestmark = pytest.mark.usefixtures("calm")


class Solo(msgspec.Struct, frozen=True):
    """What one request gets alone, and the logits that each token was drawn from."""

    tokens: tuple[int, ...]
    logits: tuple[np.ndarray, ...]
    logprobs: tuple[TokenLogprob, ...]


@cache
def model_of(kind: str) -> nn.Module:
    return random_model(kind, seed=1)


@cache
def paths(kind: str) -> Paths:
    return both_paths(random_model(kind, seed=1))


def drawn(
    request: Request, logits: np.ndarray, tokens: list[int], allowed: Allowed | None = None
) -> tuple[int, TokenLogprob | None]:
    text = [*request.prompt, *tokens]
    return reference.draw(
        logits, request.sampling, len(text), history=text, prompt=len(request.prompt), allowed=allowed
    )


def solo(model: nn.Module, request: Request) -> Solo:
    caches = make_prompt_cache(model)
    feed, tokens, rows, logprobs = list(request.prompt), [], [], []
    while len(tokens) < request.max_tokens:
        logits = np.array(model(mx.array([feed]), cache=caches)[0, -1].astype(mx.float32))
        token, logprob = drawn(request, logits, tokens)
        tokens.append(token)
        rows.append(logits)
        if logprob is not None:
            logprobs.append(logprob)
        feed = [token]
    return Solo(tuple(tokens), tuple(rows), tuple(logprobs))


def is_near_tie(request: Request, alone: Solo, place: int, token: int) -> bool:
    """Whether logits that differ by what the shape of a product moves them could have drawn this token."""
    rng = np.random.default_rng(place)
    for _ in range(200):
        moved = alone.logits[place] + rng.uniform(-NEAR_TIE, NEAR_TIE, len(alone.logits[place])).astype(np.float32)
        if drawn(request, moved, list(alone.tokens[:place]))[0] == token:
            return True
    return False


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 2),
    top_k=st.sampled_from([0, 0, 5, 70]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (9, -100.0))]),
    logprobs=st.sampled_from([None, 0, 4]),
)


def every_mixture(lane: int, turn: int) -> tuple[int, int]:
    drafted = 1 + (turn + lane) % 4
    return drafted, (0, drafted // 2, drafted)[turn // 3**lane % 3]


@pytest.mark.parametrize("path", ["packed", "padded"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@settings(max_examples=12)
@given(samplings=st.lists(SAMPLINGS, min_size=2, max_size=6), draft_tokens=st.sampled_from([0, 4]))
def test_any_settings_in_any_company_give_what_each_gives_alone(
    kind: str, path: str, samplings: list[Sampling], draft_tokens: int
) -> None:
    requests = [
        Request(f"r{place}", prompt_of(place, 5 + 40 * place, VOCABULARY), 16, sampling)
        for place, sampling in enumerate(samplings)
    ]
    alone = {request.request_id: solo(model_of(kind), request) for request in requests}
    answers = {request.request_id: (*request.prompt, *alone[request.request_id].tokens) for request in requests}
    config = EngineConfig(max_lanes=4, round_rows=70, draft_tokens=draft_tokens)
    served = serve(
        paths(kind)[path], submissions(requests, every=2), config, [OracleDrafts(answers, VOCABULARY, every_mixture)]
    )
    for request in requests:
        name = request.request_id
        mine, its = served.tokens[name], alone[name]
        differing = [place for place, pair in enumerate(zip(mine, its.tokens, strict=True)) if pair[0] != pair[1]]
        if differing:
            place = differing[0]
            assert is_near_tie(request, its, place, mine[place]), f"{name}: token {place}"
        logprobs = served.logprobs.get(name, ())
        assert len(logprobs) == (len(mine) if request.sampling.logprobs is not None else 0)
        for ours, theirs in zip(logprobs[: differing[0] if differing else None], its.logprobs, strict=False):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=NEAR_TIE)
            assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=NEAR_TIE)
