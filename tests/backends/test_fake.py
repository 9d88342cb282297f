"""The fake model: deterministic, and unforgiving about caches (contract rules 7, 15 and 16)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backends import reference
from backends.base import Budget, MaskWords
from backends.fake import EOS, FakeBackend
from backends.masks import unpack
from backends.noise import gumbel, row_key, token_hash
from scheduler.pieces import Piece
from scheduler.request import Sampling
from scheduler.round import History, Window
from tests.backends.draws import samplings

TOKEN = st.integers(0, 256)
TEXT = st.lists(TOKEN, min_size=1, max_size=20).map(tuple)
SAMPLINGS = st.builds(
    Sampling, st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
)
COLD = Sampling(temperature=0.0)


def window(
    tokens: Sequence[int],
    start: int = 0,
    *,
    slot: int = 0,
    sampling: Sampling = COLD,
    draft: Sequence[int] = (),
    samples: bool = True,
    carried: bool = False,
) -> Window:
    reach = start + len(tokens) + len(draft) + 1
    return Window(
        slot, f"lane {slot}", start, tuple(tokens), samples, sampling, reach, len(draft), tuple(draft), carried=carried
    )


def draws(backend: FakeBackend, *windows: Window) -> list[list[int]]:
    return [list(drawn.tokens) for drawn in backend.verify(windows).read()]


def next_draws(text: Sequence[int], sampling: Sampling) -> list[int]:
    """What a fresh backend draws behind each token of a text."""
    return draws(FakeBackend(), window(text[:1], draft=text[1:], sampling=sampling))[0]


# ---- windows ---------------------------------------------------------------------------------------------------------


def test_a_window_draws_behind_its_last_real_token_and_behind_each_draft() -> None:
    backend = FakeBackend()
    assert [len(drawn) for drawn in draws(backend, window((1, 2, 3), draft=(4, 5)), window((1, 2), slot=1))] == [3, 1]


def test_a_prefill_chunk_draws_nothing() -> None:
    backend = FakeBackend()
    assert draws(backend, window((1, 2, 3), samples=False), window((9,), slot=1))[0] == []


@given(text=TEXT, past=st.integers(1, 5), opened=st.booleans())
def test_a_window_beyond_what_is_cached_raises(text: tuple[int, ...], past: int, opened: bool) -> None:
    backend = FakeBackend()
    if opened:
        backend.verify([window(text, samples=False)])
    with pytest.raises(ValueError, match="cached"):
        backend.verify([window((1,), start=past + (len(text) if opened else 0))])


@given(text=TEXT, cuts=st.sets(st.integers(1, 19)), sampling=SAMPLINGS)
def test_a_text_fed_in_chunks_is_the_text_fed_at_once(
    text: tuple[int, ...], cuts: set[int], sampling: Sampling
) -> None:
    backend = FakeBackend()
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    last: list[list[int]] = []
    for start, end in pairwise(edges):
        last = draws(backend, window(text[start:end], start, sampling=sampling))
    assert last == [next_draws(text, sampling)[-1:]]


# ---- rollback --------------------------------------------------------------------------------------------------------


@given(prompt=TEXT, draft=TEXT, kept=st.integers(0, 20), going_on=TEXT, sampling=SAMPLINGS)
@example(prompt=(1,), draft=(2, 3), kept=0, going_on=(2, 3), sampling=COLD)
def test_rules_15_and_16_overwriting_is_feeding_only_what_was_kept(
    prompt: tuple[int, ...], draft: tuple[int, ...], kept: int, going_on: tuple[int, ...], sampling: Sampling
) -> None:
    kept = min(kept, len(draft))
    backend = FakeBackend()
    backend.verify([window(prompt, draft=draft, sampling=sampling)])
    length = len(prompt) + kept
    assert backend.keep({0: length}) == {0: length}
    rolled_back = draws(backend, window(going_on[:1], length, draft=going_on[1:], sampling=sampling))[0]
    assert rolled_back == next_draws((*prompt, *draft[:kept], *going_on), sampling)[length:]
    assert tuple(backend.lanes[0].tokens) == (*prompt, *draft[:kept], *going_on)


@given(texts=st.lists(TEXT, min_size=2, max_size=4), data=st.data(), sampling=SAMPLINGS)
def test_rule_16_lanes_roll_back_by_lengths_of_their_own(
    texts: list[tuple[int, ...]], data: st.DataObject, sampling: Sampling
) -> None:
    backend = FakeBackend()
    backend.verify([window(text[:1], slot=slot, draft=text[1:]) for slot, text in enumerate(texts)])
    lengths = [data.draw(st.integers(1, len(text))) for text in texts]
    backend.keep(dict(enumerate(lengths)))
    again = draws(backend, *(window((7,), length, slot=slot, sampling=sampling) for slot, length in enumerate(lengths)))
    alone = [next_draws((*text[:length], 7), sampling)[-1:] for text, length in zip(texts, lengths, strict=True)]
    assert again == alone


# ---- draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_a_draw_depends_on_every_token_that_is_cached(length: int, temperature: float) -> None:
    """A change of any one token, however far back, shows within the next few draws."""
    sampling = Sampling(temperature, seed=3)
    text = [(step * 73) % 256 for step in range(length)]
    going_on = [5] * 40
    original = next_draws([*text, *going_on], sampling)[length:]
    for place in range(length):
        changed = [*text]
        changed[place] ^= 1
        assert next_draws([*changed, *going_on], sampling)[length:] != original


def test_a_draw_depends_on_the_order_of_tokens() -> None:
    going_on = [5] * 40
    assert next_draws([1, 2, 3, *going_on], COLD)[3:] != next_draws([2, 1, 3, *going_on], COLD)[3:]


@given(text=TEXT, others=st.lists(TEXT, max_size=3), slot=st.integers(0, 7), sampling=SAMPLINGS)
def test_rule_7_a_draw_does_not_depend_on_the_slot_or_the_company(
    text: tuple[int, ...], others: list[tuple[int, ...]], slot: int, sampling: Sampling
) -> None:
    company = [window(other, slot=8 + place) for place, other in enumerate(others)]
    drawn = draws(FakeBackend(), *company, window(text, slot=slot, sampling=sampling))[-1]
    assert drawn == next_draws(text, sampling)[-1:]


@given(text=TEXT, sampling=SAMPLINGS)
def test_a_draw_is_in_the_vocabulary_and_repeats(text: tuple[int, ...], sampling: Sampling) -> None:
    drawn = next_draws(text, sampling)
    assert drawn == next_draws(text, sampling)
    assert all(0 <= token < FakeBackend().info.vocab_size for token in drawn)


def test_rule_7_seed_choice_and_position_each_make_a_difference() -> None:
    text = [9] * 30
    samplings = [Sampling(1.0, 0, 0), Sampling(1.0, 1, 0), Sampling(1.0, 0, 1)]
    drawn = [tuple(next_draws(text, sampling)) for sampling in samplings]
    assert len(set(drawn)) == 3


@given(text=TEXT, seed=st.integers(0, 2**64 - 1), choice=st.integers(0, 9))
def test_rule_7_a_hot_draw_is_the_keyed_noise_at_its_absolute_position(
    text: tuple[int, ...], seed: int, choice: int
) -> None:
    """So hot that the logits no longer matter: what is left is the noise of the position that the token will have."""
    vocabulary = np.arange(FakeBackend().info.vocab_size, dtype=np.uint32)
    expected = [
        int(np.argmax(gumbel(token_hash(row_key(seed, choice, position + 1), vocabulary))))
        for position in range(len(text))
    ]
    assert next_draws(text, Sampling(1e9, seed, choice)) == expected


@pytest.mark.parametrize("temperature", [0.3, 0.5, 1.0])
def test_every_temperature_above_zero_is_warm(temperature: float) -> None:
    text = [9] * 60
    assert next_draws(text, Sampling(temperature, 1)) != next_draws(text, Sampling(temperature, 2))


def test_cold_draws_ignore_the_seed() -> None:
    text = [9] * 30
    assert next_draws(text, Sampling(0.0, 1, 2)) == next_draws(text, Sampling(0.0, 3, 4))


def test_the_text_ends_now_and_then_and_lookup_finds_something_in_it() -> None:
    backend = FakeBackend()
    text = [1]
    while len(text) < 3000:
        text += draws(backend, window(text[-1:], len(text) - 1))[0]
    assert 3000 / 127 / 3 < text.count(EOS) < 3000 / 127 * 3
    pairs = list(pairwise(text))
    assert len(set(pairs)) < len(pairs) / 3


# ---- masks, penalties, log-probabilities -----------------------------------------------------------------------------


class Masks:
    """Counts how often it is waited for. Written by `wait`."""

    def __init__(self, words: Mapping[int, MaskWords]) -> None:
        self._words = words
        self.waited = 0

    def wait(self) -> Mapping[int, MaskWords]:
        self.waited += 1
        return self._words


def random_words(seed: int, rows: int) -> MaskWords:
    return np.random.default_rng(seed).integers(1, 2**31, (rows, 9)).astype(np.int32)


def logits_after(text: Sequence[int]) -> reference.Logits:
    """The model's logits behind a text, spelled out: its habit leads by 4 what is otherwise between 0 and 4."""
    backend = FakeBackend()
    backend.verify([window(text, samples=False)])
    state = backend.lanes[0].states[-1]
    hashed = token_hash((state >> 32, state & 0xFFFFFFFF), np.arange(257, dtype=np.uint32))
    logits = hashed.astype(np.float32) * np.float32(2.0**-30)
    logits[backend.greedy(backend.lanes[0].tokens, state)] += np.float32(4.0)
    return logits


