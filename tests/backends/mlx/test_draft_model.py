"""The draft model drafts what it would draw alone with the target's noise, whatever became of its last drafts."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_map

from backends import reference
from backends.mlx.blocks import LaneBlocks
from backends.mlx.build import load_backend
from backends.mlx.caches.packed import PackedCache
from backends.mlx.drafts.model import CATCH_UP_ROWS, DraftModel, DraftModelFacts
from backends.mlx.load import LoadError
from backends.mlx.verify import Draws, Forward, Verified
from engine.config import EngineConfig
from engine.prefix import PrefixCache
from scheduler.draft import Draft, DraftAsk, DraftSource
from scheduler.request import DraftCount, Request, Sampling
from scheduler.round import Window
from tests.backends.draws import near_tie, samplings
from tests.backends.mlx.architectures import ARCHITECTURES
from tests.backends.mlx.random_models import VOCABULARY, random_model
from tests.backends.mlx.serving import Paths, Served, both_paths, prompt_of, serve, submissions
from tests.backends.mlx.tiny_models import write_folder, write_json
from tests.backends.mlx.windows import GREEDY

pytestmark = pytest.mark.usefixtures("calm")

each_path = pytest.mark.parametrize("path", ["packed", "padded"])
FACTS = DraftModelFacts(VOCABULARY, VOCABULARY, 2048)
WARM = Sampling(1.0, seed=5)


@cache
def plain_model() -> nn.Module:
    """Mlx-lm's own code, for the oracle."""
    return random_model("llama", seed=1)


@cache
def target_paths() -> Paths:
    return both_paths(random_model("llama", seed=1))


@cache
def draft_paths() -> Paths:
    """The same weights again, with lanes of their own."""
    return both_paths(random_model("llama", seed=1))


