"""Many lanes at once give each what it gets alone in mlx-lm: contract rules 1, 7, 8, 15, 16 and 19 on tiny models.

Lengths cross capacity classes, lanes come and go, chunks and decode windows share rounds, drafts are ragged and right
in every mixture; on the packed and on the padded path.
"""

from functools import cache
from itertools import product

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from backends.mlx.backend import MLXBackend
from engine.config import EngineConfig
from engine.messages import Cancel, Finish, Submit
from scheduler.request import FinishReason, Request, Sampling
from tests.backends.mlx.random_models import VOCABULARY, random_model
from tests.backends.mlx.serving import (
    INFO,
    Agreement,
    Arrival,
    OracleDrafts,
    Paths,
    Solo,
    both_paths,
    greedy,
    prompt_of,
    serve,
    solo,
    submissions,
)
from tests.backends.mlx.windows import chunk, decode

pytestmark = pytest.mark.usefixtures("calm")

MODELS = ["llama", "qwen3", "mixtral", "phi3"]
each_model = pytest.mark.parametrize("kind", MODELS)
each_path = pytest.mark.parametrize("path", ["packed", "padded"])


@cache
def reference(kind: str) -> nn.Module:
    return random_model(kind, seed=1)


@cache
def paths(kind: str) -> Paths:
    """The same model again, with the seams in it."""
    return both_paths(random_model(kind, seed=1))


@cache
def alone(kind: str, request: Request) -> Solo:
    return solo(reference(kind), request)


def crossing(kind: str) -> list[Request]:
    """Lanes that outgrow 256 or 512 positions while they generate, among short ones."""
    lengths = [(240, 40), (12, 60), (255, 36), (500, 36), (270, 36), (4, 36), (256, 9)]
    return [
        greedy(f"{kind}-{place}", prompt_of(place, length, VOCABULARY), tokens)
        for place, (length, tokens) in enumerate(lengths)
    ]


@each_model
def test_the_models_have_something_to_say(kind: str) -> None:
    for request in crossing(kind):
        if request.max_tokens >= 30:
            assert len(set(alone(kind, request).tokens)) >= 20


@each_model
@each_path
def test_lanes_that_come_and_go_get_what_they_get_alone(kind: str, path: str, agreement: Agreement) -> None:
    requests = crossing(kind)
    served = serve(paths(kind)[path], submissions(requests, every=4), EngineConfig(max_lanes=5, round_rows=96))
    for request in requests:
        agreement.check(request, served.tokens[request.request_id], alone(kind, request))
    assert served.stats.rounds["mixed"] >= 5
    assert sum(played.ahead for played in served.rounds) >= 20, "plain rounds are pipelined"
    assert max(len(played.windows) for played in served.rounds) == 5


