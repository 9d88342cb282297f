"""What lanes take from the prefix cache, and what they give to it: which pieces, in which round, and when to wait.

Owns the pins. Holds no bytes: a `Shelf` does, which is asked for pieces that lie on the SSD and told what to copy by
the rounds that are planned. Pure; `now` comes in, in seconds.
"""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from scheduler.lane import Lane
from scheduler.pieces import Chain, Key, Piece, root_of
from scheduler.prefix import Match, PrefixIndex, Tier
from scheduler.request import Request
from scheduler.round import Restore, Store

COPY_SECONDS = 0.005
"""How long copying in may make a round while others decode."""
_ALONE_BYTES = 256 << 20
"""What is copied in one round while nobody decodes: aborts are seen in between."""
_PATIENCE = 5.0
"""So long a lane waits for one read, in seconds; then it computes what it lacks."""
_AHEAD_BYTES = 64 << 20
"""What is read ahead of what a lane is given next."""
_FIRST_BYTES = 8 << 20
"""What is copied in one round while others decode, before it is known how long that takes."""
_MORE, _LESS = 1.15, 0.7
"""How that follows the time it takes."""
_EVERY = 512
"""Tokens between two checkpoints within a long prompt."""
_MOST = 8
"""Checkpoints within a prompt."""


class Shelf(Protocol):
    """Whoever holds the bytes."""

    def fetch(self, key: Key) -> bool:
        """Begin to read a piece from the SSD into RAM; False if there is no room for it."""
        ...

    def expect(self, request: Request) -> None:
        """A request waits: whoever else has pieces of its text may make them ready."""
        ...

    def limit(self, most: int) -> None:
        """What the bytes in RAM may be from now on; what is too much goes, all but what is in use."""
        ...

    def forget(self, keys: Iterable[Key]) -> None:
        """These pieces are no good, wherever they lie, nor is what hangs under them."""
        ...


class _Account:
    """One lane's dealings. Written by `Reuse`."""

    def __init__(self, text: Chain) -> None:
        self.text = text
        """As far as it was given."""
        self.pending: deque[Piece] = deque()
        """What it is still to be given, in order."""
        self.taken: list[Key] = []
        """Pinned, and copied in the round under way."""
        self.waiting_since: float | None = None
        self.had = 0
        """How much was given to it, in tokens."""


