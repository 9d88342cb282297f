"""The parts of a target that drafters borrow: its embeddings, and rows of its language-model head."""

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import numpy.typing as npt

from backends.mlx.seam import PickingHead


class BorrowError(ValueError):
    """A target that has not what a drafter borrows; the message says what."""


class Borrowed(msgspec.Struct, frozen=True):
    """The target's own modules."""

    embedding: nn.Module
    """Tokens `[...]` to `[..., dims]`, as the table has them: a model may scale them afterwards."""
    head: nn.Module
    """A linear layer, or the embedding again."""
    vocabulary: int

    @property
    def dims(self) -> int:
        """Of hidden states."""
        return int(self.embedding(mx.array([0])).shape[-1])

    def logits(self, hidden: mx.array) -> mx.array:
        """By the target's head: `[..., dims]` to `[..., vocabulary]`."""
        head: Any = self.head
        tied = isinstance(head, (nn.Embedding, nn.QuantizedEmbedding))
        # A tied head is asked by its class: what hangs at the module is for the target's own rows.
        found: mx.array = type(head).as_linear(head, hidden) if tied else head(hidden)
        return found

    def head_rows(self, ids: npt.NDArray[np.uint32]) -> mx.array:
        """The rows of the head that give these tokens' logits, `[ids, dims]`; evaluated."""
        chosen = mx.array(ids)
        weight = cast("mx.array", self.head["weight"])
        rows = weight[chosen]
        if isinstance(self.head, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            scales = cast("mx.array", self.head["scales"])[chosen]
            biases = cast("mx.array", self.head["biases"])[chosen] if self.head.get("biases") is not None else None
            rows = mx.dequantize(rows, scales, biases, self.head.group_size, self.head.bits, mode=self.head.mode)
        mx.eval(rows)
        return rows


def borrow(model: nn.Module) -> Borrowed:
    """Of a model whose head was installed (see `seam`). Raises BorrowError."""
    embedding = head = None
    for part in reversed(model.modules()):  # in the order of definition, in which that of the tokens is the first
        if isinstance(part, PickingHead) and head is None:
            head = part.head
        if isinstance(part, (nn.Embedding, nn.QuantizedEmbedding)) and embedding is None:
            embedding = part
    if embedding is None:
        raise BorrowError("the model has no embeddings that a drafter could read")
    head = head or embedding
    if not isinstance(head, (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)) or "bias" in head:
        raise BorrowError("the model's head is no plain matrix")
    return Borrowed(embedding, head, int(head["weight"].shape[0]))
