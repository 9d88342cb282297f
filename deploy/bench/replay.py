"""`replay`: plays recorded texts again under other ways of drafting, without a model, and says how fast each is.

The engine's own loop, scheduler and draft sources run over a backend that answers with the recorded tokens and whose
clock goes on by what a round of that shape took when it was recorded. Deterministic: the same recording gives the same
numbers.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.table import Table

from backends.base import Blocks, Flight, Masks, ModelInfo
from backends.fake import FakeMemory
from deploy.bench.options import Json, say
from deploy.bench.policies import FixedDepth, Oracle
from deploy.bench.recording import LaneRecord, RecordedCosts, Recording, RecordingError, read_recording
from deploy.bench.report import new_table, show
from engine.config import EngineConfig
from engine.loop import Loop
from engine.messages import Message, Submit
from scheduler.admission import LaneMemory
from scheduler.cost import RoundShape
from scheduler.draft import DraftSource
from scheduler.events import Finished
from scheduler.pace import Pace, Planner
from scheduler.prediction import PredictionDrafts
from scheduler.request import Request, Sampling
from scheduler.round import Drawn, Window, shape_of
from scheduler.suffix import HISTORY_BYTES, SuffixDrafts

DEPTHS = (0, 2, 4, 8)
OFF = "fixed 0"
"""The policy that the others are measured against."""
_BEHIND = 0
"""Drawn behind the end of a recorded output, where nothing is delivered."""


class RoundPlayed(msgspec.Struct, frozen=True):
    """One round of a replay."""

    shape: RoundShape
    lanes: int
    """How many decoded."""
    drafted: int
    """Rows of it that were drafts."""
    ended_at: float
    """Seconds from the first submission."""


class Played(msgspec.Struct, frozen=True):
    """A replay under one policy."""

    policy: str
    tokens: int
    seconds: float
    rounds: tuple[RoundPlayed, ...]
    accepted: int

    @property
    def tokens_per_s(self) -> float:
        """From the first submission to the last end."""
        return self.tokens / self.seconds

    @property
    def drafted(self) -> int:
        """Draft rows of all rounds."""
        return sum(each.drafted for each in self.rounds)


class ReplayBackend:
    """Implements `backends.base.Backend`: draws what was recorded. Its `now` is the replay's clock, in seconds."""

    def __init__(self, lanes: Mapping[str, LaneRecord], costs: RecordedCosts) -> None:
        """`lanes` by request id."""
        self._texts = {name: (*lane.prompt, *lane.output) for name, lane in lanes.items()}
        self._costs = costs
        self.blocks: Blocks | None = None
        self.drafters: Sequence[DraftSource] = ()
        self.memory: LaneMemory = FakeMemory()
        vocabulary = 1 + max(max(text) for text in self._texts.values())
        self.info = ModelInfo("replay", None, vocabulary, 1 << 20, frozenset(), {}, "replay", 0)
        self.now = 0.0
        self.rounds: list[RoundPlayed] = []

    def comes(self, request_id: str, cached: int) -> Sequence[int]:
        """What is drawn behind a lane's last token, which stands at position `cached`."""
        return self._texts[request_id][cached + 1 :]

    def verify(self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None) -> "_Flight":  # noqa: ARG002
        """Draw at once; the time passes when it is read."""
        return _Flight(self, windows, [self._draw(window) for window in windows])

    def _draw(self, window: Window) -> Drawn:
        if not window.samples:
            return Drawn()
        count = 1 + len(window.draft)
        first = window.start + window.real
        tokens = self._texts[window.request_id][first : first + count]
        return Drawn((*tokens, *[_BEHIND] * (count - len(tokens))))

    def passed(self, windows: Sequence[Window]) -> None:
        """A round of these windows has been waited for."""
        shape = shape_of(windows)
        self.now += self._costs.seconds(shape)
        lanes = sum(window.samples for window in windows)
        drafted = sum(len(window.draft) for window in windows)
        self.rounds.append(RoundPlayed(shape, lanes, drafted, self.now))

    def keep(self, kept: Mapping[int, int]) -> dict[int, int]:
        """Any length can be kept."""
        return dict(kept)

    def release(self, slot: int) -> None:
        """Nothing is held."""

    def reset(self) -> None:
        """Nothing is held."""

    def use(self) -> None:
        """Nothing is measured."""

    def rest(self) -> None:
        """Nothing is held."""


class _Flight:
    def __init__(self, backend: ReplayBackend, windows: Sequence[Window], drawn: list[Drawn]) -> None:
        self._backend = backend
        self._windows = windows
        self._drawn = drawn

    def read(self) -> list[Drawn]:
        """Wait for it."""
        self._backend.passed(self._windows)
        return self._drawn


