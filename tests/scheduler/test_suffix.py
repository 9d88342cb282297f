"""Suffix drafts against a search through everything, and what is never drafted."""

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.draft import Draft, DraftAsk
from scheduler.suffix import ANCHORS, LONGEST, NEWEST, TOKEN_BYTES, History, SuffixDrafts

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def ask(tokens: Sequence[int], budget: int = 8, *, name: str = "a", owner: str = "", prompt: int = 0) -> DraftAsk:
    return DraftAsk(name, tokens, prompt, budget, owner)


def drafted(source: SuffixDrafts, tokens: Sequence[int], budget: int = 8, **more: str) -> tuple[int, ...]:
    (draft,) = source.propose([ask(tokens, budget, **more)])
    return draft.tokens


def reach(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences end with in common."""
    common = 0
    while common < min(len(left), len(right), LONGEST) and left[-1 - common] == right[-1 - common]:
        common += 1
    return common


def searched(text: list[int], history: list[list[int]], budget: int) -> tuple[int, ...]:
    """The definition, by looking everywhere: `history` holds texts, newest first, each with its separators."""
    for size in ANCHORS:
        found: list[tuple[int, list[int], int]] = []
        for where in (text, *history):
            last = len(where) - (where is text)
            places = [p for p in range(last, size - 1, -1) if len(text) >= size and where[p - size : p] == text[-size:]]
            found += [(reach(where[:p], text), where, p) for p in places[:NEWEST]]
        if found:
            longest = max(length for length, _, _ in found)
            return voted(text, [match for match in found if 2 * match[0] >= longest], budget)
    return ()


def voted(text: list[int], matches: list[tuple[int, list[int], int]], budget: int) -> tuple[int, ...]:
    draft: list[int] = []
    while len(draft) < budget:
        ballots: dict[int, list[tuple[int, list[int], int]]] = {}
        for length, where, place in matches:
            on = [*where, *draft] if where is text else where
            if place + len(draft) < len(on) and on[place + len(draft)] != -1:
                ballots.setdefault(on[place + len(draft)], []).append((length, where, place))
        if not ballots:
            break
        weights = {token: sum(length for length, _, _ in of) for token, of in ballots.items()}
        token = max(weights, key=lambda candidate: weights[candidate])
        draft.append(token)
        matches = ballots[token]
    return tuple(draft)


@settings(max_examples=300)
@given(tokens=TOKENS, budget=st.integers(0, 10))
def test_a_draft_is_what_the_longest_matches_went_on_with(tokens: list[int], budget: int) -> None:
    assert drafted(SuffixDrafts(), tokens, budget) == searched(tokens, [], budget)


@settings(max_examples=300)
@given(said=st.lists(TOKENS.filter(bool), max_size=4), tokens=TOKENS, budget=st.integers(0, 10))
def test_with_a_history_too(said: list[list[int]], tokens: list[int], budget: int) -> None:
    source = SuffixDrafts()
    newer: list[int] = []
    for place, output in enumerate(said):
        source.propose([ask([9, 9, *output], name=f"said {place}", prompt=2)])
        source.forget(f"said {place}")
        newer += [*output, -1]
    assert drafted(source, tokens, budget) == searched(tokens, [newer], budget)


@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 60)))
def test_growing_by_pieces_is_the_same_as_reading_at_once(tokens: list[int], cuts: list[int]) -> None:
    growing = SuffixDrafts()
    for cut in sorted({*(cut for cut in cuts if cut < len(tokens)), len(tokens)}):
        assert growing.propose([ask(tokens[:cut])]) == SuffixDrafts().propose([ask(tokens[:cut])])


def test_many_short_matches_do_not_hide_an_old_long_one() -> None:
    """A pair that stands everywhere, and one place, long ago, where what stood before it is the same too."""
    long_ago = [50, 51, 52, 53, 1, 2, 99]
    noise = [token for number in range(40) for token in (60 + number, 1, 2, 7)]
    assert drafted(SuffixDrafts(), [*long_ago, *noise, 50, 51, 52, 53, 1, 2], 1) == (99,)


def test_a_repetition_goes_on_in_its_period() -> None:
    assert drafted(SuffixDrafts(), [7, 1, 2, 3, 1, 2, 3], 7) == (1, 2, 3, 1, 2, 3, 1)


def test_frequency_decides_between_matches_of_like_reach() -> None:
    text = [5, 1, 2, 8, 6, 1, 2, 9, 4, 1, 2, 8, 3, 1, 2]
    (draft,) = SuffixDrafts().propose([ask(text, 1)])
    assert draft.tokens == (8,)


def test_marks_tell_reach_and_agreement() -> None:
    text = list(range(30))
    (long,) = SuffixDrafts().propose([ask([*text, 99, *text[:25]], 3)])
    (short,) = SuffixDrafts().propose([ask([*text, 99, *text[:2]], 3)])
    (split,) = SuffixDrafts().propose([ask([1, 2, 8, 1, 2, 9, 1, 2], 1)])
    assert long.tokens == (25, 26, 27)
    assert set(long.marks).isdisjoint(short.marks[:1])
    assert set(split.marks).isdisjoint((*long.marks, *short.marks))


# ---- the history -----------------------------------------------------------------------------------------------------


def say(source: SuffixDrafts, name: str, output: Sequence[int], owner: str = "") -> None:
    source.propose([ask([100, *output], name=name, owner=owner, prompt=1)])
    source.forget(name)


def test_one_lanes_output_is_drafted_for_the_next_one_of_the_same_owner_only() -> None:
    source = SuffixDrafts()
    say(source, "first", [1, 2, 3, 4, 5], owner="key one")
    assert drafted(source, [9, 1, 2], 3, name="mine", owner="key one") == (3, 4, 5)
    assert drafted(source, [9, 1, 2], 3, name="other", owner="key two") == ()
    assert drafted(source, [9, 1, 2], 3, name="nobody", owner="") == ()


def test_prompts_are_nobody_elses() -> None:
    source = SuffixDrafts()
    source.propose([ask([1, 2, 3, 4, 8, 8], name="first", prompt=4)])
    source.forget("first")
    assert drafted(source, [9, 1, 2], 3, name="next") == ()


def test_nothing_is_drafted_over_the_end_of_an_output() -> None:
    source = SuffixDrafts()
    say(source, "first", [1, 2, 3])
    say(source, "second", [4, 5, 6])
    assert drafted(source, [9, 1, 2], 5, name="next") == (3,)


def test_forgetting_twice_or_a_stranger_is_nothing() -> None:
    source = SuffixDrafts()
    say(source, "first", [1, 2, 3])
    size = source.history.size
    source.forget("first")
    source.forget("stranger")
    assert source.history.size == size


@given(outputs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), max_size=30), cap=st.integers(0, 60))
def test_a_history_stays_under_its_cap_and_the_newest_output_is_in_it(outputs: list[tuple[str, int]], cap: int) -> None:
    history = History(cap)
    for owner, length in outputs:
        history.add(owner, list(range(length)))
        held = [text for each in "abc" for text in history.of(each)]
        assert history.size == sum(len(text.tokens) for text in held) <= cap
        if length and cap >= 4:
            (newest, _) = history.of(owner)
            kept = list(range(length))[-(cap // 2 - 1) :]
            assert list(newest.tokens)[-len(kept) - 1 :] == [*kept, -1]


@pytest.mark.parametrize("vocabulary", [4, 50_000])
def test_a_token_in_a_history_takes_no_more_than_it_is_said_to(vocabulary: int) -> None:
    tokens = [(place * 7919 + place * place) % vocabulary for place in range(20_000)]
    tracemalloc.start()
    history = History(30_000)
    for start in range(0, 20_000, 500):
        history.add("", tokens[start : start + 500])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held <= TOKEN_BYTES * history.size


def test_a_lane_without_a_past_drafts_nothing() -> None:
    assert SuffixDrafts().propose([ask([]), ask([1], name="b"), ask([1, 2], name="c")]) == [Draft()] * 3
