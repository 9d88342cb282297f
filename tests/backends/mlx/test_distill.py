"""A drafter is trained on a target's own words: what is collected, what is learned, and that a stop changes nothing."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from backends.mlx import exponential
from backends.mlx.distill.asking import NoQuestionsError, Opening, ask
from backends.mlx.distill.collect import Prompt, Text, collect
from backends.mlx.distill.corpus import frequent, read_shard, write_shard
from backends.mlx.distill.distillation import Distillation, DistillPlan, Made, OtherRunError, first_network
from backends.mlx.distill.subject import Subject, load_subject, suiting
from backends.mlx.distill.train import (
    Schedule,
    Trained,
    batches,
    cross_entropy,
    joined,
    unrolled,
)
from backends.mlx.drafts.attach import attach_file
from backends.mlx.drafts.eagle import Eagle, EagleShape, parameters_of
from backends.mlx.drafts.files import DrafterError, save_drafter
from backends.mlx.seam import HeadRows
from scheduler.draft import DraftAsk
from scheduler.request import Sampling
from scheduler.round import Window
from tests.backends.mlx.tiny_models import write_folder, write_json
from tests.backends.mlx.windows import GREEDY

pytestmark = pytest.mark.usefixtures("calm")

SHAPE = EagleShape(
    dims=16, heads=2, kv_heads=1, head_dim=8, intermediate=32, taps=(0, "head"), window=64, rope_base=100.0
)


def said(_: object) -> None:
    """Whatever is told is not of interest here."""


# ---- the loss, and the steps that are unrolled -----------------------------------------------------------------------


def test_cross_entropy_and_its_gradient_are_those_of_the_definition() -> None:
    mx.random.seed(0)
    logits = 4 * mx.random.normal((5, 33))
    labels = mx.softmax(3 * mx.random.normal((5, 33)), axis=-1)

    def defined(logits: mx.array) -> mx.array:
        return -(labels * (logits - mx.logsumexp(logits, axis=-1, keepdims=True))).sum(axis=-1)

    assert mx.allclose(cross_entropy(logits, labels), defined(logits), atol=1e-5)
    ours = mx.grad(lambda each: (cross_entropy(each, labels) * mx.arange(5)).sum())(logits)
    theirs = mx.grad(lambda each: (defined(each) * mx.arange(5)).sum())(logits)
    assert mx.allclose(ours, theirs, atol=1e-5)
    assert mx.abs(theirs).max().item() > 0.01


def step_by_step(network: Eagle, embedded: mx.array, features: mx.array, steps: int) -> list[np.ndarray]:
    """Each row of each step by itself, from the definition: it attends the keys of rows with true features as far as
    the draft's beginning, and behind those the keys of the draft's own rows.
    """
    found = []
    length = embedded.shape[0]
    outputs = features
    drafts: list[list[tuple[mx.array, mx.array]]] = [[] for _ in range(length + steps)]
    """By where a draft begins: keys and values of its own rows."""
    true = [keys_of(network, embedded[row], features[row], row) for row in range(length)]
    for step in range(steps):
        following = []
        for row in range(length):
            begin = row - step
            if begin < 0:
                following.append(mx.zeros(embedded.shape[1]))
                continue
            feature = features[row] if step == 0 else outputs[row - 1]
            own = keys_of(network, embedded[row], feature, row)
            if step:
                drafts[begin].append(own[1:])
            past = [each[1:] for each in true[: begin + 1]] + drafts[begin]
            attended = attention_of(network, own[0], past)
            following.append(network.behind(feature, attended))
        outputs = mx.stack(following)
        found.append(np.array(outputs))
    return found


def keys_of(network: Eagle, embedded: mx.array, feature: mx.array, row: int) -> tuple[mx.array, mx.array, mx.array]:
    before = network.before(embedded[None, None], feature[None, None])
    queries, keys, values = network.attention.project(before, row)
    return queries[0, :, 0], keys[0, :, 0], values[0, :, 0]


def attention_of(network: Eagle, query: mx.array, past: list[tuple[mx.array, mx.array]]) -> mx.array:
    attention = network.attention
    repeats = attention.heads // attention.kv_heads
    heads = []
    for head in range(attention.heads):
        scores = mx.stack([(query[head] * keys[head // repeats]).sum() for keys, _ in past]) * attention.scale
        weights = mx.softmax(scores)
        values = mx.stack([values[head // repeats] for _, values in past])
        heads.append(weights @ values)
    return attention.join(mx.stack(heads)[None, :, None])[0, 0]


def test_unrolled_steps_see_what_drafts_will_see() -> None:
    network = first_network(SHAPE, 3, 1.5)
    network.attention.o_proj.weight = 10 * network.attention.o_proj.weight
    embedded, features = mx.random.normal((2, 9, 16)), mx.random.normal((2, 9, 16))
    outputs = [np.array(each) for each in unrolled(network, embedded, features, 4)]
    assert len(outputs) == 4
    for text in range(2):
        for step, expected in enumerate(step_by_step(network, embedded[text], features[text], 4)):
            assert np.allclose(outputs[step][text, step:], expected[step:], atol=1e-4)
            assert step == 0 or not np.allclose(outputs[step][text, step:], outputs[step - 1][text, step:], atol=1e-2)


# ---- a target, its texts ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("target")
    write_folder(folder, dtype=mx.float32)
    tokens = {f"t{token}": token for token in range(100)}
    write_json(folder / "tokenizer.json", {"model": {"type": "BPE", "vocab": tokens, "merges": []}})
    return load_subject(str(folder), folder, "float32", lambda *_: None, "test")


def prompts(count: int, seed: int = 0) -> list[Prompt]:
    draws = np.random.default_rng(seed)
    lengths = draws.integers(3, 12, count)
    return [
        Prompt(
            tuple(draws.integers(1, 90, length).tolist()),
            Sampling(temperature=0.0 if place % 2 == 0 else 0.8, seed=place),
        )
        for place, length in enumerate(lengths.tolist())
    ]


def test_texts_and_features_are_the_targets_own(subject: Subject) -> None:
    asked = prompts(7)
    found = list(collect(subject.backend, asked, lanes=3, answer=10))
    assert sorted(tuple(text.tokens[: text.prompt]) for text in found) == sorted(each.tokens for each in asked)
    for text in found:
        tokens = tuple(text.tokens.tolist())
        logits = subject.loaded.model(mx.array([tokens]), cache=make_prompt_cache(subject.loaded.model))[0]
        answer = tokens[text.prompt :]
        ended = answer[-1] in subject.backend.info.eos_tokens
        assert len(answer) == 10 or ended
        if text.greedy:
            assert answer == tuple(mx.argmax(logits, axis=-1)[text.prompt - 1 : -1].tolist())
        final = text.features[:, -subject.shape.dims :].astype(np.float32) * text.scales[:, None]
        rows = subject.parts.head_rows(np.arange(subject.parts.vocabulary, dtype=np.uint32))
        assert np.allclose(final @ np.array(rows).T, np.array(logits)[:-1], atol=2e-2)
        assert text.features.shape == (len(tokens) - 1, subject.shape.dims * len(subject.shape.taps))
    assert {text.greedy for text in found} == {True, False}


# ---- what the target asks itself -------------------------------------------------------------------------------------

OPENING = Opening((5, 17, 3), frozenset(range(0, 90, 6)))


def asked(subject: Subject, told: Callable[[tuple[int, ...]], None] = said, seed: int = 0) -> list[tuple[int, ...]]:
    return ask(subject.backend, OPENING, wanted=9, seed=seed, lanes=4, longest=20, told=told)


def test_questions_are_what_the_target_says_behind_the_opening_up_to_its_end(subject: Subject) -> None:
    heard: list[tuple[int, ...]] = []
    questions = asked(subject, heard.append)
    assert heard == questions
    assert len(set(questions)) == 9
    assert {len(question) for question in questions} <= set(range(4, 20))
    ends = OPENING.ends | subject.backend.info.eos_tokens
    assert not any(ends & set(question) for question in questions)
    texts = [tuple(text.tokens[3:].tolist()) for text in collect(subject.backend, drawn(60), lanes=7, answer=20)]
    said_first = {next(text[:place] for place, token in enumerate((*text, 0)) if token in ends) for text in texts}
    assert set(questions) <= said_first, "each is drawn as a seed of its own has it"


def drawn(count: int) -> list[Prompt]:
    """The first draws of seed 0."""
    return [Prompt(OPENING.tokens, Sampling(0.8, seed)) for seed in range(count)]


def test_questions_are_the_same_for_a_seed(subject: Subject) -> None:
    assert asked(subject) == asked(subject)
    assert not set(asked(subject)) & set(asked(subject, seed=1))


def test_a_target_that_never_ends_its_turn_asks_nothing(subject: Subject) -> None:
    endless = Opening(OPENING.tokens, frozenset())
    with pytest.raises(NoQuestionsError, match="of 3 questions"):
        ask(subject.backend, endless, wanted=3, seed=0, lanes=3, longest=6, told=said)


def test_questions_are_kept_for_a_run_that_goes_on(subject: Subject, tmp_path: Path) -> None:
    plan = plan_of(subject, self_asked=5, question=20)
    first = Distillation(tmp_path, plan, "target").questions(subject.backend, OPENING, said)
    heard: list[tuple[int, ...]] = []
    assert Distillation(tmp_path, plan, "target").questions(subject.backend, OPENING, heard.append) == first
    assert (len(first), heard) == (5, [])


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_a_shard_is_read_as_it_was_written(subject: Subject, tmp_path: Path) -> None:
    texts = list(collect(subject.backend, prompts(5), lanes=5, answer=6))
    write_shard(tmp_path / "texts.safetensors", texts)
    back = list(read_shard(tmp_path / "texts.safetensors"))
    assert len(back) == 5
    for text, again in zip(texts, back, strict=True):
        assert (text.prompt, text.greedy) == (again.prompt, again.greedy)
        for name in ("tokens", "features", "scales"):
            assert np.array_equal(getattr(text, name), getattr(again, name))
    assert [file.name for file in tmp_path.iterdir()] == ["texts.safetensors"]


def test_the_most_frequent_tokens_of_answers_are_drafted() -> None:
    def text(prompt: list[int], answer: list[int]) -> Text:
        tokens = np.array(prompt + answer, dtype=np.int32)
        nothing = np.zeros((len(tokens) - 1, 1), dtype=np.float16)
        return Text(tokens, len(prompt), nothing, nothing[:, 0].astype(np.float32), True)

    texts = [text([9, 9, 9], [5, 7, 7]), text([9], [7, 3])]
    assert frequent(texts, 1, 12).tolist() == [7]
    assert frequent(texts, 4, 12).tolist() == [0, 3, 5, 7]
    assert frequent(texts, 12, 12).tolist() == list(range(12))


# ---- learning --------------------------------------------------------------------------------------------------------


def plan_of(subject: Subject, **changes: object) -> DistillPlan:
    shape = msgspec.structs.replace(subject.shape, window=64)
    plan = DistillPlan(
        shape=shape,
        prompts=40,
        shard=16,
        answer=16,
        lanes=8,
        drafted=80,
        held_out=6,
        schedule=Schedule(epochs=6, rows=64, rate=3e-3),
    )
    return msgspec.structs.replace(plan, **changes)


class Told:
    """What a run says, and whether it is to be stopped. Written by the run."""

    def __init__(self, stop: int | None = None) -> None:
        self.updates: list[Trained] = []
        self._stop = stop

    def __call__(self, update: Trained) -> None:
        self.updates.append(update)
        if update.done == self._stop:
            raise KeyboardInterrupt


def run(subject: Subject, folder: Path, told: Told) -> Made:
    distillation = Distillation(folder, plan_of(subject), "target")
    distillation.collect(subject.backend, prompts(40), lambda shard, text: said((shard, text)))
    return distillation.train(subject.parts, told, every=3)


@pytest.fixture(scope="module")
def whole(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Told]:
    told = Told()
    return run(subject, tmp_path_factory.mktemp("whole"), told), told


def test_the_loss_falls_and_drafts_become_right(whole: tuple[Made, Told]) -> None:
    report, told = whole
    first, last = told.updates[0], told.updates[-1]
    assert (last.done, last.total) == (len(told.updates), len(told.updates))
    for step in range(3):
        assert last.losses[step] < first.losses[step] - 0.15  # the target's own entropy is left
        assert last.agreed[step] > first.agreed[step] + 0.1
    assert report.positions > 300
    assert 0.5 < report.covered <= 1.0
    assert len(report.acceptance) == 3


def test_a_run_that_was_stopped_comes_to_the_same(subject: Subject, whole: tuple[Made, Told], tmp_path: Path) -> None:
    for stop in (2, 5, 7):
        with pytest.raises(KeyboardInterrupt):
            run(subject, tmp_path, Told(stop))
    again = run(subject, tmp_path, Told())
    assert (again.positions, again.covered, again.acceptance) == (
        whole[0].positions,
        whole[0].covered,
        whole[0].acceptance,
    )
    assert np.array_equal(again.ids, whole[0].ids)
    expected = parameters_of(whole[0].network)
    for name, value in parameters_of(again.network).items():
        assert mx.array_equal(value, expected[name])


def test_training_goes_on_from_a_drafter(subject: Subject, whole: tuple[Made, Told], tmp_path: Path) -> None:
    """Its first losses are lower than those of one that begins by chance."""
    made, told = whole
    saved = tmp_path / "made.safetensors"
    made.save(saved, subject.header((), ""))
    header, start = subject.started(saved)
    distillation = Distillation(tmp_path / "again", plan_of(subject, start=header.checksum), "target")
    distillation.collect(subject.backend, prompts(40), lambda shard, text: said((shard, text)))
    again = Told()
    distillation.train(subject.parts, again, start=start)
    pairs = list(zip(again.updates, told.updates, strict=True))
    assert all(update.losses[0] < before.losses[0] for update, before in pairs[:8])


def test_training_goes_on_from_nothing_else(subject: Subject, whole: tuple[Made, Told], tmp_path: Path) -> None:
    header, other = subject.header((), ""), tmp_path / "other.safetensors"
    for changes, says in (
        ({"shape": msgspec.structs.replace(subject.shape, window=99)}, "other measures than a new one"),
        ({"target": "others"}, "was made for the weights of"),
        ({"tokenizer": "others"}, "another tokenizer"),
    ):
        whole[0].save(other, msgspec.structs.replace(header, **changes))
        with pytest.raises(DrafterError, match=f"{other} .*{says}"):
            subject.started(other)
    lacking = {
        name: np.array(value) for name, value in parameters_of(whole[0].network).items() if name != "norm.weight"
    }
    save_drafter(other, header, {**lacking, "ids": whole[0].ids})
    with pytest.raises(DrafterError, match=r"norm\.weight"):
        subject.started(other)


def test_collecting_goes_on_behind_the_last_whole_shard(subject: Subject, tmp_path: Path) -> None:
    heard: list[int] = []

    def told(shard: int, _: Text) -> None:
        heard.append(shard)
        if len(heard) == 20:
            raise KeyboardInterrupt

    stopped = Distillation(tmp_path, plan_of(subject), "target")
    with pytest.raises(KeyboardInterrupt):
        stopped.collect(subject.backend, prompts(40), told)
    assert [file.name for file in sorted(tmp_path.glob("texts-*"))] == ["texts-00000.safetensors"]
    subject.backend.reset()
    heard.clear()
    stopped.collect(subject.backend, prompts(40), lambda shard, _: heard.append(shard))
    assert sorted(heard) == [1] * 16 + [2] * 8


def test_a_folder_of_another_run_is_refused(subject: Subject, tmp_path: Path) -> None:
    Distillation(tmp_path, plan_of(subject), "target")
    Distillation(tmp_path, plan_of(subject), "target")
    with pytest.raises(OtherRunError, match="another plan"):
        Distillation(tmp_path, plan_of(subject, seed=1), "target")
    with pytest.raises(OtherRunError, match="another model"):
        Distillation(tmp_path, plan_of(subject), "another")


def test_the_report_is_what_serving_finds(subject: Subject, whole: tuple[Made, Told], tmp_path: Path) -> None:
    """The saved drafter is asked at every position of the texts that were held out."""
    made, _ = whole
    file = tmp_path / "drafter.safetensors"
    made.save(file, subject.header(made.acceptance, "here"))
    drafter, _, features = attach_file(file, subject.loaded, HeadRows(), exponential.attention)
    backend = subject.backend
    tried, right = np.zeros(3), np.zeros(3)
    backend.features = features
    for number, text in enumerate(made.held):
        tokens = tuple(text.tokens.tolist())
        name = str(number)
        start = 0
        for end in range(text.prompt, len(tokens)):
            samples = Window(0, name, start, tokens[start : end - 1], False, GREEDY, len(tokens))
            backend.verify([samples]).read()
            backend.keep({0: end - 1})
            start = end - 1
            (draft,) = drafter.propose([DraftAsk(name, tokens[:end], text.prompt, 3, sampling=GREEDY)])
            for place, token in enumerate(draft.tokens[: len(tokens) - end]):
                tried[place] += 1
                if token != tokens[end + place]:
                    break
                right[place] += 1
        backend.release(0)
        drafter.forget(name)
    assert tried[0] > 50
    assert np.allclose(right / np.maximum(tried, 1), made.acceptance, atol=0.03)
    assert made.acceptance[0] > 0.1


# ---- pieces ----------------------------------------------------------------------------------------------------------


def test_batches_hold_every_text_once_in_another_order_each_time(whole: tuple[Made, Told]) -> None:
    texts = [*whole[0].held] * 5
    first, second = (batches(texts, 40, seed) for seed in (1, 2))
    assert len(first) == len(second) > 2
    for made in (first, second):
        assert sorted(id(text) for batch in made for text in batch) == sorted(map(id, texts))
    assert [list(map(id, batch)) for batch in first] != [list(map(id, batch)) for batch in second]
    again = batches(texts, 40, 1)
    assert [list(map(id, batch)) for batch in first] == [list(map(id, batch)) for batch in again]


def test_only_guesses_at_answers_count(whole: tuple[Made, Told]) -> None:
    texts = whole[0].held[:3]
    batch = joined(texts)
    length = batch.features.shape[1]
    places = [divmod(row, length) for row in batch.rows.tolist()]
    for index, text in enumerate(texts):
        guessed = [row + 2 for place, row in places if place == index]
        assert guessed == list(range(text.prompt, len(text.tokens)))


def test_a_prompt_of_one_token_reaches_into_no_other_text(whole: tuple[Made, Told]) -> None:
    text = whole[0].held[0]
    single = msgspec.structs.replace(text, prompt=1)
    batch = joined([text, single])
    length = batch.features.shape[1]
    assert [row - length for row in batch.rows.tolist() if row >= length] == list(range(len(text.tokens) - 2))


def test_a_damaged_shard_is_named(subject: Subject, tmp_path: Path) -> None:
    file = tmp_path / "texts.safetensors"
    write_shard(file, list(collect(subject.backend, prompts(3), lanes=3, answer=4)))
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"texts\.safetensors is damaged"):
        list(read_shard(file))


def test_the_rate_rises_and_falls() -> None:
    schedule = Schedule(rate=1.0, warm_up=0.1)
    rates = [schedule.rate_at(done, 100) for done in range(100)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.03)


@pytest.mark.parametrize(("dims", "layers"), [(576, 30), (4096, 32), (64, 2), (24, 1), (20, 5)])
def test_a_drafter_is_measured_by_its_target(dims: int, layers: int) -> None:
    shape = suiting(dims, layers)
    assert shape.heads * shape.head_dim <= dims
    assert shape.heads % shape.kv_heads == 0
    assert shape.taps[-1] == "head"
    assert all(0 <= tap < layers for tap in shape.taps[:-1])
    assert len(set(shape.taps)) == len(shape.taps)
