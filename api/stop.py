"""Stop strings in text that arrives in pieces.

Owns what may be shown: never a stop string, nor the beginning of one that may still be completed. How the text is cut
into pieces makes no difference. Knows nothing of tokens.
"""

from collections.abc import Sequence


class StopString:
    """One stop string's place in the text: the length of its longest prefix that the text ends with (Knuth, Morris and
    Pratt 1977). Written by `StopMatcher`.
    """

    __slots__ = ("_borders", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        self._borders = [0]
        """`_borders[i]`: the length of the longest proper prefix of `string[: i + 1]` that is also its suffix."""
        for index in range(1, len(string)):
            self._borders.append(self._after(self._borders[index - 1], string[index]))

    def step(self, character: str) -> bool:
        """Take one character; True if it completes the string."""
        self.matched = self._after(self.matched, character)
        return self.matched == len(self.string)

    def _after(self, matched: int, character: str) -> int:
        while matched and self.string[matched] != character:
            matched = self._borders[matched - 1]
        return matched + (self.string[matched] == character)


class StopMatcher:
    """Finds the stop string that ends first in the text; of those that end together, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        """No stop string may be empty."""
        self._stops = [StopString(stop) for stop in stops]
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Text that can be shown now. Once a stop string is found, that is the text before it, then nothing."""
        if self.found:
            return ""
        text, begin = self._held + text, len(self._held)
        for index in range(begin, len(text)):
            completed = [len(stop.string) for stop in self._stops if stop.step(text[index])]
            if completed:
                self.found = True
                self._held = ""
                return text[: index + 1 - max(completed)]
        shown = len(text) - max((stop.matched for stop in self._stops), default=0)
        self._held = text[shown:]
        return text[:shown]

    def close(self) -> str:
        """A match that was only begun: the text is over."""
        held, self._held = self._held, ""
        return held
