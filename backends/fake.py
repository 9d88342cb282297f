"""A deterministic pseudo-model without MLX: exact, fast, and unforgiving about caches.

Every draw depends on *all* tokens that a lane's cache holds, so a rollback, a slot or a position handled wrongly
changes the output. Its text repeats its own two-byte habits often enough that lookup drafts are partly right.
"""

from collections.abc import Mapping, Sequence
from struct import Struct

import msgspec
import numpy as np
import numpy.typing as npt

from backends import reference
from backends.base import Block, Blocks, Budget, Flight, Masks, MaskWords, MemoryUse, ModelInfo
from backends.groups import LaneGroups, longest_lane
from backends.masks import Allowed, unpack
from backends.noise import token_hash
from scheduler.draft import DraftSource
from scheduler.events import TokenLogprob
from scheduler.pieces import Piece
from scheduler.request import Sampling
from scheduler.round import Drawn, Window

EOS = 256
"""The end-of-sequence token; tokens 0 to 255 are bytes."""
_VOCAB = np.arange(257, dtype=np.uint32)
_ALPHABET = b"etaoin shrdlu cmfwyp\n,."
_MASK64 = (1 << 64) - 1
_PAIR = Struct("<IQ")


class FakeRow(msgspec.Struct, frozen=True):
    """One row that is to be drawn from: what the model says there, and how the request draws."""

    greedy: int
    state: int
    """The chained hash of all tokens before."""
    sampling: Sampling
    position: int
    history: tuple[int, ...]
    """What penalties count; empty if nothing does."""
    prompt: int
    spoiled: bool = False
    """Its logits came out as NaN, whatever `logits` says; nothing can be drawn from it."""

    def logits(self) -> npt.NDArray[np.float32]:
        """Float32 `[257]`, `greedy` the largest."""
        key = (self.state >> 32, self.state & 0xFFFFFFFF)
        logits = token_hash(key, _VOCAB).astype(np.float32) * np.float32(2.0**-30)
        logits[self.greedy] += np.float32(4.0)
        return logits

    def draw(self, allowed: Allowed | None) -> tuple[int, TokenLogprob | None]:
        """Its token, and what the target thought of it if that was asked for."""
        sampling = self.sampling
        untouched = allowed is None and not sampling.counts and not sampling.logit_bias
        if sampling.temperature > 0 or not untouched:
            return reference.draw(
                self.logits(), sampling, self.position, history=self.history, prompt=self.prompt, allowed=allowed
            )
        if sampling.logprobs is None:
            return self.greedy, None
        return self.greedy, reference.token_logprob(self.logits(), self.greedy, sampling.logprobs)


class FakeFlight:
    """Rows that were fed at once; they are drawn from when someone looks, as their masks may still be under way."""

    def __init__(self, windows: Sequence[Window], rows: Sequence[Sequence[FakeRow]], masks: Masks | None) -> None:
        """`rows` holds each window's, none for a prefill chunk."""
        self._windows = windows
        self._rows = rows
        self._masks = masks
        self._drawn: list[Drawn] | None = None
        self._newest: dict[int, int] = {}

    def read(self) -> list[Drawn]:
        """The draws, per window."""
        if self._drawn is None:
            masks = self._masks.wait() if self._masks is not None else {}
            self._drawn = [_drawn(rows, masks.get(index)) for index, rows in enumerate(self._rows)]
        return self._drawn

    def newest(self, slot: int) -> int:
        """The slot's last draw, for the window that carries it on."""
        if not self._newest:
            pairs = zip(self._windows, self.read(), strict=True)
            self._newest = {window.slot: drawn.tokens[-1] for window, drawn in pairs if window.samples}
        return self._newest[slot]


def _drawn(rows: Sequence[FakeRow], words: MaskWords | None) -> Drawn:
    if any(row.spoiled for row in rows):
        return Drawn((EOS,) * len(rows), error="the model's logits are no finite numbers")
    masks = [None] * len(rows) if words is None else unpack(words, len(_VOCAB))
    draws = [row.draw(allowed) for row, allowed in zip(rows, masks, strict=True)]
    logprobs = tuple(logprob for _, logprob in draws if logprob is not None)
    return Drawn(tuple(token for token, _ in draws), logprobs)


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


