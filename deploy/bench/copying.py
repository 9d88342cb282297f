"""`copy`: Paceline with drafts against Paceline without, on prompts whose answer stands in the prompt.

The rate is that of decoding, from the first event to the end of the last token; both sides must give the same text.
"""

from operator import attrgetter
from typing import Annotated

import typer

from deploy.bench.client import Load
from deploy.bench.options import (
    CLIENTS,
    PROGRAM,
    Arguments,
    Clients,
    Json,
    Limit,
    Model,
    Pairs,
    Program,
    Prompts,
    Timeout,
    say,
)
from deploy.bench.pairs import Claim, Plan, compare, conclude
from deploy.bench.prompts import PromptFileError, copying_prompts, read_prompts
from deploy.bench.servers import ServerError, paceline

CLAIM = Claim("decode rate over no drafts", attrgetter("decode_per_s"), {1: 1.35, 4: 1.6, 8: 1.35})


def copy(
    model: Model,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Drafts of one side; the other has none.")] = 6,
    clients: Clients = None,
    pairs: Pairs = 5,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    prompts: Prompts = None,
    program: Program = PROGRAM,
    arguments: Arguments = None,
    timeout: Timeout = 120.0,
    limit: Limit = 600.0,
    json: Json = False,
) -> None:
    """Compare drafting with plain decoding where drafting should pay most: copying."""
    names = (f"{draft_tokens} drafts", "no drafts")
    drafting, plain = (
        paceline(str(program), str(model.resolve()), ("--draft-tokens", str(drafts), *(arguments or ())), name=name)
        for drafts, name in zip((draft_tokens, 0), names, strict=True)
    )
    load = Load(clients=1, max_tokens=max_tokens, ignore_eos=True, timeout_s=timeout, limit_s=limit)
    try:
        texts = copying_prompts() if prompts is None else read_prompts(prompts)
        plan = Plan(texts, tuple(clients or CLIENTS), pairs, per_client=1, load=load)
        comparisons = compare(drafting, plain, plan)
    except (PromptFileError, ServerError) as error:
        say(f"copy: {error}")
        raise typer.Exit(2) from None
    conclude(CLAIM, comparisons, names, same=lambda agreed: agreed.other_text == 0, as_json=json)
