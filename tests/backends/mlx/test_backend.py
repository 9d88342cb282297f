"""The MLX backend draws by the reference: masks are waited for when a flight is read, penalties follow the lane."""

from collections.abc import Mapping, Sequence
from functools import cache

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from backends import reference
from backends.base import MaskWords
from backends.masks import unpack
from backends.mlx.backend import MLXBackend
from scheduler.request import Sampling
from scheduler.round import Drawn, History, Window
from tests.backends.draws import masked, near_tie, samplings
from tests.backends.mlx.random_models import VOCABULARY, random_model
from tests.backends.mlx.serving import INFO, Paths, both_paths, prompt_of
from tests.backends.mlx.windows import chunk, decode

WORDS = VOCABULARY // 32


class Masks:
    """Masks that are there as soon as they are waited for. Written by `wait`."""

    def __init__(self, words: Mapping[int, MaskWords]) -> None:
        self._words = words
        self.waited = 0

    def wait(self) -> Mapping[int, MaskWords]:
        self.waited += 1
        return self._words


def random_words(seed: int, rows: int, words: int = WORDS) -> MaskWords:
    return np.random.default_rng(seed).integers(1, 2**31, (rows, words)).astype(np.int32)


@cache
def paths() -> Paths:
    return both_paths(random_model("llama", seed=1))


def backend_of(path: str = "packed") -> MLXBackend:
    forward = paths()[path]
    forward.reset()
    return MLXBackend(INFO, forward)


@cache
def logits_after(tokens: tuple[int, ...]) -> reference.Logits:
    """Of the token behind `tokens`, by mlx-lm's own cache and the model without company."""
    model = random_model("llama", seed=1)
    return np.array(model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1])


def with_history(window: Window, tokens: Sequence[int], prompt: int) -> Window:
    if not window.sampling.counts:
        return window
    return msgspec.structs.replace(window, history=History(tokens, prompt))


def check(drawn: Drawn, window: Window, text: Sequence[int], prompt: int, words: MaskWords | None) -> None:
    """A window's draws are the reference's on the model's logits, up to rounding."""
    assert len(drawn.tokens) == 1 + len(window.draft)
    allowed = [None] * len(drawn.tokens) if words is None else unpack(words, VOCABULARY)
    for place, token in enumerate(drawn.tokens):
        fed = (*text, *window.draft[:place])
        raw = logits_after(fed)
        expected, reported = reference.draw(
            raw, window.sampling, len(fed), history=fed, prompt=prompt, allowed=allowed[place]
        )
        if token != expected:
            adjusted = masked(reference.adjust(raw, window.sampling, fed, prompt), allowed[place])
            assert near_tie(token, adjusted, window.sampling, len(fed))
        if reported is not None:
            top = reference.token_logprob(raw, token, len(reported.top))
            assert drawn.logprobs[place].logprob == pytest.approx(top.logprob, abs=1e-3)
            got, wanted = (dict(each.top) for each in (drawn.logprobs[place], top))
            assert got == pytest.approx(wanted, abs=1e-3)
    assert len(drawn.logprobs) == (0 if window.sampling.logprobs is None else len(drawn.tokens))


TEXTS = [prompt_of(place, length, VOCABULARY) for place, length in enumerate((3, 9, 14, 6))]