class Watched:
    """A forward that writes down what it is fed, and fails when told to. Written by the draft model."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.fed: list[tuple[Window, ...]] = []
        self.fail_after: int | None = None
        """So many runs from now on one raises, after it has been computed."""

    def run(self, windows: Sequence[Window], carried: Draws | None) -> Verified:
        self.fed.append(tuple(windows))
        verified = self._forward.run(windows, carried)
        if self.fail_after is not None:
            if self.fail_after == 0:
                self.fail_after = None
                raise MemoryError("no room")
            self.fail_after -= 1
        return verified

    def release(self, slot: int) -> None:
        self._forward.release(slot)

    def reset(self) -> None:
        self._forward.reset()

    def buffers(self) -> list[mx.array]:
        return self._forward.buffers()


@pytest.fixture
def watched() -> Iterator[Watched]:
    yield Watched(draft_paths().packed)
    draft_paths().packed.reset()


def drafter(path: str = "packed", facts: DraftModelFacts = FACTS) -> DraftModel:
    forward = draft_paths()[path]
    forward.reset()
    return DraftModel(forward, facts)


def asked(
    name: str, tokens: Sequence[int], budget: int = 4, sampling: Sampling = GREEDY, prompt: int | None = None
) -> DraftAsk:
    return DraftAsk(name, tuple(tokens), len(tokens) if prompt is None else prompt, budget, sampling=sampling)


# ---- the oracle: one token after the other, each from the whole text -------------------------------------------------


@cache
def logits_after(tokens: tuple[int, ...]) -> np.ndarray:
    return np.array(plain_model()(mx.array([tokens]))[0, -1])


def check(draft: Draft, ask: DraftAsk, length: int | None = None) -> None:
    """Fail unless every token is what the model draws behind those before it, near-ties apart."""
    assert len(draft.tokens) == (ask.budget if length is None else length)
    assert draft.marks == tuple(range(len(draft.tokens)))
    text = tuple(ask.tokens)
    for token in draft.tokens:
        raw = logits_after(text)
        expected, _ = reference.draw(raw, ask.sampling, len(text), history=text, prompt=ask.prompt)
        if token != expected:
            adjusted = reference.adjust(raw, ask.sampling, text, ask.prompt)
            assert near_tie(token, adjusted, ask.sampling, len(text)), (token, expected)
        text = (*text, token)


# ---- rollback --------------------------------------------------------------------------------------------------------


@each_path
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.1, seed=3), Sampling(0.9, 4, top_p=0.8)])
def test_after_every_mixture_of_acceptance_it_drafts_as_if_fed_only_what_was_kept(
    path: str, sampling: Sampling
) -> None:
    """Three lanes keep 0, 2 or all 4 of their drafts, each mixture, then one to three tokens that were not drafted; one
    outgrows a capacity class.
    """
    for mixture in product((0, 2, 4), repeat=3):
        model = drafter(path)
        texts = [prompt_of(lane, length, VOCABULARY) for lane, length in enumerate((251, 3, 4))]
        first = model.propose([asked(str(lane), text, 4, sampling) for lane, text in enumerate(texts)])
        asks = []
        for lane, accepted in enumerate(mixture):
            wrong = (first[lane].tokens[accepted] + 1) % VOCABULARY if accepted < 4 else 7
            text = (*texts[lane], *first[lane].tokens[:accepted], wrong, *(11, 12)[:lane])
            asks.append(asked(str(lane), text, 3, sampling, len(texts[lane])))
        for ask, draft in zip(asks, model.propose(asks), strict=True):
            check(draft, ask)


def test_what_was_kept_is_not_fed_again(watched: Watched) -> None:
    model = DraftModel(watched, FACTS)
    text = prompt_of(1, 20, VOCABULARY)
    for accepted in (0, 2, 4):
        (draft,) = model.propose([asked("a", text)])
        wrong = (draft.tokens[accepted] + 1) % VOCABULARY if accepted < 4 else 7
        text = (*text, *draft.tokens[:accepted], wrong)
    watched.fed.clear()
    model.propose([asked("a", text)])
    # all four were right, and the last of them had not been fed
    assert [[window.tokens for window in windows] for windows in watched.fed] == [[text[-2:]], [()], [()], [()]]


def test_being_asked_twice_and_having_drafted_all_that_came_changes_nothing() -> None:
    """Then the newest token is in the caches already: it is fed again, for its logits."""
    model = drafter()
    ask = asked("a", prompt_of(2, 12, VOCABULARY), 5, WARM)
    (draft,) = model.propose([ask])
    assert model.propose([ask]) == [draft]
    later = msgspec.structs.replace(ask, tokens=(*ask.tokens, *draft.tokens[:3]))
    assert model.propose([later])[0].tokens[:2] == draft.tokens[3:]


# ---- lanes join, leave, skip, and other sources draft ----------------------------------------------------------------


class Lane(msgspec.Struct):
    """A request as the engine would keep it."""

    name: str
    sampling: Sampling
    prompt: int
    tokens: tuple[int, ...]


@settings(max_examples=30)
@given(path=st.sampled_from(["packed", "padded"]), data=st.data())
def test_no_company_and_no_history_changes_a_draft(path: str, data: st.DataObject) -> None:
    """Lanes of all kinds of sampling, random budgets, random acceptance, rounds without them, other sources' tokens."""
    model = drafter(path)
    lanes: list[Lane] = []
    for turn in range(data.draw(st.integers(2, 6), "turns")):
        if len(lanes) < 4 and (not lanes or data.draw(st.booleans(), "joins")):
            prompt = prompt_of(turn, data.draw(st.sampled_from([1, 5, 30, 254]), "prompt"), VOCABULARY)
            lanes.append(Lane(str(turn), data.draw(samplings(VOCABULARY)), len(prompt), prompt))
        if len(lanes) > 1 and data.draw(st.booleans(), "leaves"):
            model.forget(lanes.pop(data.draw(st.integers(0, len(lanes) - 1))).name)
        present = [lane for lane in lanes if data.draw(st.integers(0, 3), "asked")]
        asks = [
            asked(lane.name, lane.tokens, data.draw(st.integers(1, 5), "budget"), lane.sampling, lane.prompt)
            for lane in present
        ]
        drafts = model.propose(asks)
        assert not asks or any(draft.tokens for draft in drafts)
        for lane, ask, draft in zip(present, asks, drafts, strict=True):
            check(draft, ask, ask.budget if draft.tokens else 0)
            accepted = data.draw(st.integers(0, len(draft.tokens)), "accepted")
            others = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3), "others")
            lane.tokens = (*lane.tokens, *draft.tokens[:accepted], *others)
        for lane in lanes:
            if lane not in present:
                lane.tokens = (*lane.tokens, *prompt_of(turn, 2, VOCABULARY))
    for lane in lanes:
        model.forget(lane.name)
        model.forget(lane.name)
    assert draft_paths()[path].buffers() == []


