"""The drafter that reads its target drafts what its definition says of the kept text alone, whatever became of its last
drafts and whoever drafts beside it; and what it drafts changes no answer.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.mlx.backend import MLXBackend
from backends.mlx.build import paths, prepare
from backends.mlx.caches.buffers import LayerShape
from backends.mlx.caches.packed import PackedCache
from backends.mlx.caches.sight import Sight
from backends.mlx.drafts.eagle import Eagle, EagleNetwork, EagleShape, parameters_of
from backends.mlx.drafts.reading import MOST_UNREAD, ReadingDrafter, ReadingNetwork
from backends.mlx.drafts.target import Borrowed, BorrowError, borrow
from backends.mlx.features import Features
from backends.mlx.seam import install_head
from backends.mlx.taps import Tap, Taps
from backends.mlx.verify import Forward
from engine.config import EngineConfig
from scheduler.draft import Draft, DraftAsk
from scheduler.request import Request, Sampling
from tests.backends.draws import samplings
from tests.backends.mlx.architectures import tiny_model
from tests.backends.mlx.random_models import VOCABULARY, random_model
from tests.backends.mlx.reading_reference import Borrowings, DenseDrafter, WholeTexts
from tests.backends.mlx.serving import (
    INFO,
    Served,
    both_paths,
    prompt_of,
    serve,
    serve_with,
    submissions,
)
from tests.backends.mlx.windows import GREEDY, chunk, decode

pytestmark = pytest.mark.usefixtures("calm")

each_path = pytest.mark.parametrize("path", ["packed", "padded"])
SEEN = 20
"""How many positions back the drafter sees."""
SHAPE = EagleShape(
    dims=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, taps=(0, "head", 1), window=SEEN, rope_base=500.0
)
IDS = np.sort(np.random.default_rng(4).permutation(VOCABULARY)[:80]).astype(np.uint32)
WARM = Sampling(1.0, seed=5)
ATTENTION = mx.fast.scaled_dot_product_attention


# ---- a target, its drafter, and the oracle ---------------------------------------------------------------------------


def random_target() -> nn.Module:
    return random_model("llama", seed=1)


class Tapped(msgspec.Struct, frozen=True):
    """A target with all that a drafter needs of it."""

    borrowed: Borrowed
    forwards: Mapping[str, Forward]


@cache
def tapped() -> Tapped:
    model = random_target()
    head = install_head(model)
    packed, padded = paths(model, prepare(model), attention=ATTENTION, head=head)
    for forward in (packed, padded):
        forward.taps = Taps(model, head, SHAPE.taps)
    return Tapped(borrow(model), {"packed": packed, "padded": padded})


def random_eagle(seed: int = 3) -> Eagle:
    """Loud enough to say something; its norms are no ones."""
    mx.random.seed(seed)
    network = Eagle(SHAPE)

    def louder(path: str, weight: mx.array) -> mx.array:
        if weight.ndim < 2:
            return mx.random.uniform(0.5, 1.5, weight.shape)
        return weight * (4.0 if "attention" in path else 2.0)

    network.load_weights([(path, louder(path, weight)) for path, weight in parameters_of(network).items()])
    mx.eval(parameters_of(network))
    return network


@cache
def whole_texts() -> WholeTexts:
    return WholeTexts(random_target())


def definition(ids: np.ndarray) -> DenseDrafter:
    """Of the drafter that drafts these tokens."""
    target = random_target()
    embeddings, head = (np.array(part.weight).astype(float) for part in (target.model.embed_tokens, target.lm_head))
    return DenseDrafter(random_eagle(), SHAPE, Borrowings(embeddings, head, ids))


@cache
def oracle() -> DenseDrafter:
    return definition(IDS)


class Lane(msgspec.Struct, kw_only=True):
    """A request as the engine would keep it, and where the drafter must have begun with it."""

    name: str
    slot: int
    tokens: tuple[int, ...]
    sampling: Sampling = WARM
    prompt: int
    cached: int
    noted: int
    """Where its features begin; they end where its caches do."""
    first: int = 0
    """Where the drafter begins, once it was asked."""
    read: int | None = None
    """Up to where its features were read."""


class Table:
    """Lanes of a target, fed by hand. Its rounds cut drafts wherever they are told to."""

    def __init__(self, path: str = "packed", network: ReadingNetwork | None = None) -> None:
        forward = tapped().forwards[path]
        forward.reset()
        self.backend = MLXBackend(INFO, forward)
        self.features = self.backend.features = Features(MOST_UNREAD)
        self.drafter = ReadingDrafter(network or eagle_network(), self.features, ATTENTION)
        self._slots = 0

    def join(
        self,
        name: str,
        tokens: Sequence[int],
        sampling: Sampling = WARM,
        *,
        like: Lane | None = None,
        prompt: int | None = None,
    ) -> Lane:
        """Prefill all but the newest token; of what the lane has in common with another nothing is computed."""
        shared = 0 if like is None else min(like.cached, len(tokens) - 1)
        assert like is None or tuple(tokens[:shared]) == like.tokens[:shared]
        lane = Lane(
            name=name,
            slot=self._slots,
            tokens=tuple(tokens),
            sampling=sampling,
            prompt=len(tokens) if prompt is None else prompt,
            cached=shared,
            noted=shared,
        )
        self._slots += 1
        self.prefill(lane, like)
        return lane

    def prefill(self, lane: Lane, like: Lane | None = None) -> None:
        """What is not cached yet."""
        if lane.cached < len(lane.tokens) - 1:
            window = chunk(lane.slot, lane.tokens[lane.cached : -1], lane.cached)
            copies = None if like is None else like.slot
            self.backend.verify([msgspec.structs.replace(window, request_id=lane.name, copies=copies)]).read()
            self.backend.keep({lane.slot: window.end})
            lane.cached = window.end

    def leave(self, lane: Lane) -> None:
        self.drafter.forget(lane.name)
        self.backend.release(lane.slot)

    def round(self, *turns: tuple[Lane, Sequence[int], int, Sequence[int]]) -> None:
        """Verify each lane's draft, keep so many tokens of it, and go on with some others: the last of them is new, and
        those before it are fed too.
        """
        windows = []
        for lane, draft, _, _ in turns:
            window = decode(lane.slot, lane.tokens, draft)
            windows.append(msgspec.structs.replace(window, request_id=lane.name))
        self.backend.verify(windows).read()
        kept = {lane.slot: len(lane.tokens) + accepted for lane, _, accepted, _ in turns}
        self.backend.keep(kept)
        more = []
        for lane, draft, accepted, others in turns:
            lane.tokens = (*lane.tokens, *draft[:accepted], *others)
            lane.cached = kept[lane.slot]
            if len(others) > 1:
                window = chunk(lane.slot, lane.tokens[lane.cached : -1], lane.cached)
                more.append(msgspec.structs.replace(window, request_id=lane.name))
                lane.cached = window.end
        if more:
            self.backend.verify(more).read()
            self.backend.keep({window.slot: window.end for window in more})

    def propose(self, *lanes: Lane, budgets: Sequence[int] = (4,)) -> list[Draft]:
        """What is drafted for these lanes, which is checked."""
        asks = [ask_for(lane, budgets[place % len(budgets)]) for place, lane in enumerate(lanes)]
        drafts = self.drafter.propose(asks)
        for lane, ask, draft in zip(lanes, asks, drafts, strict=True):
            start = max(lane.noted, lane.cached - MOST_UNREAD)
            if lane.read is None or not start <= lane.read < lane.cached:
                lane.first = start
            lane.read = lane.cached
            check(draft, ask, lane.first)
        return drafts


def ask_for(lane: Lane, budget: int = 4) -> DraftAsk:
    return DraftAsk(lane.name, lane.tokens, lane.prompt, budget, sampling=lane.sampling)


def check(draft: Draft, ask: DraftAsk, first: int) -> None:
    """Fail unless it is what the definition says of a lane whose features are known from there on."""
    features = whole_texts().features(ask.tokens[:-1], SHAPE.taps)[first:]
    oracle().check(draft, ask, features)


def eagle_network(network: Eagle | None = None, ids: np.ndarray = IDS) -> EagleNetwork:
    return EagleNetwork(network or random_eagle(), SHAPE, tapped().borrowed, ids)


# ---- together and alone ----------------------------------------------------------------------------------------------

KINDS = {
    "greedy": GREEDY,
    "warm": WARM,
    "cool": Sampling(0.3, 2**63, 7),
    "few": Sampling(0.8, 1, top_k=20),
    "nucleus": Sampling(1.3, 2, top_p=0.9),
    "likely": Sampling(1.0, 3, min_p=0.1),
    "penalised": Sampling(1.0, 4, frequency_penalty=0.5, repetition_penalty=1.2),
    "present": Sampling(0.0, presence_penalty=3.0),
    "biased": Sampling(1.0, 6, logit_bias=((int(IDS[3]), 5.0), (int(IDS[40]), -100.0))),
    "biased greedily": Sampling(0.0, logit_bias=((int(IDS[9]), 100.0),)),
}


@each_path
@pytest.mark.parametrize("kinds", [["greedy", "warm", "cool"], ["warm", "biased", "biased greedily"], [*KINDS]])
def test_all_lanes_together_draft_what_each_drafts_alone(kinds: Sequence[str], path: str) -> None:
    """Ragged prompts, ragged budgets; lanes that need the host, and lanes that do not."""
    texts = {kind: prompt_of(30 + place, 2 + 9 * (7 * place % 10), VOCABULARY) for place, kind in enumerate(kinds)}
    budgets = [2 + place % 4 for place in range(len(kinds))]
    table = Table(path)
    together = table.propose(*(table.join(kind, texts[kind], KINDS[kind]) for kind in kinds), budgets=budgets)
    for kind, budget, draft in zip(kinds, budgets, together, strict=True):
        table = Table(path)
        assert table.propose(table.join(kind, texts[kind], KINDS[kind]), budgets=[budget]) == [draft]


def test_the_order_in_which_lanes_are_asked_for_is_nobodys() -> None:
    texts = [prompt_of(50 + lane, 3 + 7 * lane, VOCABULARY) for lane in range(4)]
    table = Table()
    forth = table.propose(*(table.join(str(lane), text) for lane, text in enumerate(texts)))
    table = Table()
    lanes = [table.join(str(lane), text) for lane, text in enumerate(texts)]
    assert table.propose(*lanes[::-1]) == forth[::-1]


def test_only_tokens_of_its_own_vocabulary_are_drafted_and_many_of_them() -> None:
    table = Table()
    lanes = [
        table.join(str(lane), prompt_of(60 + lane, 8, VOCABULARY), Sampling(2.0, lane, top_k=(0, 60)[lane % 2]))
        for lane in range(6)
    ]
    said = {token for draft in table.propose(*lanes, budgets=[8]) for token in draft.tokens}
    assert said <= set(IDS.tolist())
    assert len(said) > 20
    assert not {token for text in (lane.tokens for lane in lanes) for token in text} <= set(IDS.tolist())


def test_a_drafter_of_all_tokens() -> None:
    """Its columns are the tokens themselves."""
    every = np.arange(VOCABULARY, dtype=np.uint32)
    table = Table(network=eagle_network(ids=every))
    asks = [
        ask_for(table.join(kind, prompt_of(lane, 9, VOCABULARY), KINDS[kind]), 6)
        for lane, kind in enumerate(("greedy", "warm", "biased"))
    ]
    for ask, draft in zip(asks, table.drafter.propose(asks), strict=True):
        definition(every).check(draft, ask, whole_texts().features(ask.tokens[:-1], SHAPE.taps))


# ---- rollback --------------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(path=st.sampled_from(["packed", "padded"]), data=st.data())
def test_no_company_and_no_history_changes_a_draft(path: str, data: st.DataObject) -> None:
    """Lanes of all kinds of sampling; random budgets, acceptance and drafts of others; lanes that begin behind what a
    sibling computed, lanes that are not asked for.
    """
    table = Table(path)
    lanes: list[Lane] = []
    for turn in range(data.draw(st.integers(2, 6), "turns")):
        if len(lanes) < 4 and (not lanes or data.draw(st.booleans(), "joins")):
            lanes.append(newcomer(table, lanes, turn, data))
        if len(lanes) > 1 and data.draw(st.booleans(), "leaves"):
            table.leave(lanes.pop(data.draw(st.integers(0, len(lanes) - 1))))
        asked = [lane for lane in lanes if data.draw(st.integers(0, 3), "asked")]
        budgets = [data.draw(st.integers(1, 6), "budget") for _ in asked] or [1]
        proposed = table.propose(*asked, budgets=budgets)
        drafts = {lane.name: draft.tokens for lane, draft in zip(asked, proposed, strict=True)}
        played = []
        for lane in lanes:
            draft = drafts.get(lane.name) or tuple(data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=4)))
            accepted = data.draw(st.integers(0, len(draft)), "accepted")
            others = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3), "others")
            played.append((lane, draft, accepted, others))
        table.round(*played)
    table.propose(*lanes)
    for lane in lanes:
        table.leave(lane)
        table.leave(lane)
    assert table.drafter.store.arrays() == []


def newcomer(table: Table, lanes: Sequence[Lane], turn: int, data: st.DataObject) -> Lane:
    sampling = data.draw(samplings(VOCABULARY))
    own = prompt_of(turn, data.draw(st.sampled_from([2, 5, 30, 70]), "prompt"), VOCABULARY)
    if not lanes or not data.draw(st.booleans(), "shares"):
        return table.join(str(turn), own, sampling)
    sibling = lanes[0]
    return table.join(str(turn), (*sibling.tokens[: sibling.cached], *own), sampling, like=sibling)


@each_path
@pytest.mark.parametrize("sampling", [GREEDY, WARM, KINDS["nucleus"]])
def test_after_rejections_it_stands_where_a_drafter_stands_that_saw_the_kept_text_only(
    path: str, sampling: Sampling
) -> None:
    table = Table(path)
    lanes = [table.join(str(lane), prompt_of(70 + lane, 5 + 20 * lane, VOCABULARY), sampling) for lane in range(3)]
    for turn in range(4):
        drafts = table.propose(*lanes, budgets=[5])
        accepted = [(turn + lane) % 3 * 2 for lane in range(3)]
        table.round(
            *(
                (lane, (*draft.tokens[:kept], *(9, 8, 7, 6, 5)[kept:]), kept, (11 + turn,))
                for lane, draft, kept in zip(lanes, drafts, accepted, strict=True)
            )
        )
    stands = table.propose(*lanes)
    fresh = Table(path)
    again = [fresh.join(lane.name, lane.tokens, sampling, prompt=lane.prompt) for lane in lanes]
    assert fresh.propose(*again) == stands


def test_only_what_is_new_is_fed() -> None:
    """As many rows as the text went on by, then one for each further token."""
    network = Faulty(eagle_network())
    table = Table(network=network)
    lane = table.join("a", prompt_of(3, MOST_UNREAD, VOCABULARY))
    table.propose(lane)
    table.round((lane, (1, 2, 3, 4), 2, (9,)))
    table.propose(lane)
    table.round((lane, (), 0, (9, 10)))
    table.propose(lane)
    assert network.fed == [MOST_UNREAD - 1, 1, 1, 1, 3, 1, 1, 1, 2, 1, 1, 1]


# ---- lanes that begin late -------------------------------------------------------------------------------------------


def test_a_lane_whose_beginning_was_never_computed_here_begins_where_it_was() -> None:
    """What it has of a sibling has no features of its own; also where that is all but its newest tokens."""
    table = Table()
    text = prompt_of(7, 60, VOCABULARY)
    sibling = table.join("sibling", text)
    forty = table.join("forty", text[:41])
    late = [
        table.join("long", (*text[:40], *prompt_of(8, 30, VOCABULARY)), like=forty),
        table.join("short", (*text[:59], 5, 6), like=sibling),
    ]
    assert [lane.noted for lane in late] == [40, 59]
    for _ in range(3):
        drafts = table.propose(*late, sibling)
        table.round(*((lane, draft.tokens, 1, (3,)) for lane, draft in zip((*late, sibling), drafts, strict=True)))
    table.propose(*late, sibling)
    assert [lane.first for lane in late] == [40, 59]


def test_a_lane_that_nobody_asked_for_begins_anew_where_its_features_do() -> None:
    """Twice: before it was ever asked for, and behind what was read."""
    table = Table()
    other = table.join("other", prompt_of(1, 9, VOCABULARY))
    lane = table.join("a", prompt_of(9, MOST_UNREAD + 40, VOCABULARY))
    table.propose(lane, other, budgets=[1])
    assert lane.first == 39
    table.round((lane, (1, 2), 1, prompt_of(10, MOST_UNREAD - 1, VOCABULARY)))
    table.propose(lane, budgets=[2])
    assert lane.first == 39, "so many positions are just kept"
    table.round((lane, (1, 2), 1, prompt_of(11, MOST_UNREAD, VOCABULARY)))
    table.propose(lane, budgets=[2])
    assert lane.first == len(lane.tokens) - 1 - MOST_UNREAD
    table.round((lane, (1, 2), 2, (9,)), (other, (), 0, (7,)))
    table.propose(other, lane)


def test_past_its_sliding_window_nothing_is_seen() -> None:
    """Over many rounds, round its ring and round again, with rejected drafts in many places of it."""
    table = Table()
    lane = table.join("a", prompt_of(12, 15, VOCABULARY))
    for turn in range(20):
        (draft,) = table.propose(lane, budgets=[1 + 5 * turn % 9])
        table.round((lane, (*draft.tokens, 1, 2, 3, 4), turn % 5, (turn,)))
    assert len(lane.tokens) > 15 + Sight(window=SEEN).span


# ---- lanes that cannot be drafted for --------------------------------------------------------------------------------


def test_a_lane_without_features_or_with_too_few_has_no_draft_and_harms_nobody() -> None:
    """One that was never computed here, one in the midst of its prompt, one that nothing may be drafted for, one of a
    single token.
    """
    table = Table()
    fine = table.join("fine", prompt_of(13, 20, VOCABULARY))
    half = table.join("half", prompt_of(14, 20, VOCABULARY))
    longer = msgspec.structs.replace(ask_for(half), tokens=(*half.tokens, 5, 6))
    shorter = msgspec.structs.replace(ask_for(half), tokens=half.tokens[:-1])
    strangers = [DraftAsk("stranger", (1, 2, 3), 3, 4), DraftAsk("single", (1,), 1, 4)]
    none = msgspec.structs.replace(ask_for(half), budget=0)
    for other in (longer, shorter, none, *strangers):
        assert table.drafter.propose([other]) == [Draft()]
        drafts = table.drafter.propose([other, ask_for(fine), other])
        assert (drafts[0], drafts[2]) == (Draft(), Draft())
        check(drafts[1], ask_for(fine), 0)
        table.round((fine, drafts[1].tokens, 2, (4,)))
    table.propose(half, fine)


def test_a_lane_that_is_asked_for_again_before_it_went_on_has_no_draft_and_harms_nobody() -> None:
    table = Table()
    twice = table.join("twice", prompt_of(15, 20, VOCABULARY))
    other = table.join("other", prompt_of(16, 12, VOCABULARY))
    table.propose(twice)
    drafts = table.drafter.propose([ask_for(twice), ask_for(other)])
    assert drafts[0] == Draft()
    check(drafts[1], ask_for(other), 0)
    assert table.drafter.propose([ask_for(twice)]) == [Draft()]
    table.round((twice, (), 0, (3,)), (other, (), 0, (4,)))
    for lane, draft in zip((other, twice), table.drafter.propose([ask_for(other), ask_for(twice)]), strict=True):
        check(draft, ask_for(lane), 0)


def test_nobody_to_draft_for() -> None:
    assert Table().drafter.propose([]) == []


# ---- failures --------------------------------------------------------------------------------------------------------


class Faulty:
    """A network that writes down how many rows it computes, and fails when told to. Written by the drafter."""

    def __init__(self, network: ReadingNetwork) -> None:
        self._network = network
        self.fed: list[int] = []
        self.fail_after: int | None = None
        """So many forwards from now on one raises, with its keys cached."""

    @property
    def taps(self) -> tuple[Tap, ...]:
        return self._network.taps

    @property
    def module(self) -> nn.Module:
        return self._network.module

    @property
    def cached(self) -> tuple[LayerShape, Sight]:
        return self._network.cached

    @property
    def ids(self) -> mx.array:
        return self._network.ids

    @property
    def vocabulary(self) -> int:
        return self._network.vocabulary

    def read(self, features: mx.array) -> mx.array:
        return self._network.read(features)

    def output(self, tokens: mx.array, features: mx.array, cache: PackedCache) -> mx.array:
        self.fed.append(tokens.shape[0])
        output = self._network.output(tokens, features, cache)
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                self.fail_after = None
                raise MemoryError("no room")
        return output

    def logits(self, outputs: mx.array) -> mx.array:
        return self._network.logits(outputs)


@pytest.mark.parametrize("forwards", [0, 1, 3])
def test_a_call_that_fails_loses_the_lanes_and_the_next_one_is_right(forwards: int) -> None:
    """They begin anew where they stand: what had been read is not there any more."""
    network = Faulty(eagle_network())
    table = Table(network=network)
    kinds = ("warm", "penalised", "biased")
    lanes = [table.join(kind, prompt_of(20 + lane, 30, VOCABULARY), KINDS[kind]) for lane, kind in enumerate(kinds)]
    for turn in range(2):
        drafts = table.propose(*lanes)
        table.round(*((lane, draft.tokens, turn, (5,)) for lane, draft in zip(lanes, drafts, strict=True)))
    network.fail_after = forwards
    with pytest.raises(MemoryError):
        table.drafter.propose([ask_for(lane) for lane in lanes])
    assert table.drafter.store.arrays() == []
    for lane in lanes:
        assert table.drafter.propose([ask_for(lane)]) == [Draft()]
        lane.noted, lane.read = lane.cached, None
    for turn in range(2):
        table.round(*((lane, (1, 2, 3), turn, (6, 7)) for lane in lanes))
        table.propose(*lanes)


def test_after_the_target_lost_its_caches_lanes_are_drafted_for_again() -> None:
    """Their texts are fed again, whether they went on since or not; what was under way is never kept."""
    table = Table()
    lanes = [table.join(str(lane), prompt_of(27 + lane, 30, VOCABULARY)) for lane in range(2)]
    table.propose(*lanes)
    table.round((lanes[0], (1, 2, 3), 2, (6,)))
    table.backend.verify([decode(lane.slot, lane.tokens, (1, 2)) for lane in lanes]).read()
    table.backend.reset()
    assert table.drafter.propose([ask_for(lane) for lane in lanes]) == [Draft(), Draft()]
    for lane in lanes:
        lane.cached = lane.noted = 0
        table.prefill(lane)
    table.propose(*lanes)
    table.round(*((lane, (1, 2, 3), 1, (5,)) for lane in lanes))
    table.propose(*lanes)


def test_lanes_that_leave_give_all_back_and_may_come_again() -> None:
    table = Table()
    lanes = [table.join(kind, prompt_of(24, 30, VOCABULARY), KINDS[kind]) for kind in ("warm", "penalised")]
    table.propose(*lanes)
    for lane in lanes:
        table.leave(lane)
        table.drafter.forget(lane.name)
        assert table.features.of(lane.name) is None
    table.drafter.forget("stranger")
    assert table.drafter.store.arrays() == []
    again = [table.join(kind, prompt_of(25, 20, VOCABULARY), KINDS[kind]) for kind in ("warm", "penalised")]
    table.propose(*again)


# ---- through the loop ------------------------------------------------------------------------------------------------


class Answers(msgspec.Struct, frozen=True):
    """What a run gave, and what is left of it in the drafter."""

    run: Served
    features: Features
    drafter: ReadingDrafter


CONFIG = EngineConfig(max_lanes=3, round_rows=120, draft_tokens=4)


def served(requests: Sequence[Request], network: ReadingNetwork, path: str = "packed") -> Answers:
    """Serve them in the real loop, with the drafter among the backend's."""
    forward = tapped().forwards[path]
    forward.reset()
    backend = MLXBackend(INFO, forward)
    features = backend.features = Features(MOST_UNREAD)
    drafter = ReadingDrafter(network, features, ATTENTION)
    backend.drafters = (drafter,)
    return Answers(serve_with(backend, submissions(requests, every=3), CONFIG), features, drafter)


