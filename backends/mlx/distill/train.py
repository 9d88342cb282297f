"""Trains an `Eagle` on collected texts: it learns the target's distribution at every position of an answer, from the
target's features and, further steps down, from its own output.

Several steps are unrolled as they are drafted later (training-time test; EAGLE-3, Li et al. 2025): in step j a row
attends the keys made of true features up to j rows before it, and the keys of its own unrolled rows behind those.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx.optimizers import AdamW, clip_grad_norm
from mlx.utils import tree_flatten, tree_unflatten

from backends.mlx import exponential
from backends.mlx.distill.collect import Text
from backends.mlx.drafts.eagle import Eagle, parameters_of


class Frozen(msgspec.Struct, frozen=True):
    """What is the target's: embeddings float32 `[vocabulary, dims]`, and the rows of its head `[drafted, dims]`."""

    embedding: mx.array
    head: mx.array


class Batch(msgspec.Struct, frozen=True):
    """Texts side by side, padded at their ends: tokens `[texts, length + 1]`, features `[texts, length, width]` and the
    scales of their last tap `[texts, length]`; `rows` are the places in the flattened `[texts * length]` whose guess
    counts.
    """

    tokens: mx.array
    features: mx.array
    scales: mx.array
    rows: mx.array


def cross_entropy(logits: mx.array, labels: mx.array) -> mx.array:
    """Of rows `[rows, drafted]` against distributions; `[rows]`. Its exponentials are `exponential`'s."""
    return cast("mx.array", _entropy(logits, labels))


def _log_softmax(logits: mx.array) -> tuple[mx.array, mx.array]:
    """The logarithm of the sum of e**logits, `[rows]`, and their softmax."""
    highest = logits.max(axis=-1, keepdims=True)
    weights = exponential.exp(logits - highest)
    total = weights.sum(axis=-1, keepdims=True)
    return (mx.log(total) + highest)[:, 0], weights / total


@mx.custom_function
def _entropy(logits: mx.array, labels: mx.array) -> mx.array:
    return _log_softmax(logits)[0] - (labels * logits).sum(axis=-1)


