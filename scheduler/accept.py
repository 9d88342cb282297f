"""The acceptance walk: which of a window's drawn tokens become the lane's own. Pure.

The target draws a token at the last real position and at every draft position, by a rule that depends on the context
only. Draft token i is accepted if and only if it is the token that the target drew there, so what is emitted is what
plain decoding would have emitted, whoever drafted (contract rules 1 to 3).
"""

from collections.abc import Sequence, Set

from scheduler.request import FinishReason
from scheduler.round import Acceptance


def accept(draft: Sequence[int], drawn: Sequence[int], *, stop_tokens: Set[int], remaining: int) -> Acceptance:
    """Walk along a draft and the target's draws.

    `drawn[i]` is the target's token given that `draft[:i]` was right, so it holds one token more than `draft`.
    `stop_tokens` end the walk undelivered; pass the empty set to ignore them. `remaining` is how many tokens the
    request may still emit, at least one.
    """
    accepted = _agreement(draft, drawn)
    emitted = tuple(drawn[: accepted + 1][:remaining])
    for position, token in enumerate(emitted):
        if token in stop_tokens:
            agreed = min(accepted, position + 1)
            return Acceptance(emitted[:position], agreed, FinishReason.STOP, ended_by_token=True)
    end = FinishReason.LENGTH if len(emitted) == remaining else None
    return Acceptance(emitted, min(accepted, remaining), end)


def _agreement(draft: Sequence[int], drawn: Sequence[int]) -> int:
    for position, token in enumerate(draft):
        if drawn[position] != token:
            return position
    return len(draft)
