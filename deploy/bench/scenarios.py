"""The scenarios of drafting: what is asked, by how many at a time, and how much faster drafts must make it.

A rate is that of decoding: of a lane, what came behind its first token by the time that it took, so that neither a
lane's own prefill nor its wait counts. Where drafts should not matter the bound says that they do no harm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deploy.bench.client import Run
from deploy.bench.pairs import Claim
from deploy.bench.prompts import (
    Prompt,
    agent_prompts,
    copying_prompts,
    editing_prompts,
    mixed_prompts,
    ordinary_prompts,
    roleplay_prompts,
)
from deploy.bench.report import summarise

_COPYING_FLOORS: Mapping[int, float] = {1: 1.8, 4: 1.8, 8: 1.5}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of work. The levels of its first claim are those that it is played at."""

    name: str
    prompts: Callable[[], tuple[Prompt, ...]]
    claims: tuple[Claim, ...]
    max_tokens: int
    per_client: int = 1
    """Requests of each client in a run."""
    ignore_eos: bool = True
    """Whether answers are made equally long."""

    @property
    def levels(self) -> tuple[int, ...]:
        """How many clients at a time."""
        return tuple(self.claims[0].floors)


def _decoding(run: Run) -> float:
    """Of all lanes together, from the first token of all to the last one."""
    return summarise(run).decode_per_s


def lane_rate(run: Run, name: str = "") -> float:
    """Tokens a second of one lane while it decodes, over all requests whose name begins so; 0 if there are none."""
    spans = [
        (record.decoded, record.last_at - record.first_at)
        for record in run.records
        if record.error is None and record.first_at is not None and record.last_at is not None
        if record.prompt.startswith(name)
    ]
    seconds = sum(span for _, span in spans)
    return sum(decoded for decoded, _ in spans) / seconds if seconds > 0 else 0.0


def _ordinary() -> tuple[Prompt, ...]:
    """Parts to play among writing, reasoning and questions."""
    roles = roleplay_prompts()
    asked: list[Prompt] = []
    for place, prompt in enumerate(ordinary_prompts()):
        asked.append(prompt)
        if place % 3 == 2 and place // 3 < len(roles):
            asked.append(roles[place // 3])
    return tuple(asked)


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "ordinary",
        _ordinary,
        (Claim("ordinary: a lane's decode rate over no drafts", lane_rate, {1: 1.15, 4: 1.1, 8: 0.98}),),
        max_tokens=64,
    ),
    Scenario(
        "copying",
        copying_prompts,
        (Claim("copying: a lane's decode rate over no drafts", lane_rate, _COPYING_FLOORS),),
        max_tokens=88,
    ),
    Scenario(
        "editing",
        editing_prompts,
        (Claim("editing with a prediction: a lane's decode rate over no drafts", lane_rate, _COPYING_FLOORS),),
        max_tokens=88,
    ),
    Scenario(
        "mixed",
        mixed_prompts,
        (
            Claim("half copying, half ordinary: all lanes' decode rate over no drafts", _decoding, {8: 1.2}),
            Claim(
                "half copying, half ordinary: an ordinary lane's decode rate over no drafts",
                lambda run: lane_rate(run, "ordinary"),
                {8: 0.95},
            ),
        ),
        max_tokens=88,
    ),
    Scenario(
        "agents",
        agent_prompts,
        (Claim("tasks of one shape: a lane's decode rate over no drafts", lane_rate, {4: 1.2}),),
        max_tokens=64,
        per_client=4,
        ignore_eos=False,
    ),
)


def scenario_named(name: str) -> Scenario:
    """Raises KeyError for a name that none has."""
    return {scenario.name: scenario for scenario in SCENARIOS}[name]
