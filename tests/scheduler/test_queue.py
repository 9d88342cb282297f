"""Whose turn it is: against a naive count of what everybody had, and as shares of a service that many want more of than
there is.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.lane import Lane
from scheduler.queue import FairQueue
from scheduler.request import Request
from tests.scheduler.turns import Turns

OWNERS = ("", "a", "b", "c")


class QueueMachine(RuleBasedStateMachine):
    """Requests come, are served, give way, come back and end."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue()
        self.model: Turns[Lane] = Turns()
        self.served: list[Lane] = []
        self.requests = 0
        self.turns = 0

    @rule(owner=st.sampled_from(OWNERS), priority=st.integers(-2, 2))
    def push(self, owner: str, priority: int) -> None:
        lane = Lane(Request(f"r{self.requests}", (1,), 1, owner=owner, priority=priority), submitted=0.0)
        self.requests += 1
        self.queue.push(lane)
        self.model.come(lane)

    @rule()
    def take(self) -> None:
        lane = self.queue.next()
        assert lane is self.model.next()
        if lane is None:
            return
        assert self.queue.remove(lane.request.request_id) is lane
        self.model.take(lane)
        lane.seat(0, self.turns, 0.0)
        self.turns += 1
        self.served.append(lane)

    @precondition(lambda self: self.served)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(self.served))
        self.served.remove(lane)
        self.model.give_way(lane)
        self.queue.put_back(lane)

    @precondition(lambda self: self.served)
    @rule(data=st.data(), computed=st.integers(0, 50), generated=st.integers(0, 20))
    def charge(self, data: st.DataObject, computed: int, generated: int) -> None:
        owner = data.draw(st.sampled_from(self.served)).request.owner
        self.model.charge(owner, computed, generated)
        self.queue.charge(owner, computed, generated)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Of one that is served, or waits."""
        open_ones = [*self.served, *self.model.waiting]
        if not open_ones:
            assert self.queue.remove("unknown") is None
            return
        lane = data.draw(st.sampled_from(open_ones))
        waited = self.queue.remove(lane.request.request_id)
        if lane in self.served:
            assert waited is None
            self.served.remove(lane)
        else:
            assert waited is lane
            self.model.take(lane)
        self.queue.close(lane.request.owner)
        self.model.close(lane.request.owner)

    @invariant()
    def the_same_one_is_next(self) -> None:
        assert len(self.queue) == len(self.model.waiting)
        assert self.queue.next() is self.model.next()


QueueMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestQueue = QueueMachine.TestCase


def test_a_generated_token_counts_as_much_as_two_of_a_prompt() -> None:
    queue = FairQueue()
    for name, owner in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b")):
        queue.push(Lane(Request(name, (1,), 1, owner=owner), submitted=0.0))
    queue.charge("a", 15, 0)
    queue.charge("b", 0, 8)
    assert (lane := queue.next()) is not None
    assert lane.request.request_id == "a1"
    queue.charge("a", 2, 0)
    assert (lane := queue.next()) is not None
    assert lane.request.request_id == "b1"


# ---- shares of a service -------------------------------------------------------------------------------------------


@dataclass
class Service:
    """A few lanes, each of which says a token in a round; owners come with requests of random lengths."""

    lanes: int
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    queue: FairQueue = field(default_factory=FairQueue)
    served: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Owner, and tokens still to be said."""
    said: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)
    requests: int = 0

    def come(self, owner: str, count: int) -> None:
        self.waiting[owner] += count
        for _ in range(count):
            self.requests += 1
            length = self.rng.randint(1, 40)
            self.queue.push(Lane(Request(f"r{self.requests}", (1,), length, owner=owner), submitted=0.0))

    def round(self) -> None:
        while len(self.served) < self.lanes and (lane := self.queue.next()) is not None:
            self.queue.remove(lane.request.request_id)
            self.waiting[lane.request.owner] -= 1
            self.served[lane.request.request_id] = (lane.request.owner, lane.request.max_tokens)
        for name, (owner, left) in list(self.served.items()):
            self.queue.charge(owner, 0, 1)
            self.said[owner] += 1
            self.served[name] = (owner, left - 1)
            if left == 1:
                del self.served[name]
                self.queue.close(owner)

    def rounds(self, count: int, coming: Callable[[int], Sequence[tuple[str, int]]] = lambda _: ()) -> Counter[str]:
        """What was said in so many of them."""
        before = Counter(self.said)
        for turn in range(count):
            for owner, requests in coming(turn):
                self.come(owner, requests)
            self.round()
        return self.said - before


def jain(shares: Sequence[float]) -> float:
    """1 where all have the same, 1 / n where one has everything (Jain, Chiu and Hawe 1984)."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def test_an_owner_that_sends_ten_times_as_much_has_no_more_than_the_others() -> None:
    owners = ("greedy", "a", "b", "c", "d")

    def coming(turn: int) -> Sequence[tuple[str, int]]:
        return [(owner, 10 if owner == "greedy" else 1) for owner in owners] if turn % 10 == 0 else ()

    said = Service(lanes=4).rounds(4000, coming)
    assert jain([said[owner] for owner in owners]) >= 0.95
    assert jain([10, 1, 1, 1, 1]) < 0.5, "what first come, first served would give them"


def test_who_wants_less_than_its_share_has_all_that_it_wants() -> None:
    service = Service(lanes=4)
    service.come("greedy", 1000)
    longest = 0
    for turn in range(2000):
        if turn % 100 == 0:
            service.come("modest", 1)
        service.round()
        longest = max(longest, service.waiting["modest"])
    assert longest <= 1, "no two of its requests ever wait"
    assert service.said["modest"] > 0.8 * 20 * 20


def test_idle_time_cannot_be_saved_up() -> None:
    service = Service(lanes=4)
    service.come("early", 2000)
    service.come("paused", 1)
    service.rounds(1000)
    service.come("paused", 1000)
    service.come("late", 1000)
    said = service.rounds(300)
    assert jain([said[owner] for owner in ("early", "paused", "late")]) >= 0.95
