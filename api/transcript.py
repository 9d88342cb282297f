"""One lane's reply as it grows: tokens in, text to show out, stop strings obeyed, tokens counted.

Owns the count that usage and metrics share: tokens up to the one that completed a stop string. Knows the engine's
events; must not know HTTP or any dialect.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from api.detokenize import Detokenizer
from api.metrics import RequestRecord
from api.stop import StopMatcher
from engine.client import Generation
from scheduler.events import Finished, TokenLogprob, Tokens
from scheduler.request import FinishReason, Usage


class LoggedToken(msgspec.Struct, frozen=True):
    """A delivered token whose log-probability was asked for."""

    token: int
    logprob: TokenLogprob
    offset: int
    """Where its text begins in the reply's text, in characters; inside a character, where that begins."""


Deliver = Callable[[str, Sequence[LoggedToken]], Awaitable[None]]
"""Takes the next piece of a reply's text, and the tokens that it came from if they are logged; never neither."""


class Logged:
    """Tokens that wait for their text to be shown. Written by `Transcript`."""

    def __init__(self) -> None:
        self._held: deque[tuple[int, LoggedToken]] = deque()
        """With how many characters of text must be shown first."""
        self._wordless: list[LoggedToken] = []
        """Tokens that gave no text by themselves: they go with the next that does."""
        self._length = 0
        self._shown = 0

    def take(self, token: int, logprob: TokenLogprob, characters: int) -> None:
        """A token came, and with it so many characters became certain."""
        self._wordless.append(LoggedToken(token, logprob, self._length))
        if characters:
            self._length += characters
            self._held.extend((self._length, logged) for logged in self._wordless)
            self._wordless = []

    def show(self, characters: int) -> list[LoggedToken]:
        """So much more text is shown: the tokens that it came from, as far as it is all of theirs."""
        self._shown += characters
        ready: list[LoggedToken] = []
        while self._held and self._held[0][0] <= self._shown:
            ready.append(self._held.popleft()[1])
        return ready

    def close(self) -> list[LoggedToken]:
        """No more text comes: all that are left."""
        rest = [*(logged for _, logged in self._held), *self._wordless]
        self._held.clear()
        self._wordless = []
        return rest


class Transcript:
    """The text of one reply. Written by the handler of its request alone."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, logged: bool = False) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._logged = Logged() if logged else None
        self.tokens = 0
        """How many tokens were delivered, not counting any behind the one that completed a stop string."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed, by token number `tokens` (from 1)."""
        return self._matcher is not None and self._matcher.found

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> tuple[str, Sequence[LoggedToken]]:
        """Take the tokens of a round; the text that can be shown now, and the tokens it came from if they are logged
        (then `logprobs` has one for each token).
        """
        if self._matcher is None and self._logged is None:
            self.tokens += len(tokens)
            if len(tokens) == 1:
                return self._detokenizer.push(tokens[0]), ()
            return "".join([self._detokenizer.push(token) for token in tokens]), ()
        shown = ""
        for place, token in enumerate(tokens):
            if self.stopped:
                break
            self.tokens += 1
            piece = self._detokenizer.push(token)
            if self._logged is not None:
                self._logged.take(token, logprobs[place], len(piece))
            shown += piece if self._matcher is None else self._matcher.push(piece)
        return shown, self._logged.show(len(shown)) if self._logged is not None else ()

    def close(self) -> tuple[str, Sequence[LoggedToken]]:
        """The lane has ended: what was held back, unless it lies behind a stop string."""
        tail = self._detokenizer.close()
        if self._matcher is not None:
            tail = self._matcher.push(tail) + self._matcher.close()
        return tail, self._logged.close() if self._logged is not None else ()


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
        text, logged = transcript.push(event.tokens, event.logprobs)
        record.deliver(transcript.tokens)
        if transcript.stopped:
            generation.finish(transcript.tokens)
            told = True
        if text or logged:
            await deliver(text, logged)
    assert ended is not None, "a generation ends with Finished"
    text, logged = transcript.close()
    if text or logged:
        await deliver(text, logged)
    ended = _as_told(ended, generation.request.sampling.choice, transcript)
    record.finish(ended)
    return ended


def _as_told(ended: Finished, choice: int, transcript: Transcript) -> Finished:
    """How a generation ended in the eyes of its client. The first of several choices counts their common prompt."""
    usage = ended.usage
    if choice > 0:
        usage = Usage(0, usage.completion_tokens, 0, usage.drafts)
    if not transcript.stopped:
        return msgspec.structs.replace(ended, usage=usage) if choice > 0 else ended
    usage = msgspec.structs.replace(usage, completion_tokens=transcript.tokens)
    return msgspec.structs.replace(ended, reason=FinishReason.STOP, usage=usage, error=None)
