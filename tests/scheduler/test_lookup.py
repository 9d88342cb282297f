"""Prompt lookup against a brute-force search through the whole text."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.draft import DraftAsk
from scheduler.lookup import LookupIndex, PromptLookup

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=40)
SIZES = st.sets(st.integers(1, 6), min_size=1).map(tuple)


def searched(tokens: Sequence[int], sizes: Sequence[int]) -> int | None:
    """Where the newest earlier occurrence of the longest matched ending ends, by looking everywhere."""
    for size in sorted(sizes, reverse=True):
        ending = list(tokens[-size:])
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(ending) == size and list(tokens[end - size : end]) == ending:
                return end
    return None


def continued(tokens: Sequence[int], start: int | None, budget: int) -> tuple[int, ...]:
    """The text from `start` on, its own continuation where it runs out."""
    if start is None:
        return ()
    text = list(tokens)
    for position in range(start, start + budget):
        text.append(text[position])
    return tuple(text[len(tokens) :])


@given(tokens=TEXT, sizes=SIZES, budget=st.integers(1, 12))
def test_a_draft_is_what_followed_the_longest_newest_match(
    tokens: list[int], sizes: tuple[int, ...], budget: int
) -> None:
    (draft,) = PromptLookup(sizes).propose([DraftAsk("a", tokens, budget)])
    assert draft == continued(tokens, searched(tokens, sizes), budget)


@given(tokens=TEXT, sizes=SIZES, cuts=st.lists(st.integers(0, 40)))
def test_growing_by_pieces_is_the_same_as_reading_at_once(
    tokens: list[int], sizes: tuple[int, ...], cuts: list[int]
) -> None:
    growing = LookupIndex(sizes)
    for cut in sorted({*(cut for cut in cuts if cut < len(tokens)), len(tokens)}):
        growing.extend(tokens[:cut])
        assert growing.continuation() == (searched(tokens[:cut], sizes) if cut else None)
        fresh = LookupIndex(sizes)
        fresh.extend(tokens[:cut])
        assert growing.continuation() == fresh.continuation()


@given(tokens=TEXT, budget=st.integers(1, 5))
def test_asking_twice_changes_nothing(tokens: list[int], budget: int) -> None:
    lookup = PromptLookup()
    ask = DraftAsk("a", tokens, budget)
    assert lookup.propose([ask]) == lookup.propose([ask])


@given(texts=st.lists(TEXT, min_size=1, max_size=4), budget=st.integers(1, 6))
def test_lanes_do_not_read_each_others_texts(texts: list[list[int]], budget: int) -> None:
    together = PromptLookup().propose([DraftAsk(str(place), text, budget) for place, text in enumerate(texts)])
    apart = [PromptLookup().propose([DraftAsk("a", text, budget)])[0] for text in texts]
    assert together == apart


@given(text=st.lists(st.integers(0, 1), min_size=8, max_size=200))
def test_each_token_is_read_once_however_often_it_is_asked(text: list[int]) -> None:
    class Counted(list[int]):
        reads = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
            Counted.reads += 1
            return super().__getitem__(index)

    index = LookupIndex((2, 3, 5))
    counts = []
    for length in range(1, len(text) + 1):
        index.extend(Counted(text[:length]))
        counts.append(Counted.reads)
    assert max(after - before for before, after in pairwise(counts)) <= 3


def test_a_period_goes_on() -> None:
    (draft,) = PromptLookup().propose([DraftAsk("a", [7, 1, 2, 3, 1, 2, 3], 7)])
    assert draft == (1, 2, 3, 1, 2, 3, 1)


def test_one_token_repeated_goes_on() -> None:
    (draft,) = PromptLookup().propose([DraftAsk("a", [5, 5, 5], 4)])
    assert draft == (5, 5, 5, 5)


def test_the_longer_match_wins_over_the_newer_one() -> None:
    tokens = [1, 2, 3, 4, 9, 3, 4, 8, 1, 2, 3, 4]
    assert PromptLookup((2, 4)).propose([DraftAsk("a", tokens, 1)]) == [(9,)]
    assert PromptLookup((2,)).propose([DraftAsk("a", tokens, 1)]) == [(8,)]


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4, 5]])
def test_nothing_repeated_is_nothing_drafted(tokens: list[int]) -> None:
    assert PromptLookup().propose([DraftAsk("a", tokens, 4)]) == [()]


def test_a_forgotten_lane_leaves_nothing_behind() -> None:
    lookup = PromptLookup()
    lookup.propose([DraftAsk("a", [1, 2, 3, 1, 2], 2), DraftAsk("b", [4, 5, 6, 4, 5], 2)])
    lookup.forget("a")
    lookup.forget("a")
    lookup.forget("never seen")
    assert lookup.propose([DraftAsk("a", [1, 2], 2), DraftAsk("b", [4, 5, 6, 4, 5], 2)]) == [(), (6, 4)]
