"""What a target says to some prompts, and what its layers made of it: the texts that a drafter is trained on.

Lanes are served by the backend itself, as many at once as there is room for; whoever ends makes room for the next
prompt. Draws are keyed, so that a text depends on its prompt and seed alone.
"""

from collections.abc import Iterator, Sequence, Set

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from backends.mlx.backend import MLXBackend
from backends.mlx.features import Features, gathered, normalised
from scheduler.request import Sampling
from scheduler.round import Window

_PREFILL_ROWS = 256


class Prompt(msgspec.Struct, frozen=True):
    """What the target is asked, and how it draws its answer."""

    tokens: tuple[int, ...]
    sampling: Sampling


class Text(msgspec.Struct, frozen=True):
    """A prompt and its answer: tokens int32 `[length]`, of which `prompt` were asked, and the features of all but the
    last of them, float16 `[length - 1, width]`, those of each tap divided by their root mean square; of the last tap,
    which is the head's, that is kept in `scales`, float32 `[length - 1]`.
    """

    tokens: npt.NDArray[np.int32]
    prompt: int
    features: npt.NDArray[np.float16]
    scales: npt.NDArray[np.float32]
    greedy: bool
    """Whether it was drawn at temperature 0."""


class _Lane:
    """One prompt being answered. Written by `collect`."""

    def __init__(self, slot: int, index: int, prompt: Prompt) -> None:
        self.slot = slot
        self.name = str(index)
        self.prompt = prompt
        self.tokens = list(prompt.tokens)
        self.cached = 0

    def window(self, reach: int) -> Window:
        """The rest of the prompt but its last token, or the newest token."""
        end = len(self.tokens) - 1
        chunk = self.cached < end
        end = min(end, self.cached + _PREFILL_ROWS) if chunk else end + 1
        tokens = tuple(self.tokens[self.cached : end])
        return Window(self.slot, self.name, self.cached, tokens, not chunk, self.prompt.sampling, reach)


def collect(
    backend: MLXBackend, prompts: Sequence[Prompt], *, lanes: int, answer: int, ends: Set[int] = frozenset()
) -> Iterator[Text]:
    """The texts, as they end: at an end-of-sequence token or one of `ends`, or after `answer` tokens.

    The backend must have taps and no other work. `lanes` are served at once.
    """
    features = backend.features = Features(None)
    ends |= backend.info.eos_tokens
    coming = list(enumerate(prompts))[::-1]
    free = list(range(lanes))[::-1]
    serving: list[_Lane] = []
    while serving or coming:
        while free and coming:
            serving.append(_Lane(free.pop(), *coming.pop()))
        windows = [lane.window(len(lane.prompt.tokens) + answer) for lane in serving]
        drawn = backend.verify(windows).read()
        backend.keep({window.slot: window.end for window in windows})
        staying = []
        for lane, window, draws in zip(serving, windows, drawn, strict=True):
            lane.cached = window.end
            lane.tokens += draws.tokens
            made = len(lane.tokens) - len(lane.prompt.tokens)
            if made < answer and not (made and lane.tokens[-1] in ends):
                staying.append(lane)
                continue
            yield _text(lane, features, backend.taps)
            features.forget(lane.name)
            backend.release(lane.slot)
            free.append(lane.slot)
        serving = staying


def _text(lane: _Lane, features: Features, taps: int) -> Text:
    noted = features.of(lane.name)
    assert noted is not None
    hidden = gathered(noted.pieces).astype(mx.float32)
    last = hidden[:, -(hidden.shape[1] // taps) :]
    scales = mx.sqrt(mx.mean(mx.square(last), axis=-1))
    tokens = np.array(lane.tokens, dtype=np.int32)
    even = normalised(hidden, taps).astype(mx.float16)
    return Text(
        tokens, len(lane.prompt.tokens), np.array(even), np.array(scales), lane.prompt.sampling.temperature == 0
    )