@each_path
def test_all_lanes_together_draft_what_each_drafts_alone(path: str) -> None:
    kinds = [GREEDY, WARM, Sampling(0.8, 1, top_k=20), Sampling(1.3, 2, top_p=0.9), Sampling(1.0, 3, min_p=0.1)]
    kinds += [Sampling(1.0, 4, frequency_penalty=0.5, repetition_penalty=1.2), Sampling(0.0, logit_bias=((9, 4.0),))]
    asks = [
        asked(str(lane), prompt_of(30 + lane, 3 + 9 * lane, VOCABULARY), 2 + lane, sampling)
        for lane, sampling in enumerate(kinds)
    ]
    together = drafter(path).propose(asks)
    assert together == [drafter(path).propose([ask])[0] for ask in asks]
    for ask, draft in zip(asks, together, strict=True):
        check(draft, ask)


def test_a_step_is_one_forward_and_lanes_with_smaller_budgets_drop_out(watched: Watched) -> None:
    model = DraftModel(watched, FACTS)
    budgets = (5, 1, 3)
    model.propose([asked(str(lane), prompt_of(lane, 6, VOCABULARY), each, WARM) for lane, each in enumerate(budgets)])
    assert [len(windows) for windows in watched.fed] == [3, 2, 2, 1, 1]
    assert [windows[0].carried for windows in watched.fed] == [False, True, True, True, True]


# ---- long prompts ----------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_fed_in_chunks_and_drafted_for_at_once_if_nobody_else_is(watched: Watched) -> None:
    model = DraftModel(watched, FACTS)
    ask = asked("long", prompt_of(3, 2 * CATCH_UP_ROWS + 30, VOCABULARY), 2, WARM)
    (draft,) = model.propose([ask])
    check(draft, ask)
    assert [windows[0].rows for windows in watched.fed] == [CATCH_UP_ROWS, CATCH_UP_ROWS, 30, 1]


def test_a_newcomer_does_not_hold_up_the_others(watched: Watched) -> None:
    """No forward is longer than the limit; the newcomer catches up over the calls, then drafts like anyone."""
    model = DraftModel(watched, FACTS)
    short = asked("short", prompt_of(4, 10, VOCABULARY), 3, WARM)
    model.propose([short])
    newcomer = asked("long", prompt_of(5, 2 * CATCH_UP_ROWS + 30, VOCABULARY), 3, WARM)
    watched.fed.clear()
    lengths = []
    for _ in range(3):
        ours, theirs = model.propose([short, newcomer])
        check(ours, short)
        check(theirs, newcomer, len(theirs.tokens))
        lengths.append(len(theirs.tokens))
    assert lengths == [0, 0, 3]
    assert max(sum(window.rows for window in windows) for windows in watched.fed) <= CATCH_UP_ROWS + 2
    assert len(watched.fed) == 9


def test_newcomers_share_the_rows_of_a_forward(watched: Watched) -> None:
    model = DraftModel(watched, FACTS)
    asks = [asked(str(lane), prompt_of(lane, 150, VOCABULARY), 2) for lane in range(4)]
    ready = []
    for _ in range(3):
        drafts = model.propose(asks)
        ready.append(sum(bool(draft.tokens) for draft in drafts))
    assert ready == [1, 3, 4]
    assert [sum(window.rows for window in windows) for windows in watched.fed[::2]] == [257, 259, 88]
    for ask, draft in zip(asks, drafts, strict=True):
        check(draft, ask)


def test_no_draft_reaches_beyond_the_context() -> None:
    model = drafter(facts=DraftModelFacts(VOCABULARY, VOCABULARY, 40))
    for length, room in ((36, 4), (38, 2), (39, 1), (40, 0), (90, 0)):
        ask = asked("a", prompt_of(6, 100, VOCABULARY)[:length], 6, WARM, 30)
        check(model.propose([ask])[0], ask, room)
    assert draft_paths().packed.buffers() == [], "a lane that has outgrown the context holds no seat"


# ---- vocabularies of other widths ------------------------------------------------------------------------------------


def test_only_tokens_of_the_target_are_drafted() -> None:
    """As many as there would be otherwise: the rest of the logits is left out of the draw."""
    model = drafter(facts=DraftModelFacts(VOCABULARY, 50, 2048))
    text = prompt_of(7, 12, 50)
    (draft,) = model.propose([asked("a", text, 8, Sampling(3.0, 1))])
    assert len(draft.tokens) == 8
    assert max(draft.tokens) < 50
    (free,) = drafter().propose([asked("a", text, 8, Sampling(3.0, 1))])
    assert max(free.tokens) >= 50


