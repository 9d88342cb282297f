"""Many requests through the real loop and a tiny or real model, and what each of them must get: alone, in mlx-lm."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx_lm.generate import generate_step

from backends.base import Blocks, Flight, Masks, MemoryUse, ModelInfo
from backends.mlx.backend import MLXBackend, MLXFlight
from backends.mlx.build import paths, prepare
from backends.mlx.runtime import load_blas, set_blas_threads
from backends.mlx.verify import Forward, PackedForward, PaddedForward
from backends.noise import gumbel, row_key, token_hash
from engine.config import EngineConfig
from engine.loop import Loop
from engine.messages import Message, Submit
from engine.prefix import PrefixCache
from scheduler.admission import LaneMemory
from scheduler.draft import Draft, DraftAsk, DraftSource
from scheduler.events import Finished, TokenLogprob, Tokens
from scheduler.pace import Headlong
from scheduler.request import Request, Sampling
from scheduler.round import Window
from scheduler.stats import Stats
from tests.backends.mlx.windows import GREEDY

MOST_STEPS = 2000
NEAR_TIE = 1e-3
"""Two scores this close may come out either way (float32; the shape of a product moves them)."""


# ---- what a request must get ---------------------------------------------------------------------------------------


class Solo(msgspec.Struct, frozen=True):
    """What mlx-lm generates for one request alone, and by how much each token led the second best."""

    tokens: tuple[int, ...]
    leads: tuple[float, ...]


def solo(model: nn.Module, request: Request) -> Solo:
    """mlx-lm's own generation with its own cache; drawn by numpy, with the keyed noise, where the request is warm."""
    leads: list[float] = []

    def sample(logprobs: mx.array) -> mx.array:
        scores = _scores(np.array(logprobs[0]), request.sampling, len(request.prompt) + len(leads))
        second, best = np.sort(scores)[-2:]
        leads.append(float(best - second))
        return mx.array([int(scores.argmax())])

    steps = generate_step(mx.array(request.prompt), model, max_tokens=request.max_tokens, sampler=sample)
    tokens = tuple(int(token) for token, _ in steps)
    return Solo(tokens, tuple(leads[: len(tokens)]))


def _scores(logprobs: np.ndarray, sampling: Sampling, position: int) -> np.ndarray:
    if sampling.temperature == 0:
        return logprobs
    key = row_key(sampling.seed, sampling.choice, position)
    noise = gumbel(token_hash(key, np.arange(len(logprobs), dtype=np.uint32)))
    return logprobs / np.float32(sampling.temperature) + noise


class Agreement:
    """Counts requests that were answered as alone, and the near-ties that excuse a difference. Written by `check`."""

    def __init__(self) -> None:
        self.requests = 0
        self.ties: list[str] = []

    def check(self, request: Request, tokens: Sequence[int], alone: Solo) -> None:
        """Fail unless the tokens are those of the solo run, or first differ from them at a near-tie."""
        self.requests += 1
        if tuple(tokens) == alone.tokens:
            return
        differing = [place for place, pair in enumerate(zip(tokens, alone.tokens, strict=False)) if pair[0] != pair[1]]
        assert differing, f"{request.request_id}: {len(tokens)} tokens instead of {len(alone.tokens)}"
        first = differing[0]
        told = f"{request.request_id}: token {first} is {tokens[first]}, alone {alone.tokens[first]}"
        assert alone.leads[first] <= NEAR_TIE, f"{told}, which leads by {alone.leads[first]:.3g}"
        self.ties.append(f"{told}, a near-tie")

    def close(self) -> None:
        """Print the count; more near-ties than 0.1% of the requests are a failure."""
        print(f"{self.requests} requests, {len(self.ties)} near-ties {self.ties}")  # noqa: T201
        assert 1000 * len(self.ties) <= self.requests, self.ties


# ---- the loop that serves them -------------------------------------------------------------------------------------


