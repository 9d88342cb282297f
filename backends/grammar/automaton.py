"""Languages of strings as deterministic automata over Unicode code points, with the operations of set algebra.

What a schema says of strings and numbers meets here: patterns, lengths, formats, ranges, and keys that are none of
those named before. Owns no syntax; bounded in states, so that a hostile pattern ends in TooLargeError and not in the
machine's memory.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

MAX_STATES = 4096
"""Automata above this many states are refused; minimal ones of real patterns have a few dozen."""
_MAX_CODE_POINT = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]
"""Code points as sorted, disjoint, non-adjacent ranges, both ends included."""
Place = TypeVar("Place", bound=Hashable)
EVERY_CHARACTER: Ranges = ((0, _MAX_CODE_POINT),)


class TooLargeError(ValueError):
    """An automaton above the limit of states."""


def normalized(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted and merged."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def inverted(ranges: Ranges) -> Ranges:
    """All other code points."""
    gaps = []
    following = 0
    for low, high in ranges:
        if following < low:
            gaps.append((following, low - 1))
        following = high + 1
    if following <= _MAX_CODE_POINT:
        gaps.append((following, _MAX_CODE_POINT))
    return tuple(gaps)


def intersected(left: Ranges, right: Ranges) -> Ranges:
    """Code points of both."""
    return inverted(normalized((*inverted(left), *inverted(right))))


State = tuple[tuple[int, int, int], ...]
"""A state's transitions: sorted disjoint `(low, high, target)`; what none of them names leads nowhere."""


class Automaton:
    """A minimal deterministic automaton; state 0 is the start. Immutable."""

    def __init__(self, states: Sequence[State], accepting: frozenset[int]) -> None:
        self.states = tuple(states)
        self.accepting = accepting

    @property
    def empty(self) -> bool:
        """No string is in the language: a minimal automaton keeps only states from which acceptance is reached."""
        return not self.accepting

    def accepts(self, text: str) -> bool:
        """Whether a string is in the language."""
        state: int | None = 0
        for character in text:
            state = self._step(state, ord(character)) if state is not None else None
        return state in self.accepting

    def lengths(self) -> tuple[int, int | None]:
        """Of the shortest string, and of the longest; None if there is none. Zero twice if there are no strings."""
        reached = {0}
        shortest = 0
        while reached and self.accepting.isdisjoint(reached):
            reached = {target for state in reached for _, _, target in self.states[state]}
            shortest += 1
        longest = 0
        while reached and longest <= len(self.states):
            reached = {target for state in reached for _, _, target in self.states[state]}
            longest += bool(reached)
        return (0, 0) if self.empty else (shortest, None if reached else shortest + longest)

    def _step(self, state: int, code: int) -> int | None:
        for low, high, target in self.states[state]:
            if low <= code <= high:
                return target
        return None

    def __and__(self, other: "Automaton") -> "Automaton":
        """The strings of both."""
        return _product(self, other, lambda left, right: left and right)

    def __or__(self, other: "Automaton") -> "Automaton":
        """The strings of either."""
        return _product(self, other, lambda left, right: left or right)

    def __sub__(self, other: "Automaton") -> "Automaton":
        """The strings of the first that are not in the second."""
        return _product(self, other, lambda left, right: left and not right)

    def __invert__(self) -> "Automaton":
        """All other strings."""
        return EVERYTHING - self


def literals(texts: Iterable[str]) -> Automaton:
    """Exactly these strings."""
    edges: list[dict[int, int]] = [{}]
    accepting = set()
    for text in texts:
        state = 0
        for character in text:
            target = edges[state].setdefault(ord(character), len(edges))
            if target == len(edges):
                edges.append({})
                _check(len(edges))
            state = target
        accepting.add(state)
    return minimal([tuple((code, code, to) for code, to in sorted(state.items())) for state in edges], accepting)