NARROW = tuple((int(token), 12.0) for token in IDS[10:13])
"""A bias that leaves few tokens to draw, so that many guesses come true."""
SERVED = {
    "greedy": GREEDY,
    "warm": WARM,
    "few": KINDS["few"],
    "penalised": KINDS["penalised"],
    "narrow": Sampling(1.0, 8, logit_bias=NARROW),
    "nucleus": Sampling(1.0, 9, top_p=0.9, logit_bias=NARROW),
}


def request_of(kind: str, place: int = 0) -> Request:
    prompt = prompt_of(200 + place, (5, 40, 17, 1, 60, 25)[place], VOCABULARY)
    return Request(kind, prompt, 10 + place, SERVED[kind])


REQUESTS = [request_of(kind, place) for place, kind in enumerate(SERVED)]


@cache
def plain_answers(path: str) -> dict[str, tuple[int, ...]]:
    """Of the target alone, with nothing tapped and nothing drafted."""
    alone = both_paths(random_target())[path]
    return serve(alone, submissions(REQUESTS, every=3), msgspec.structs.replace(CONFIG, draft_tokens=0)).tokens


@each_path
def test_drafts_change_no_answer(path: str) -> None:
    answers = served(REQUESTS, eagle_network(), path)
    assert answers.run.tokens == plain_answers(path)
    assert answers.run.drafted > 100
    assert 10 < answers.run.accepted < answers.run.drafted / 2, "some are right and some are wrong"
    assert answers.drafter.store.arrays() == []
    assert not any(answers.features.of(request.request_id) for request in REQUESTS)


