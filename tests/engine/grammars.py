"""A grammar engine of a few lines, for the engine's tests: charts of states over single bytes, exact by inspection."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from backends.base import MaskWords
from backends.fake import EOS

WORDS = 9
"""257 tokens, 32 to a word."""


@dataclass(frozen=True)
class Chart:
    """A deterministic automaton. Implements `backends.grammar.base.Grammar`.

    `steps[state]` leads from a state by byte; the text may end in the states `ends`. Begins in state 0.
    """

    steps: tuple[Mapping[int, int], ...]
    ends: frozenset[int]

    @property
    def summary(self) -> str:
        return f"chart of {len(self.steps)} states"

    def matcher(self) -> "ChartMatcher":
        return ChartMatcher(self)


class ChartMatcher:
    """Implements `backends.grammar.base.Matcher`."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        self.states: list[int | None] = [0]
        """Where it stood after each token; None behind the end-of-sequence token."""

    @property
    def _here(self) -> int | None:
        return self.states[-1]

    def accept(self, token: int) -> bool:
        if self._here is None:
            return False
        if token == EOS:
            if self._here not in self._chart.ends:
                return False
            self.states.append(None)
            return True
        if token not in self._chart.steps[self._here]:
            return False
        self.states.append(self._chart.steps[self._here][token])
        return True

    def rollback(self, count: int) -> None:
        assert count < len(self.states)
        if count:
            del self.states[-count:]

    def fill(self, words: MaskWords) -> None:
        words[:] = 0
        allowed = [] if self._here is None else [*self._chart.steps[self._here]]
        if self._here is None or self._here in self._chart.ends:
            allowed.append(EOS)
        bits = words.view("uint32")
        for token in allowed:
            bits[token // 32] |= 1 << token % 32

    @property
    def finished(self) -> bool:
        return self._here is None or (self._here in self._chart.ends and not self._chart.steps[self._here])

    def forced(self, limit: int) -> tuple[int, ...]:
        forced: list[int] = []
        here = self._here
        while len(forced) < limit and here is not None and here not in self._chart.ends:
            steps = self._chart.steps[here]
            if len(steps) != 1:
                break
            ((byte, here),) = steps.items()
            forced.append(byte)
        return tuple(forced)


def random_chart(seed: int) -> Chart:
    """Some states force the next byte, some offer a few or many, some end the text; none is a dead end."""
    rng = random.Random(seed)
    count = rng.randint(2, 12)
    steps: list[dict[int, int]] = []
    for state in range(count):
        width = rng.choice([1, 1, 1, 2, 5, 60, 256])
        steps.append({byte: rng.randrange(count) for byte in rng.sample(range(256), width)})
        if state == count - 1 and rng.random() < 0.7:
            steps[state] = {}
    ends = {count - 1} | {state for state in range(count) if rng.random() < 0.1}
    return Chart(tuple(steps), frozenset(ends))


def literal(text: bytes) -> Chart:
    """Nothing but this text."""
    return Chart((*({byte: place + 1} for place, byte in enumerate(text)), {}), frozenset({len(text)}))