@given(
    prompt=TEXT,
    generated=st.lists(TOKEN, max_size=9),
    draft=st.lists(TOKEN, max_size=4),
    sampling=samplings(257),
    mask=st.none() | st.integers(0, 10**6),
)
def test_every_draw_is_the_references(
    prompt: tuple[int, ...], generated: list[int], draft: list[int], sampling: Sampling, mask: int | None
) -> None:
    text = [*prompt, *generated]
    asked = window(text, draft=draft, sampling=sampling)
    if sampling.counts:
        asked = msgspec.structs.replace(asked, history=History(text, len(prompt)))
    words = None if mask is None else random_words(mask, 1 + len(draft))
    (drawn,) = FakeBackend().verify([asked], masks=None if words is None else Masks({0: words})).read()
    allowed = [None] * (1 + len(draft)) if words is None else unpack(words, 257)
    expected = []
    for place in range(1 + len(draft)):
        fed = [*text, *draft[:place]]
        expected.append(
            reference.draw(
                logits_after(fed), sampling, len(fed), history=fed, prompt=len(prompt), allowed=allowed[place]
            )
        )
    assert list(drawn.tokens) == [token for token, _ in expected]
    assert list(drawn.logprobs) == [logprob for _, logprob in expected if logprob is not None]


def test_masks_are_waited_for_once_and_only_when_someone_looks() -> None:
    backend = FakeBackend()
    words = random_words(1, 2)
    masks = Masks({1: words})
    flight = backend.verify([window((1, 2)), window((3,), slot=1, draft=(4,))], masks=masks)
    assert masks.waited == 0
    free, constrained = flight.read()
    assert list(free.tokens) == next_draws((1, 2), COLD)[-1:]
    assert unpack(words, 257)[range(2), list(constrained.tokens)].all()
    flight.read()
    carried = backend.verify([window((), 2, carried=True)], flight).read()
    assert [list(each.tokens) for each in carried] == [next_draws((1, 2, *free.tokens), COLD)[-1:]]
    assert masks.waited == 1


