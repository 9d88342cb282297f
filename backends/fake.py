"""A deterministic pseudo-model without MLX: exact, fast, and unforgiving about caches.

Every draw depends on *all* tokens that a lane's cache holds, so a rollback, a slot or a position handled wrongly
changes the output. Its text repeats its own two-byte habits often enough that lookup drafts are partly right.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from backends.base import Flight, ModelInfo
from backends.noise import gumbel, row_key, token_hash
from scheduler.request import Sampling
from scheduler.round import Window

EOS = 256
"""The end-of-sequence token; tokens 0 to 255 are bytes."""
_VOCAB = np.arange(257, dtype=np.uint32)
_ALPHABET = b"etaoin shrdlu cmfwyp\n,."
_MASK64 = (1 << 64) - 1


class FakeFlight:
    """Draws that were made at once; `last_draws` holds each slot's newest, for the windows that carry it on."""

    def __init__(self, drawn: list[list[int]], last_draws: dict[int, int]) -> None:
        self._drawn = drawn
        self.last_draws = last_draws

    def read(self) -> list[list[int]]:
        """The draws, per window."""
        return self._drawn


class FakeLane:
    """The cache of one slot: a chained hash after each token. Written by `FakeBackend`."""

    def __init__(self) -> None:
        self.states = [0x9E3779B97F4A7C15]
        """`states[i]` stands for the first i tokens."""
        self.tokens: list[int] = []

    def cut(self, length: int) -> None:
        """Forget what stands at `length` and behind it; a gap is an error of the caller."""
        if length > len(self.tokens):
            raise ValueError(f"window starts at {length}, but only {len(self.tokens)} tokens are cached")
        del self.tokens[length:]
        del self.states[length + 1 :]

    def copy(self, length: int) -> "FakeLane":
        """A lane of its own that holds the first `length` tokens."""
        other = FakeLane()
        other.tokens = self.tokens[:length]
        other.states = self.states[: length + 1]
        return other

    def feed(self, token: int) -> None:
        """Append one token."""
        state = ((self.states[-1] ^ (token + 1)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK64
        self.states.append(state ^ (state >> 29))
        self.tokens.append(token)


class FakeBackend:
    """Implements `backends.base.Backend` over a byte-level vocabulary."""

    def __init__(self, context_length: int = 8192) -> None:
        self.info = ModelInfo(
            name="fake",
            folder=None,
            vocab_size=len(_VOCAB),
            context_length=context_length,
            eos_tokens=frozenset({EOS}),
            defaults={},
            device="fake",
            parameter_bytes=0,
        )
        self.lanes: dict[int, FakeLane] = {}
        """What each open slot holds."""

    def verify(self, windows: Sequence[Window], after: Flight | None = None) -> FakeFlight:
        """Feed every window and draw its sampled rows."""
        carried = after.last_draws if isinstance(after, FakeFlight) else {}
        drawn: list[list[int]] = []
        last: dict[int, int] = {}
        for window in windows:
            tokens = (carried[window.slot],) if window.carried else window.tokens
            draws = self._feed(window, tokens)
            drawn.append(draws)
            if draws:
                last[window.slot] = draws[-1]
        return FakeFlight(drawn, last)

    def _feed(self, window: Window, tokens: tuple[int, ...]) -> list[int]:
        if window.copies is not None:
            self.lanes[window.slot] = self.lanes[window.copies].copy(window.start)
        lane = self.lanes.setdefault(window.slot, FakeLane())
        lane.cut(window.start)
        for token in tokens:
            lane.feed(token)
        if not window.samples:
            return []
        draws = [self.draw(lane, window.sampling)]
        for token in window.draft:
            lane.feed(token)
            draws.append(self.draw(lane, window.sampling))
        return draws

    def draw(self, lane: FakeLane, sampling: Sampling) -> int:
        """The token that follows what the lane holds."""
        state = lane.states[-1]
        greedy = self.greedy(lane.tokens, state)
        if sampling.temperature == 0:
            return greedy
        logits = token_hash((state >> 32, state & 0xFFFFFFFF), _VOCAB).astype(np.float32) * np.float32(2.0**-30)
        logits[greedy] += np.float32(4.0)
        key = row_key(sampling.seed, sampling.choice, len(lane.tokens))
        noise = gumbel(token_hash(key, _VOCAB))
        return int(np.argmax(logits / np.float32(sampling.temperature) + noise))

    def greedy(self, tokens: Sequence[int], state: int) -> int:
        """The likeliest token after `tokens`, whose chained hash is `state`; tests may speak otherwise."""
        if state % 127 == 0:
            return EOS
        if state % 4 == 0 or len(tokens) < 2:
            return _ALPHABET[(state >> 20) % len(_ALPHABET)]
        return _ALPHABET[(tokens[-1] * 31 + tokens[-2] * 17) % len(_ALPHABET)]

    def keep(self, kept: Mapping[int, int]) -> dict[int, int]:
        """Nothing needs to be cut before the next window overwrites it."""
        return dict(kept)

    def release(self, slot: int) -> None:
        """Drop the slot's lane."""
        self.lanes.pop(slot, None)

    def reset(self) -> None:
        """Drop all lanes."""
        self.lanes.clear()