class CheckedDrafts:
    """A drafter whose every draft is checked. The executor takes a source that raises for one that failed, and goes on
    without it: what was wrong is told in the end. Written by the executor.
    """

    name = "drafter"
    costly = True

    def __init__(self, drafter: DraftSource, check: Callable[[DraftAsk, Draft], None]) -> None:
        """`check` fails for a wrong draft."""
        self._drafter = drafter
        self._check = check
        self.drafts = 0
        """How many were checked that are no empty ones."""
        self.wrong: list[AssertionError] = []

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """What the drafter does."""
        drafts = self._drafter.propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            try:
                self._check(ask, draft)
            except AssertionError as error:
                self.wrong.append(error)
            self.drafts += bool(draft.tokens)
        return drafts

    def forget(self, request_id: str) -> None:
        """The lane left."""
        self._drafter.forget(request_id)


class OracleDrafts:
    """Drafts that are right for a chosen number of tokens.

    `plan(lane, turn)` gives how many tokens to draft and how many of them are right, for the lane's place among
    `answers` and the number of proposals so far. Written by the executor.
    """

    name = "oracle"
    costly = False

    def __init__(
        self, answers: Mapping[str, Sequence[int]], vocabulary: int, plan: Callable[[int, int], tuple[int, int]]
    ) -> None:
        self._answers = answers
        self._lanes = {request_id: lane for lane, request_id in enumerate(answers)}
        self._vocabulary = vocabulary
        self._plan = plan
        self._turns = 0

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """Right tokens, then wrong ones."""
        drafts = [self._draft(ask) for ask in asks]
        self._turns += 1
        return [Draft(tokens, (0,) * len(tokens)) for tokens in drafts]

    def _draft(self, ask: DraftAsk) -> tuple[int, ...]:
        drafted, right = self._plan(self._lanes[ask.request_id], self._turns)
        coming = self._answers[ask.request_id][len(ask.tokens) :][: min(drafted, ask.budget)]
        return tuple(
            token if place < right else (token + 1 + place) % self._vocabulary for place, token in enumerate(coming)
        )

    def forget(self, request_id: str) -> None:
        """Nothing is kept per lane."""


class Played(msgspec.Struct, frozen=True):
    """One round as the backend saw it: its windows with their drafts, and what each slot kept."""

    windows: tuple[Window, ...]
    kept: dict[int, int]

    @property
    def ahead(self) -> bool:
        return any(window.carried for window in self.windows)

    def accepted(self, window: Window) -> int:
        return self.kept[window.slot] - window.start - window.real


class RecordingBackend:
    """An MLX backend that writes its rounds down. Written by the executor."""

    def __init__(self, backend: MLXBackend) -> None:
        self._backend = backend
        self._launched: list[tuple[Window, ...]] = []
        self.rounds: list[Played] = []

    @property
    def info(self) -> ModelInfo:
        return self._backend.info

    @property
    def blocks(self) -> Blocks | None:
        return self._backend.blocks

    @property
    def drafters(self) -> Sequence[DraftSource]:
        return self._backend.drafters

    def verify(self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None) -> MLXFlight:
        self._launched.append(tuple(windows))
        return self._backend.verify(windows, after, masks)

    @property
    def memory(self) -> LaneMemory:
        return self._backend.memory

    def use(self) -> MemoryUse:
        return self._backend.use()

    def rest(self) -> None:
        self._backend.rest()

    def keep(self, kept: Mapping[int, int]) -> dict[int, int]:
        cached = self._backend.keep(kept)
        self.rounds.append(Played(self._launched[len(self.rounds)], cached))
        return cached

    def release(self, slot: int) -> None:
        self._backend.release(slot)

    def reset(self) -> None:
        self._backend.reset()


class Arrival(msgspec.Struct, frozen=True):
    """A message that comes before the loop's step number `step`."""

    step: int
    message: Message


class Served(msgspec.Struct, frozen=True):
    """Everything that came of a run, by request."""

    tokens: dict[str, tuple[int, ...]]
    finished: dict[str, Finished]
    rounds: tuple[Played, ...]
    stats: Stats
    logprobs: dict[str, tuple[TokenLogprob, ...]] = {}

    @property
    def drafted(self) -> int:
        """Drafted tokens that were verified."""
        return sum(sum(count.drafted) for ended in self.finished.values() for count in ended.usage.drafts)

    @property
    def accepted(self) -> int:
        """Those of them that were right."""
        return sum(sum(count.accepted) for ended in self.finished.values() for count in ended.usage.drafts)