def lengths(least: int, most: int | None) -> Automaton:
    """All strings of so many code points."""
    last = least if most is None else most
    _check(last + 1)
    states: list[State] = [((0, _MAX_CODE_POINT, state + 1),) for state in range(last)]
    states.append(((0, _MAX_CODE_POINT, last),) if most is None else ())
    return minimal(states, set(range(least, last + 1)))


Edges = list[list[tuple[Ranges, int]]]
"""A nondeterministic automaton's transitions by state."""


def determinized(edges: Edges, skips: Sequence[Sequence[int]], start: int, accepting: set[int]) -> Automaton:
    """From a nondeterministic automaton, whose `skips` are transitions without a character."""

    def closed(states: Iterable[int]) -> frozenset[int]:
        found = set(states)
        waiting = list(found)
        while waiting:
            for state in skips[waiting.pop()]:
                if state not in found:
                    found.add(state)
                    waiting.append(state)
        return frozenset(found)

    def moves(states: frozenset[int]) -> Iterator[tuple[int, int, frozenset[int]]]:
        arcs = [(low, high, to) for state in states for ranges, to in edges[state] for low, high in ranges]
        for low, high in _pieces((low, high) for low, high, _ in arcs):
            reached = frozenset(to for first, last, to in arcs if first <= low and high <= last)
            if reached:
                yield low, high, closed(reached)

    return _explored(closed([start]), moves, lambda states: not accepting.isdisjoint(states))


