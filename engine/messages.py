"""What clients say to the engine thread. Everything that crosses is frozen.

What the engine says back are the scheduler's own events (`scheduler.events`). The prefix cache's threads answer by the
same mailbox.
"""

from collections.abc import Callable

import msgspec

from backends.spill_format import Content
from scheduler.pieces import Key
from scheduler.request import Request


class Submit(msgspec.Struct, frozen=True):
    """Serve this request; answered by `Tokens` events and exactly one `Finished`."""

    request: Request


class Cancel(msgspec.Struct, frozen=True):
    """The client is gone. Idempotent; unknown or ended requests are ignored."""

    request_id: str


class Finish(msgspec.Struct, frozen=True):
    """A stop string was completed by generated token number `kept` (counted from 1): the request ends with reason STOP
    and `completion_tokens == kept`, whatever the engine drew after it (contract rules 12 and 13).
    """

    request_id: str
    kept: int


class Fetched(msgspec.Struct, frozen=True):
    """A piece of the prefix cache was read from the SSD; None if it cannot be had."""

    key: Key
    content: Content | None


class Spilled(msgspec.Struct, frozen=True):
    """A piece of the prefix cache was written to the SSD, or could not be."""

    key: Key
    written: bool


class Task(msgspec.Struct, frozen=True):
    """Call this on the engine thread between two rounds."""

    call: Callable[[], None]


Message = Submit | Cancel | Finish | Fetched | Spilled | Task
