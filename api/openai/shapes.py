"""The JSON of OpenAI's replies, whole and in chunks.

Owns every field name a client reads. The constant part of a chunk is encoded once per reply; a token costs one small
string. Knows nothing of the engine's life.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from api.openai.logprobs import TokenBytes, chat_logprobs, completion_logprobs
from api.sse import frame
from api.transcript import LoggedToken
from scheduler.request import DraftCount, FinishReason, Usage

DONE = frame(b"[DONE]")
_MARK = "\0text\0"
"""Stands where a chunk's text goes, while its constant part is made."""
_encode = msgspec.json.Encoder().encode
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.DEADLINE: "length"}
"""A deadline cuts a text as a limit of tokens does, and the dialect has no other word for it."""


class Choice(msgspec.Struct, frozen=True):
    """One finished choice of a reply that is not streamed."""

    index: int
    text: str
    reason: FinishReason
    logged: Sequence[LoggedToken] = ()
    """Its tokens, if logprobs were asked for."""


class ReplyShape(Protocol):
    """A reply's wire form. Implemented by `ChatShape`, `CompletionShape` and `api.openai.calls.CallsShape`."""

    def opening(self, index: int) -> bytes:
        """Frames that begin a choice; may be empty."""
        ...

    def delta(self, index: int, text: str, logged: Sequence[LoggedToken] = ()) -> bytes:
        """The frames of a piece of text and of the tokens that it came from; may be empty."""
        ...

    def closing(self, index: int, reason: FinishReason) -> bytes:
        """The frames that end a choice."""
        ...

    def totals(self, usages: Sequence[Usage]) -> bytes:
        """The frame of the usage, after all choices."""
        ...

    def whole(self, choices: Sequence[Choice], usages: Sequence[Usage]) -> bytes:
        """The body of a reply that is not streamed."""
        ...


class Heading(msgspec.Struct, frozen=True):
    """What stays the same through all chunks of a reply."""

    reply_id: str
    created: int
    model: str
    include_usage: bool = False
    """A stream that ends with usage says in each chunk before it that there is none yet."""


class Chunks:
    """Chunks under one heading; those that carry text are cut in two around it once."""

    def __init__(self, heading: Heading, kind: str, choices: Sequence[dict[str, Any]]) -> None:
        """`choices[i]` is choice i with `_MARK` for its text."""
        self._base = {"id": heading.reply_id, "object": kind, "created": heading.created, "model": heading.model}
        self._no_usage: dict[str, Any] = {"usage": None} if heading.include_usage else {}
        self._around = [self.of(choice).split(_encode(_MARK)) for choice in choices]

    def of(self, choice: dict[str, Any]) -> bytes:
        """A frame with this choice."""
        return frame(_encode({**self._base, "choices": [choice], **self._no_usage}))

    def text(self, index: int, text: str) -> bytes:
        """A frame with this much more text for a choice."""
        before, after = self._around[index]
        return before + _encode(text) + after

    def totals(self, usages: Sequence[Usage]) -> bytes:
        """The frame that has usage and no choice."""
        return frame(_encode({**self._base, "choices": [], "usage": usage_object(usages)}))

    def whole(self, kind: str, choices: list[dict[str, Any]], usages: Sequence[Usage]) -> bytes:
        """Not a chunk: everything at once."""
        return _encode({**self._base, "object": kind, "choices": choices, "usage": usage_object(usages)})


