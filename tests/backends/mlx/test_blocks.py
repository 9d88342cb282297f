"""Lanes in pieces: out, through bytes, and into another seat they are the same, for every family of caches; and what is
served from pieces is what is served without.
"""

import random
from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from backends.base import KVQuantization
from backends.mlx.blocks import LaneBlocks, MLXBlock
from backends.mlx.build import build_forward
from backends.mlx.verify import Forward
from engine.config import EngineConfig
from engine.prefix import PrefixCache
from scheduler.pieces import Piece, chain, checkpoint_key
from scheduler.request import Request, Sampling
from tests.backends.mlx.architectures import VOCABULARY, tiny_model
from tests.backends.mlx.serving import Agreement, OracleDrafts, greedy, prompt_of, serve, solo, submissions
from tests.backends.mlx.windows import chunk, decode

pytestmark = pytest.mark.usefixtures("calm")

NAMES = (
    "llama",
    "qwen2",
    "gemma3_text",
    "llama4_text",
    "deepseek_v3",
    "mamba2",
    "rwkv7",
    "qwen3_next",
    "recurrent_gemma",
    "baichuan_m1",
)
each_model = pytest.mark.parametrize("name", NAMES)
BLOCK = 16
ROOT = b"root"


@cache
def reference(name: str) -> nn.Module:
    return tiny_model(name)


@cache
def served(name: str) -> Forward:
    return build_forward(tiny_model(name), VOCABULARY, name)


@cache
def rounded() -> Forward:
    """Quantized behind the 20th position."""
    model = tiny_model("llama", head_dim=32)
    return build_forward(model, VOCABULARY, "llama", quantization=KVQuantization(8, 32, start=20))


def blocks_of(forward: Forward) -> LaneBlocks:
    return LaneBlocks(forward.store, forward.regrouping, "test")


def pieces_of(tokens: Sequence[int], *, checkpoint: bool) -> list[Piece]:
    pieces: list[Piece] = []
    for place, key in enumerate(chain(ROOT, tokens, BLOCK)):
        pieces.append(Piece(key, pieces[-1].key if pieces else ROOT, place * BLOCK, (place + 1) * BLOCK))
    if checkpoint:
        start = len(pieces) * BLOCK
        parent = pieces[-1].key if pieces else ROOT
        pieces.append(Piece(checkpoint_key(parent, tokens[start:]), parent, start, len(tokens), checkpoint=True))
    return pieces


def arrays_of(blocks: Sequence[MLXBlock]) -> list[list[np.ndarray]]:
    return [[np.array(array.reshape(-1).view(mx.uint8)) for array in block.arrays] for block in blocks]


def assert_equal(found: list[list[np.ndarray]], expected: list[list[np.ndarray]]) -> None:
    assert [len(each) for each in found] == [len(each) for each in expected]
    assert all(
        np.array_equal(a, b)
        for left, right in zip(found, expected, strict=True)
        for a, b in zip(left, right, strict=True)
    )


def fed(forward: Forward, slot: int, tokens: Sequence[int]) -> None:
    forward.run([chunk(slot, tokens)], None)
    mx.eval(forward.buffers())
    forward.keep({})


@pytest.mark.parametrize("length", [16, 50, 300])
@pytest.mark.parametrize("name", [*NAMES, "quantized"])
def test_a_lane_in_pieces_through_bytes_in_another_seat_is_the_same(name: str, length: int) -> None:
    forward = rounded() if name == "quantized" else served(name)
    blocks = blocks_of(forward)
    tokens = prompt_of(1, length, VOCABULARY)
    fed(forward, 0, prompt_of(2, 40, VOCABULARY))
    fed(forward, 1, tokens)
    pieces = pieces_of(tokens, checkpoint=blocks.checkpoints)
    taken = [block for block in blocks.take(1, pieces) if isinstance(block, MLXBlock)]
    assert len(taken) == len(pieces)
    read = [
        blocks.parse(piece, block.meta, memoryview(b"".join(block.parts())))
        for piece, block in zip(pieces, taken, strict=True)
    ]
    end = pieces[-1].end
    (expected,) = forward.run([decode(1, (*tokens[:end], 7))], None).logits[None]
    forward.keep({})
    halfway = len(pieces) // 2
    for part in (slice(0, halfway), slice(halfway, None)):
        if pieces[part]:
            blocks.put(5, length + 2, list(zip(pieces[part], read[part], strict=True)))
    assert_equal(arrays_of([b for b in blocks.take(5, pieces) if isinstance(b, MLXBlock)]), arrays_of(taken))
    (found,) = forward.run([decode(5, (*tokens[:end], 7))], None).logits[None]
    forward.keep({})
    assert np.abs(np.array(found) - np.array(expected)).max() <= 1e-4
    forward.reset()


@each_model
def test_a_block_owns_its_memory(name: str) -> None:
    forward = served(name)
    blocks = blocks_of(forward)
    tokens = prompt_of(3, 40, VOCABULARY)
    fed(forward, 0, tokens)
    taken = [b for b in blocks.take(0, pieces_of(tokens, checkpoint=blocks.checkpoints)) if isinstance(b, MLXBlock)]
    before = [[array.copy() for array in each] for each in arrays_of(taken)]
    forward.run([decode(0, (*tokens, 7), (8, 9))], None)
    mx.eval(forward.buffers())
    forward.keep({0: 41})
    fed(forward, 0, prompt_of(4, 60, VOCABULARY)) if forward.cuttable else None
    forward.reset()
    assert_equal(arrays_of(taken), before)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_a_checkpoint_can_be_had_while_the_next_round_is_under_way_and_not_elsewhere(name: str) -> None:
    forward = served(name)
    blocks = blocks_of(forward)
    tokens = prompt_of(5, 30, VOCABULARY)
    fed(forward, 0, tokens)
    pieces = pieces_of(tokens, checkpoint=True)
    standing = blocks.take(0, pieces[-1:])
    forward.run([decode(0, (*tokens, 7))], None)
    (under_way,) = blocks.take(0, pieces[-1:])
    assert isinstance(under_way, MLXBlock)
    assert isinstance(standing[0], MLXBlock)
    assert_equal(arrays_of([under_way]), arrays_of([standing[0]]))
    forward.keep({})
    assert blocks.take(0, pieces[-1:]) == [None]
    forward.reset()


