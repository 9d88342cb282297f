"""From a valid body to what the engine is asked: tokens, sampling, how many tokens there is room for.

Owns the checks that need the model. Nothing here waits for the engine.
"""

import secrets
import uuid
from collections.abc import Sequence

import msgspec

from api.errors import invalid
from api.openai.schema import GenerationBody
from api.service import ServedModel
from backends.base import ModelInfo
from scheduler.request import Request, Sampling

_GREEDY_BELOW = 1e-5
"""A temperature so low is 0: dividing float32 logits by it leaves nothing of the noise."""


class Seed(msgspec.Struct, frozen=True):
    """A request's seed in [0, 2**64), and whether it was drawn here."""

    value: int
    drawn: bool


def new_id(prefix: str) -> str:
    """A reply's own id."""
    return f"{prefix}-{uuid.uuid4().hex}"


def seed_of(body: GenerationBody) -> Seed:
    """Negative seeds wrap around; an absent one is drawn."""
    if body.seed is None:
        return Seed(secrets.randbits(64), drawn=True)
    return Seed(body.seed % 2**64, drawn=False)


def make_requests(
    reply_id: str,
    body: GenerationBody,
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    *,
    seed: Seed,
    wanted: int | None,
    field: str,
) -> tuple[Request, ...]:
    """One request per prompt, each as it would be alone. `field` is where the prompt stands in the body, `wanted` the
    limit of tokens that the client set. Raises ApiError.
    """
    temperature = body.temperature
    if temperature is None:
        temperature = model.info.defaults.get("temperature", 1.0)
    sampling = Sampling(temperature=temperature if temperature >= _GREEDY_BELOW else 0.0, seed=seed.value)
    return tuple(
        Request(
            request_id=f"{reply_id}-{index}",
            prompt=tuple(prompt),
            max_tokens=_room(len(prompt), wanted, model.info, field),
            sampling=sampling,
            stop_tokens=model.info.eos_tokens,
            ignore_eos=bool(body.ignore_eos),
        )
        for index, prompt in enumerate(prompts)
    )


def _room(prompt_tokens: int, wanted: int | None, info: ModelInfo, field: str) -> int:
    """How many tokens may be generated: what is wanted, or what the context leaves if that is less."""
    if prompt_tokens == 0:
        raise invalid(f"{field} is empty: there is no token to go on from", field)
    left = info.context_length - prompt_tokens
    if left < 1:
        message = (
            f"This model's maximum context length is {info.context_length} tokens. However, your {field} resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the {field}."
        )
        raise invalid(message, field, "context_length_exceeded")
    return left if wanted is None else min(wanted, left)
