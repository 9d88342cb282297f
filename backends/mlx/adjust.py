"""Penalties and logit bias: which logits of a round's rows they change, and by how much (contract rule 6).

Only tokens in a lane's context or in its bias are touched, so a row's change is a short list. A table of them
follows each lane's tokens as they are committed; drafts are added for one round only (contract rule 5).
"""

from collections.abc import Sequence
from typing import TypeVar

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from scheduler.request import Sampling
from scheduler.round import History, Window

Floats = npt.NDArray[np.float32]


class Adjustments(msgspec.Struct, frozen=True):
    """Changes of logits, all `[rows, touched]`: a logit above 0 is divided by its divisor, another multiplied with it,
    then its offset is added. A token that a row names twice has the same divisor and offset in both places.
    """

    tokens: npt.NDArray[np.int32]
    divisors: Floats
    offsets: Floats

    def apply(self, logits: mx.array) -> mx.array:
        """Changed float32 logits `[rows, vocabulary]`."""
        tokens, divisors, offsets = mx.array(self.tokens), mx.array(self.divisors), mx.array(self.offsets)
        found = mx.take_along_axis(logits, tokens, axis=-1)
        changed = mx.where(found > 0, found / divisors, found * divisors) + offsets
        return mx.put_along_axis(logits, tokens, changed, axis=-1)


class LaneTable:
    """One lane's touched tokens, a column each. Written by `LaneTables`."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._columns: dict[int, int] = {}
        self._tokens = np.zeros(0, dtype=np.int32)
        self._biases = np.zeros(0, dtype=np.float32)
        self._present = np.zeros(0, dtype=np.bool_)
        """Stands in the prompt or was generated; what only has a bias does not."""
        self._generated = np.zeros(0, dtype=np.int32)
        """How often it was generated."""
        self._followed = 0
        biased = self._take_in([token for token, _ in sampling.logit_bias])
        np.add.at(self._biases, biased, np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32))

    def follow(self, history: History) -> None:
        """Take in the tokens that were committed since the last call."""
        prompt = max(history.prompt - self._followed, 0)
        fresh = history.tokens[self._followed :]
        self._followed = len(history.tokens)
        if self._sampling.repetition_penalty != 1:
            context = self._take_in(fresh)
            self._present[context] = True
        generated = self._take_in(fresh[prompt:])
        self._present[generated] = True
        np.add.at(self._generated, generated, 1)

    def rows(self, draft: Sequence[int], vocabulary: int) -> Adjustments:
        """The changes at the last real token and behind each token of a draft: `[1 + len(draft), touched]`."""
        drafted = draft if self._sampling.counts else ()
        fresh = self._unknown(drafted)
        width, touched = len(self._tokens), len(self._tokens) + len(fresh)
        columns = {token: width + place for place, token in enumerate(fresh)}
        present = np.zeros((1 + len(draft), touched), dtype=np.bool_)
        generated = np.zeros(present.shape, dtype=np.int32)
        present[:, :width], generated[:, :width] = self._present, self._generated
        for place, token in enumerate(drafted, start=1):
            column = columns[token] if token in columns else self._columns[token]
            present[place:, column] = True
            generated[place:, column] += 1
        tokens = np.concatenate([self._tokens, np.array(fresh, dtype=np.int32)])
        biases = _longer(self._biases, len(fresh))
        inside = (tokens >= 0) & (tokens < vocabulary)
        if not inside.all():
            tokens, biases = tokens[inside], biases[inside]
            present, generated = present[:, inside], generated[:, inside]
        return Adjustments(
            np.broadcast_to(tokens, present.shape), self._divisors(present), biases - self._penalties(generated)
        )

    def _divisors(self, present: npt.NDArray[np.bool_]) -> Floats:
        return np.where(present, np.float32(self._sampling.repetition_penalty), np.float32(1.0))

    def _penalties(self, generated: npt.NDArray[np.int32]) -> Floats:
        presence, frequency = self._sampling.presence_penalty, self._sampling.frequency_penalty
        penalties: Floats = (generated > 0) * np.float32(presence) + generated * np.float32(frequency)
        return penalties.astype(np.float32)

    def _take_in(self, tokens: Sequence[int]) -> npt.NDArray[np.intp]:
        """The columns of tokens, new ones for those without."""
        if fresh := self._unknown(tokens):
            self._columns.update(zip(fresh, range(len(self._columns), len(self._columns) + len(fresh)), strict=True))
            self._tokens = np.concatenate([self._tokens, np.array(fresh, dtype=np.int32)])
            self._biases = _longer(self._biases, len(fresh))
            self._present = _longer(self._present, len(fresh))
            self._generated = _longer(self._generated, len(fresh))
        return np.array([self._columns[token] for token in tokens], dtype=np.intp)

    def _unknown(self, tokens: Sequence[int]) -> list[int]:
        """Those without a column, each once."""
        return list(dict.fromkeys(token for token in tokens if token not in self._columns))


_Any = TypeVar("_Any", bound=np.generic)


def _longer(array: npt.NDArray[_Any], added: int) -> npt.NDArray[_Any]:
    return np.concatenate([array, np.zeros(added, dtype=array.dtype)])


class LaneTables:
    """The tables of all lanes with penalties or a bias, by slot. Written by `MLXBackend`."""

    def __init__(self) -> None:
        self._tables: dict[int, LaneTable] = {}

    def adjustments(self, windows: Sequence[Window], vocabulary: int) -> Adjustments | None:
        """What to change in the sampled rows of these windows, one after another; None if nothing.

        Tokens that the vocabulary lacks are passed over.
        """
        if not any(window.sampling.counts or window.sampling.logit_bias for window in windows):
            return None
        parts = [self._rows(window, vocabulary) for window in windows]
        touched = max(part.tokens.shape[1] for part in parts)
        if not touched:
            return None
        padded = [_padded(part, touched) for part in parts]
        return Adjustments(
            np.concatenate([part.tokens for part in padded]),
            np.concatenate([part.divisors for part in padded]),
            np.concatenate([part.offsets for part in padded]),
        )

    def _rows(self, window: Window, vocabulary: int) -> Adjustments:
        if not window.sampling.counts and not window.sampling.logit_bias:
            return _unchanged(1 + len(window.draft))
        table = self._tables.get(window.slot)
        if table is None:
            table = self._tables[window.slot] = LaneTable(window.sampling)
        if window.history is not None:
            table.follow(window.history)
        return table.rows(window.draft, vocabulary)

    def release(self, slot: int) -> None:
        """Forget a lane. Idempotent."""
        self._tables.pop(slot, None)

    def reset(self) -> None:
        """Forget all lanes."""
        self._tables.clear()


def _unchanged(rows: int) -> Adjustments:
    shape = (rows, 0)
    return Adjustments(np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape, np.float32))


def _padded(part: Adjustments, touched: int) -> Adjustments:
    """The same changes with the first of each row repeated; token 0 unchanged if there is none."""
    missing = touched - part.tokens.shape[1]
    if not part.tokens.shape[1]:
        shape = (len(part.tokens), touched)
        return Adjustments(np.zeros(shape, np.int32), np.ones(shape, np.float32), np.zeros(shape, np.float32))
    if not missing:
        return part
    return Adjustments(
        *(
            np.concatenate([each, np.repeat(each[:, :1], missing, axis=1)], axis=1)
            for each in (part.tokens, part.divisors, part.offsets)
        )
    )