def test_what_was_fed_after_a_masked_round_does_not_change_its_draws() -> None:
    backend = FakeBackend()
    words = random_words(2, 1)
    sampling = Sampling(0.8, 5, repetition_penalty=1.5)
    text = [4, 5, 6]
    asked = msgspec.structs.replace(window(text, sampling=sampling), history=History(text, 2))
    expected = FakeBackend().verify([asked], masks=Masks({0: words})).read()
    flight = backend.verify([asked], masks=Masks({0: words}))
    backend.verify([window((9, 9, 9), 3)])
    backend.release(0)
    text += [7, 7]
    assert flight.read() == expected


def test_penalties_want_a_history() -> None:
    with pytest.raises(ValueError, match="history"):
        FakeBackend().verify([window((1, 2), sampling=Sampling(presence_penalty=1.0))])


class OneTrack(FakeBackend):
    """A model with one habit."""

    def greedy(self, tokens: Sequence[int], state: int) -> int:
        return 200


@pytest.mark.parametrize("sampling", [COLD, Sampling(0.0, logprobs=2), Sampling(0.0, logit_bias=((7, 0.0),))])
def test_a_habit_is_the_likeliest_token_whatever_else_is_asked_for(sampling: Sampling) -> None:
    (drawn,) = OneTrack().verify([window((1, 2), sampling=sampling)]).read()
    assert drawn.tokens == (200,)
    assert all(logprob.top[0][0] == 200 for logprob in drawn.logprobs)


def test_rule_5_a_draft_counts_for_the_positions_behind_it() -> None:
    sampling = Sampling(0.0, presence_penalty=20.0)
    text = [1, 2]
    asked = msgspec.structs.replace(window(text, draft=(200, 9), sampling=sampling), history=History(text, 2))
    (drawn,) = OneTrack().verify([asked]).read()
    assert [token == 200 for token in drawn.tokens] == [True, False, False]
    asked = msgspec.structs.replace(asked, draft=(9, 200))
    (drawn,) = OneTrack().verify([asked]).read()
    assert [token == 200 for token in drawn.tokens] == [True, True, False]


def test_a_copy_goes_on_from_what_it_copied() -> None:
    backend = FakeBackend()
    backend.verify([window((1, 2, 3), samples=False)])
    copied = msgspec.structs.replace(window((9,), 2, slot=1), copies=0)
    assert draws(backend, copied) == [next_draws((1, 2, 9), COLD)[-1:]]
    assert backend.lanes[0].tokens == [1, 2, 3]


# ---- slots and flights -----------------------------------------------------------------------------------------------