def test_a_lane_with_a_token_that_the_draft_model_cannot_be_fed_is_not_drafted_for() -> None:
    model = drafter()
    fine = asked("fine", (5, 6, 7), 2)
    foreign = asked("foreign", (5, VOCABULARY, 7), 2)
    ours, theirs = model.propose([fine, foreign])
    check(ours, fine)
    assert theirs == Draft()


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [0, 1, 3])
def test_a_call_that_fails_leaves_the_next_one_right(watched: Watched, runs: int) -> None:
    model = DraftModel(watched, FACTS)
    penalised = Sampling(1.0, 9, presence_penalty=2.0)
    asks = [asked("a", prompt_of(8, 30, VOCABULARY), 5, WARM), asked("b", prompt_of(9, 300, VOCABULARY), 5, penalised)]
    model.propose(asks)
    model.propose(asks)
    watched.fail_after = runs
    with pytest.raises(MemoryError):
        model.propose(asks)
    assert watched.buffers() == []
    for ask, draft in [pair for _ in range(2) for pair in zip(asks, model.propose(asks), strict=True)][2:]:
        check(draft, ask)


# ---- through the loop ------------------------------------------------------------------------------------------------


class Reseeded:
    """A draft source whose noise has nothing to do with the target's."""

    name = "reseeded"
    costly = True

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return self._model.propose(
            [
                msgspec.structs.replace(
                    ask, sampling=msgspec.structs.replace(ask.sampling, seed=ask.sampling.seed + 99)
                )
                for ask in asks
            ]
        )

    def forget(self, request_id: str) -> None:
        self._model.forget(request_id)


def requests_with(sampling: Sampling) -> list[Request]:
    lengths = [(5, 24), (60, 30), (254, 24), (17, 36), (1, 20)]
    return [
        Request(
            f"lane-{place}",
            prompt_of(200 + place, length, VOCABULARY),
            tokens,
            msgspec.structs.replace(sampling, seed=sampling.seed + place),
        )
        for place, (length, tokens) in enumerate(lengths)
    ]


def served_with(requests: Sequence[Request], *sources: DraftSource, path: str = "packed", drafts: int = 4) -> Served:
    config = EngineConfig(max_lanes=3, round_rows=120, draft_tokens=drafts)
    return serve(target_paths()[path], submissions(requests, every=3), config, sources)


def acceptance(served: Served) -> tuple[int, int]:
    """How many draft tokens were accepted, of how many."""
    counts: list[DraftCount] = [each for ended in served.finished.values() for each in ended.usage.drafts]
    return sum(sum(each.accepted) for each in counts), sum(sum(each.drafted) for each in counts)


KINDS = {
    "greedy": GREEDY,
    "cool": Sampling(0.7, 20),
    "warm": Sampling(1.3, 30),
    "nucleus": Sampling(1.0, 40, top_p=0.9),
    "few": Sampling(1.0, 50, top_k=20),
    "both": Sampling(1.3, 60, top_k=20, top_p=0.9),
    "penalised": Sampling(0.7, 70, presence_penalty=0.6, repetition_penalty=1.1, logit_bias=((3, 2.0),)),
}


@each_path
@pytest.mark.parametrize("kind", KINDS)
def test_of_a_draft_model_like_the_target_every_draft_is_accepted(kind: str, path: str) -> None:
    requests = requests_with(KINDS[kind])
    plain = served_with(requests, drafts=0, path=path)
    served = served_with(requests, drafter(path), path=path)
    accepted, drafted = acceptance(served)
    assert accepted == drafted >= 70
    assert served.tokens == plain.tokens
    assert len(served.rounds) < len(plain.rounds)
    assert draft_paths()[path].buffers() == [], "lanes left behind"


def perturbed(share: float) -> nn.Module:
    """The target, each weight changed by noise of this share of its layer's spread."""
    model = random_model("llama", seed=1)
    mx.random.seed(2)

    def shaken(weight: mx.array) -> mx.array:
        return weight + share * mx.std(weight) * mx.random.normal(weight.shape)

    model.update(cast(dict[str, Any], tree_map(shaken, model.parameters())))
    mx.eval(model.parameters())
    return model