class Reuse:
    """Written by `Scheduler`, which asks in the order: `admit`, then each round `restores`, and `stores` behind it."""

    def __init__(self, index: PrefixIndex, shelf: Shelf, namespace: str) -> None:
        """`namespace`: what the model is and how it caches."""
        self._index = index
        self._shelf = shelf
        self._namespace = namespace
        self._lanes: dict[str, _Account] = {}
        self._bytes = _FIRST_BYTES

    def root(self, request: Request) -> Key:
        """Under which key a request's text hangs: another owner's, or one with another salt, never meets it."""
        return root_of(self._namespace, request.owner, request.cache_salt)

    # ---- taking -----------------------------------------------------------------------------------------------------

    def queued(self, request: Request) -> None:
        """A request waits: what it will need is made the newest, and read ahead from the SSD."""
        found = self._index.match(self.root(request), request.prompt[:-1])
        self._index.use(piece.key for piece in found.pieces)
        self._read_ahead(found.pieces)
        self._shelf.expect(request)

    def match(self, lane: Lane) -> Match:
        """What is known of a lane's text but its last token, which heads a window."""
        return self._index.match(self.root(lane.request), lane.tokens[:-1])

    def admit(self, lane: Lane, found: Match) -> None:
        """A lane begins, and is to be given what was found of its text; give it nothing where that is empty."""
        self.leave(lane.request.request_id)
        account = self._lanes[lane.request.request_id] = _Account(Chain(self.root(lane.request), self._index.block))
        keys = [piece.key for piece in found.pieces]
        self._index.pin(keys)
        self._index.use(keys)
        account.pending.extend(found.pieces)
        account.had = found.length
        end = len(lane.tokens) - 1
        lane.stops |= _stops(end, found) if self._index.checkpoints else {end}

    def waits(self, lane: Lane) -> bool:
        """Whether a lane is still to be given something."""
        account = self._lanes.get(lane.request.request_id)
        return account is not None and bool(account.pending)

    def restores(self, lanes: Iterable[Lane], *, decoding: bool, now: float) -> list[Restore]:
        """What is copied in this round, as if done: the lanes' `cached` moves on. `decoding`: somebody would have to
        wait for it.
        """
        room = self._bytes if decoding else _ALONE_BYTES
        restores: list[Restore] = []
        for lane in lanes:
            account = self._lanes.get(lane.request.request_id)
            if account is None or not account.pending:
                continue
            self._read_ahead(account.pending)
            pieces: list[Piece] = []
            while (piece := self._next(account, now)) is not None:
                size = self._index.size(piece.key)
                if (restores or pieces) and size > room:
                    break
                room -= size
                pieces.append(account.pending.popleft())
            if pieces:
                account.taken += [piece.key for piece in pieces]
                reach = len(lane.tokens) + 1
                restores.append(Restore(lane.slot, lane.request.request_id, tuple(pieces), reach))
                if pieces[-1].checkpoint or not self._index.checkpoints:  # without its checkpoint a lane has nothing
                    lane.reuse(pieces[-1].end)
        return restores

    def restored(self, size: int, seconds: float) -> None:
        """Copying so many bytes took so long. A piece has a price of its own besides its bytes', so it is tried out how
        many bytes go into the time.
        """
        for account in self._lanes.values():
            self._index.unpin(account.taken)
            account.taken.clear()
        if seconds > COPY_SECONDS and size <= _MORE * self._bytes:
            self._bytes = max(1, int(self._bytes * _LESS))
        elif seconds < COPY_SECONDS * _LESS and size > self._bytes // 2:
            self._bytes = min(_ALONE_BYTES, int(self._bytes * _MORE))

    def _next(self, account: _Account, now: float) -> Piece | None:
        """The next piece, if it lies in RAM. What cannot be had is given up."""
        if not account.pending:
            return None
        piece = account.pending[0]
        if not self._index.holds(piece.key, Tier.RAM):
            if account.waiting_since is None:
                account.waiting_since = now
            if not self._index.loading(piece.key) or now - account.waiting_since > _PATIENCE:
                self._give_up(account, piece)
            return None
        account.waiting_since = None
        return piece

    def _give_up(self, account: _Account, piece: Piece) -> None:
        """A piece cannot be had, so that those behind it are of no use."""
        while account.pending and account.pending[-1].end >= piece.end:
            self._index.unpin((account.pending.pop().key,))
        if self._index.checkpoints:  # blocks alone are of no use either
            self._index.unpin(piece.key for piece in account.pending)
            account.pending.clear()
            account.had = 0
        elif not account.pending:
            account.had = min(account.had, piece.start)

    def _read_ahead(self, pieces: Iterable[Piece]) -> None:
        ahead = 0
        for piece in pieces:
            if piece.key not in self._index or ahead > _AHEAD_BYTES:
                return
            if self._index.holds(piece.key, Tier.RAM):
                continue
            if not self._index.loading(piece.key) and not self._shelf.fetch(piece.key):
                return
            ahead += self._index.size(piece.key)

    # ---- giving -----------------------------------------------------------------------------------------------------

    def stores(self, lane: Lane, *, leaving: bool = False) -> list[Store]:
        """What can be kept of a lane now that was not before; when it is `leaving`, also where it stands."""
        account = self._lanes.get(lane.request.request_id)
        if account is None:
            return []
        blocks = account.text.grow(lane.tokens, lane.cached)
        if not self._index.blocks:
            for piece in blocks:
                self._index.see(piece.key)
            blocks = []
        paused = leaving or lane.cached in lane.stops
        had = account.had if self._index.checkpoints else account.text.end
        if paused and lane.cached > had and lane.cached >= account.text.end:
            blocks.append(account.text.checkpoint(lane.tokens, lane.cached))
        kept = [piece for piece in blocks if not self._index.holds(piece.key, Tier.RAM)]
        return [Store(lane.slot, lane.request.request_id, piece) for piece in kept]

    def spoil(self, lane: Lane) -> None:
        """What a lane's caches hold is no good, so nothing of its text that was kept is, whoever kept it."""
        while found := self.match(lane).pieces:  # the longest, and then what checkpoints there are before it
            self._shelf.forget([piece.key for piece in found])

    # ---- giving way -------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes in RAM."""
        return self._index.stats(Tier.RAM).bytes

    def unyielding(self) -> int:
        """Bytes in RAM that are in use."""
        return self._index.unyielding(Tier.RAM)

    def limit(self, most: int) -> int:
        """What RAM may hold from now on; returns what it holds then."""
        self._shelf.limit(most)
        return self.used

    def renounce(self) -> None:
        """Lanes are given nothing more, so that nothing is in use for them: they compute what they lack. What is being
        read is not waited for either.
        """
        self._index.abandon()
        for account in self._lanes.values():
            if account.pending:
                self._give_up(account, account.pending[0])

    def leave(self, request_id: str) -> None:
        """A lane left: what it was still to be given is given back, and its text is the newest. Idempotent."""
        account = self._lanes.pop(request_id, None)
        if account is not None:
            self._index.unpin([*account.taken, *(piece.key for piece in account.pending)])
            self._index.use(account.text.keys)


def _stops(end: int, found: Match) -> set[int]:
    """Where a prompt leaves checkpoints: where others went another way, at its end, and now and then in between."""
    step = _EVERY * max(1, -(-end // (_EVERY * _MOST)))
    return {stop for stop in (*range(step, end, step), found.branch, end) if stop > found.length}
