"""`serve-pair`: Paceline and mlx-lm's own server side by side, with the same weights, BLAS and prompts.

Neither side is told to ignore the end of the text, because mlx-lm's server cannot: with the same greedy answers both
end at the same token, and the report counts the requests where they did not.
"""

from typing import Annotated

import typer

from deploy.bench.client import Load
from deploy.bench.float32 import ConversionError, float32_copy
from deploy.bench.options import (
    CACHE_DIR,
    CLIENTS,
    PROGRAM,
    Arguments,
    AsIs,
    CacheDir,
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
from deploy.bench.pairs import Claim, Part, Plan, compare, conclude
from deploy.bench.prompts import PromptFileError, ordinary_prompts, read_prompts
from deploy.bench.report import summarise
from deploy.bench.servers import ServerError, mlx_lm, paceline

CLAIM = Claim("tokens/s over mlx-lm's server", lambda run: summarise(run).tokens_per_s, {1: 1.05, 4: 1.1, 8: 1.1})


def serve_pair(
    model: Model,
    clients: Clients = None,
    pairs: Pairs = 5,
    per_client: Annotated[int, typer.Option(min=1, help="Requests of each client in each run.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    prompts: Prompts = None,
    program: Program = PROGRAM,
    arguments: Arguments = None,
    as_is: AsIs = False,
    cache_dir: CacheDir = CACHE_DIR,
    timeout: Timeout = 120.0,
    limit: Limit = 600.0,
    json: Json = False,
) -> None:
    """Compare `paceline serve` with mlx-lm's server, end to end, plain decoding on both sides.

    The prompts come again in later pairs: with drafts on, one pair's answers would be drafted from those before.
    """
    try:
        folder = model.resolve() if as_is else float32_copy(model, cache_dir)
        texts = ordinary_prompts() if prompts is None else read_prompts(prompts)
        plan = Plan(
            prompts=texts,
            levels=tuple(clients or CLIENTS),
            pairs=pairs,
            per_client=per_client,
            load=Load(clients=1, max_tokens=max_tokens, timeout_s=timeout, limit_s=limit),
        )
        comparisons = compare(
            paceline(str(program), str(folder), ("--draft-tokens", "0", *(arguments or ()))), mlx_lm(folder), plan
        )
    except (ConversionError, PromptFileError, ServerError) as error:
        say(f"serve-pair: {error}")
        raise typer.Exit(2) from None
    names = ("paceline", "mlx-lm")
    part = Part("", (CLAIM,), comparisons)
    conclude([part], names, same=lambda agreed: agreed.other_count == 0, as_json=json)