def test_shared_noise_makes_a_similar_model_agree_far_more_often_than_noise_of_its_own() -> None:
    requests = requests_with(Sampling(1.0, 80))
    plain = served_with(requests, drafts=0)
    similar = both_paths(perturbed(0.05)).packed
    shares = []
    for make in (lambda model: model, Reseeded):
        source = cast(Callable[[DraftModel], DraftSource], make)(DraftModel(similar, FACTS))
        served = served_with(requests, source)
        assert served.tokens == plain.tokens, "what is drafted never changes an answer"
        accepted, drafted = acceptance(served)
        assert drafted >= 100
        shares.append(accepted / drafted)
    coupled, independent = shares
    assert coupled > 5 * independent


def test_a_forward_that_fails_in_service_changes_no_answer(watched: Watched) -> None:
    requests = requests_with(WARM)
    plain = served_with(requests, drafts=0)
    watched.fail_after = 7
    served = served_with(requests, DraftModel(watched, FACTS))
    assert served.tokens == plain.tokens
    assert watched.fail_after is None
    accepted, drafted = acceptance(served)
    assert accepted == drafted >= 50


# ---- company in the prefix cache -------------------------------------------------------------------------------------


def fed_for(watched: Watched, model: DraftModel, ask: DraftAsk) -> int:
    """How many real tokens a draft takes; the draft is checked, and the lane leaves."""
    watched.fed.clear()
    (draft,) = model.propose([ask])
    while not draft.tokens:  # long prompts take several calls
        (draft,) = model.propose([ask])
    check(draft, ask)
    model.forget(ask.request_id)
    return sum(len(window.tokens) for windows in watched.fed for window in windows)


def test_what_the_prefix_cache_has_of_a_draft_models_lanes_is_not_fed_again(watched: Watched) -> None:
    forward = draft_paths().packed
    blocks = LaneBlocks(forward.store, forward.regrouping, "draft")
    cache = PrefixCache(blocks, 1 << 30, None, 0, lambda _: None)
    model = DraftModel(watched, FACTS, blocks)
    cache.accompany(model)
    text = prompt_of(5, 300, VOCABULARY)
    assert fed_for(watched, model, asked("first", text)) == 300
    assert fed_for(watched, model, asked("again", text)) == 300 - 256
    assert fed_for(watched, model, asked("on", (*text, *prompt_of(6, 50, VOCABULARY)))) == 350 - 256
    assert fed_for(watched, model, asked("other way", (*text[:200], *prompt_of(7, 30, VOCABULARY)))) == 230 - 192
    other = msgspec.structs.replace(asked("other", text), owner="other")
    assert fed_for(watched, model, other) == 300, "another owner's"
    salted = msgspec.structs.replace(asked("salted", text), cache_salt="salt")
    assert fed_for(watched, model, salted) == 300
    assert cache.clear() > 0
    assert fed_for(watched, model, asked("gone", text)) == 300


# ---- loading ---------------------------------------------------------------------------------------------------------


def tokenizer_of(words: Sequence[str], merges: Sequence[Any] = (), added: Sequence[str] = ("<end>",)) -> dict[str, Any]:
    names = [{"id": len(words) + place, "content": name} for place, name in enumerate(added)]
    vocabulary = {word: place for place, word in enumerate(words)}
    return {"model": {"type": "BPE", "vocab": vocabulary, "merges": list(merges)}, "added_tokens": names}


WORDS = ["a", "b", "ab", "aba"]
TOKENIZER = tokenizer_of(WORDS, ["a b", "ab a"])
WIDE = {"vocab_size": 112}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The target's."""
    write_folder(tmp_path / "target", dtype=mx.float32)
    write_json(tmp_path / "target" / "tokenizer.json", TOKENIZER)
    return tmp_path / "target"


def drafting_folder(folder: Path, tokenizer: dict[str, Any] | None, config: dict[str, Any] | None = None) -> Path:
    drafting = folder.parent / "drafting"
    write_folder(drafting, config, dtype=mx.float32)
    if tokenizer is not None:
        write_json(drafting / "tokenizer.json", tokenizer)
    return drafting


