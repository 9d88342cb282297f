"""Random sampling settings, and when a draw by other means than the reference's is the same draw."""

import msgspec
import numpy as np
from hypothesis import strategies as st

from backends import reference
from backends.masks import Allowed
from backends.reference import Logits
from scheduler.request import Sampling

NEAR = 1e-3
"""Scores this close may come out either way, as may tokens whose probability lies this close to a cut."""

TRUNCATIONS = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.sampled_from([1, 2, 5, 40, 63, 64, 65, 200, 256, 300, 10_000]),
        "top_p": st.sampled_from([0.0, 0.01, 0.3, 0.6, 0.9, 0.99, 0.9999]),
        "min_p": st.sampled_from([0.001, 0.05, 0.3, 1.0]),
    },
)
PENALTIES = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.2, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.3, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.2, 1.5]),
    },
)


def samplings(
    vocabulary: int, temperatures: tuple[float, ...] = (0.0, 0.3, 0.8, 1.0, 2.0, 10.0)
) -> st.SearchStrategy[Sampling]:
    """Settings of all kinds; a plain one now and then."""
    tokens = st.integers(0, vocabulary - 1)
    return st.builds(
        lambda temperature, seed, choice, truncation, penalties, bias, logprobs: Sampling(
            temperature, seed, choice, logit_bias=tuple(bias.items()), logprobs=logprobs, **truncation, **penalties
        ),
        st.sampled_from(temperatures),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**32 - 1),
        TRUNCATIONS,
        st.just({}) | PENALTIES,
        st.just({}) | st.dictionaries(tokens, st.sampled_from([-100.0, -3.0, 0.5, 2.0, 100.0]), max_size=5),
        st.sampled_from([None, None, None, 0, 1, 5, 20]),
    )


def near_tie(token: int, adjusted: Logits, sampling: Sampling, position: int) -> bool:
    """Whether rounding may turn the reference's draw into `token`: by its score, or as it stands at a cut.

    `adjusted` are the logits after penalties, bias and mask.
    """
    for share in (1.0, 1.0 - NEAR, 1.0 + NEAR):
        top_p = sampling.top_p * share if sampling.top_p < 1 else 1.0
        shifted = msgspec.structs.replace(sampling, top_p=top_p, min_p=min(sampling.min_p * share, 1.0))
        scores = reference.scores(adjusted, shifted, position)
        if scores[token] >= scores.max() - NEAR:
            return True
    return False


def masked(adjusted: Logits, allowed: Allowed | None) -> Logits:
    return adjusted if allowed is None else np.where(allowed, adjusted, np.float32(-np.inf))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's, over the tokens that are expected at all; infinite if another one came."""
    if counts[expected == 0].any():
        return float("inf")
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum())
