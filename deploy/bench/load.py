"""`load`: drive any OpenAI-compatible server, and say how fast it was."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from deploy.bench.client import Endpoint, Load, Target, drive_now
from deploy.bench.options import Json, Limit, Prompts, Timeout, say
from deploy.bench.prompts import PromptFileError, draw, ordinary_prompts, read_prompts
from deploy.bench.report import first_errors, show, summarise, summary_table
from deploy.bench.servers import ServerError, first_model


def load(
    url: Annotated[str, typer.Option(help="http://host:port, with the API's path if it is not /v1.")],
    clients: Annotated[int, typer.Option(min=1, help="How many requests at a time.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="How many in all.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    endpoint: Annotated[Endpoint, typer.Option(help="The route to drive.")] = Endpoint.CHAT,
    model: Annotated[str | None, typer.Option(help="The model to ask for; the first one listed, if absent.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Its first word is the key.")
    ] = None,
    prompts: Prompts = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always generate the most tokens.")] = False,
    timeout: Timeout = 120.0,
    limit: Limit = 600.0,
    json: Json = False,
) -> None:
    """Drive a running server with N concurrent clients: tokens/s, time to first token, inter-token times."""
    key = None if api_key_file is None else api_key_file.read_text(encoding="utf-8").split()[0]
    try:
        texts = ordinary_prompts() if prompts is None else read_prompts(prompts)
        target = Target.of_url(url, model or "", key)
        if model is None:
            target = replace(target, model=first_model(target.host, target.port, target.base, key))
    except (ValueError, PromptFileError, ServerError) as error:
        say(f"load: {error}")
        raise typer.Exit(2) from None
    how = Load(clients, max_tokens, endpoint, ignore_eos, timeout, limit)
    run = drive_now(target, draw(texts, requests, start=0, label="load"), how)
    summary = summarise(run)
    table = summary_table(f"{url}, {max_tokens} tokens a request (times in ms)", [(target.model[-24:], summary)])
    show([table], first_errors(run.records), {"summary": summary, "records": run.records}, as_json=json)
    raise typer.Exit(1 if summary.errors else 0)