class Told:
    """Stages of loading, in order."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        self.stages.append(stage)


def loaded_drafter(folder: Path, drafting: Path, told: Told | None = None) -> DraftSource:
    backend = load_backend(
        str(folder), folder / "no-home", "float32", told or Told(), "here", draft_model=str(drafting)
    )
    (source,) = backend.drafters
    return source


def test_a_loaded_draft_model_is_among_the_backends_drafters(folder: Path) -> None:
    """Its logits are wider than the target's, its merges are written in the other form."""
    pairs = {**TOKENIZER, "model": {**TOKENIZER["model"], "merges": [["a", "b"], ["ab", "a"]]}}
    source = loaded_drafter(folder, drafting_folder(folder, pairs, WIDE))
    assert (source.name, source.costly) == ("draft_model", True)
    (draft,) = source.propose([asked("a", (1, 2, 3), 6, Sampling(5.0, 1))])
    assert len(draft.tokens) == 6
    assert max(draft.tokens) < 96


def test_without_one_there_are_no_drafters(folder: Path) -> None:
    assert not load_backend(str(folder), folder / "no-home", "float32", Told(), "here").drafters


def test_a_model_that_drafts_for_itself_is_loaded_once_and_keeps_its_lanes_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a call of the drafter that fails half-way leaves nothing behind in the model that both use."""
    told, twice = Told(), Told()
    backend = load_backend(
        str(folder), folder / "no-home", "float32", told, "here", draft_model=str(folder / ".." / "target")
    )
    (source,) = backend.drafters
    loaded_drafter(folder, drafting_folder(folder, TOKENIZER), twice)
    assert 2 * told.stages.count("load") == twice.stages.count("load") > 0
    text = prompt_of(1, 12, 96)
    window = Window(0, "a", 0, text, True, WARM, 20)
    (expected,) = backend.verify([window]).read()
    ask = asked("a", text, 3, WARM)
    (draft,) = source.propose([ask])
    assert draft.tokens[:1] == tuple(expected.tokens)
    other = msgspec.structs.replace(ask, request_id="b")
    with monkeypatch.context() as broken:
        broken.setattr(PackedCache, "attend", no_room)
        with pytest.raises(MemoryError):
            source.propose([other])
    assert backend.verify([window]).read() == [expected]
    assert source.propose([ask]) == [draft]


def no_room(*_: Any, **__: Any) -> mx.array:
    raise MemoryError("no room")


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (None, "no tokenizer.json"),
        ({"model": {"type": "BPE"}}, "no tokenizer.json with a vocabulary"),
        (tokenizer_of(["b", "a", "ab", "aba"], ["a b", "ab a"]), "another vocabulary .*'[ab]'"),
        (tokenizer_of(WORDS[:3], ["a b"]), "another vocabulary .*token 3"),
        (
            tokenizer_of(WORDS, ["a b", "ab a"], ["<end>", "<think>"]),
            r"token 5 is '<think>' in drafting, but not in target",
        ),
        (tokenizer_of(WORDS, ["ab a", "a b"]), "merges"),
    ],
)
def test_another_vocabulary_is_refused(folder: Path, tokenizer: dict[str, Any] | None, reason: str) -> None:
    told = Told()
    with pytest.raises(LoadError, match=rf"drafting cannot draft for target: .*{reason}"):
        loaded_drafter(folder, drafting_folder(folder, tokenizer), told)
    assert "load" not in told.stages, "before anything large is read"


def test_pieces_with_scores_are_compared_too(folder: Path) -> None:
    unigram = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}
    write_json(folder / "tokenizer.json", unigram)
    loaded_drafter(folder, drafting_folder(folder, json.loads(json.dumps(unigram))))
    other = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["c", -2.0]]}}
    with pytest.raises(LoadError, match="another vocabulary"):
        loaded_drafter(folder, drafting_folder(folder, other))


def test_a_draft_model_that_cannot_be_served_in_lanes_is_refused(folder: Path) -> None:
    with pytest.raises(LoadError, match="drafting: several lanes at once"):
        loaded_drafter(folder, drafting_folder(folder, TOKENIZER, {"model_type": "plamo3"} | ARCHITECTURES["plamo3"]))


def test_a_draft_model_whose_layers_carry_a_state_is_refused(folder: Path) -> None:
    with pytest.raises(LoadError, match="drafting: its layers carry a state"):
        loaded_drafter(folder, drafting_folder(folder, TOKENIZER, {"model_type": "mamba"} | ARCHITECTURES["mamba"]))


def test_a_draft_model_that_is_nowhere_is_refused(folder: Path) -> None:
    with pytest.raises(LoadError, match="neither an installed model"):
        load_backend(str(folder), folder / "no-home", "float32", Told(), "here", draft_model="nowhere-to-be-found")
