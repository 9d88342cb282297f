"""How often a network's greedy drafts are what a target said, by position: what serving finds, on texts held out."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from backends.mlx.distill.collect import Text
from backends.mlx.distill.train import Frozen, joined, unrolled
from backends.mlx.drafts.eagle import Eagle

_TEXTS = 16


def acceptance(
    network: Eagle, frozen: Frozen, ids: npt.NDArray[np.uint32], texts: Sequence[Text], depth: int
) -> tuple[float, ...]:
    """Of the drafts from every position of the answers, by place in the draft the share that was right where those
    before it were; over texts that the target drew greedily. `ids` are the tokens of the head's rows.
    """
    tried, right = np.zeros(depth), np.zeros(depth)
    for first in range(0, len(texts), _TEXTS):
        batch = joined(texts[first : first + _TEXTS])
        tokens = np.array(batch.tokens)
        coming = np.pad(tokens[:, 2:], [(0, 0), (0, 1)]).reshape(-1)
        counted = np.zeros(coming.size, dtype=np.bool_)
        counted[np.array(batch.rows)] = True
        embedded = frozen.embedding[batch.tokens[:, 1:]]
        features = network.fuse(batch.features.astype(mx.float32))
        reached = counted
        for place, output in enumerate(unrolled(network, embedded, features, depth)):
            logits = network.norm(output.reshape(-1, output.shape[-1])) @ frozen.head.T
            agrees = ids[np.array(mx.argmax(logits, axis=-1))] == coming
            tried[place] += reached.sum()
            right[place] += (reached & agrees).sum()
            reached = np.concatenate([[False], (reached & agrees)[:-1]]) & counted  # its next token is a row further on
    return tuple((right / np.maximum(tried, 1)).tolist())