def test_nothing_is_kept_of_lanes_that_left_while_a_round_was_under_way() -> None:
    """Nobody drafts, so that rounds are planned ahead; lanes end in one round while the next one holds them."""
    requests = []
    for place, kind in enumerate(("greedy", "warm", "narrow")):
        said = plain_answers("packed")[kind]
        stop = next(token for token in said[3 + 2 * place :] if token not in said[: 3 + 2 * place])
        ending = msgspec.structs.replace(request_of(kind), draft_tokens=0, stop_tokens=frozenset({stop}))
        requests.append(ending)
    answers = served(requests, eagle_network())
    assert sum(played.ahead for played in answers.run.rounds) > 5
    assert [each.request_id for each in requests if answers.features.of(each.request_id) is not None] == []


CORRUPTIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "nan": lambda weight: mx.full(weight.shape, mx.nan),
    "one nan": lambda weight: mx.concatenate([mx.array([mx.nan]), weight.reshape(-1)[1:]]).reshape(weight.shape),
    "infinite": lambda weight: mx.full(weight.shape, mx.inf),
    "zero": mx.zeros_like,
    "negative": mx.negative,
    "large": lambda weight: weight * 1e30,
    "small": lambda weight: weight * 1e-30,
}


@settings(max_examples=6)
@given(
    parts=st.lists(st.sampled_from(sorted(parameters_of(Eagle(SHAPE)))), min_size=1, max_size=3, unique=True),
    how=st.sampled_from(sorted(CORRUPTIONS)),
)
def test_a_broken_network_changes_drafts_and_no_answer(parts: list[str], how: str) -> None:
    network = random_eagle()
    weights = parameters_of(network)
    network.load_weights([(part, CORRUPTIONS[how](weights[part])) for part in parts], strict=False)
    answers = served(REQUESTS, eagle_network(network))
    assert answers.run.tokens == plain_answers("packed")
    assert answers.run.drafted > 0