def serve(
    forward: Forward,
    arrivals: Iterable[Arrival],
    config: EngineConfig,
    sources: Sequence[DraftSource] = (),
    prefix: PrefixCache | None = None,
) -> Served:
    """As `serve_with` a backend over a forward, which is left without lanes."""
    info = msgspec.structs.replace(INFO, cuttable=forward.cuttable)
    served = serve_with(MLXBackend(info, forward), arrivals, config, sources, prefix)
    assert forward.buffers() == [], "lanes left behind"
    return served


def serve_with(
    mlx: MLXBackend,
    arrivals: Iterable[Arrival],
    config: EngineConfig,
    sources: Sequence[DraftSource] = (),
    prefix: PrefixCache | None = None,
) -> Served:
    """Run the loop until all mail is read and all requests have ended; what the backend drafts itself is drafted."""
    backend = RecordingBackend(mlx)
    pending = sorted(arrivals, key=lambda arrival: arrival.step)
    steps = 0

    def mailbox() -> list[Message]:
        due = [arrival.message for arrival in pending if arrival.step <= steps]
        del pending[: len(due)]
        return due

    loop = Loop(
        backend,
        config,
        sources=sources,
        mailbox=mailbox,
        clock=lambda: float(steps),
        pace=Headlong(),
        prefix=prefix,
    )
    tokens: dict[str, tuple[int, ...]] = {}
    logprobs: dict[str, tuple[TokenLogprob, ...]] = {}
    finished: dict[str, Finished] = {}
    while pending or not loop.idle:
        for event in loop.step():
            assert event.request_id not in finished, "an event after the last"
            if isinstance(event, Tokens):
                tokens[event.request_id] = tokens.get(event.request_id, ()) + event.tokens
                logprobs[event.request_id] = logprobs.get(event.request_id, ()) + event.logprobs
            else:
                finished[event.request_id] = event
        steps += 1
        assert steps < MOST_STEPS, "the loop makes no progress"
    return Served(tokens, finished, tuple(backend.rounds), loop.stats(), logprobs)


def submissions(requests: Iterable[Request], *, every: int = 0) -> list[Arrival]:
    """The requests one after another, `every` steps apart."""
    return [Arrival(place * every, Submit(request)) for place, request in enumerate(requests)]


INFO = ModelInfo("tiny", None, 1 << 20, 8192, frozenset(), {}, "test", 0)


# ---- forwards --------------------------------------------------------------------------------------------------------


class Paths(msgspec.Struct, frozen=True):
    """A model with the seams installed, and both forwards over it."""

    model: nn.Module
    packed: PackedForward
    padded: PaddedForward

    def __getitem__(self, name: str) -> Forward:
        return {"packed": self.packed, "padded": self.padded}[name]


def both_paths(model: nn.Module) -> Paths:
    """Both forwards of a model, by mlx's own attention; nothing is checked."""
    packed, padded = paths(model, prepare(model), attention=mx.fast.scaled_dot_product_attention)
    assert isinstance(packed, PackedForward)
    assert isinstance(padded, PaddedForward)
    return Paths(model, packed, padded)


def prompt_of(seed: int, length: int, vocabulary: int) -> tuple[int, ...]:
    """Random tokens, the same for the same arguments."""
    return tuple(np.random.default_rng(seed).integers(1, vocabulary, length).tolist())


def greedy(request_id: str, prompt: Sequence[int], max_tokens: int) -> Request:
    return Request(request_id, tuple(prompt), max_tokens, GREEDY)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Products on one thread: several wait for each other, ten times as long where other work keeps the cores."""
    blas = load_blas("auto")
    if blas.threads is None:
        yield
        return
    set_blas_threads(1)
    try:
        yield
    finally:
        set_blas_threads(blas.threads)
