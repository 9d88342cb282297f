"""What a Gemma 4 assistant drafts is right in service too, and changes no answer, however broken its weights are."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.mlx.backend import MLXBackend
from backends.mlx.features import Features
from engine.config import EngineConfig
from scheduler.draft import Draft, DraftAsk, DraftSource
from scheduler.request import Request, Sampling
from tests.backends.mlx.architectures import VOCABULARY
from tests.backends.mlx.assistant.reference import (
    GROUPED,
    PlainAssistant,
    random_assistant,
)
from tests.backends.mlx.assistant.targets import (
    CONFIGS,
    SAMPLINGS,
    TARGETS,
    Target,
    Targets,
    write_assistant,
)
from tests.backends.mlx.serving import INFO, CheckedDrafts, Served, prompt_of, serve_with, submissions

pytestmark = pytest.mark.usefixtures("calm")

each_config = pytest.mark.parametrize("config", CONFIGS)


def check_against(plain: PlainAssistant) -> Callable[[DraftAsk, Draft], None]:
    def check(ask: DraftAsk, draft: Draft) -> None:
        if len(ask.tokens) == 1:
            assert draft == Draft(), "nothing of it is cached"
        else:
            plain.check(draft, ask)

    return check


NARROW = tuple((token, 12.0) for token in (10, 11, 12))
"""A bias that leaves few tokens to draw, so that many guesses come true."""
SERVED = (*SAMPLINGS, Sampling(1.0, 8, logit_bias=NARROW), Sampling(1.0, 9, top_p=0.9, logit_bias=NARROW))
REQUESTS = [
    Request(str(place), prompt_of(200 + place, (5, 40, 17, 1, 60, 25)[place], VOCABULARY), 10 + place, sampling)
    for place, sampling in enumerate(SERVED)
]


def served(target: Target, *sources: DraftSource, features: Features | None = None, drafts: int = 4) -> Served:
    """Lanes of several lengths and ways to sample that come one after the other, in the real loop."""
    backend = MLXBackend(INFO, target.forward)
    backend.features = features
    config = EngineConfig(max_lanes=3, round_rows=60, draft_tokens=drafts)
    answers = serve_with(backend, submissions(REQUESTS, every=2), config, sources)
    assert target.forward.buffers() == [], "lanes left behind"
    return answers


@pytest.fixture(scope="module")
def plain_answers(targets: Targets) -> Callable[[str], dict[str, tuple[int, ...]]]:
    """Of targets alone, with nothing tapped and nothing drafted."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}

    def answers(name: str) -> dict[str, tuple[int, ...]]:
        if name not in found:
            target = targets(name)
            target.forward.reset()
            if target.forward.taps is not None:
                target.forward.taps.remove()
                target.forward.taps = None
            found[name] = served(target, drafts=0).tokens
        return found[name]

    return answers


Answers = Callable[[str], dict[str, tuple[int, ...]]]


@each_config
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_are_right_in_service_and_change_no_answer(
    name: str, config: str, targets: Targets, folders: dict[str, Path], plain_answers: Answers
) -> None:
    target, plain = targets(name), plain_answers(name)
    drafter, features = target.attach(folders[config])
    described = PlainAssistant(CONFIGS[config], random_assistant(CONFIGS[config]), target.plain)
    checked = CheckedDrafts(drafter, check_against(described))
    answers = served(target, checked, features=features)
    assert answers.tokens == plain
    assert checked.wrong == []
    assert checked.drafts > 30
    assert answers.drafted > 100
    assert 0 < answers.accepted < answers.drafted / 2, "some are right and some are wrong"
    assert not any(features.of(request.request_id) for request in REQUESTS)


CORRUPTIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "nan": lambda weight: mx.full(weight.shape, mx.nan),
    "one nan": lambda weight: mx.concatenate([mx.array([mx.nan]), weight.reshape(-1)[1:]]).reshape(weight.shape),
    "infinite": lambda weight: mx.full(weight.shape, mx.inf),
    "zero": mx.zeros_like,
    "negative": mx.negative,
    "large": lambda weight: weight * 1e30,
    "small": lambda weight: weight * 1e-30,
}
FLOATS = sorted(set(random_assistant(GROUPED)) - {"masked_embedding.token_ordering"})


@settings(max_examples=12)
@given(
    parts=st.lists(st.sampled_from(FLOATS), min_size=1, max_size=3, unique=True),
    how=st.sampled_from(sorted(CORRUPTIONS)),
)
def test_broken_weights_change_drafts_and_no_answer(
    parts: list[str],
    how: str,
    targets: Targets,
    plain_answers: Answers,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    plain, weights = plain_answers("shared"), random_assistant(GROUPED)
    broken = weights | {part: CORRUPTIONS[how](weights[part]) for part in parts}
    drafter, features = targets("shared").attach(write_assistant(tmp_path_factory.mktemp("broken"), GROUPED, broken))
    answers = served(targets("shared"), drafter, features=features)
    assert answers.tokens == plain
    assert answers.drafted > 100
