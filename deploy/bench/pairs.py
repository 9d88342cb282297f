"""Two servers side by side, taking turns: A B, A B, ... Both stay up; one is always idle.

Owns the order of the turns, what is asked in each (new prompts for every turn, the same ones for both sides of it) and
what the outcome is: the bounds, and whether both sides did the same work at all.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import typer

from deploy.bench.client import Load, Run, Target, drive_now
from deploy.bench.options import say, warn_if_busy
from deploy.bench.prompts import Prompt, draw
from deploy.bench.report import (
    Bound,
    Spread,
    bound_table,
    first_errors,
    ratios,
    show,
    summarise,
    summary_table,
)
from deploy.bench.servers import Command, Server, running


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask: at each of `levels` clients, `pairs` turns of `per_client` requests for each client."""

    prompts: tuple[Prompt, ...]
    levels: tuple[int, ...]
    pairs: int
    per_client: int
    load: Load
    name: str = ""
    """Tells it apart where several are played on the same servers."""
    keyed: bool = False
    """Whether each turn comes with an API key of its own, so that no server drafts from what earlier turns said."""

    def key(self, level: int, pair: int) -> str:
        """The key of one turn."""
        return f"{self.name}-{level}-{pair}"

    @property
    def keys(self) -> tuple[str, ...]:
        """Of all turns, and of the run that warms up."""
        return (WARM_UP, *(self.key(level, pair) for level in self.levels for pair in range(self.pairs)))


WARM_UP = "warm-up"
"""What the run that does not count is called."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All turns at one number of clients; run i of one side and run i of the other are a pair."""

    clients: int
    ours: tuple[Run, ...]
    theirs: tuple[Run, ...]

    def ratio(self, rate: Callable[[Run], float]) -> Spread:
        """Ours over theirs, by pair. Raises ValueError when a run produced nothing."""
        return ratios([rate(run) for run in self.ours], [rate(run) for run in self.theirs])


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether both sides did the same work: how many requests failed on a side, or differ in tokens or in text."""

    requests: int
    failed: int
    other_count: int
    other_text: int
    errors: tuple[str, ...]


def compare(ours: Command, theirs: Command, plan: Plan) -> tuple[Comparison, ...]:
    """Start both servers, warm both up, and play all turns of all levels."""
    warn_if_busy()
    with ExitStack() as stack:
        sides = [stack.enter_context(running(command)) for command in (ours, theirs)]
        for side in sides:
            warm_up(side, plan)
        return take_turns(sides, plan)


def take_turns(sides: Sequence[Server], plan: Plan) -> tuple[Comparison, ...]:
    """All turns of all levels; `sides` are two servers that are up and warm, ours first."""
    return tuple(_compare_at(level, sides, plan) for level in plan.levels)


def warm_up(server: Server, plan: Plan) -> None:
    """One run that does not count: it loads the model and touches the memory that later runs use."""
    say(f"warming up {server.name}")
    load = replace(plan.load, clients=max(plan.levels))
    target = target_of(server, WARM_UP if plan.keyed else None)
    run = drive_now(target, draw(plan.prompts, load.clients, start=0, label=WARM_UP), load)
    for error in first_errors(run.records):
        say(error)


def _compare_at(level: int, sides: Sequence[Server], plan: Plan) -> Comparison:
    count = level * plan.per_client
    load = replace(plan.load, clients=level)
    runs: list[list[Run]] = [[] for _ in sides]
    for pair in range(plan.pairs):
        drawn = draw(plan.prompts, count, start=pair * count, label=f"{level}-{pair}")
        key = plan.key(level, pair) if plan.keyed else None
        for server, of_side in zip(sides, runs, strict=True):
            of_side.append(drive_now(target_of(server, key), drawn, load))
            speed = summarise(of_side[-1])
            say(
                f"{plan.name} {level} clients, pair {pair + 1} of {plan.pairs}, {server.name}: "
                f"{speed.tokens_per_s:.1f} tokens/s, decode {speed.decode_per_s:.1f}".lstrip()
            )
    ours, theirs = runs
    return Comparison(level, tuple(ours), tuple(theirs))


def target_of(server: Server, key: str | None = None) -> Target:
    """Where a server of this comparison listens, and the API key to show it."""
    return Target(server.host, server.port, server.model, key=key)


def agreement(comparisons: Sequence[Comparison]) -> Agreement:
    """Over all requests of all comparisons."""
    both = [
        pair
        for comparison in comparisons
        for our, their in zip(comparison.ours, comparison.theirs, strict=True)
        for pair in zip(our.records, their.records, strict=True)
    ]
    whole = [(our, their) for our, their in both if our.error is None and their.error is None]
    return Agreement(
        requests=len(both),
        failed=len(both) - len(whole),
        other_count=sum(our.tokens != their.tokens for our, their in whole),
        other_text=sum(our.text != their.text for our, their in whole),
        errors=tuple(message for pair in both for message in first_errors(pair))[:5],
    )


@dataclass(frozen=True, slots=True)
class Claim:
    """What a comparison sets out to show: `rate` of ours over theirs is at least `floors` at so many clients."""

    text: str
    rate: Callable[[Run], float]
    floors: Mapping[int, float]

    def bounds(self, comparisons: Sequence[Comparison]) -> list[Bound]:
        """One for each level; a level without a floor has the floor 0."""
        return [
            Bound(self.text, each.clients, each.ratio(self.rate), self.floors.get(each.clients, 0.0))
            for each in comparisons
        ]


@dataclass(frozen=True, slots=True)
class Part:
    """Comparisons of one plan, and what they are to show."""

    name: str
    claims: tuple[Claim, ...]
    comparisons: tuple[Comparison, ...]


def conclude(
    parts: Sequence[Part],
    names: tuple[str, str],
    *,
    same: Callable[[Agreement], bool],
    as_json: bool,
    notes: Sequence[str] = (),
) -> None:
    """Report, further `notes` too, and end the program: exit 0 when every bound holds, nothing failed and the work was
    the `same`.
    """
    agreed = agreement([comparison for part in parts for comparison in part.comparisons])
    try:
        bounds = [bound for part in parts for claim in part.claims for bound in claim.bounds(part.comparisons)]
    except ValueError as error:
        say("\n".join([str(error), *agreed.errors]))
        raise typer.Exit(1) from None
    sides = [
        (f"{part.name} {name}".lstrip(), summarise(*runs))
        for part in parts
        for each in part.comparisons
        for name, runs in zip(names, (each.ours, each.theirs), strict=True)
    ]
    notes = [
        *notes,
        f"{agreed.requests} requests on each side: {agreed.failed} failed, {agreed.other_count} with another count of "
        f"tokens, {agreed.other_text} with another text",
        *agreed.errors,
    ]
    tables = [summary_table("Sides (rates: median of the runs; times in ms)", sides), bound_table("Ratios", bounds)]
    facts = {"bounds": bounds, "agreement": agreed, "sides": [{"name": name, "summary": side} for name, side in sides]}
    show(tables, notes, facts, as_json=as_json)
    good = all(bound.holds for bound in bounds) and agreed.failed == 0 and same(agreed)
    raise typer.Exit(0 if good else 1)