def test_bytes_that_are_no_block_of_this_model_are_refused() -> None:
    forward = served("llama")
    blocks = blocks_of(forward)
    tokens = prompt_of(6, 20, VOCABULARY)
    fed(forward, 0, tokens)
    (piece,) = pieces_of(tokens, checkpoint=False)
    (block,) = blocks.take(0, [piece])
    assert block is not None
    data = b"".join(block.parts())
    other = served("deepseek_v3")
    for meta, broken in ((b"", data), (b"x", data), (block.meta, data[:-1]), (block.meta, data + b"x")):
        with pytest.raises(ValueError, match="no block of this model"):
            blocks.parse(piece, meta, memoryview(broken))
    with pytest.raises(ValueError, match="no block of this model"):
        blocks_of(other).parse(piece, block.meta, memoryview(data))
    forward.reset()


@each_model
@pytest.mark.parametrize("drafts", [0, 4])
def test_served_from_pieces_everyone_gets_what_mlx_lm_gives(name: str, drafts: int, agreement: Agreement) -> None:
    """Three waves with one beginning: of its own turn, of another's, and once more the same."""
    forward = served(name)
    prefix = PrefixCache(blocks_of(forward), 1 << 30, None, 0, lambda _: None, block=BLOCK)
    trunk = prompt_of(70, 70, VOCABULARY)
    first = greedy("first", trunk, 20)
    told = solo(reference(name), first).tokens
    waves = [
        [first],
        [greedy("next turn", (*trunk, *told, 5, 6), 12), greedy("other way", (*trunk[:50], 9, 9, 9), 12)],
        [greedy("another way", (*trunk[:50], 8, 8), 12), greedy("again", trunk, 12), greedy("short", trunk[:5], 12)],
        [greedy("third way", (*trunk[:50], 7, 8), 12)],
    ]
    answers = {each.request_id: (*each.prompt, *solo(reference(name), each).tokens) for wave in waves for each in wave}
    reused = {}
    for wave in waves:
        source = OracleDrafts(answers, VOCABULARY, lambda lane, turn: (3, (lane + turn) % 4))
        config = EngineConfig(max_lanes=3, round_rows=40, draft_tokens=drafts)
        run = serve(forward, submissions(wave, every=2), config, [source] if drafts else [], prefix)
        for request in wave:
            agreement.check(request, run.tokens[request.request_id], solo(reference(name), request))
            reused[request.request_id] = run.finished[request.request_id].usage.cached_tokens
    assert reused["first"] == 0
    assert reused["next turn"] >= 80, "prompt and answer of the turn before"
    assert reused["again"] >= 64
    assert reused["third way"] >= 48, "others went another way here before"


@each_model
@pytest.mark.parametrize("seed", range(2))
def test_random_traffic_over_a_small_cache_gets_what_mlx_lm_gives(name: str, seed: int, agreement: Agreement) -> None:
    """Waves of requests that share beginnings, warm and cold, drafted for or not; blocks come and go."""
    forward, rng = served(name), random.Random(seed)
    blocks = blocks_of(forward)
    trunks = [prompt_of(80 + seed, 90, VOCABULARY), prompt_of(90 + seed, 60, VOCABULARY)]
    probe = [Piece(b"", ROOT, 0, BLOCK)]
    fed(forward, 0, trunks[0])
    (block,) = blocks.take(0, probe)
    assert block is not None
    forward.reset()
    ram = rng.choice([4, 10]) * max(block.nbytes, 4096)
    prefix = PrefixCache(blocks, ram, None, 0, lambda _: None, block=BLOCK)
    reused = 0
    for wave in range(3):
        requests = []
        for place in range(4):
            trunk = rng.choice(trunks)
            prompt = (
                *trunk[: rng.randint(1, len(trunk))],
                *prompt_of(rng.randint(0, 2), rng.randint(1, 4), VOCABULARY),
            )
            sampling = Sampling(rng.choice([0.0, 0.0, 0.9]), rng.randint(0, 9))
            requests.append(Request(f"{wave}-{place}", prompt, rng.randint(4, 20), sampling))
        alone = {each.request_id: solo(reference(name), each) for each in requests}
        answers = {each.request_id: (*each.prompt, *alone[each.request_id].tokens) for each in requests}
        source = OracleDrafts(answers, VOCABULARY, lambda lane, turn: (3, (lane + turn) % 4))
        config = EngineConfig(max_lanes=3, round_rows=rng.choice([8, 40]), draft_tokens=rng.choice([0, 4]))
        run = serve(forward, submissions(requests, every=1), config, [source] if config.draft_tokens else [], prefix)
        for request in requests:
            agreement.check(request, run.tokens[request.request_id], alone[request.request_id])
            reused += run.finished[request.request_id].usage.cached_tokens
        assert prefix.stats().ram.bytes <= ram
    assert reused > 0
