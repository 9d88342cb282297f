"""What the clients of `soak` send: plain requests, constrained ones, ones that are left or never read, and bad ones.

Owns how a due request becomes bytes. All that is left to chance depends on the seed and on the request's number, and
not on what was asked before.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from deploy.bench.arrivals import Due
from deploy.bench.client import Endpoint, Load, Target, http_bytes, request_bytes
from deploy.bench.prefix_asking import token_prompt
from deploy.bench.prompts import Message, Prompt

SCHEMAS = Path(__file__).parents[3] / "shared" / "data" / "schemas.jsonl"
MOST_SCHEMAS = 12
_SMALL = 600
"""Characters of a schema."""
_BUILT_IN: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"enum": ["red", "green", "blue"]},
    {"type": "object", "properties": {"at": {"type": "array", "items": {"type": "number"}}}, "required": ["at"]},
)
_FAMILIES, _HEAD = 4, 128
"""How many texts half of the prompts begin with, and of how many tokens at most: so that the prefix cache has hits."""
_MOST_TOKENS = 10**9
_PATIENCE_S = (1.0, 15.0)
"""How long clients stay that leave or never read."""
_DEADLINES_S = (0.5, 2.5)
"""Short, as a lane is taken for so long by each."""


class Kind(StrEnum):
    """What a client does."""

    PLAIN = "plain"
    """Streams to the end."""
    WHOLE = "whole"
    """Wants the answer in one piece."""
    CONSTRAINED = "constrained"
    """Wants JSON of a schema."""
    LEAVING = "leaving"
    """Hangs up in mid-stream, or while it still waits."""
    UNREAD = "unread"
    """Never reads, and hangs up after a while."""
    DEADLINE = "deadline"
    """Wants more tokens than there is room for, and an end after some seconds."""
    BAD = "bad"
    """Must be refused."""


SHARES: Mapping[Kind, float] = {
    Kind.PLAIN: 0.62,
    Kind.WHOLE: 0.08,
    Kind.CONSTRAINED: 0.12,
    Kind.LEAVING: 0.10,
    Kind.UNREAD: 0.05,
    Kind.DEADLINE: 0.03,
}
"""Of the requests that are due. Bad ones come on top."""
BAD_SHARE = 0.10
"""How many due requests have a bad one beside them."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, ready to be sent."""

    kind: Kind
    name: str
    request: bytes
    reads: int = 0
    """After how many reads a client that leaves hangs up."""
    held_s: float = 0.0
    """How long it waits for them in any case; and how long one that never reads holds the connection."""

    @property
    def streams(self) -> bool:
        """Whether the answer comes as events."""
        return self.kind is not Kind.WHOLE


def small_schemas(path: Path = SCHEMAS) -> list[dict[str, Any]]:
    """A dozen objects' schemas of a file of JSON lines; without one, some of our own."""
    if not path.exists():
        return list(_BUILT_IN)
    rows = [json.loads(line)["schema"] for line in path.read_text().splitlines()]
    plain = [row for row in rows if row.get("type") == "object" and "properties" in row and "$ref" not in str(row)]
    return sorted(plain, key=lambda row: len(json.dumps(row)))[:MOST_SCHEMAS] or list(_BUILT_IN)


