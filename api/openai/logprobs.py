"""Logprobs in OpenAI's two forms.

Owns their field names. Knows tokens by their bytes only.
"""

from collections.abc import Callable, Sequence
from typing import Any

from api.transcript import LoggedToken

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""

TokenBytes = Callable[[int], bytes]
"""The bytes of one token."""


def chat_logprobs(logged: Sequence[LoggedToken], token_bytes: TokenBytes) -> dict[str, Any] | None:
    """`choices[].logprobs` of a chat completion or its chunk; None if there are no tokens in it."""
    if not logged:
        return None
    content = [
        {
            **_entry(one.token, one.logprob.logprob, token_bytes),
            "top_logprobs": [_entry(token, logprob, token_bytes) for token, logprob in one.logprob.top],
        }
        for one in logged
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(logged: Sequence[LoggedToken], token_bytes: TokenBytes, offset: int) -> dict[str, Any] | None:
    """`choices[].logprobs` of a text completion or its chunk, whose reply begins `offset` characters into its text.

    Tokens are keys in `top_logprobs`: of several that read alike, as halves of characters do, the likeliest is there,
    but always the one that was drawn.
    """
    if not logged:
        return None
    told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for one in logged:
        drawn = _text(one.token, token_bytes)
        logprob = _finite(one.logprob.logprob)
        top: dict[str, float] = {}
        for token, likely in one.logprob.top:
            top.setdefault(_text(token, token_bytes), _finite(likely))
        told["tokens"].append(drawn)
        told["token_logprobs"].append(logprob)
        told["top_logprobs"].append({**top, drawn: logprob})
        told["text_offset"].append(offset + one.offset)
    return told


def _entry(token: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    spelled = token_bytes(token)
    return {"token": spelled.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(spelled)}


def _text(token: int, token_bytes: TokenBytes) -> str:
    return token_bytes(token).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob)  # a NaN is not greater
