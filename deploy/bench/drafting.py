"""`drafting`: Paceline as it is against Paceline without drafts, on work where drafts pay, where they cannot, and both.

Both sides must give the same texts. Each run comes with an API key of its own, so that what is drafted from earlier
answers are those of the same run: else the prompts that come again in a later one would be answered by heart.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from deploy.bench.client import Load
from deploy.bench.options import (
    PROGRAM,
    Arguments,
    Clients,
    Json,
    Limit,
    Model,
    Pairs,
    Program,
    Timeout,
    say,
    warn_if_busy,
)
from deploy.bench.pairs import WARM_UP, Part, Plan, conclude, take_turns, warm_up
from deploy.bench.prefix_asking import Scrape, scrape
from deploy.bench.scenarios import SCENARIOS, Scenario, scenario_named
from deploy.bench.servers import Command, ServerError, paceline, running

NAMES = ("drafting", "no drafts")
_MODEL = "bench"


def drafting(
    model: Model,
    only: Annotated[str, typer.Option(help=f"One of {', '.join(each.name for each in SCENARIOS)}.")] = "",
    clients: Clients = None,
    pairs: Pairs = 9,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="By default each scenario's own.")] = None,
    program: Program = PROGRAM,
    arguments: Arguments = None,
    timeout: Timeout = 120.0,
    limit: Limit = 600.0,
    json: Json = False,
) -> None:
    """Compare the default with --draft-tokens 0. All scenarios take about 24 minutes on two idle cores."""
    warn_if_busy()
    try:
        named = (scenario_named(only),) if only else SCENARIOS
    except KeyError:
        say(f"drafting: there is no scenario {only!r}")
        raise typer.Exit(2) from None
    scenarios = [scenario for scenario in named if _levels(scenario, clients)]
    if not scenarios:
        say("drafting: no scenario is played by so many clients")
        raise typer.Exit(2)
    load = Load(clients=1, max_tokens=max_tokens or 1, timeout_s=timeout, limit_s=limit)
    plans = [
        _plan(scenario, clients, pairs, replace(load, max_tokens=max_tokens or scenario.max_tokens))
        for scenario in scenarios
    ]
    try:
        with TemporaryDirectory(prefix="paceline-bench-") as folder:
            keys = Path(folder) / "keys"
            keys.write_text("\n".join(dict.fromkeys(key for plan in plans for key in plan.keys)))
            words = ("--api-key-file", str(keys), "--served-name", _MODEL, *(arguments or ()))
            ours = _server(program, model, words, NAMES[0])
            theirs = _server(program, model, (*words, "--draft-tokens", "0"), NAMES[1])
            parts, notes = _play(ours, theirs, scenarios, plans)
    except ServerError as error:
        say(f"drafting: {error}")
        raise typer.Exit(2) from None
    conclude(parts, NAMES, same=lambda agreed: agreed.other_text == 0, as_json=json, notes=notes)


def _plan(scenario: Scenario, clients: Sequence[int] | None, pairs: int, load: Load) -> Plan:
    how = replace(load, ignore_eos=scenario.ignore_eos)
    levels = _levels(scenario, clients)
    return Plan(scenario.prompts(), levels, pairs, scenario.per_client, how, scenario.name, keyed=True)


def _levels(scenario: Scenario, clients: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(level for level in scenario.levels if not clients or level in clients)


def _server(program: Path, model: Path, words: Sequence[str], name: str) -> Command:
    return replace(paceline(str(program), str(model.resolve()), words, name=name), model=_MODEL)


def _play(
    ours: Command, theirs: Command, scenarios: Sequence[Scenario], plans: Sequence[Plan]
) -> tuple[list[Part], list[str]]:
    with ExitStack() as stack:
        sides = [stack.enter_context(running(command)) for command in (ours, theirs)]
        for side in sides:
            warm_up(side, max(plans, key=lambda plan: max(plan.levels)))
        parts = [
            Part(scenario.name, scenario.claims, take_turns(sides, plan))
            for scenario, plan in zip(scenarios, plans, strict=True)
        ]
        return parts, by_position(scrape(sides[0], WARM_UP))


def by_position(metrics: Scrape) -> list[str]:
    """For each source that drafted, what was drafted and accepted at the first, second, ... place of its drafts."""
    counts: dict[str, dict[str, dict[int, float]]] = {}
    for what in ("draft", "accepted"):
        for labels, count in metrics.all(f"paceline_spec_decode_num_{what}_tokens_per_pos_total"):
            counts.setdefault(labels["source"], {}).setdefault(what, {})[int(labels["position"])] = count
    return [
        f"{source}: drafted {_in_order(of_source['draft'])}, accepted {_in_order(of_source['accepted'])} by position"
        for source, of_source in sorted(counts.items())
    ]


def _in_order(counts: Mapping[int, float]) -> str:
    return " ".join(f"{counts[place]:.0f}" for place in sorted(counts))