class FakeBlock:
    """Tokens of a lane and the states behind them."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        self.meta = b"fake"

    @classmethod
    def of(cls, lane: FakeLane, start: int, end: int) -> "FakeBlock":
        """What a lane holds from `start` to `end`."""
        pairs = zip(lane.tokens[start:end], lane.states[start + 1 : end + 1], strict=True)
        return cls(b"".join(_PAIR.pack(token, state) for token, state in pairs))

    @property
    def nbytes(self) -> int:
        """12 a token."""
        return len(self.packed)

    def parts(self) -> list[memoryview]:
        """All of it."""
        return [memoryview(self.packed)]

    def append_to(self, lane: FakeLane) -> None:
        """Let a lane go on by it."""
        for token, state in _PAIR.iter_unpack(self.packed):
            lane.tokens.append(token)
            lane.states.append(state)


class FakeMemory:
    """Implements `scheduler.admission.LaneMemory` for lanes that would lie in buffers: `token_bytes` for each place of
    a row. Written by `FakeBackend` and `FakeBlocks`, and by whoever sets its limit.
    """

    def __init__(self, token_bytes: int = _PAIR.size, most: int | None = None) -> None:
        """`most` is the limit until another one is set; None for none."""
        self._groups = LaneGroups(row_bytes=lambda capacity: capacity * token_bytes)
        self._most = most
        if most is not None:
            self._groups.limit(most)

    @property
    def held(self) -> int:
        """Bytes of all rows."""
        return self._groups.held

    def needed(self, lengths: Mapping[int, int]) -> int:
        """Bytes of as many rows as lanes of these lengths need."""
        return self._groups.needed(lengths)

    def limit(self, most: int) -> None:
        """Give back spare rows beyond it, and take none."""
        self._most = most
        self._groups.limit(most)

    def place(self, needs: Mapping[int, tuple[int, int]]) -> None:
        """Seat lanes as `LaneGroups` does. Raises ValueError if they take more than the limit."""
        self._groups.place(needs)
        if self._most is not None and self.held > self._most:
            raise ValueError(f"lanes take {self.held} bytes of {self._most}")

    def leave(self, slot: int) -> None:
        """A lane is gone. Idempotent."""
        self._groups.leave(slot)

    def clear(self) -> None:
        """All lanes are gone."""
        self._groups.clear()


class FakeBlocks:
    """Implements `backends.base.Blocks`. With `checkpoints`, a checkpoint holds all states up to its end, and other
    blocks only stand for it.
    """

    namespace = "fake"
    blocks = True

    def __init__(self, lanes: dict[int, FakeLane], *, checkpoints: bool, memory: FakeMemory | None = None) -> None:
        """`memory` counts what lanes take, if anybody does."""
        self.checkpoints = checkpoints
        self._lanes = lanes
        self._memory = memory

    def take(self, slot: int, pieces: Sequence[Piece]) -> list[Block | None]:
        """Copy pieces out of a slot."""
        lane = self._lanes[slot]
        if any(piece.end > len(lane.tokens) for piece in pieces):
            raise ValueError(f"slot {slot} does not hold what is to be taken from it")
        return [FakeBlock.of(lane, self._start(piece), piece.end) for piece in pieces]

    def _start(self, piece: Piece) -> int:
        """From where on a piece holds something."""
        return 0 if self.checkpoints and piece.checkpoint else piece.start

    def put(self, slot: int, reach: int, pieces: Sequence[tuple[Piece, Block]]) -> None:
        """Copy pieces into a slot."""
        if self._memory is not None:
            first, last = pieces[0][0], pieces[-1][0]
            self._memory.place({slot: (max(reach, last.end), first.start)})
        for piece, block in pieces:
            assert isinstance(block, FakeBlock), "a block of another backend"
            if self._start(piece) == 0:
                self._lanes[slot] = FakeLane()
            lane = self._lanes[slot]
            lane.cut(self._start(piece))
            block.append_to(lane)
            if len(lane.tokens) != piece.end:
                raise ValueError(f"slot {slot} holds {len(lane.tokens)} tokens behind a piece that ends at {piece.end}")

    def parse(self, piece: Piece, meta: bytes, data: memoryview) -> FakeBlock:
        """A block out of bytes."""
        tokens = piece.end - self._start(piece)
        if meta != b"fake" or len(data) != tokens * _PAIR.size:
            raise ValueError("these bytes are no block")
        return FakeBlock(bytes(data))


class FakeBackend:
    """Implements `backends.base.Backend` over a byte-level vocabulary."""

    def __init__(
        self,
        context_length: int = 8192,
        *,
        cuttable: bool = True,
        budget: Budget | None = None,
        token_bytes: int = _PAIR.size,
    ) -> None:
        """`cuttable`: False for a model whose lanes cannot be had at any length but where they stand.

        Lanes take `token_bytes` for each position of their classes, and never more than the `budget`, nor than the
        limit that `memory` was set. A context that would take more is cut to one that does not. Raises ValueError if
        there is none.
        """
        self.memory = FakeMemory(token_bytes, None if budget is None else budget.pool)
        longest = longest_lane(
            context_length, lambda length: budget is None or self.memory.needed({0: length}) <= budget.pool
        )
        if longest is None:
            raise ValueError("not even the shortest lane fits into the budget")
        self.info = ModelInfo(
            name="fake",
            folder=None,
            vocab_size=len(_VOCAB),
            context_length=longest,
            eos_tokens=frozenset({EOS}),
            defaults={},
            device="fake",
            parameter_bytes=0,
            cuttable=cuttable,
            budget=budget,
        )
        self.drafters: Sequence[DraftSource] = ()
        self.lanes: dict[int, FakeLane] = {}
        """What each open slot holds."""
        self._spoiled: set[int] = set()
        self.blocks: Blocks | None = FakeBlocks(self.lanes, checkpoints=not cuttable, memory=self.memory)

    def verify(self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None) -> FakeFlight:
        """Feed every window; its sampled rows are drawn from when the flight is read. Raises ValueError if the lanes
        take more memory than they may.
        """
        self.memory.place({window.slot: (max(window.end, window.reach), window.start) for window in windows})
        rows = []
        for window in windows:
            tokens = window.tokens
            if window.carried:
                assert isinstance(after, FakeFlight), "a carried window feeds on the flight before"
                tokens = (after.newest(window.slot),)
            rows.append(self._feed(window, tokens))
        self._spoiled.clear()
        return FakeFlight(windows, rows, masks)

    def _feed(self, window: Window, tokens: tuple[int, ...]) -> list[FakeRow]:
        if window.copies is not None:
            self.lanes[window.slot] = self.lanes[window.copies].copy(window.start)
        lane = self.lanes.setdefault(window.slot, FakeLane())
        lane.cut(window.start)
        for token in tokens:
            lane.feed(token)
        if not window.samples:
            return []
        rows = [self._row(lane, window, 0)]
        for place, token in enumerate(window.draft, start=1):
            lane.feed(token)
            rows.append(self._row(lane, window, place))
        return rows

    def _row(self, lane: FakeLane, window: Window, drafted: int) -> FakeRow:
        """The row behind what the lane holds, `drafted` tokens of the window's draft included."""
        history: tuple[int, ...] = ()
        prompt = 0
        if window.sampling.counts:
            if window.history is None:
                raise ValueError("a request with penalties needs the history of its tokens")
            history, prompt = (*window.history.tokens, *window.draft[:drafted]), window.history.prompt
        state = lane.states[-1]
        greedy = self.greedy(lane.tokens, state)
        spoiled = window.slot in self._spoiled
        return FakeRow(greedy, state, window.sampling, len(lane.tokens), history, prompt, spoiled)

    def greedy(self, tokens: Sequence[int], state: int) -> int:
        """The likeliest token after `tokens`, whose chained hash is `state`; tests may speak otherwise."""
        if state % 127 == 0:
            return EOS
        if state % 4 == 0 or len(tokens) < 2:
            return _ALPHABET[(state >> 20) % len(_ALPHABET)]
        return _ALPHABET[(tokens[-1] * 31 + tokens[-2] * 17) % len(_ALPHABET)]

    def spoil(self, slot: int) -> None:
        """Make the slot's logits in the next forward NaN: see `backends.faults`."""
        self._spoiled.add(slot)

    def keep(self, kept: Mapping[int, int]) -> dict[int, int]:
        """Nothing needs to be cut before the next window overwrites it."""
        return dict(kept)

    def release(self, slot: int) -> None:
        """Drop the slot's lane."""
        self.lanes.pop(slot, None)
        self.memory.leave(slot)

    def reset(self) -> None:
        """Drop all lanes."""
        self.lanes.clear()
        self.memory.clear()

    def use(self) -> MemoryUse | None:
        """Nothing is measured."""
        return None

    def rest(self) -> None:
        """Nothing is held to be fast."""
