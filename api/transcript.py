"""One lane's reply as it grows: tokens in, text to show out, stop strings obeyed, tokens counted.

Owns the count that usage and metrics share: tokens up to the one that completed a stop string. Knows the engine's
events; must not know HTTP or any dialect.
"""

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from api.detokenize import Detokenizer
from api.metrics import RequestRecord
from api.stop import StopMatcher
from engine.client import Generation
from scheduler.events import Finished, Tokens
from scheduler.request import FinishReason

Deliver = Callable[[str], Awaitable[None]]
"""Takes the next piece of a reply's text."""


class Transcript:
    """The text of one reply. Written by the handler of its request alone."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self.tokens = 0
        """How many tokens were delivered, not counting any behind the one that completed a stop string."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed, by token number `tokens` (from 1)."""
        return self._matcher is not None and self._matcher.found

    def push(self, tokens: Sequence[int]) -> str:
        """Take the tokens of a round; the text that can be shown now."""
        if self._matcher is None:
            self.tokens += len(tokens)
            if len(tokens) == 1:
                return self._detokenizer.push(tokens[0])
            return "".join([self._detokenizer.push(token) for token in tokens])
        shown = ""
        for token in tokens:
            if self._matcher.found:
                break
            self.tokens += 1
            shown += self._matcher.push(self._detokenizer.push(token))
        return shown

    def close(self) -> str:
        """The lane has ended: what was held back, unless it lies behind a stop string."""
        tail = self._detokenizer.close()
        if self._matcher is None:
            return tail
        return self._matcher.push(tail) + self._matcher.close()


async def follow(generation: Generation, transcript: Transcript, record: RequestRecord, deliver: Deliver) -> Finished:
    """Deliver a generation's text to its end, and return how it ended.

    A stop string found here outranks whatever end the engine found after it (contract rule 12).
    """
    ended: Finished | None = None
    told = False
    async for event in generation:
        if not isinstance(event, Tokens):
            ended = event
            break
        if told:
            continue
        text = transcript.push(event.tokens)
        record.deliver(transcript.tokens)
        if transcript.stopped:
            generation.finish(transcript.tokens)
            told = True
        if text:
            await deliver(text)
    assert ended is not None, "a generation ends with Finished"
    tail = transcript.close()
    if tail:
        await deliver(tail)
    if transcript.stopped:
        usage = msgspec.structs.replace(ended.usage, completion_tokens=transcript.tokens)
        ended = msgspec.structs.replace(ended, reason=FinishReason.STOP, usage=usage, error=None)
    record.finish(ended)
    return ended