PlannerOf = Callable[[ReplayBackend], Planner]


P = TypeVar("P", bound=Planner)


def warmed(planner: P, recording: Recording) -> P:
    """The planner when it has seen what rounds cost, as one has behind a warm-up, and nothing of the texts."""
    for record in recording.rounds:
        if not record.served:
            planner.timed(record.shape, record.seconds)
    return planner


def policies(recording: Recording, costs: RecordedCosts) -> dict[str, PlannerOf]:
    """By name, how to make each planner."""

    def fixed(depth: int) -> PlannerOf:
        return lambda _backend: warmed(FixedDepth(depth), recording)

    return {
        **{f"fixed {depth}": fixed(depth) for depth in DEPTHS},
        "pace": lambda _backend: warmed(Pace(), recording),
        "oracle": lambda backend: warmed(Oracle(backend.comes, costs), recording),
    }


def sources_of(history_bytes: int = HISTORY_BYTES) -> tuple[DraftSource, ...]:
    """What a server drafts from."""
    return PredictionDrafts(), SuffixDrafts(history_bytes)


def play(
    recording: Recording,
    costs: RecordedCosts,
    name: str,
    planner_of: PlannerOf,
    *,
    sources: Sequence[DraftSource] | None = None,
    clients: int | None = None,
    draft_tokens: int = 8,
) -> Played:
    """Serve all lanes again, `clients` at a time (by default as many as were recorded), under one policy."""
    names = {str(place): lane for place, lane in enumerate(recording.lanes)}
    backend = ReplayBackend(names, costs)
    mail: deque[Message] = deque()
    at_a_time = clients or recording.clients
    loop = Loop(
        backend,
        EngineConfig(max_lanes=at_a_time, round_rows=max(256, 2 * at_a_time), draft_tokens=draft_tokens),
        sources=sources_of() if sources is None else sources,
        mailbox=lambda: [mail.popleft() for _ in range(len(mail))],
        clock=lambda: backend.now,
        pace=planner_of(backend),
    )
    waiting = deque(_request(request_id, lane) for request_id, lane in names.items())
    mail.extend(Submit(waiting.popleft()) for _ in range(min(at_a_time, len(waiting))))
    tokens = accepted = 0
    while mail or not loop.idle:
        for event in loop.step():
            if isinstance(event, Finished):
                tokens += event.usage.completion_tokens
                accepted += sum(sum(count.accepted) for count in event.usage.drafts)
                if waiting:
                    mail.append(Submit(waiting.popleft()))
    return Played(name, tokens, backend.now, tuple(backend.rounds), accepted)


def _request(request_id: str, lane: LaneRecord) -> Request:
    """To be answered with the recorded output, all of it."""
    return Request(
        request_id,
        lane.prompt,
        len(lane.output),
        Sampling(0.0),
        ignore_eos=True,
        expected=lane.expected,
        draft_sources=None if lane.sources is None else frozenset(lane.sources),
    )


def replay(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `record` wrote.")],
    clients: Annotated[int | None, typer.Option(min=1, help="How many at a time; as recorded, if absent.")] = None,
    json: Json = False,
) -> None:
    """Compare ways of drafting on recorded rounds, without a model."""
    try:
        recording = read_recording(file)
    except RecordingError as error:
        say(f"replay: {error}")
        raise typer.Exit(2) from None
    costs = RecordedCosts(recording.rounds)
    played = [
        play(recording, costs, name, planner_of, clients=clients)
        for name, planner_of in policies(recording, costs).items()
    ]
    off = next(each for each in played if each.policy == OFF)
    facts = [
        {
            "policy": each.policy,
            "tokens": each.tokens,
            "tokens_per_s": each.tokens_per_s,
            "ratio": each.tokens_per_s / off.tokens_per_s,
            "rounds": len(each.rounds),
            "drafted": each.drafted,
            "accepted": each.accepted,
        }
        for each in played
    ]
    show([_table(file.name, played, off)], [], facts, as_json=json)


def _table(title: str, played: Sequence[Played], off: Played) -> Table:
    columns = ("policy", "tokens/s", "over drafting off", "rounds", "tokens", "drafted", "accepted")
    rows = new_table(f"{title}, by recorded costs", columns)
    for each in played:
        rows.add_row(
            each.policy,
            f"{each.tokens_per_s:.1f}",
            f"{each.tokens_per_s / off.tokens_per_s:.3f}",
            *(str(count) for count in (len(each.rounds), each.tokens, each.drafted, each.accepted)),
        )
    return rows