# ---- what is borrowed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma4_text"])
def test_rows_of_the_head_give_what_the_target_says(name: str, bits: int | None) -> None:
    """Also where there are embeddings of other things: of positions, or one for each layer."""
    model = tiny_model(name)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits, class_predicate=lambda _, part: quantizable(part))
    head = install_head(model)
    borrowed = borrow(model)
    assert borrowed.embedding is (model.model.wte if name == "gpt2" else model.model.embed_tokens)
    head.noting = True
    logits = np.array(model(mx.array([prompt_of(1, 12, VOCABULARY)]))[0])
    assert head.noted is not None
    assert (borrowed.vocabulary, borrowed.dims) == (VOCABULARY, head.noted.shape[-1])
    found = np.array((head.noted @ borrowed.head_rows(IDS).T)[0])
    expected = logits[:, IDS]
    if name == "gemma4_text":  # its logits are capped
        found = np.tanh(found / 30) * 30
    assert np.abs(found - expected).max() <= 1e-3 * expected.std()


def quantizable(part: nn.Module) -> bool:
    """As mlx-lm does it."""
    return hasattr(part, "to_quantized") and part["weight"].shape[-1] % 32 == 0


def test_a_model_that_has_not_what_is_borrowed_is_refused() -> None:
    with pytest.raises(BorrowError, match="no embeddings"):
        borrow(nn.Linear(4, 4))
    model = tiny_model("phi")
    install_head(model)
    assert "bias" in model.lm_head.head
    with pytest.raises(BorrowError, match="no plain matrix"):
        borrow(model)
