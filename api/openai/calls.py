"""The JSON of a chat reply that consists of function calls, whole and in chunks.

Owns the calls' ids. What a call looks like in the model's own text is `api.tools`'.
"""

import secrets
import string
from collections.abc import Sequence
from typing import Any

from api.openai.logprobs import TokenBytes, chat_logprobs
from api.openai.shapes import REASONS, Choice, Chunks, Heading, chat_delta
from api.tools import CallPiece, CallSplitter, ToolFormat
from api.transcript import LoggedToken
from scheduler.request import FinishReason, Usage

_ID_ALPHABET = string.ascii_letters + string.digits


class CallsShape:
    """A `chat.completion` of `tool_calls` and its chunks. Written by the handler of its reply."""

    def __init__(self, heading: Heading, choices: int, token_bytes: TokenBytes, form: ToolFormat) -> None:
        self._chunks = Chunks(heading, "chat.completion.chunk", [])
        self._token_bytes = token_bytes
        self._form = form
        self._splitters = [CallSplitter(form) for _ in range(choices)]
        self._logged: list[list[LoggedToken]] = [[] for _ in range(choices)]
        """Tokens of text that belongs to no call, until a chunk comes that can carry them."""

    def opening(self, index: int) -> bytes:
        """The first chunk names the role; there is no content."""
        return self._chunks.of(chat_delta(index, {"role": "assistant", "content": None}))

    def delta(self, index: int, text: str, logged: Sequence[LoggedToken] = ()) -> bytes:
        """A chunk for each call that begins, and for more of its arguments."""
        self._logged[index] += logged
        return b"".join(
            [
                self._chunk(index, {"tool_calls": [{"index": piece.index, **self._call(piece)}]})
                for piece in self._splitters[index].push(text)
            ]
        )

    def closing(self, index: int, reason: FinishReason) -> bytes:
        """An empty delta and the reason."""
        rest = self._chunk(index, {}) if self._logged[index] else b""
        return rest + self._chunks.of(chat_delta(index, {}, _reason(self._splitters[index], reason)))

    def totals(self, usages: Sequence[Usage]) -> bytes:
        """Usage."""
        return self._chunks.totals(usages)

    def whole(self, choices: Sequence[Choice], usages: Sequence[Usage]) -> bytes:
        """Complete messages."""
        return self._chunks.whole("chat.completion", [self._message(choice) for choice in choices], usages)

    def _message(self, choice: Choice) -> dict[str, Any]:
        splitter = self._splitters[choice.index]
        calls: list[dict[str, Any]] = []
        for piece in splitter.push(choice.text):
            if piece.name is not None:
                calls.append(self._call(piece))
            else:
                calls[piece.index]["function"]["arguments"] += piece.arguments
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls or None},
            "logprobs": chat_logprobs(choice.logged, self._token_bytes),
            "finish_reason": _reason(splitter, choice.reason),
        }

    def _chunk(self, index: int, delta: dict[str, Any]) -> bytes:
        logged, self._logged[index] = self._logged[index], []
        return self._chunks.of(chat_delta(index, delta, logprobs=chat_logprobs(logged, self._token_bytes)))

    def _call(self, piece: CallPiece) -> dict[str, Any]:
        """A call's beginning has its id, type and name, and empty arguments; what follows, only more arguments."""
        if piece.name is None:
            return {"function": {"arguments": piece.arguments}}
        call_id = self._form.id_prefix + "".join(secrets.choice(_ID_ALPHABET) for _ in range(self._form.id_length))
        return {"id": call_id, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}


def _reason(splitter: CallSplitter, reason: FinishReason) -> str:
    """A call that a stop string cut in two is none to be made."""
    return "tool_calls" if reason is FinishReason.STOP and splitter.complete else REASONS[reason]
