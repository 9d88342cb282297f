"""What one row's draw is, by definition (contract rules 6 and 7), in numpy: one row, every token, no short cuts.

The fake backend draws by it as it stands; the tests hold `backends.mlx.sampler` against it.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from backends.masks import Allowed
from backends.noise import gumbel, row_key, token_hash
from scheduler.events import TokenLogprob
from scheduler.request import Sampling

Logits = npt.NDArray[np.float32]


def draw(
    logits: Logits,
    sampling: Sampling,
    position: int,
    *,
    history: Sequence[int] = (),
    prompt: int = 0,
    allowed: Allowed | None = None,
) -> tuple[int, TokenLogprob | None]:
    """The token at absolute `position` for raw `logits` `[vocabulary]`, and its log-probability if it was asked for.

    `history` is what penalties count: all tokens before `position`, accepted or drafted, the first `prompt` of them
    the prompt. `allowed` `[vocabulary]` is the grammar's mask.
    """
    adjusted = adjust(logits, sampling, history, prompt)
    if allowed is not None:
        adjusted = np.where(allowed, adjusted, np.float32(-np.inf))
    token = int(np.argmax(scores(adjusted, sampling, position)))
    return token, None if sampling.logprobs is None else token_logprob(logits, token, sampling.logprobs)


def adjust(logits: Logits, sampling: Sampling, history: Sequence[int], prompt: int) -> Logits:
    """The logits after penalties and bias; tokens outside the vocabulary are passed over."""
    adjusted = logits.copy()
    repetition = np.float32(sampling.repetition_penalty)
    for token in _inside(logits, history):
        logit = logits[token]
        adjusted[token] = logit / repetition if logit > 0 else logit * repetition
    for token, times in _inside(logits, history[prompt:]).items():
        adjusted[token] -= np.float32(sampling.presence_penalty + sampling.frequency_penalty * times)
    for token, bias in sampling.logit_bias:
        if 0 <= token < len(logits):
            adjusted[token] += np.float32(bias)
    return adjusted


def _inside(logits: Logits, tokens: Sequence[int]) -> Counter[int]:
    return Counter(token for token in tokens if 0 <= token < len(logits))


def scores(adjusted: Logits, sampling: Sampling, position: int) -> Logits:
    """What the draw is the largest of, ties going to the lowest token: the logits themselves if greedy, else logits
    over temperature plus keyed noise, and minus infinity for what is left out.
    """
    if sampling.temperature == 0:
        return adjusted
    key = row_key(sampling.seed, sampling.choice, position)
    noise = gumbel(token_hash(key, np.arange(len(adjusted), dtype=np.uint32)))
    noisy: Logits = adjusted / np.float32(sampling.temperature) + noise
    return np.where(kept(adjusted, sampling), noisy, np.float32(-np.inf)) if sampling.truncates else noisy


def kept(adjusted: Logits, sampling: Sampling) -> Allowed:
    """Which tokens stay in the draw: top-k, then top-p on what top-k left, then min-p, all by value.

    Tokens of equal logit stay or go together, so an order of tokens plays no part. The likeliest always stays.
    """
    highest = adjusted.max()
    if highest == -np.inf:
        return np.ones(len(adjusted), dtype=np.bool_)
    falling, level, sizes = np.unique(-adjusted, return_inverse=True, return_counts=True)
    weights = np.exp((-falling.astype(np.float64) - float(highest)) / sampling.temperature)
    stays = np.ones(len(falling), dtype=np.bool_)
    if sampling.top_k > 0:
        stays &= _before(sizes) < sampling.top_k
    masses = weights * sizes * stays
    if sampling.top_p < 1:
        stays &= _before(masses) < sampling.top_p * masses.sum()
    stays &= weights >= sampling.min_p
    stays[0] = True
    return np.asarray(stays[level], dtype=np.bool_)


def _before(masses: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """What lies strictly before each entry."""
    return np.concatenate([[0.0], np.cumsum(masses, dtype=np.float64)[:-1]])


def token_logprob(logits: Logits, token: int, top: int) -> TokenLogprob:
    """Log-softmax of raw logits at a token, and the `top` likeliest tokens; of equal ones the lowest first."""
    wide = logits.astype(np.float64)
    highest = wide.max()
    normaliser = highest + np.log(np.exp(wide - highest).sum())
    likeliest = np.argsort(-logits, kind="stable")[:top]
    return TokenLogprob(
        float(wide[token] - normaliser), tuple((int(each), float(wide[each] - normaliser)) for each in likeliest)
    )
