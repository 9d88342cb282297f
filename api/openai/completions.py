"""`POST /v1/completions`: one or several prompts, as text or as tokens."""

import time
from collections.abc import Sequence

import anyio.to_thread
import msgspec

from api.errors import invalid
from api.openai.constraint import constraint_of
from api.openai.prepare import encoded, make_requests, new_id, seed_of
from api.openai.reply import Order
from api.openai.schema import CompletionBody
from api.openai.shapes import CompletionShape, Heading
from api.service import ServedModel
from backends.base import ModelInfo

_MAX_PROMPTS = 128

Prompt = str | list[int]


class Encoded(msgspec.Struct, frozen=True):
    """A prompt as tokens, and as text if it is to be echoed."""

    tokens: list[int]
    echo: str


async def prepare_completion(body: CompletionBody, model: ServedModel, arrived: float) -> Order:
    """What prompts ask of the engine: `n` requests each. Raises ApiError."""
    constraint = constraint_of(body)
    prompts = prompts_of(body.prompt, model.info)
    encoded = await anyio.to_thread.run_sync(_encode, model, prompts, bool(body.echo))
    reply_id, seed = new_id("cmpl"), seed_of(body)
    heading = Heading(reply_id, int(time.time()), model.name, body.include_usage)
    tokens = [prompt.tokens for prompt in encoded]
    echoes = [prompt.echo for prompt in encoded for _ in range(body.n or 1)]
    return Order(
        reply_id=reply_id,
        model=model,
        shape=CompletionShape(heading, echoes, model.tokenizer.token_bytes),
        requests=make_requests(reply_id, body, model, tokens, seed=seed, wanted=body.wanted_tokens, field="prompt"),
        stops=body.stops,
        seed=seed,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        arrived=arrived,
        constraint=constraint,
    )


def prompts_of(prompt: str | list[str | int | list[int]], info: ModelInfo) -> list[Prompt]:
    """A text, texts, tokens, or lists of tokens: always as a list of prompts. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt is empty", "prompt")
    tokens = [item for item in prompt if isinstance(item, int)]
    if len(tokens) == len(prompt):
        return [_checked(tokens, info, "prompt")]
    if len(prompt) > _MAX_PROMPTS:
        raise invalid(f"prompt takes at most {_MAX_PROMPTS} prompts, not {len(prompt)}", "prompt")
    prompts: list[Prompt] = []
    for index, item in enumerate(prompt):
        if isinstance(item, int) or type(item) is not type(prompt[0]):
            raise invalid("prompt must hold only texts, only tokens or only lists of tokens", f"prompt[{index}]")
        prompts.append(item if isinstance(item, str) else _checked(item, info, f"prompt[{index}]"))
    return prompts


def _checked(tokens: list[int], info: ModelInfo, field: str) -> list[int]:
    if tokens and not (min(tokens) >= 0 and max(tokens) < info.vocab_size):
        raise invalid(f"{field}: tokens must lie in [0, {info.vocab_size})", field)
    return tokens


def _encode(model: ServedModel, prompts: Sequence[Prompt], echo: bool) -> list[Encoded]:
    """Runs in a thread."""
    told: list[Encoded] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            told.append(Encoded(encoded(model, prompt, "prompt", special=True), prompt if echo else ""))
        else:
            told.append(Encoded(prompt, model.tokenizer.decode(prompt) if echo else ""))
    return told
