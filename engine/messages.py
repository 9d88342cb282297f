"""What clients say to the engine thread. Everything that crosses is frozen.

What the engine says back are the scheduler's own events (`scheduler.events`).
"""

import msgspec

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


Message = Submit | Cancel | Finish