@_entropy.vjp
def _entropy_vjp(primals: tuple[mx.array, mx.array], cotangent: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    logits, labels = primals
    return (_log_softmax(logits)[1] - labels) * cotangent[:, None], mx.zeros_like(labels)


def unrolled(network: Eagle, embedded: mx.array, features: mx.array, steps: int) -> Iterator[mx.array]:
    """The outputs `[texts, length, dims]` of each step; row t of step j has the output of row t - 1 of step j - 1."""
    attention = network.attention
    _, length, _ = embedded.shape
    place = mx.arange(length)
    repeats = attention.heads // attention.kv_heads
    steps_keys: list[mx.array] = []
    steps_values: list[mx.array] = []
    for step in range(steps):
        queries, keys, values = attention.project(network.before(embedded, features), 0)
        queries = queries * attention.scale
        steps_keys.append(mx.repeat(keys, repeats, axis=1))
        steps_values.append(mx.repeat(values, repeats, axis=1))
        scores = queries @ steps_keys[0].swapaxes(-1, -2)
        scores = mx.where(place <= place[:, None] - step, scores, -1e9)
        own_keys = [_shifted(each, step - 1 - index) for index, each in enumerate(steps_keys[1:])]
        own = [(queries * each).sum(axis=-1, keepdims=True) for each in own_keys]
        weights = mx.softmax(mx.concatenate([scores, *own], axis=-1), axis=-1)
        attended = weights[..., :length] @ steps_values[0]
        for index, each in enumerate(steps_values[1:]):
            attended = attended + weights[..., length + index, None] * _shifted(each, step - 1 - index)
        output = network.behind(features, attention.join(attended))
        yield output
        features = _shifted(output[:, None], 1)[:, 0]


def _shifted(rows: mx.array, by: int) -> mx.array:
    """Row t is what row t - by was; `[batch, heads, length, dim]`."""
    if by == 0:
        return rows
    return mx.pad(rows[:, :, :-by], [(0, 0), (0, 0), (by, 0), (0, 0)])


def losses(network: Eagle, frozen: Frozen, batch: Batch, steps: int) -> tuple[mx.array, mx.array]:
    """Per step the mean cross-entropy, `[steps]`, and how often the likeliest token is the target's, `[steps]`."""
    labels, best = _labels(frozen, batch)
    embedded = frozen.embedding[batch.tokens[:, 1:]]
    features = network.fuse(batch.features.astype(mx.float32))
    found, agreed = [], []
    for output in unrolled(network, embedded, features, steps):
        picked = output.reshape(-1, output.shape[-1])[batch.rows]
        logits = network.norm(picked) @ frozen.head.T
        found.append(cross_entropy(logits, labels).mean())
        agreed.append(mx.mean(mx.argmax(logits, axis=-1) == best))
    return mx.stack(found), mx.stack(agreed)


def _labels(frozen: Frozen, batch: Batch) -> tuple[mx.array, mx.array]:
    """What the target thinks comes behind the row's token: distributions over the drafted tokens, and the likeliest."""
    dims = frozen.head.shape[1]
    rows = batch.rows + 1
    final = batch.features.reshape(-1, batch.features.shape[-1])[rows, -dims:].astype(mx.float32)
    logits = (final * batch.scales.reshape(-1)[rows][:, None]) @ frozen.head.T
    return mx.stop_gradient(_log_softmax(logits)[1]), mx.argmax(logits, axis=-1)


class Schedule(msgspec.Struct, frozen=True):
    """How the network is trained."""

    epochs: int = 3
    rows: int = 1024
    """About so many positions make a batch."""
    steps: int = 3
    """How many are unrolled."""
    rate: float = 1e-3
    warm_up: float = 0.04
    """The share of the updates in which the rate rises; along a cosine it falls afterwards."""
    decay: float = 0.01
    """Of weights (Loshchilov and Hutter 2019)."""
    discount: float = 0.8
    """What a step's loss counts beside that of the step before it."""

    def rate_at(self, done: int, total: int) -> float:
        """The rate of the update behind so many of all."""
        share = (done + 1) / total
        if share < self.warm_up:
            return self.rate * share / self.warm_up
        left = (1 - share) / (1 - self.warm_up)
        return self.rate * (0.03 + 0.97 * 0.5 * (1 - math.cos(math.pi * left)))


class Trained(msgspec.Struct, frozen=True):
    """What an update showed: mean cross-entropy and agreement with the target's likeliest token, per unrolled step."""

    done: int
    total: int
    losses: tuple[float, ...]
    agreed: tuple[float, ...]
    rows: int


class Trainer:
    """Updates one network. Deterministic: what it has come to depends on the texts, the schedule and the seed alone,
    and not on whether it was stopped and went on from a checkpoint. Another number of BLAS threads may round otherwise.
    """

    def __init__(self, network: Eagle, frozen: Frozen, texts: Sequence[Text], schedule: Schedule, seed: int) -> None:
        """`network` has its first weights."""
        self.network = network
        self.done = 0
        """Updates so far."""
        self._frozen = frozen
        self._texts = texts
        self._schedule = schedule
        self._seed = seed
        self._optimizer = AdamW(schedule.rate, betas=[0.9, 0.95], weight_decay=schedule.decay)
        self._optimizer.init(network.trainable_parameters())  # type: ignore[no-untyped-call]
        discounts = mx.array([schedule.discount**step for step in range(schedule.steps)])
        self._discounts = discounts / discounts.sum()
        self._gradients = nn.value_and_grad(network, self._loss)
        self.total = schedule.epochs * len(batches(texts, schedule.rows, seed))

    def _loss(self, batch: Batch) -> tuple[mx.array, mx.array, mx.array]:
        found, agreed = losses(self.network, self._frozen, batch, self._schedule.steps)
        return (found * self._discounts).sum(), found, agreed

    def updates(self) -> Iterator[Trained]:
        """One after the other, from where it stands to the end."""
        while self.done < self.total:
            of_epoch = self.total // self._schedule.epochs
            epoch, skipped = divmod(self.done, of_epoch)
            for batch in batches(self._texts, self._schedule.rows, self._seed + epoch)[skipped:]:
                yield self._update(joined(batch))

    def _update(self, batch: Batch) -> Trained:
        self._optimizer.learning_rate = mx.array(self._schedule.rate_at(self.done, self.total))
        (_, found, agreed), gradients = self._gradients(batch)
        gradients, _ = clip_grad_norm(gradients, 1.0)
        self._optimizer.update(self.network, gradients)
        mx.eval(parameters_of(self.network), self._optimizer.state, found, agreed)
        self.done += 1
        shown = [tuple(cast("list[float]", each.tolist())) for each in (found, agreed)]
        return Trained(self.done, self.total, shown[0], shown[1], batch.rows.size)

    def save(self, file: Path) -> None:
        """A checkpoint, whole or not at all."""
        arrays = {f"network.{name}": value for name, value in parameters_of(self.network).items()}
        state = cast("list[tuple[str, mx.array]]", tree_flatten(self._optimizer.state))
        arrays |= {f"optimizer.{name}": value for name, value in state}
        unfinished = file.with_suffix(".unfinished.safetensors")
        mx.save_safetensors(str(unfinished), arrays, {"done": str(self.done)})
        unfinished.replace(file)

    def restore(self, file: Path) -> None:
        """Go on from a checkpoint."""
        arrays, told = cast("tuple[dict[str, mx.array], dict[str, str]]", mx.load(str(file), return_metadata=True))
        own = {name: value for name, value in arrays.items() if name.startswith("network.")}
        self.network.load_weights([(name.removeprefix("network."), value) for name, value in own.items()])
        state = [(name.removeprefix("optimizer."), value) for name, value in arrays.items() if name not in own]
        self._optimizer.state = tree_unflatten(state)
        self.done = int(told["done"])


def batches(texts: Sequence[Text], rows: int, seed: int) -> list[list[Text]]:
    """Each text once, with others of about its length, in an order of chance; about so many positions in each batch.
    Their number does not depend on the seed.
    """
    chance = np.random.default_rng(seed)
    order = sorted(range(len(texts)), key=lambda index: (len(texts[index].tokens) // 16, chance.random()))
    count = max(1, sum(len(text.tokens) for text in texts) // rows)
    made = [[texts[index] for index in part] for part in np.array_split(np.array(order), count) if part.size]
    return [made[place] for place in chance.permutation(len(made))]


def joined(texts: Sequence[Text]) -> Batch:
    """Texts side by side. A row's guess counts if it is of the answer and the target's own is known."""
    length = max(len(text.tokens) for text in texts) - 1
    width = texts[0].features.shape[1]
    tokens = np.zeros((len(texts), length + 1), dtype=np.int32)
    features = np.zeros((len(texts), length, width), dtype=np.float16)
    scales = np.zeros((len(texts), length), dtype=np.float32)
    rows: list[int] = []
    for index, text in enumerate(texts):
        size = len(text.tokens)
        tokens[index, :size] = text.tokens
        features[index, : size - 1] = text.features
        scales[index, : size - 1] = text.scales
        first = max(0, text.prompt - 2)  # behind a single token of prompt nothing is known yet to guess from
        rows.extend(range(index * length + first, index * length + size - 2))
    return Batch(mx.array(tokens), mx.array(features), mx.array(scales), mx.array(rows))