class ChatShape:
    """`chat.completion` and its chunks."""

    def __init__(self, heading: Heading, choices: int, token_bytes: TokenBytes) -> None:
        marked = [chat_delta(index, {"content": _MARK}) for index in range(choices)]
        self._chunks = Chunks(heading, "chat.completion.chunk", marked)
        self._token_bytes = token_bytes

    def opening(self, index: int) -> bytes:
        """The first chunk names the role."""
        return self._chunks.of(chat_delta(index, {"role": "assistant", "content": ""}))

    def delta(self, index: int, text: str, logged: Sequence[LoggedToken] = ()) -> bytes:
        """More content."""
        if not logged:
            return self._chunks.text(index, text)
        logprobs = chat_logprobs(logged, self._token_bytes)
        return self._chunks.of(chat_delta(index, {"content": text}, logprobs=logprobs))

    def closing(self, index: int, reason: FinishReason) -> bytes:
        """An empty delta and the reason."""
        return self._chunks.of(chat_delta(index, {}, REASONS[reason]))

    def totals(self, usages: Sequence[Usage]) -> bytes:
        """Usage."""
        return self._chunks.totals(usages)

    def whole(self, choices: Sequence[Choice], usages: Sequence[Usage]) -> bytes:
        """Complete messages."""
        told = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": chat_logprobs(choice.logged, self._token_bytes),
                "finish_reason": REASONS[choice.reason],
            }
            for choice in choices
        ]
        return self._chunks.whole("chat.completion", told, usages)


class CompletionShape:
    """`text_completion`, whose chunks have the same form."""

    def __init__(self, heading: Heading, echoes: Sequence[str], token_bytes: TokenBytes) -> None:
        """`echoes[i]` is text that choice i begins with: its prompt, if that was asked for."""
        self._echoes = echoes
        marked = [_text_choice(index, _MARK) for index in range(len(echoes))]
        self._chunks = Chunks(heading, "text_completion", marked)
        self._token_bytes = token_bytes

    def opening(self, index: int) -> bytes:
        """The prompt to echo, or nothing."""
        return self._chunks.text(index, self._echoes[index]) if self._echoes[index] else b""

    def delta(self, index: int, text: str, logged: Sequence[LoggedToken] = ()) -> bytes:
        """More text."""
        if not logged:
            return self._chunks.text(index, text)
        return self._chunks.of(_text_choice(index, text, logprobs=self._logprobs(index, logged)))

    def closing(self, index: int, reason: FinishReason) -> bytes:
        """No text and the reason."""
        return self._chunks.of(_text_choice(index, "", REASONS[reason]))

    def totals(self, usages: Sequence[Usage]) -> bytes:
        """Usage."""
        return self._chunks.totals(usages)

    def whole(self, choices: Sequence[Choice], usages: Sequence[Usage]) -> bytes:
        """Complete texts."""
        told = [
            _text_choice(
                choice.index,
                self._echoes[choice.index] + choice.text,
                REASONS[choice.reason],
                self._logprobs(choice.index, choice.logged),
            )
            for choice in choices
        ]
        return self._chunks.whole("text_completion", told, usages)

    def _logprobs(self, index: int, logged: Sequence[LoggedToken]) -> dict[str, Any] | None:
        return completion_logprobs(logged, self._token_bytes, len(self._echoes[index]))


def usage_object(usages: Sequence[Usage]) -> dict[str, Any]:
    """The sum over all choices, of which those of one prompt count it once. `speculation` is ours: what was drafted and
    accepted, by source and position.
    """
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    counts = [count for usage in usages for count in usage.drafts]
    predicted = [count for count in counts if count.source == "prediction"]
    told: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": sum(sum(count.accepted) for count in predicted),
            "rejected_prediction_tokens": sum(sum(count.drafted) - sum(count.accepted) for count in predicted),
        },
    }
    if counts:
        told["speculation"] = _speculation(counts)
    return told


def _speculation(counts: Sequence[DraftCount]) -> dict[str, Any]:
    sources: dict[str, dict[str, Any]] = {}
    for count in counts:
        total = sources.setdefault(count.source, {"drafts": 0, "drafted": [], "accepted": []})
        total["drafts"] += count.drafts
        total["drafted"] = _add(total["drafted"], count.drafted)
        total["accepted"] = _add(total["accepted"], count.accepted)
    return {
        "drafted": sum(sum(count.drafted) for count in counts),
        "accepted": sum(sum(count.accepted) for count in counts),
        "sources": sources,
    }


def _add(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Position by position; the shorter one counts as zero behind its end."""
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    return [count + (shorter[at] if at < len(shorter) else 0) for at, count in enumerate(longer)]


def chat_delta(
    index: int, delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The choice in a chunk of a chat completion."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _text_choice(
    index: int, text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
