"""`constrained`: eight lanes of which half must follow a schema, against eight free ones, on one server in turns.

Two claims: constraints cost the whole little, and the text that a grammar forces makes a constrained lane write a
document faster than a free lane beside it writes as many tokens.
"""

import json as json_text
import statistics
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from deploy.bench.client import Load, Record, Run, drive_now
from deploy.bench.options import PROGRAM, Arguments, Json, Limit, Model, Pairs, Program, Timeout, say, warn_if_busy
from deploy.bench.pairs import target_of
from deploy.bench.prompts import Message, Prompt, draw, ordinary_prompts
from deploy.bench.report import Bound, bound_table, first_errors, ratios, show, summarise, summary_table
from deploy.bench.servers import ServerError, paceline, running

_PARTIES = ("customer", "supplier", "carrier", "insurer")


def order_schema() -> dict[str, Any]:
    """A document of four parties with short values: about 110 tokens, whatever the model says."""
    word = {"type": "string", "minLength": 3, "maxLength": 12, "pattern": "^[A-Za-z ]+$"}
    party = {
        "type": "object",
        "properties": {"name": word, "city": word, "rating": {"type": "integer", "enum": [1, 2, 3, 4, 5]}},
        "required": ["name", "city", "rating"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": dict.fromkeys(_PARTIES, party),
        "required": list(_PARTIES),
        "additionalProperties": False,
    }


def constrained_prompts() -> tuple[Prompt, ...]:
    """Each asks for an order about another kind of goods."""
    format_ = {"type": "json_schema", "json_schema": {"name": "order", "schema": order_schema()}}
    keys = json_text.dumps(list(_PARTIES))
    return tuple(
        Prompt(
            f"constrained-{goods}",
            (
                Message(
                    "user", f"Invent an order of {goods} as JSON with the keys {keys}; each has name, city, rating."
                ),
            ),
            {"response_format": format_, "ignore_eos": False},
        )
        for goods in ("apples", "bicycles", "candles", "desks", "envelopes", "flutes", "gloves", "hammers")
    )


def constrained(
    model: Model,
    pairs: Pairs = 5,
    clients: Annotated[int, typer.Option(min=2, help="How many at a time; half of them constrained.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    program: Program = PROGRAM,
    arguments: Arguments = None,
    timeout: Timeout = 120.0,
    limit: Limit = 600.0,
    json: Json = False,
) -> None:
    """Compare a crowd of which half is constrained with one that is free."""
    warn_if_busy()
    load = Load(clients=clients, max_tokens=max_tokens, ignore_eos=True, timeout_s=timeout, limit_s=limit)
    words = (
        "--history-bytes",
        "0",
        *(arguments or ()),
    )  # the prompts come again: no run is drafted from an earlier one
    command = paceline(str(program), str(model.resolve()), words)
    try:
        with running(command) as server:
            target = target_of(server)
            drive_now(target, _crowd(clients, "warm-up"), load)
            mixed, free = [], []
            for pair in range(pairs):
                mixed.append(drive_now(target, _crowd(3 * clients, f"mixed-{pair}"), load))
                free.append(
                    drive_now(target, draw(ordinary_prompts(), 3 * clients, start=0, label=f"free-{pair}"), load)
                )
                rates = [summarise(each[-1]).tokens_per_s for each in (mixed, free)]
                say(f"pair {pair + 1} of {pairs}: {rates[0]:.1f} tokens/s half constrained, {rates[1]:.1f} free")
    except ServerError as error:
        say(f"constrained: {error}")
        raise typer.Exit(2) from None
    _conclude(mixed, free, as_json=json)


def _crowd(count: int, label: str) -> tuple[Prompt, ...]:
    """Constrained and free ones in turn."""
    halves = [
        draw(prompts, (count + 1) // 2, start=0, label=label) for prompts in (constrained_prompts(), ordinary_prompts())
    ]
    return tuple(prompt for pair in zip(*halves, strict=True) for prompt in pair)[:count]


def _conclude(mixed: Sequence[Run], free: Sequence[Run], *, as_json: bool) -> None:
    bounds = [
        Bound(
            "tokens/s, half of the lanes constrained, over all free",
            mixed[0].clients,
            ratios([summarise(run).tokens_per_s for run in mixed], [summarise(run).tokens_per_s for run in free]),
            0.9,
        ),
        Bound(
            "writing speed of a constrained lane over a free lane beside it",
            mixed[0].clients,
            ratios(*zip(*[_speeds(run) for run in mixed], strict=True)),
            1.0,
        ),
    ]
    records = [record for run in (*mixed, *free) for record in run.records]
    errors = first_errors(records)
    documents = [record for run in mixed for record in run.records if record.prompt.startswith("constrained")]
    broken = [record.prompt for record in documents if record.finish_reason == "stop" and not _is_json(record.text)]
    ended = sum(record.finish_reason == "stop" for record in documents)
    notes = [f"{ended} of {len(documents)} documents complete, {len(broken)} of them no JSON", *errors]
    sides = [(name, summarise(*runs)) for name, runs in (("half constrained", mixed), ("free", free))]
    tables = [summary_table("Sides (rates: median of the runs; times in ms)", sides), bound_table("Ratios", bounds)]
    show(tables, notes, {"bounds": bounds, "sides": dict(sides)}, as_json=as_json)
    raise typer.Exit(0 if all(bound.holds for bound in bounds) and not errors and not broken else 1)


def _speeds(run: Run) -> tuple[float, float]:
    """Tokens a second of one lane, constrained and free: medians over the run's requests."""
    kinds: tuple[list[float], list[float]] = ([], [])
    for record in run.records:
        kinds[not record.prompt.startswith("constrained")].append(_speed(record))
    return statistics.median(kinds[0]), statistics.median(kinds[1])


def _speed(record: Record) -> float:
    if record.first_at is None or record.last_at is None or record.last_at <= record.first_at:
        return 0.0
    return record.decoded / (record.last_at - record.first_at)


def _is_json(text: str) -> bool:
    try:
        json_text.loads(text)
    except ValueError:
        return False
    return True
