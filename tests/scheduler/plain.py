"""What plain decoding would have made of a round, token by token: the oracle of the acceptance walk."""

from collections.abc import Sequence, Set

from scheduler.request import FinishReason
from scheduler.round import Acceptance


def replay(draft: Sequence[int], drawn: Sequence[int], stop_tokens: Set[int], remaining: int) -> Acceptance:
    """Decode one token after the other for as long as the draws of this round are known to be the target's own.

    `drawn[i]` is the target's token only in a context that continues with `draft[:i]`.
    """
    emitted: list[int] = []
    accepted = 0
    while True:
        position = len(emitted)
        token = drawn[position]
        foreseen = position < len(draft) and draft[position] == token
        accepted += foreseen
        if token in stop_tokens:
            return Acceptance(tuple(emitted), accepted, FinishReason.STOP, ended_by_token=True)
        emitted.append(token)
        if len(emitted) == remaining:
            return Acceptance(tuple(emitted), accepted, FinishReason.LENGTH)
        if not foreseen:
            return Acceptance(tuple(emitted), accepted)