@settings(max_examples=25)
@given(
    lanes=st.lists(
        st.tuples(samplings(VOCABULARY), st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=4
    ),
    path=st.sampled_from(["packed", "padded"]),
    data=st.data(),
)
def test_a_round_draws_what_the_reference_draws(
    lanes: list[tuple[Sampling, int, bool, bool]], path: str, data: st.DataObject
) -> None:
    """Lanes of all kinds, with drafts, masks and prefill chunks; then the round after it, over other drafts."""
    backend = backend_of(path)
    backend.verify([chunk(slot, TEXTS[slot][:-1]) for slot in range(len(lanes))]).read()
    texts = [list(TEXTS[slot]) for slot in range(len(lanes))]
    for turn in range(2):
        windows, words = [], {}
        for slot, (sampling, drafted, constrained, _) in enumerate(lanes):
            draft = prompt_of(100 * turn + slot, drafted, VOCABULARY)
            window = decode(slot, texts[slot], draft, sampling)
            windows.append(with_history(window, texts[slot], len(TEXTS[slot])))
            if constrained:
                words[slot] = random_words(slot, 1 + drafted)
        # a stranger's prefill comes and goes with each round
        windows.append(chunk(7, TEXTS[0]))
        flight = backend.verify(windows, masks=Masks(words) if words else None)
        drawn = flight.read()
        assert drawn[-1] == Drawn()
        for slot, window in enumerate(windows[:-1]):
            check(drawn[slot], window, texts[slot], len(TEXTS[slot]), words.get(slot))
            texts[slot].append(data.draw(st.integers(0, VOCABULARY - 1)))
        backend.release(7)


def test_masks_are_waited_for_when_the_flight_is_read_and_not_before() -> None:
    backend = backend_of()
    words = random_words(3, 3)
    masks = Masks({1: words})
    windows = [decode(0, TEXTS[0][:1]), decode(1, TEXTS[1][:1], TEXTS[1][1:3])]
    flight = backend.verify(windows, masks=masks)
    assert masks.waited == 0
    drawn = flight.read()
    assert masks.waited == 1
    assert unpack(words, VOCABULARY)[range(3), list(drawn[1].tokens)].all()
    for window, each, mask in zip(windows, drawn, (None, words), strict=True):
        check(each, window, window.tokens, 1, mask)


@pytest.mark.parametrize("words", [WORDS - 1, WORDS + 2])
def test_a_mask_may_be_narrower_or_wider_than_the_logits(words: int) -> None:
    backend = backend_of()
    mask = random_words(4, 4, words)
    (drawn,) = backend.verify([decode(0, TEXTS[1][:1], TEXTS[1][1:4])], masks=Masks({0: mask})).read()
    assert unpack(mask, VOCABULARY)[range(4), list(drawn.tokens)].all()
    assert max(drawn.tokens) < 32 * words


def test_masks_that_name_no_window_mask_nothing() -> None:
    backend = backend_of()
    window = decode(0, TEXTS[1][:1], TEXTS[1][1:4])
    (drawn,) = backend.verify([window], masks=Masks({})).read()
    check(drawn, window, TEXTS[1][:1], 1, None)


def test_a_round_ahead_of_a_masked_one_waits_for_its_draws() -> None:
    """The constrained lane left while its round flew; what goes on feeds on the draws of that round."""
    backend = backend_of()
    masks = Masks({1: random_words(5, 1)})
    first = backend.verify([decode(0, TEXTS[0][:1]), decode(1, TEXTS[1][:1])], masks=masks)
    carried = msgspec.structs.replace(decode(0, (1,)), start=1, tokens=(), reach=4, carried=True)
    second = backend.verify([carried], first)
    (token,) = first.read()[0].tokens
    assert masks.waited == 1
    check(second.read()[0], carried, (*TEXTS[0][:1], token), 1, None)


def test_a_flight_keeps_what_it_counted_when_its_slot_is_released() -> None:
    backend = backend_of()
    sampling = Sampling(0.0, repetition_penalty=1.7, frequency_penalty=2.0)
    text = list(TEXTS[1])
    backend.verify([chunk(0, text[:-1])]).read()
    window = with_history(decode(0, text, (5, 5), sampling), text, 4)
    flight = backend.verify([window], masks=Masks({0: random_words(6, 3)}))
    backend.release(0)
    check(flight.read()[0], window, text, 4, random_words(6, 3))


@pytest.mark.parametrize("forget", ["release", "reset"])
def test_the_next_lane_of_a_slot_is_not_penalised_for_the_last(forget: str) -> None:
    """Not even where it draws what the last one had generated."""
    sampling = Sampling(0.0, presence_penalty=50.0)
    backend = backend_of()
    likeliest, _ = reference.draw(logits_after(TEXTS[2]), sampling, 0)
    assert likeliest not in TEXTS[2]
    for text in ((1, 2, likeliest, 3), TEXTS[2]):
        backend.verify([chunk(0, text[:-1])]).read()
        window = with_history(decode(0, text, (), sampling), text, 2)
        check(backend.verify([window]).read()[0], window, text, 2, None)
        if forget == "release":
            backend.release(0)
        else:
            backend.reset()


def test_a_prefill_round_draws_nothing() -> None:
    assert backend_of().verify([chunk(0, TEXTS[0]), chunk(1, TEXTS[1])]).read() == [Drawn(), Drawn()]


def test_plain_rounds_draw_at_once() -> None:
    """What a round ahead feeds on is on its way before anyone reads."""
    backend = backend_of()
    flight = backend.verify([decode(0, TEXTS[0][:1]), decode(1, TEXTS[1][:1], sampling=Sampling(1.0, 4))])
    draws = flight.draws()
    assert draws is not None
    early = draws.tokens.tolist()
    read = flight.read()
    assert [early[draws.newest[slot]] for slot in (0, 1)] == [drawn.tokens[-1] for drawn in read]
    assert all(drawn.logprobs == () for drawn in read)
