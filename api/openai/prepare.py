"""From a valid body to what the engine is asked: tokens, sampling, choices, how many tokens there is room for.

Owns the checks that need the model. Nothing here waits for the engine.
"""

import secrets
import uuid
from collections.abc import Mapping, Sequence

import msgspec

from api.errors import ApiError, invalid
from api.openai.schema import ChatBody, CompletionBody, ContentPart, DraftOptions, GenerationBody
from api.service import ServedModel
from backends.base import ModelInfo
from scheduler.request import Request, Sampling

_GREEDY_BELOW = 1e-5
"""A temperature so low is 0: dividing float32 logits by it leaves nothing of the noise."""


class Seed(msgspec.Struct, frozen=True):
    """A request's seed in [0, 2**64), and whether it was drawn here."""

    value: int
    drawn: bool


class TimeLimit(msgspec.Struct, frozen=True):
    """How long a request may take, in seconds, and when that is over, by `time.monotonic`."""

    seconds: float
    deadline: float

    def exceeded(self) -> ApiError:
        """What a client is told that got nothing. OpenAI's own clients send a request that got a 5xx again, twice: each
        of those is one of its own and has the same time once more.
        """
        return ApiError(504, f"nothing was generated within {self.seconds:g} s", code="deadline_exceeded")


def time_limit(body: GenerationBody, seconds: float, arrived: float) -> TimeLimit | None:
    """The smaller of what a body asks for and what the server allows (0: any time). `arrived`: by `time.monotonic`."""
    limits = [limit for limit in (body.timeout, seconds) if limit]
    return TimeLimit(min(limits), arrived + min(limits)) if limits else None


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
    body: ChatBody | CompletionBody,
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    *,
    seed: Seed,
    wanted: int | None,
    field: str,
    expected: Sequence[int] = (),
) -> tuple[Request, ...]:
    """`n` requests per prompt, each as it would be alone; choice c of prompt p is number p * n + c. `field` is where
    the prompt stands in the body, `wanted` the limit of tokens that the client set, `expected` what its `prediction`
    says. Raises ApiError.
    """
    draft = body.draft or DraftOptions()
    sampling = sampling_of(body, model.info, seed)
    choices = body.n or 1
    requests: list[Request] = []
    for place, prompt in enumerate(prompts):
        tokens, room = tuple(prompt), _room(len(prompt), wanted, model.info, field)
        requests += [
            Request(
                request_id=f"{reply_id}-{place * choices + choice}",
                prompt=tokens,
                max_tokens=room,
                sampling=msgspec.structs.replace(sampling, choice=choice) if choice else sampling,
                stop_tokens=model.info.eos_tokens,
                ignore_eos=bool(body.ignore_eos),
                cache_salt=body.cache_salt or "",
                expected=tuple(expected[: model.info.context_length]),
                draft_tokens=draft.max,
                draft_sources=None if draft.sources is None else frozenset(draft.sources),
                priority=body.priority or 0,
            )
            for choice in range(choices)
        ]
    return tuple(requests)


_EXPECTED_CHARACTERS = 16
"""Of a `prediction`, so many characters for each token of the context are read: what lies behind cannot be of use."""


def expected_tokens(body: ChatBody, model: ServedModel) -> list[int]:
    """What `prediction` says, as tokens, where it may be drafted from. Raises ApiError. Runs in a thread."""
    if body.prediction is None:
        return []
    text = text_of(body.prediction.content, "prediction.content")
    draft = body.draft or DraftOptions()
    if draft.max == 0 or (draft.sources is not None and "prediction" not in draft.sources):
        return []
    return model.tokenizer.encode(text[: _EXPECTED_CHARACTERS * model.info.context_length], special=False)


def encoded(model: ServedModel, text: str, field: str, *, special: bool) -> list[int]:
    """The tokens of a prompt. Raises ApiError for one that is too long, and does not read what cannot fit."""
    least = len(text) // model.tokenizer.longest
    if least > model.info.context_length:
        raise _too_long(f"at least {least}", model.info, field)
    return model.tokenizer.encode(text, special=special)


def text_of(content: str | Sequence[ContentPart], field: str) -> str:
    """Text parts become lines of one text. Raises ApiError."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type != "text":
            place = f"{field}[{index}].type"
            raise invalid(f"{place}: {part.type!r} is not supported, only 'text'", place, "unsupported_parameter")
        if part.text is None:
            raise invalid(f"{field}[{index}].text is required", f"{field}[{index}].text")
        texts.append(part.text)
    return "\n".join(texts)


def sampling_of(body: ChatBody | CompletionBody, info: ModelInfo, seed: Seed) -> Sampling:
    """The settings of a body; what it leaves open is as the model's generation_config has it. Raises ApiError."""
    temperature = _told(body.temperature, info, "temperature", 1.0)
    return Sampling(
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        seed=seed.value,
        top_k=_top_k(body, info),
        top_p=_told(body.top_p, info, "top_p", 1.0),
        min_p=_told(body.min_p, info, "min_p", 0.0),
        repetition_penalty=_told(body.repetition_penalty, info, "repetition_penalty", 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_biases(body.logit_bias or {}, info),
        logprobs=body.logged,
    )


def _told(value: float | None, info: ModelInfo, name: str, otherwise: float) -> float:
    return info.defaults.get(name, otherwise) if value is None else value


def _top_k(body: GenerationBody, info: ModelInfo) -> int:
    """-1 and 0 are both off."""
    if body.top_k is None:
        return min(max(int(info.defaults.get("top_k", 0)), 0), info.vocab_size)
    if body.top_k > info.vocab_size:
        raise invalid(f"top_k must be at most the {info.vocab_size} tokens of the vocabulary", "top_k")
    return max(body.top_k, 0)


def _biases(biases: Mapping[str, float], info: ModelInfo) -> tuple[tuple[int, float], ...]:
    pairs = tuple((int(token), bias) for token, bias in biases.items())
    for token, _ in pairs:
        if token >= info.vocab_size:
            raise invalid(f"logit_bias: token {token} is not in [0, {info.vocab_size})", "logit_bias")
    return pairs


def _room(prompt_tokens: int, wanted: int | None, info: ModelInfo, field: str) -> int:
    """How many tokens may be generated: what is wanted, or what the context leaves if that is less."""
    if prompt_tokens == 0:
        raise invalid(f"{field} is empty: there is no token to go on from", field)
    left = info.context_length - prompt_tokens
    if left < 1:
        raise _too_long(str(prompt_tokens), info, field)
    return left if wanted is None else min(wanted, left)


def _too_long(tokens: str, info: ModelInfo, field: str) -> ApiError:
    message = (
        f"This model's maximum context length is {info.context_length} tokens. However, your {field} resulted in "
        f"{tokens} tokens. Please reduce the length of the {field}."
    )
    return invalid(message, field, "context_length_exceeded")
