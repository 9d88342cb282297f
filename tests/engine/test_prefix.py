"""The prefix cache in the real loop over the fake model: it never changes an answer, whatever comes, goes and fails;
what it says it spared was not computed; and it keeps within its caps and gives back what it pins.
"""

import queue
import random
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.fake import EOS, FakeBlocks, FakeLane
from backends.spill import Spill
from engine.config import EngineConfig
from engine.messages import Fetched, Message, Spilled
from engine.prefix import PrefixCache
from scheduler.lane import Lane
from scheduler.pieces import Chain, Key, Piece
from scheduler.prefix import Match, Tier
from scheduler.request import FinishReason, Request, Sampling
from scheduler.round import Store
from tests.engine.grammars import random_chart
from tests.engine.served import Guest, Harm, Leave, Served, StopString, decode, serve
from tests.engine.shelves import MemorySpill, Shelf

STOPS = frozenset({EOS})
TRUNK = tuple(random.Random(5).choices(range(256), k=60))
SAMPLING = st.builds(Sampling, temperature=st.sampled_from([0.0, 0.8]), seed=st.integers(0, 99))
CONSTRAINTS = st.none() | st.none() | st.builds(random_chart, st.integers(0, 10_000))
GOES = (
    st.none() | st.none() | st.builds(Leave, st.integers(0, 30)) | st.builds(StopString, st.integers(4, 30), st.just(1))
)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Beginnings of one text, with few ways on."""
    length = draw(st.integers(0, len(TRUNK)))
    return (*TRUNK[:length], *draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)))


@st.composite
def guests(draw: st.DrawFn) -> list[Guest]:
    return [
        Guest(
            Request(
                f"r{place}",
                draw(prompts()),
                draw(st.integers(1, 25)),
                draw(SAMPLING),
                STOPS,
                constraint=draw(CONSTRAINTS),
                owner=draw(st.sampled_from(["", "", "", "other"])),
                cache_salt=draw(st.sampled_from(["", "", "", "salt"])),
            ),
            draw(st.integers(0, 80)),
            draw(GOES),
        )
        for place in range(draw(st.integers(1, 10)))
    ]


@st.composite
def shelves(draw: st.DrawFn) -> Shelf:
    """A token of the fake model takes 12 bytes: from room for a few blocks to room for all."""
    disk = MemorySpill({}, draw(st.integers(0, 99)), fails=draw(st.sampled_from([0.0, 0.0, 0.3])))
    cuttable = draw(st.booleans())
    ram = draw(st.sampled_from([0, 48, 200, 1000, 5000] if cuttable else [0, 500, 3000, 20000]))
    return Shelf(ram, draw(st.sampled_from([0, 200, 2000, 50000])), draw(st.sampled_from([None, disk])), 4, cuttable)


@st.composite
def runs(draw: st.DrawFn) -> Served:
    lanes = draw(st.integers(1, 5))
    config = EngineConfig(lanes, lanes + draw(st.integers(1, 30)), draw(st.sampled_from([0, 0, 4])))
    sources = draw(st.sampled_from(["", "suffix", "prophet"]))
    harm = Harm(verify=draw(st.sampled_from([frozenset(), frozenset(), frozenset({3, 99})])))
    return serve(draw(guests()), config, sources, harm=harm, shelf=draw(shelves()))


def assert_right(run: Served) -> None:
    assert not run.backend.faults
    for name in run.undisturbed():
        plain = decode(run.guests[name].request)
        assert (run.tokens(name), run.end(name).reason) == (plain.tokens, plain.reason)


def assert_tidy(run: Served) -> None:
    """Nothing is pinned, what is held is what is known, and caps hold."""
    assert run.prefix is not None
    index = run.prefix.index
    assert all(not entry.pins and not entry.loading for entry in index._entries.values())
    assert set(run.prefix._held) == {piece.key for piece in index.pieces(Tier.RAM)}
    for tier in Tier:
        assert index.stats(tier).bytes <= index.stats(tier).most
    assert sum(block.nbytes for block in run.prefix._held.values()) == index.stats(Tier.RAM).bytes


@settings(max_examples=200, deadline=None)
@given(run=runs())
def test_any_traffic_over_any_cache_gets_the_plain_answers(run: Served) -> None:
    assert_right(run)
    assert_tidy(run)


@settings(max_examples=100, deadline=None)
@given(run=runs())
def test_what_was_spared_was_not_computed_and_all_else_was_once(run: Served) -> None:
    if run.backend.failed:
        return
    for name in run.undisturbed():
        windows = [each for forward in run.backend.forwards for each in forward.windows if each.request_id == name]
        fed = sum(window.real for window in windows if not window.samples)
        assert fed + run.end(name).usage.cached_tokens == len(run.guests[name].request.prompt) - 1


def conversation(turns: int, owner: str = "") -> list[Guest]:
    """Each turn goes on from what was said in the one before, and comes when that has ended."""
    prompt: tuple[int, ...] = TRUNK
    told = []
    for turn in range(turns):
        request = Request(f"turn {turn}", prompt, 30, Sampling(0.0), frozenset(), owner=owner)
        told.append(Guest(request, arrives=turn * 100))
        prompt = (*prompt, *decode(request).tokens, *range(5))
    return told


@pytest.mark.parametrize("cuttable", [True, False])
def test_each_turn_of_a_conversation_computes_only_what_is_new(cuttable: bool) -> None:
    run = serve(conversation(5), EngineConfig(2, 40, 0), shelf=Shelf(cuttable=cuttable))
    assert_right(run)
    for turn in range(1, 5):
        before = len(run.guests[f"turn {turn - 1}"].request.prompt) + 30
        reused = run.end(f"turn {turn}").usage.cached_tokens
        assert reused == before - 1


@pytest.mark.parametrize("cuttable", [True, False])
def test_it_is_alive_after_a_restart(cuttable: bool) -> None:
    files: dict[Key, tuple[Piece, bytes, bytes]] = {}
    talk = conversation(3)
    first = serve(talk[:2], EngineConfig(2, 40, 0), shelf=Shelf(ssd=10**6, disk=MemorySpill(files), cuttable=cuttable))
    assert first.prefix is not None
    first.prefix.close(1.0)
    again = serve(talk[2:], EngineConfig(2, 40, 0), shelf=Shelf(ssd=10**6, disk=MemorySpill(files), cuttable=cuttable))
    assert_right(again)
    assert again.end("turn 2").usage.cached_tokens >= len(talk[1].request.prompt) + 30 - 4
    tiny = serve(talk[2:], EngineConfig(2, 40, 0), shelf=Shelf(0, 10**6, MemorySpill(files), cuttable=cuttable))
    assert_right(tiny)
    assert tiny.end("turn 2").usage.cached_tokens == 0, "without memory nothing can be read"


@pytest.mark.parametrize("cuttable", [True, False])
def test_a_prompt_that_is_asked_again_is_had_but_for_its_last_token(cuttable: bool) -> None:
    twice = [Guest(Request(f"r{place}", TRUNK, 5, Sampling(0.0)), arrives=place * 60) for place in range(2)]
    run = serve(twice, EngineConfig(2, 40, 0), shelf=Shelf(cuttable=cuttable))
    assert_right(run)
    assert run.end("r1").usage.cached_tokens == len(TRUNK) - 1


@pytest.mark.parametrize("cuttable", [True, False])
def test_requests_with_one_beginning_wait_for_the_lane_that_is_just_computing_it(cuttable: bool) -> None:
    many = [Guest(Request(f"r{place}", (*TRUNK, place), 5, Sampling(0.0))) for place in range(4)]
    run = serve(many, EngineConfig(4, 24, 0), shelf=Shelf(cuttable=cuttable))
    assert_right(run)
    assert run.backend.copies == 3
    assert [run.end(f"r{place}").usage.cached_tokens for place in range(4)] == [0, 60, 60, 60]


def test_a_lane_that_shares_takes_over_when_the_one_before_it_leaves() -> None:
    first = Guest(Request("r0", (*TRUNK, 0), 5, Sampling(0.0)), goes=Leave(4))
    run = serve(
        [first, *(Guest(Request(f"r{n}", (*TRUNK, n), 5, Sampling(0.0))) for n in (1, 2))], EngineConfig(3, 13, 0)
    )
    assert_right(run)
    assert run.end("r0").reason is FinishReason.CANCELLED
    assert run.end("r2").usage.cached_tokens == 60


def test_what_a_cancelled_request_had_computed_is_kept() -> None:
    run = serve(
        [
            Guest(Request("left", TRUNK, 50, Sampling(0.0)), goes=Leave(6)),
            Guest(Request("next", TRUNK, 5, Sampling(0.0)), arrives=20),
        ],
        EngineConfig(1, 17, 0),
        shelf=Shelf(),
    )
    assert run.end("left").reason is FinishReason.CANCELLED
    assert run.end("next").usage.cached_tokens > 0
    assert_right(run)


@pytest.mark.parametrize("change", [{"owner": "other"}, {"cache_salt": "other"}])
def test_another_owner_or_salt_gets_nothing_of_it(change: dict[str, str]) -> None:
    first = Request("r0", TRUNK, 5, Sampling(0.0))
    others = [msgspec.structs.replace(first, request_id=f"r{n}", **change) for n in (1, 2)]
    late = [Guest(others[0], arrives=0), Guest(others[1], arrives=60)]
    run = serve([Guest(first), *late], EngineConfig(3, 40, 0), shelf=Shelf())
    assert run.end("r1").usage.cached_tokens == 0, "neither of the lane beside it"
    assert run.end("r2").usage.cached_tokens == 59, "of its own"


def test_a_read_that_never_answers_costs_patience_not_the_request() -> None:
    files: dict[Key, tuple[Piece, bytes, bytes]] = {}
    request = Request("r0", TRUNK, 5, Sampling(0.0))
    first = serve([Guest(request)], EngineConfig(1, 40, 0), shelf=Shelf(ssd=10**6, disk=MemorySpill(files)))
    assert first.prefix is not None
    first.prefix.close(1.0)

    class Deaf(MemorySpill):
        @property
        def busy(self) -> bool:
            return False

        def turn(self) -> None:
            """Nothing ever comes."""

    run = serve([Guest(request)], EngineConfig(1, 40, 0), shelf=Shelf(ssd=10**6, disk=Deaf(files)))
    assert_right(run)
    assert run.end("r0").usage.cached_tokens == 0


def test_while_others_decode_little_is_copied_at_once() -> None:
    long = tuple(random.Random(6).choices(range(256), k=400))
    talk = [
        Guest(Request("first", long, 2, Sampling(0.0), ignore_eos=True)),
        Guest(Request("writer", (1, 2), 200, Sampling(0.0), ignore_eos=True), arrives=60),
        Guest(Request("again", long, 2, Sampling(0.0), ignore_eos=True), arrives=70),
    ]
    run = serve(talk, EngineConfig(2, 40, 0), shelf=Shelf())
    assert_right(run)
    assert run.end("again").usage.cached_tokens == 399


def pieces_of(run: Served) -> Sequence[Piece]:
    assert run.prefix is not None
    return run.prefix.index.pieces(Tier.RAM)


def test_nothing_is_kept_of_caches_that_are_presumed_lost() -> None:
    guest = Guest(Request("r0", TRUNK, 10, Sampling(0.0)))
    run = serve([guest], EngineConfig(1, 100, 0), harm=Harm(verify=frozenset({0, 1})), shelf=Shelf())
    assert run.end("r0").reason is FinishReason.ERROR
    assert not pieces_of(run)


def sizes_of(folder: Path) -> list[int]:
    """Of all files that are there, finished or not, while others are being removed."""
    sizes = []
    for file in folder.glob("*/*"):
        with suppress(FileNotFoundError):
            sizes.append(file.stat().st_size if file.suffix in (".block", ".partial") else 0)
    return sizes


def test_a_lower_cap_keeps_what_was_used_last() -> None:
    files: dict[Key, tuple[Piece, bytes, bytes]] = {}
    old, new = (tuple(random.Random(seed).choices(range(256), k=40)) for seed in (1, 2))
    talk = [Guest(Request(f"r{n}", text, 2, Sampling(0.0)), arrives=n * 60) for n, text in enumerate((old, new))]
    first = serve(talk, EngineConfig(1, 60, 0), shelf=Shelf(ssd=10**6, disk=MemorySpill(files)))
    assert first.prefix is not None
    first.prefix.close(1.0)
    size = sum(5 + len(data) for _, _, data in files.values())
    later = [Guest(Request(f"r{n}", text, 2, Sampling(0.0)), arrives=n * 60) for n, text in enumerate((new, old))]
    again = serve(later, EngineConfig(1, 60, 0), shelf=Shelf(ssd=size * 2 // 3, disk=MemorySpill(files)))
    assert again.end("r0").usage.cached_tokens >= 36
    assert again.end("r1").usage.cached_tokens < 30


def test_under_churn_neither_memory_nor_files_pass_their_caps(tmp_path: Path) -> None:
    """Texts come and go through a real folder; files are looked at on the disk, whatever the accounts say."""
    lanes = {0: FakeLane()}
    letters: queue.SimpleQueue[Message] = queue.SimpleQueue()
    ram, ssd, biggest = 4000, 9000, 0
    spill = Spill(tmp_path, "fake", most_bytes=ssd, queue_bytes=1000, bytes_per_second=0, warn=pytest.fail)
    cache = PrefixCache(FakeBlocks(lanes, checkpoints=False), ram, spill, ssd, letters.put, block=8)
    rng = random.Random(3)
    for turn in range(100):
        tokens = [*TRUNK[: rng.randint(0, 60)], *rng.choices(range(256), k=rng.randint(8, 40))]
        lanes[0] = FakeLane()
        for token in tokens:
            lanes[0].feed(token)
        lane = Lane(Request(f"r{turn}", tuple(tokens), 1), submitted=0.0)
        lane.seat(0, turn, 0.0)
        cache.reuse.admit(lane, Match())
        lane.cached = len(tokens) - 1
        cache.store(cache.reuse.stores(lane, leaving=True))
        cache.reuse.leave(lane.request.request_id)
        for piece in cache.reuse.match(Lane(Request("next", (*TRUNK, 0), 1), submitted=0.0)).pieces:
            if not cache.index.holds(piece.key, Tier.RAM):
                cache.fetch(piece.key)
        if turn % 3:
            assert spill.flush(60.0)
        while not letters.empty():
            message = letters.get()
            assert isinstance(message, Fetched | Spilled)
            cache.receive(message)
        files = sizes_of(tmp_path)
        biggest = max([biggest, *files])
        assert sum(files) <= ssd + biggest
        assert cache.stats().ram.bytes <= ram
        assert sum(block.nbytes for block in cache._held.values()) <= ram
    stats = cache.stats()
    assert stats.ram.evictions > 100
    assert stats.ssd.evictions > 0
    cache.close(5.0)
    assert sum(file.stat().st_size for file in tmp_path.glob("*/*.block")) <= ssd


def test_a_read_that_failed_takes_nothing_from_memory_that_came_meanwhile() -> None:
    lanes = {0: FakeLane()}
    for token in TRUNK:
        lanes[0].feed(token)
    letters: list[Message] = []
    disk = MemorySpill({})
    cache = PrefixCache(FakeBlocks(lanes, checkpoints=False), 10**6, disk, 10**6, letters.append, block=8)
    (piece, *_) = Chain(cache.reuse.root(Request("r", TRUNK, 1)), 8).grow(TRUNK, 8)
    cache.store([Store(0, "r", piece)])
    disk.close(1.0)
    cache.receive(letters.pop())
    cache.index._remove(cache.index._entries[piece.key], Tier.RAM)
    cache._held.clear()
    assert cache.fetch(piece.key)
    cache.damaged([piece.key])
    cache.store([Store(0, "r", piece)])
    cache.receive(Fetched(piece.key, None))
    assert cache.index.holds(piece.key, Tier.RAM)
    assert cache.held(piece.key) is not None


@pytest.mark.parametrize(("length", "most"), [(300, 1), (3000, 7), (9000, 9), (100_000, 9)])
def test_a_long_prompt_pauses_often_enough_and_not_too_often(length: int, most: int) -> None:
    cache = PrefixCache(FakeBlocks({}, checkpoints=True), 10**6, None, 0, lambda _: None)
    lane = Lane(Request("r", tuple(range(length)), 1), submitted=0.0)
    cache.reuse.admit(lane, Match())
    pauses = sorted({0, *lane.stops})
    assert max(lane.stops) == length - 1
    assert len(lane.stops) <= most
    assert max(b - a for a, b in pairwise(pauses)) <= max(512, -(-length // 512 // 8) * 512 + 512)


def test_a_stop_string_within_a_block_leaves_no_piece_that_ends_before_it_begins() -> None:
    cache = PrefixCache(FakeBlocks({}, checkpoints=True), 10**6, None, 0, lambda _: None, block=8)
    lane = Lane(Request("r", TRUNK[:10], 9), submitted=0.0)
    lane.seat(0, 0, 0.0)
    cache.reuse.admit(lane, Match())
    lane.tokens += TRUNK[10:20]
    lane.cached = 19
    cache.reuse.stores(lane)
    lane.cut(3)
    assert cache.reuse.stores(lane, leaving=True) == []