class Script:
    """Makes requests of what is due."""

    def __init__(
        self,
        target: Target,
        tokens: Callable[[int, int], Sequence[int]],
        schemas: Sequence[dict[str, Any]],
        seed: int,
        patience_s: tuple[float, float] = _PATIENCE_S,
    ) -> None:
        """`tokens(count, seed)` are tokens that the model has."""
        self._target = target
        self._tokens = tokens
        self._schemas = schemas
        self._seed = seed
        self._patience_s = patience_s
        self._bad = bad_requests(target)

    def plain(self, number: int, due: Due) -> Ask:
        """One that is streamed to its end, whatever chance says."""
        return self._generation(Kind.PLAIN, number, due, self._chance(number, 0))

    def good(self, number: int, due: Due) -> Ask:
        """One of the kinds that must be served."""
        chance = self._chance(number, 1)
        kind = Kind(chance.choice([str(kind) for kind in SHARES], p=list(SHARES.values())))
        if kind is Kind.CONSTRAINED:
            return self._constrained(number, due, chance)
        return self._generation(kind, number, due, chance)

    def bad(self, number: int) -> Ask | None:
        """What comes beside it, if chance says so."""
        chance = self._chance(number, 2)
        return self._bad[int(chance.integers(len(self._bad)))] if chance.random() < BAD_SHARE else None

    def _chance(self, number: int, what: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, number, what])

    def _generation(self, kind: Kind, number: int, due: Due, chance: np.random.Generator) -> Ask:
        fields: dict[str, Any] = {"temperature": 0.8 if chance.random() < 0.5 else 0.0, "seed": number}
        if kind is Kind.WHOLE:
            fields |= {"stream": False, "stream_options": None}
        if kind is Kind.DEADLINE:
            fields |= {"max_tokens": _MOST_TOKENS, "timeout": round(float(chance.uniform(*_DEADLINES_S)), 1)}
        load = Load(1, due.output, Endpoint.COMPLETIONS, ignore_eos=True)
        prompt = token_prompt(f"{kind} {number}", self._prompt(number, due.prompt, chance), **fields)
        reads, held_s = int(chance.integers(1, max(2, due.output))), float(chance.uniform(*self._patience_s))
        return Ask(kind, prompt.name, request_bytes(self._target, prompt, load), reads, held_s)

    def _prompt(self, number: int, count: int, chance: np.random.Generator) -> list[int]:
        """Half of them begin as others do."""
        own = self._tokens(count, (self._seed + 1) * 1_000_000 + number)
        if chance.random() < 0.5:
            return list(own)
        head = self._tokens(_HEAD, int(chance.integers(_FAMILIES)))[: count // 2]
        return [*head, *own[len(head) :]]

    def _constrained(self, number: int, due: Due, chance: np.random.Generator) -> Ask:
        schema = self._schemas[int(chance.integers(len(self._schemas)))]
        fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
        prompt = Prompt(f"constrained {number}", (Message("user", f"Make up example {number}."),), fields)
        return Ask(Kind.CONSTRAINED, prompt.name, request_bytes(self._target, prompt, Load(1, due.output)))


def bad_requests(target: Target) -> tuple[Ask, ...]:
    """Every one is the client's fault, and to be told so."""
    chat, completions = (f"POST {target.base}/{route}" for route in ("chat/completions", "completions"))
    asked: dict[str, tuple[str, Any]] = {
        "malformed JSON": (chat, b'{"messages": ['),
        "no body": (completions, b""),
        "deeply nested": (chat, b"[" * 20_000),
        "not an object": (completions, [1, 2, 3]),
        "wrong type": (chat, {"messages": 5}),
        "wrong type of a number": (completions, {"prompt": "p", "max_tokens": "many"}),
        "no prompt": (completions, {"max_tokens": 4}),
        "negative max_tokens": (completions, {"prompt": "p", "max_tokens": -1}),
        "too hot": (completions, {"prompt": "p", "temperature": 9}),
        "unknown model": (chat, {"model": "gpt-5", "messages": [{"role": "user", "content": "p"}]}),
        "no such token": (completions, {"prompt": [_MOST_TOKENS], "max_tokens": 4}),
        "too long a prompt": (completions, {"prompt": [40] * 200_000, "max_tokens": 4}),
        "too many stops": (completions, {"prompt": "p", "stop": ["x"] * 99}),
        "too large a bias": (completions, {"prompt": "p", "logit_bias": {"1": 1e6}}),
        "no type of JSON": (chat, _with_schema({"type": "nonsense"})),
        "schema that is none": (chat, _with_schema(7)),
        "pattern that is none": (completions, {"prompt": "p", "structured_outputs": {"regex": "(("}}),
        "wrong method": (f"GET {target.base}/chat/completions", b""),
        "another wrong method": (f"DELETE {target.base}/completions", b""),
        "no such path": (f"POST {target.base}/answers", {"prompt": "p"}),
    }
    asks = [
        Ask(Kind.BAD, name, http_bytes(target, line, body if isinstance(body, bytes) else json.dumps(body).encode()))
        for name, (line, body) in asked.items()
    ]
    text = http_bytes(target, completions, b'{"prompt": "p"}', "text/plain")
    return (*asks, Ask(Kind.BAD, "not declared as JSON", text), Ask(Kind.BAD, "no HTTP", b"\x16\x03\x01 hello\r\n\r\n"))


def _with_schema(schema: object) -> dict[str, Any]:
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {"messages": [{"role": "user", "content": "p"}], "response_format": asked}
