"""Prompts that a target makes up itself: handed the opening of a user's turn, it writes what a user might say there.

After Magpie (Xu et al. 2024): in a user's place a model says what it was taught to answer.
"""

from collections.abc import Callable
from itertools import count

import msgspec

from backends.mlx.backend import MLXBackend
from backends.mlx.distill.collect import Prompt, collect
from scheduler.request import Sampling

_SHORTEST = 4
"""Tokens of a question at least."""
_TRIES = 4
"""For each question that is wanted, so many may be made up."""
_TEMPERATURE = 0.8
"""Questions of many kinds, most of which make sense. Leaving out unlikely tokens instead would cost more than the model
where many are drawn for at once.
"""


class NoQuestionsError(ValueError):
    """The target does not ask by itself."""


class Opening(msgspec.Struct, frozen=True):
    """Where a user's turn begins, as tokens, and the tokens that end it."""

    tokens: tuple[int, ...]
    ends: frozenset[int]


def ask(
    backend: MLXBackend,
    opening: Opening,
    *,
    wanted: int,
    seed: int,
    lanes: int,
    longest: int,
    told: Callable[[tuple[int, ...]], None],
) -> list[tuple[int, ...]]:
    """So many different questions, without their ends, in the order in which they ended; `told` of each.

    What has no end after `longest` tokens is dropped. Raises NoQuestionsError.
    """
    found: dict[tuple[int, ...], None] = {}
    seeds = count(seed << 24)
    for _ in range(_TRIES):
        prompts = [Prompt(opening.tokens, Sampling(_TEMPERATURE, next(seeds))) for _ in range(wanted - len(found))]
        for text in collect(backend, prompts, lanes=lanes, answer=longest, ends=opening.ends):
            *question, last = text.tokens[text.prompt :].tolist()
            if last in opening.ends and len(question) >= _SHORTEST and tuple(question) not in found:
                found[tuple(question)] = None
                told(tuple(question))
        if len(found) == wanted:
            return list(found)
    raise NoQuestionsError(f"of {wanted} questions that the model should make up, {len(found)} came to an end")