def every_mixture(lane: int, turn: int) -> tuple[int, int]:
    """None, some or all of a ragged draft are right: 27 turns show every mixture over three lanes."""
    drafted = 2 + (turn + lane) % 4
    return drafted, (0, 1 + turn % (drafted - 1), drafted)[turn // 3**lane % 3]


@each_model
@each_path
def test_ragged_drafts_of_every_mixture_change_nothing(kind: str, path: str, agreement: Agreement) -> None:
    lengths = [(200, 110), (230, 110), (30, 110), (300, 25), (90, 25)]
    requests = [
        greedy(f"{kind}-draft-{lane}", prompt_of(20 + lane, length, VOCABULARY), tokens)
        for lane, (length, tokens) in enumerate(lengths)
    ]
    answers = {request.request_id: (*request.prompt, *alone(kind, request).tokens) for request in requests}
    arrivals = submissions(requests[:3]) + submissions(requests[3:], every=9)
    config = EngineConfig(max_lanes=4, round_rows=120, draft_tokens=5)
    served = serve(paths(kind)[path], arrivals, config, [OracleDrafts(answers, VOCABULARY, every_mixture)])
    for request in requests:
        agreement.check(request, served.tokens[request.request_id], alone(kind, request))
    seen = set()
    for played in served.rounds:
        drafting = {window.request_id: window for window in played.windows if window.draft}
        if all(request.request_id in drafting for request in requests[:3]):
            shares = [(played.accepted(drafting[each.request_id]), drafting[each.request_id]) for each in requests[:3]]
            seen.add(tuple("none" if not right else "all" if right == len(w.draft) else "some" for right, w in shares))
    assert len(seen) == 27, f"only {sorted(seen)}"
    assert served.stats.rounds["mixed"] >= 3


# ---- rules 15 and 16: the state after a round ----------------------------------------------------------------------


class CachedLane(msgspec.Struct, frozen=True):
    """Keys and values of one lane in one layer, `[kv_heads, length, dim]` each."""

    keys: mx.array
    values: mx.array


def cached_alone(model: nn.Module, tokens: tuple[int, ...]) -> list[CachedLane]:
    """Per layer, what mlx-lm's own cache holds after exactly these tokens."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens]), cache=caches))
    return [CachedLane(each.keys[0, :, : len(tokens)], each.values[0, :, : len(tokens)]) for each in caches]


def seats_of(lane: list[CachedLane], buffers: list[mx.array]) -> set[tuple[int, int]]:
    """The (capacity, row) at which all layers hold the lane, within 1e-4. A layer's keys come before its values."""
    share = len(buffers) // len(lane)
    found = []
    for layer, expected in enumerate(lane):
        arrays = buffers[layer * share : (layer + 1) * share]
        keys = _holding(expected.keys, arrays[: share // 2])
        found.append(keys & _holding(expected.values, arrays[share // 2 :]))
    return set.intersection(*found)


def _holding(expected: mx.array, buffers: list[mx.array]) -> set[tuple[int, int]]:
    length = expected.shape[1]
    return {
        (buffer.shape[2], row)
        for buffer in buffers
        if buffer.shape[2] >= length
        for row, held in enumerate(np.array(buffer)[:, :, :length])
        if np.abs(held - np.array(expected)).max() < 1e-4
    }


@each_model
@each_path
def test_after_every_mixture_the_caches_hold_exactly_the_kept_tokens(kind: str, path: str) -> None:
    """Three lanes keep 0, 2 or all 4 of their drafts, each mixture; then a correction is fed behind what they kept."""
    forward = paths(kind)[path]
    prompts = [prompt_of(40 + lane, length, VOCABULARY) for lane, length in enumerate((251, 40, 254))]
    drafts = [prompt_of(50 + lane, 4, VOCABULARY) for lane in range(3)]
    corrections = [(7 + lane,) for lane in range(3)]
    kept_tokens = {
        (lane, accepted): (*prompts[lane], *drafts[lane][:accepted], *corrections[lane])
        for lane in range(3)
        for accepted in (0, 2, 4)
    }
    expected = {key: cached_alone(reference(kind), tokens) for key, tokens in kept_tokens.items()}
    forward.run([chunk(lane, prompts[lane][:-1]) for lane in range(3)], None)
    for mixture in product((0, 2, 4), repeat=3):
        forward.run([decode(lane, prompts[lane], drafts[lane]) for lane in range(3)], None)
        last = [decode(lane, kept_tokens[lane, accepted]) for lane, accepted in enumerate(mixture)]
        mx.eval(forward.run(last, None).logits)
        seats = [seats_of(expected[lane, accepted], forward.buffers()) for lane, accepted in enumerate(mixture)]
        assert [len(found) for found in seats] == [1, 1, 1], f"{mixture}: {seats}"
        assert len(set.union(*seats)) == 3
    forward.reset()


# ---- rule 7: seeded draws ------------------------------------------------------------------------------------------


def seeded() -> list[Request]:
    """Warm requests of one prompt and of several, with seeds of any size and two choices of one seed."""
    same = prompt_of(60, 20, VOCABULARY)
    samplings = [
        (same, Sampling(0.7, seed=1)),
        (same, Sampling(0.7, seed=2)),
        (same, Sampling(0.7, seed=2, choice=1)),
        (prompt_of(61, 250, VOCABULARY), Sampling(1.0, seed=2**63 + 11)),
        (prompt_of(62, 7, VOCABULARY), Sampling(1.6, seed=3)),
        (prompt_of(63, 33, VOCABULARY), Sampling(0.0, seed=3)),
    ]
    return [Request(f"warm-{place}", prompt, 24, sampling) for place, (prompt, sampling) in enumerate(samplings)]


@each_path
@pytest.mark.parametrize("company", ["alone", "crowd", "drafted"])
def test_seeded_draws_are_the_same_in_any_company(path: str, company: str, agreement: Agreement) -> None:
    requests = seeded()
    answers = {request.request_id: (*request.prompt, *alone("llama", request).tokens) for request in requests}
    config = EngineConfig(
        max_lanes=1 if company == "alone" else 6, round_rows=70, draft_tokens=4 if company == "drafted" else 0
    )
    arrivals = submissions(requests, every=2)
    served = serve(paths("llama")[path], arrivals, config, [OracleDrafts(answers, VOCABULARY, every_mixture)])
    for request in requests:
        agreement.check(request, served.tokens[request.request_id], alone("llama", request))


@each_path
@pytest.mark.parametrize(("length", "lanes"), [(1, 4), (33, 2), (250, 4), (300, 3)])
def test_siblings_copy_one_prefill_and_get_what_they_get_alone(
    path: str, length: int, lanes: int, agreement: Agreement
) -> None:
    """More of them than lanes, some outgrowing a capacity class, a stranger among them."""
    prompt = prompt_of(90, length, VOCABULARY)
    family = [Request(f"choice-{choice}", prompt, 14 + 4 * choice, Sampling(1.0, 3, choice)) for choice in range(5)]
    requests = [*family, greedy("stranger", prompt_of(91, 40, VOCABULARY), 30)]
    served = serve(paths("llama")[path], submissions(requests), EngineConfig(max_lanes=lanes, round_rows=70))
    for request in requests:
        agreement.check(request, served.tokens[request.request_id], alone("llama", request))
    windows = [window for played in served.rounds for window in played.windows]
    prefilled = sum(window.rows for window in windows if not window.samples and window.request_id != "stranger")
    assert prefilled == length - 1
    assert sum(window.copies is not None for window in windows) == (4 if length > 1 else 0)


def test_seeds_and_choices_matter() -> None:
    answers = {alone("llama", request).tokens for request in seeded()}
    assert len(answers) == len(seeded())


# ---- random company, random ends -----------------------------------------------------------------------------------


POOL = [
    greedy(f"pool-{place}", prompt_of(70 + place, length, VOCABULARY), tokens)
    for place, (length, tokens) in enumerate([(1, 12), (5, 20), (17, 9), (60, 14), (130, 6), (250, 12), (508, 8)])
]


@settings(max_examples=25)
@given(
    arrivals=st.dictionaries(st.sampled_from(range(len(POOL))), st.integers(0, 12), min_size=1),
    cancels=st.dictionaries(st.sampled_from(range(len(POOL))), st.integers(0, 25), max_size=3),
    kind=st.sampled_from(["llama", "mixtral"]),
    path=st.sampled_from(["packed", "padded"]),
    config=st.builds(EngineConfig, st.integers(1, 6), st.integers(7, 300), st.sampled_from([0, 0, 1, 6])),
    shares=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12),
)
def test_no_company_and_no_cancel_changes_another_lane(
    agreement: Agreement,
    arrivals: dict[int, int],
    cancels: dict[int, int],
    kind: str,
    path: str,
    config: EngineConfig,
    shares: list[tuple[int, int]],
) -> None:
    answers = {each.request_id: (*each.prompt, *alone(kind, each).tokens) for each in POOL}
    drafts = OracleDrafts(answers, VOCABULARY, lambda lane, turn: shares[(3 * lane + turn) % len(shares)])
    mail = [Arrival(step, Submit(POOL[place])) for place, step in arrivals.items()]
    mail += [Arrival(step, Cancel(POOL[place].request_id)) for place, step in cancels.items() if place in arrivals]
    served = serve(paths(kind)[path], mail, config, [drafts])
    for place in arrivals:
        request = POOL[place]
        tokens = served.tokens.get(request.request_id, ())
        if served.finished[request.request_id].reason is FinishReason.CANCELLED:
            assert len(tokens) < request.max_tokens
            request = msgspec.structs.replace(request, max_tokens=len(tokens))
        agreement.check(request, tokens, first_tokens(alone(kind, POOL[place]), request.max_tokens))


def first_tokens(whole: Solo, length: int) -> Solo:
    return Solo(whole.tokens[:length], whole.leads[:length])


def test_a_stop_string_that_ends_one_lane_leaves_the_others(agreement: Agreement) -> None:
    requests = crossing("phi3")[:3]
    mail = [*submissions(requests), Arrival(12, Finish(requests[1].request_id, 4))]
    served = serve(paths("phi3")["packed"], mail, EngineConfig())
    assert served.finished[requests[1].request_id].usage.completion_tokens == 4
    for request in (requests[0], requests[2]):
        agreement.check(request, served.tokens[request.request_id], alone("phi3", request))


def test_a_stop_token_seen_one_round_late_is_not_felt_by_the_next_lane_in_the_seat(agreement: Agreement) -> None:
    """A pipelined round is already under way when a lane ends: what it writes must not reach who sits there next."""
    ending, *others = crossing("llama")[:4]
    stop = alone("llama", ending).tokens[6]
    ended = msgspec.structs.replace(ending, stop_tokens=frozenset({stop}))
    served = serve(paths("llama")["packed"], submissions([ended, *others], every=1), EngineConfig(max_lanes=2))
    length = alone("llama", ending).tokens.index(stop)
    assert served.tokens.get(ended.request_id, ()) == alone("llama", ending).tokens[:length]
    assert served.finished[ended.request_id].reason is FinishReason.STOP
    for request in others:
        agreement.check(request, served.tokens[request.request_id], alone("llama", request))


@each_path
def test_a_carried_window_feeds_on_its_lanes_newest_draw(path: str) -> None:
    """Behind drafts of different lengths, all accepted, and with the lanes in another order than before."""
    requests = crossing("llama")[:2]
    answers = [alone("llama", each).tokens for each in requests]
    forward = paths("llama")[path]
    backend = MLXBackend(INFO, forward)
    backend.verify([chunk(lane, each.prompt[:-1]) for lane, each in enumerate(requests)]).read()
    drafted = [decode(lane, each.prompt, answers[lane][: 2 + lane]) for lane, each in enumerate(requests)]
    first = backend.verify(drafted)
    carried = [
        msgspec.structs.replace(
            decode(window.slot, (1,)), start=window.end, tokens=(), reach=window.end + 2, carried=True
        )
        for window in reversed(drafted)
    ]
    second = backend.verify(carried, first)
    assert [drawn.tokens for drawn in first.read()] == [answers[lane][: 3 + lane] for lane in range(2)]
    assert [drawn.tokens for drawn in second.read()] == [(answers[lane][3 + lane],) for lane in (1, 0)]
    forward.reset()