@given(texts=st.tuples(TEXT, TEXT), slots=st.permutations(range(4)), sampling=SAMPLINGS)
def test_a_carried_window_feeds_the_newest_draw_of_its_slot(
    texts: tuple[tuple[int, ...], ...], slots: list[int], sampling: Sampling
) -> None:
    backend = FakeBackend()
    lanes = dict(zip(slots, texts, strict=False))
    flight = backend.verify([window(text, slot=slot, sampling=sampling) for slot, text in lanes.items()])
    for ahead in range(3):
        lanes = {slot: (*text, next_draws(text, sampling)[-1]) for slot, text in lanes.items()}
        carried = [
            window((), len(text) - 1, slot=slot, sampling=sampling, carried=True) for slot, text in lanes.items()
        ]
        if ahead:
            carried.reverse()
        flight = backend.verify(carried, flight)
        expected = {slot: next_draws(text, sampling)[-1:] for slot, text in lanes.items()}
        assert [list(drawn.tokens) for drawn in flight.read()] == [expected[window.slot] for window in carried]
        assert {slot: tuple(lane.tokens) for slot, lane in backend.lanes.items()} == lanes


def test_a_released_slot_starts_from_nothing() -> None:
    backend = FakeBackend()
    backend.verify([window((1, 2, 3)), window((1, 2, 3), slot=1)])
    backend.release(0)
    backend.release(0)
    with pytest.raises(ValueError, match="cached"):
        backend.verify([window((4,), 3)])
    assert draws(backend, window((4,), 3, slot=1)) == [next_draws((1, 2, 3, 4), COLD)[-1:]]


def test_a_reset_forgets_every_lane() -> None:
    backend = FakeBackend()
    backend.verify([window((1, 2)), window((1, 2), slot=1)])
    backend.reset()
    for slot in (0, 1):
        with pytest.raises(ValueError, match="cached"):
            backend.verify([window((4,), 2, slot=slot)])
        backend.release(slot)
    assert draws(backend, window((1, 2, 4))) == [next_draws((1, 2, 4), COLD)[-1:]]


def test_a_flight_outlives_the_release_of_its_slot() -> None:
    backend = FakeBackend()
    flight = backend.verify([window((1, 2))])
    backend.release(0)
    assert [list(drawn.tokens) for drawn in flight.read()] == [next_draws((1, 2), COLD)[-1:]]


def test_what_it_says_of_itself() -> None:
    info = FakeBackend(context_length=64).info
    assert (info.vocab_size, info.context_length, info.eos_tokens, info.folder) == (257, 64, frozenset({EOS}), None)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_lanes_take_rows_by_capacity_class_and_rows_double() -> None:
    backend = FakeBackend(token_bytes=10)
    for slot, held in enumerate((1, 2, 4, 4, 8)):
        backend.verify([window((1,), slot=slot)])
        assert backend.memory.held == held * 2560
    backend.verify([window((1,) * 300, slot=2)])
    assert backend.memory.held == 8 * 2560 + 5120
    assert backend.memory.needed({0: 1, 2: 1, 9: 257}) == 2560 + 2 * 5120
    backend.memory.limit(4 * 2560 + 5120)
    assert backend.memory.held == 4 * 2560 + 5120
    for slot in range(5):
        backend.release(slot)
        backend.release(slot)
    assert backend.memory.held == 0


def test_lanes_that_take_more_than_they_may_are_an_error() -> None:
    backend = FakeBackend(budget=Budget(5000, 1000, 928), token_bytes=4)
    backend.verify([window((1,), slot=slot) for slot in range(3)])
    with pytest.raises(ValueError, match="lanes take 4096 bytes of 3072"):
        backend.verify([window((1,), slot=3)])
    backend.reset()
    assert backend.memory.held == 0
    backend.memory.limit(1024)
    backend.verify([window((1,))])
    assert backend.blocks is not None
    piece = Piece(b"first", b"root", 0, 1)
    (block,) = backend.blocks.take(0, [piece])
    assert block is not None
    with pytest.raises(ValueError, match="lanes take 2048 bytes of 1024"):
        backend.blocks.put(1, 1, [(piece, block)])


def test_a_context_that_does_not_fit_is_cut_to_one_that_does() -> None:
    def context(size: int, told: int = 1000) -> int:
        return FakeBackend(told, budget=Budget(size, 0, 0), token_bytes=1).info.context_length

    assert [context(size) for size in (1024, 1023, 512, 511, 256)] == [1000, 512, 512, 256, 256]
    assert context(256, 100) == 100
    with pytest.raises(ValueError, match="shortest lane"):
        context(255)


def test_nothing_is_measured_and_nothing_kept_at_rest() -> None:
    backend = FakeBackend()
    backend.rest()
    assert backend.use() is None
