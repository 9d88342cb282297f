"""The states of recurrent layers, a lane each: state-space models, gated delta rules, short convolutions, RWKV, RG-LRU.

A state is never written in place. A lane holds a reference to a row of the batch that its newest call made, so that the
state before a round is kept, copied to a sibling or gone back to for nothing. Lanes that are fed together again in the
same order use that batch as it is; one that is not fed with the others any more gets a copy of its own.
"""

from collections.abc import Iterable, Sequence

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import ArraysCache


class Row(msgspec.Struct, frozen=True):
    """One lane's part of an array `[lanes, ...]`."""

    batch: mx.array
    row: int


State = tuple[Row | None, ...]
"""One lane's state in one layer, an entry for each array; None where nothing was written yet."""


class RecurrentCache(ArraysCache):  # type: ignore[misc]  # mlx-lm's is untyped; model code asks for its class
    """One layer's states. To the model's code it is a cache of the lanes that were opened; written by `Regrouping`."""

    def __init__(self, entries: int) -> None:
        super().__init__(entries)
        self.entries = entries
        self._states: dict[int, State] = {}
        self._open: tuple[int, ...] = ()
        self._before: list[State] = []
        self._arrays: dict[int, mx.array | None] = {}
        self._written: set[int] = set()

    # ---- lanes ------------------------------------------------------------------------------------------------------

    def state(self, slot: int) -> State:
        """A lane's state; of one that was never fed, nothing."""
        return self._states.get(slot) or (None,) * self.entries

    def put(self, slot: int, state: State) -> None:
        """Let a lane have this state."""
        self._states[slot] = state

    def drop(self, slot: int) -> None:
        """Forget a lane. Idempotent."""
        self._states.pop(slot, None)

    def own(self, slots: Iterable[int]) -> None:
        """Copy these lanes' states out of batches that they share, which would else live on with them."""
        for slot in slots:
            self._states[slot] = tuple(_alone(row) for row in self.state(slot))
        mx.eval([row.batch for slot in slots for row in self._states[slot] if row is not None])

    def clear(self) -> None:
        """Forget all lanes."""
        self._states.clear()

    def arrays(self) -> list[mx.array]:
        """Everything that lanes refer to, each array once."""
        rows = [row for state in self._states.values() for row in state if row is not None]
        return list({id(row.batch): row.batch for row in rows}.values())

    def open(self, slots: Sequence[int], states: Sequence[State]) -> None:
        """The model's code is about to feed these lanes, in this order, which have these states."""
        self._open, self._before = tuple(slots), list(states)
        self._arrays, self._written = {}, set()

    def close(self) -> None:
        """It has fed them: what it wrote is theirs."""
        for place, slot in enumerate(self._open):
            state = list(self.state(slot))
            for entry in self._written:
                value = self._arrays[entry]
                state[entry] = None if value is None else Row(value, place)
            self._states[slot] = tuple(state)
        self._open = ()

    # ---- as the model's code sees it ---------------------------------------------------------------------------------

    def __getitem__(self, entry: int) -> mx.array | None:
        """One array of the opened lanes' states, `[lanes, ...]`; None if they are new."""
        if not self._open:
            raise RuntimeError("a state is read outside of the module that owns it")
        if entry not in self._arrays:
            self._arrays[entry] = _together([state[entry] for state in self._before])
        return self._arrays[entry]

    def __setitem__(self, entry: int, value: mx.array | None) -> None:
        if not self._open:
            raise RuntimeError("a state is written outside of the module that owns it")
        self._arrays[entry] = value
        self._written.add(entry)

    def make_mask(self, _: int) -> None:
        """Opened lanes are equally wide: there is no padding."""

    def advance(self, _: int) -> None:
        """Nothing is padded, so nothing counts down."""


def _alone(row: Row | None) -> Row | None:
    if row is None or row.batch.shape[0] == 1:
        return row
    return Row(mx.take(row.batch, mx.array([row.row]), axis=0), 0)


def _together(rows: Iterable[Row | None]) -> mx.array | None:
    """The rows as one array, without a copy where they are a whole batch already."""
    found = [row for row in rows if row is not None]
    if not found:
        return None
    batch = found[0].batch
    if any(row.batch is not batch for row in found):
        return mx.concatenate([row.batch[row.row : row.row + 1] for row in found])
    places = [row.row for row in found]
    return batch if places == list(range(batch.shape[0])) else mx.take(batch, mx.array(places), axis=0)
