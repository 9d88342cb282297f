"""Agents for `prefix`: conversations over one shared system prompt, and the account of what could have been reused.

A turn is sent as the tokens of all that was said before and of a new message. The answer's text is encoded again for
the next one: where the model had drawn other tokens for it, a server has less of the next prompt than is counted here.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deploy.bench.client import Endpoint, Load, Target
from deploy.bench.prefix_asking import Answer, ask, token_prompt
from deploy.bench.report import percentile
from deploy.bench.texts import ORDINARY, PASSAGES
from scheduler.pieces import BLOCK_TOKENS

CLIENTS, TURNS = 8, 4
SYSTEM, MESSAGE, ANSWER = 600, 40, 48
"""Tokens of the shared system prompt, of each message besides what frames it, and of each answer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One turn as its client saw it. Times in seconds of `time.perf_counter`."""

    client: int
    turn: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    """Its text, encoded again."""
    drawn: int
    """How many tokens the model drew for it."""
    sent_at: float
    first_at: float
    ended_at: float
    reused: int
    """Tokens of the prompt that were not computed."""


@dataclass(frozen=True, slots=True)
class Account:
    """Sums over all turns of a play, in tokens."""

    prompt: int
    """What was asked."""
    reused: int
    """What was not computed of it."""
    reusable: int
    """What need not have been."""
    fulfilled: int
    """How much of that was not: what one turn was spared beyond it makes up for no other."""

    @property
    def share(self) -> float:
        """How much of what could be reused was."""
        return self.fulfilled / self.reusable


class Script:
    """What the agents of one play say, in tokens. No two plays begin alike."""

    def __init__(self, tokenizer: Tokenizer, label: str) -> None:
        self._tokenizer = tokenizer
        self._label = label
        self._words = self.encode(" ".join(ORDINARY))
        self.special = tuple(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)
        """Tokens without a text that could be encoded again; they must not be drawn."""

    def encode(self, text: str) -> list[int]:
        """The text's own tokens and no others."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def system(self) -> list[int]:
        """The shared beginning: rules of which there are enough for any length."""
        rules = f"{self._label}: You help people who write. These are texts that they like.\n\n" + "\n\n".join(PASSAGES)
        return self.encode(rules)[:SYSTEM]

    def message(self, client: int, turn: int) -> list[int]:
        """A client's next words; no two of a play are alike."""
        start = MESSAGE * (client * TURNS + turn)
        words = [self._words[place % len(self._words)] for place in range(start, start + MESSAGE)]
        return [*self.encode(f"\n\nUser {client}-{turn}: "), *words, *self.encode("\n\nAssistant:")]


def tokenizer_of(model: Path) -> Tokenizer:
    """Raises OSError for a folder without a tokenizer.json."""
    file = model / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{model} has no tokenizer.json")
    return Tokenizer.from_file(str(file))


async def play(target: Target, script: Script, load: Load, turns: int = TURNS) -> list[Asked]:
    """All clients at the same time, each one turn after the other. Raises ServerError if a turn fails."""
    how = Load(CLIENTS, ANSWER, Endpoint.COMPLETIONS, timeout_s=load.timeout_s)
    talks = [_converse(target, script, client, turns, how) for client in range(CLIENTS)]
    return [asked for talk in await asyncio.gather(*talks) for asked in talk]


async def _converse(target: Target, script: Script, client: int, turns: int, load: Load) -> list[Asked]:
    text = script.system()
    fields: dict[str, Any] = {"logit_bias": {str(token): -100 for token in script.special}}
    asked: list[Asked] = []
    for turn in range(turns):
        text = [*text, *script.message(client, turn)]
        answer = await ask(target, token_prompt(f"client {client}, turn {turn}", text, **fields), load)
        asked.append(_asked(client, turn, text, script.encode(answer.record.text), answer))
        text = [*text, *asked[-1].answer]
    return asked


def _asked(client: int, turn: int, prompt: Sequence[int], again: Sequence[int], answer: Answer) -> Asked:
    record = answer.record
    return Asked(
        client=client,
        turn=turn,
        prompt=tuple(prompt),
        answer=tuple(again),
        drawn=record.tokens,
        sent_at=record.started_at,
        first_at=answer.first_at,
        ended_at=record.ended_at,
        reused=answer.cached,
    )


# ---- the account -----------------------------------------------------------------------------------------------------


def account(play: Sequence[Asked]) -> Account:
    """Of a whole play, to which nothing was known before."""
    could = [reusable(asked, play) for asked in play]
    return Account(
        prompt=sum(len(asked.prompt) for asked in play),
        reused=sum(asked.reused for asked in play),
        reusable=sum(could),
        fulfilled=sum(min(asked.reused, most) for asked, most in zip(play, could, strict=True)),
    )


def reusable(asked: Asked, play: Iterable[Asked]) -> int:
    """How much of a prompt need not be computed in any case: what it begins with in common with a text that was
    committed before it was sent, but for its last token, which heads a window, and for a block.
    """
    common = (shared(asked.prompt[:-1], text) for text in committed(play, asked.sent_at))
    return max(0, max(common, default=0) - BLOCK_TOKENS)


def committed(play: Iterable[Asked], at: float) -> Iterator[Sequence[int]]:
    """Texts that a server had computed at a time: whole ones that had ended, prompts of those that had got a token."""
    for asked in play:
        if asked.ended_at <= at:
            yield (*asked.prompt, *asked.answer)
        elif asked.first_at <= at:
            yield asked.prompt


def spared_too_much(play: Sequence[Asked]) -> list[Asked]:
    """Turns that were spared more than they begin with in common with anything that was sent before they got a token:
    no cache can know that.
    """
    return [
        asked
        for asked in play
        if asked.reused
        > max(
            (
                shared(asked.prompt[:-1], (*other.prompt, *other.answer))
                for other in play
                if other is not asked and other.sent_at < asked.first_at
            ),
            default=0,
        )
    ]


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    most = min(len(left), len(right))
    differing = (place for place in range(most) if left[place] != right[place])
    return next(differing, most)


def told_of(plays: Sequence[Sequence[Asked]]) -> Iterator[str]:
    """What several plays came to besides, for people."""
    accounts, turns = [account(turns) for turns in plays], [asked for turns in plays for asked in turns]
    asked, reused = sum(each.prompt for each in accounts), sum(each.reused for each in accounts)
    beyond = reused - sum(each.fulfilled for each in accounts)
    yield (
        f"traffic: {reused / asked:.3f} of {asked} prompt tokens reused; {beyond} of those could not be counted on "
        "(from lanes served at the same time, or of the block in which texts part)"
    )
    for name, later in (("first", False), ("later", True)):
        times = [each.first_at - each.sent_at for each in turns if (each.turn > 0) is later]
        halves = [(percentile(times, share) or 0.0) * 1e3 for share in (0.5, 0.9)]
        yield f"traffic: {name} turns' time to first token p50 {halves[0]:.0f} ms, p90 {halves[1]:.0f} ms"
    other = sum(len(each.answer) != each.drawn for each in turns)
    yield f"traffic: {other} of {len(turns)} answers encoded again have another count of tokens than the model drew"