def _pieces(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The coarsest cut of the code points that respects the borders of all ranges."""
    borders = sorted({border for low, high in ranges for border in (low, high + 1)})
    return ((low, following - 1) for low, following in pairwise(borders))


_Pair = tuple[int | None, int | None]


def _product(left: Automaton, right: Automaton, accepts: Callable[[bool, bool], bool]) -> Automaton:
    dead: State = ()

    def arcs(automaton: Automaton, state: int | None) -> State:
        return dead if state is None else automaton.states[state]

    def target(arcs: State, low: int) -> int | None:
        return next((to for first, last, to in arcs if first <= low <= last), None)

    def moves(pair: _Pair) -> Iterator[tuple[int, int, _Pair]]:
        ours, theirs = arcs(left, pair[0]), arcs(right, pair[1])
        for low, high in _pieces((low, high) for low, high, _ in (*ours, *theirs)):
            reached = target(ours, low), target(theirs, low)
            if reached != (None, None):
                yield low, high, reached

    start: _Pair = (0, 0)
    return _explored(start, moves, lambda pair: accepts(pair[0] in left.accepting, pair[1] in right.accepting))


def _explored(
    start: Place,
    moves: Callable[[Place], Iterable[tuple[int, int, Place]]],
    accepts: Callable[[Place], bool],
) -> Automaton:
    """Number whatever is reached from the start, then minimise."""
    numbers = {start: 0}
    waiting = [start]
    states: list[State] = []
    for place in waiting:
        arcs = []
        for low, high, target in moves(place):
            if target not in numbers:
                numbers[target] = len(numbers)
                _check(len(numbers))
                waiting.append(target)
            arcs.append((low, high, numbers[target]))
        states.append(tuple(arcs))
    return minimal(states, {number for place, number in numbers.items() if accepts(place)})


def minimal(states: Sequence[State], accepting: set[int]) -> Automaton:
    """The least automaton of the same language, numbered in the order of its strings; state 0 is the start.

    Partition refinement as Hopcroft has it: only states that lead into a class that was split are looked at again.
    """
    live = _leading_to(states, accepting)
    if 0 not in live:
        return NOTHING
    arcs = [tuple(arc for arc in state if arc[2] in live) for state in states]
    before: dict[int, set[int]] = defaultdict(set)
    for number in live:
        for _, _, target in arcs[number]:
            before[target].add(number)
    class_of = {number: int(number in accepting) for number in live}
    members: dict[int, set[int]] = {0: live - accepting, 1: live & accepting}
    changed = set(live)
    while changed:
        changed = _split(changed, class_of, members, arcs, before)
    return _numbered(arcs, accepting, class_of)


def _leading_to(states: Sequence[State], accepting: set[int]) -> set[int]:
    before: dict[int, set[int]] = defaultdict(set)
    for number, state in enumerate(states):
        for _, _, target in state:
            before[target].add(number)
    found = set(accepting)
    waiting = list(found)
    while waiting:
        for number in before[waiting.pop()] - found:
            found.add(number)
            waiting.append(number)
    return found


def _signature(arcs: State, class_of: dict[int, int]) -> State:
    """Where a state leads, in classes; adjacent ranges to the same class are one."""
    merged: list[tuple[int, int, int]] = []
    for low, high, target in arcs:
        if merged and merged[-1][2] == class_of[target] and merged[-1][1] == low - 1:
            merged[-1] = (merged[-1][0], high, class_of[target])
        else:
            merged.append((low, high, class_of[target]))
    return tuple(merged)


def _split(
    changed: set[int],
    class_of: dict[int, int],
    members: dict[int, set[int]],
    arcs: Sequence[State],
    before: dict[int, set[int]],
) -> set[int]:
    """Split the classes of the changed states, all by the classes as they were; the states that this changes."""
    by_class: dict[int, dict[State, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number in changed:
        by_class[class_of[number]][_signature(arcs[number], class_of)].append(number)
    apart: list[list[int]] = []
    for label, groups in by_class.items():
        # States of a class that did not change have one signature: that of any of them.
        unchanged = next((number for number in members[label] if number not in changed), None)
        if unchanged is not None:
            groups.pop(_signature(arcs[unchanged], class_of), None)
        else:
            groups.pop(max(groups, key=lambda signature: len(groups[signature])))
        apart.extend(groups.values())
    again: set[int] = set()
    for group in apart:
        label = len(members)
        members[class_of[group[0]]].difference_update(group)
        members[label] = set(group)
        for number in group:
            class_of[number] = label
            again |= before[number]
    return again


def _numbered(arcs: Sequence[State], accepting: set[int], class_of: dict[int, int]) -> Automaton:
    numbers = {class_of[0]: 0}
    waiting = [0]
    states: list[State] = []
    ends = set()
    for number in waiting:
        if number in accepting:
            ends.add(len(states))
        for _, _, target in arcs[number]:
            if class_of[target] not in numbers:
                numbers[class_of[target]] = len(numbers)
                waiting.append(target)
        merged = _signature(arcs[number], class_of)
        states.append(tuple((low, high, numbers[label]) for low, high, label in merged))
    return Automaton(states, frozenset(ends))


def rebased(automaton: Automaton, first: int, last: int) -> Automaton:
    """The strings w for which `first w last` is in the language, where `first` and `last` stand for characters beyond
    Unicode.
    """

    def step(state: int, code: int) -> int | None:
        return next((to for low, high, to in automaton.states[state] if low <= code <= high), None)

    start = step(0, first)
    if start is None:
        return NOTHING

    def moves(state: int) -> Iterator[tuple[int, int, int]]:
        for low, high, target in automaton.states[state]:
            if low <= _MAX_CODE_POINT:
                yield low, min(high, _MAX_CODE_POINT), target

    return _explored(start, moves, lambda state: step(state, last) in automaton.accepting)


def preceded(character: str, automaton: Automaton) -> Automaton:
    """The strings of an automaton, each behind one character."""
    states = [tuple((low, high, target + 1) for low, high, target in state) for state in automaton.states]
    return minimal([((ord(character), ord(character), 1),), *states], {state + 1 for state in automaton.accepting})


NOTHING = Automaton(((),), frozenset())
"""No string."""
EVERYTHING = Automaton((((0, _MAX_CODE_POINT, 0),),), frozenset({0}))
"""All strings."""


def _check(states: int) -> None:
    if states > MAX_STATES:
        raise TooLargeError(f"it needs an automaton of more than {MAX_STATES} states")
