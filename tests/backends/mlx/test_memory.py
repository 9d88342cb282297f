"""What lanes are said to take against what their arrays do; the budget; and the device's limits against a fake one."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backends.base import MOST_DRAFT_TOKENS, Budget, KVQuantization, MemoryUse
from backends.groups import capacity_class
from backends.mlx.build import build_forward, load_backend, state_bytes
from backends.mlx.caches.buffers import LayerShape
from backends.mlx.cgroups import memory_limit, parse_limit
from backends.mlx.drafts.model import DraftModel, DraftModelFacts
from backends.mlx.load import LoadError
from backends.mlx.memory import (
    LaneLedger,
    MetalMemory,
    NoRoomError,
    PlainMemory,
    Residence,
    Scratch,
    budget_of,
    device_memory,
    most_held,
)
from backends.mlx.regroup import ROWS_PER_LANE
from backends.mlx.runtime import Device, MemoryLimit
from backends.mlx.verify import Forward, LaneStore
from backends.mlx.warmup import LargestRound
from scheduler.draft import DraftAsk
from scheduler.request import Sampling
from scheduler.round import Window
from tests.backends.mlx.architectures import VOCABULARY, tiny_model
from tests.backends.mlx.random_models import random_model
from tests.backends.mlx.serving import both_paths, prompt_of
from tests.backends.mlx.tiny_models import write_folder
from tests.backends.mlx.windows import window_of

pytestmark = pytest.mark.usefixtures("calm")

# ---- lanes -----------------------------------------------------------------------------------------------------------

WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads of 32, which is a group of quantized numbers."""


@cache
def forward_of(family: str) -> Forward:
    """One of each cache family; states' sizes are known."""
    if family == "padded":
        return both_paths(random_model("llama")).padded
    how = {"quantized": KVQuantization(4, 32), "quantized from 300": KVQuantization(8, 32, 300)}.get(family)
    model = tiny_model(family) if how is None else random_model("llama", **WIDE)
    forward = build_forward(model, VOCABULARY, family, None, how)
    forward.store.groups.lane_bytes = state_bytes(forward)
    return forward


KEPT_WHOLE = ("llama", "gemma3_text", "llama4", "deepseek_v3", "quantized", "quantized from 300", "padded")
WITH_STATES = ("mamba", "rwkv7", "qwen3_next", "recurrent_gemma", "falcon_h1", "baichuan_m1")


def visits(ledger: LaneLedger, forward: Forward) -> Iterator[None]:
    """Lanes join, grow, share a round or not, have drafts cut, are copied, squeezed, and leave."""
    lengths = {0: 5, 1: 7, 2: 3, 3: 70}
    forward.run([window_of(slot, 0, rows, samples=False) for slot, rows in lengths.items()], None)
    forward.keep({})
    yield
    forward.run([window_of(0, 5, 4, drafted=3, reach=300), window_of(1, 7, 1), window_of(2, 3, 3, drafted=2)], None)
    forward.keep({0: 7, 1: 8, 2: 6})
    yield
    forward.run([window_of(1, 8, 2, drafted=1, reach=1100)], None)
    forward.keep({})
    copied = msgspec.structs.replace(window_of(9, 10, 1), copies=1)
    forward.run([copied, window_of(3, 70, 1)], None)
    forward.keep({})
    yield
    forward.release(0)
    yield
    ledger.limit(ledger.needed({1: 10, 2: 6, 3: 71, 9: 11}))
    yield
    forward.run([window_of(2, 6, 30, samples=False)], None)
    forward.keep({})
    yield
    for slot in (1, 3, 9):
        forward.release(slot)
    yield


def bytes_of(arrays: Sequence[mx.array]) -> int:
    mx.eval(arrays)
    return sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("family", KEPT_WHOLE)
def test_what_is_held_is_what_the_buffers_take(family: str) -> None:
    forward = forward_of(family)
    ledger = LaneLedger(forward.store)
    for _ in visits(ledger, forward):
        assert ledger.held == bytes_of(forward.buffers()) > 0
    forward.reset()
    assert ledger.held == 0 == bytes_of(forward.buffers())


@pytest.mark.parametrize("family", WITH_STATES)
def test_states_take_no_more_than_is_held_for_them(family: str) -> None:
    """Right after a round, twice each lane's at most; until the next round, what lanes that left had may be there."""
    forward = forward_of(family)
    ledger, state = LaneLedger(forward.store), state_bytes(forward) // ROWS_PER_LANE
    assert forward.regrouping is not None
    lanes = 0
    for _ in visits(ledger, forward):
        buffers = bytes_of(forward.store.arrays())
        states = bytes_of(forward.regrouping.arrays())
        lanes = max(lanes, (ledger.held - buffers) // (ROWS_PER_LANE * state))
        assert (ledger.held - buffers) % (ROWS_PER_LANE * state) == 0
        assert 0 < states <= 2 * lanes * state
    forward.reset()
    assert ledger.held == 0 == bytes_of(forward.buffers())


def test_a_lane_that_is_not_fed_with_the_others_keeps_its_own_state_only() -> None:
    forward = forward_of("mamba")
    assert forward.regrouping is not None
    state = state_bytes(forward) // ROWS_PER_LANE
    forward.run([window_of(slot, 0, 70, samples=False) for slot in range(8)], None)
    forward.keep({})
    for last in range(7, 0, -1):
        forward.run([window_of(slot, 70 + 7 - last, 1) for slot in range(last)], None)
        forward.keep({})
    assert bytes_of(forward.regrouping.arrays()) == 8 * state
    forward.reset()


def test_giving_back_rows_frees_them() -> None:
    store = LaneStore(together=False)
    layers = [store.layer(LayerShape(2, 32, 32, mx.float32)) for _ in range(3)]
    store.place(dict.fromkeys(range(8), (1000, 0)))
    for layer in layers:
        for plane in layer.planes:
            plane[1024][5] = 5.0
    mx.eval(store.arrays())
    full = mx.get_active_memory()
    for slot in (0, 1, 2, 3, 4, 6):
        store.release(slot)
    mx.reset_peak_memory()
    store.limit(store.groups.needed({5: 1000, 7: 1000}))
    assert full - mx.get_active_memory() >= 6 * store.groups.bytes_of_row(1024)
    moving = 3 * store.groups.bytes_of_row(1024) * store.largest_share(1024)
    assert mx.get_peak_memory() - full <= 1.1 * moving, "one plane at a time, and a lane on its way"
    assert store.groups.held == 2 * store.groups.bytes_of_row(1024) == bytes_of(store.arrays())
    assert store.groups.seat(5).row in (0, 1)
    assert (layers[2].values[1024][store.groups.seat(5).row] == 5.0).all()


def test_padding_needs_no_larger_class_than_its_lane() -> None:
    """A lane near the end of its row beside one with a long draft, and a long chunk beside a short one; what comes out
    is what packed rows give.
    """
    model = both_paths(random_model("llama"))
    prompts = {slot: prompt_of(slot, length, VOCABULARY) for slot, length in enumerate((250, 3, 90))}
    draft = prompt_of(7, 31, VOCABULARY)
    sampled: dict[str, list[mx.array]] = {}
    for name in ("packed", "padded"):
        forward = model[name]
        forward.run([window_of(slot, 0, 1, tokens=text, samples=False) for slot, text in prompts.items()], None)
        mixed = [window_of(0, 250, 2, drafted=1), window_of(1, 3, 32, drafted=31), window_of(2, 90, 1)]
        mixed[1] = msgspec.structs.replace(mixed[1], draft=draft)
        verified = forward.run(mixed, None)
        assert verified.logits is not None
        rows = {each.index: verified.logits[each.first : each.last] for each in verified.sampled}
        sampled[name] = [rows[index] for index in range(3)]
        assert {forward.store.groups.seat(slot).capacity for slot in prompts} == {256}
        forward.reset()
    for packed, padded in zip(sampled["packed"], sampled["padded"], strict=True):
        assert packed.shape == padded.shape
        assert mx.abs(packed - padded).max().item() < 1e-3


# ---- and a draft model's ---------------------------------------------------------------------------------------------

DRAFTED = 600
"""Context of the draft model."""
LENGTHS = st.dictionaries(st.integers(0, 5), st.integers(1, 1500), min_size=1, max_size=5)


def two_stores() -> tuple[LaneStore, LaneStore, LaneLedger]:
    stores = LaneStore(together=False), LaneStore(together=False)
    for store, heads in zip(stores, (2, 1), strict=True):
        store.layer(LayerShape(heads, 2, 2, mx.float32))
    return *stores, LaneLedger(*stores, DRAFTED)


@settings(max_examples=60)
@given(before=LENGTHS, lengths=LENGTHS, ahead=st.integers(0, MOST_DRAFT_TOKENS), order=st.permutations(range(12)))
def test_both_models_lanes_fit_into_what_is_needed(
    before: Mapping[int, int], lengths: Mapping[int, int], ahead: int, order: Sequence[int]
) -> None:
    """In whatever order they are placed, the draft model's under numbers of its own; also where spare rows were taken
    before by the other one.
    """
    target, drafter, ledger = two_stores()
    target.place({slot: (length, 0) for slot, length in before.items()})
    drafter.place({slot + 50: (min(length, DRAFTED), 0) for slot, length in before.items()})
    lengths = {slot: max(length, before.get(slot, 0)) for slot, length in lengths.items()}
    for slot in before.keys() - lengths.keys():
        target.release(slot)
        drafter.release(slot + 50)
    needed = ledger.needed(lengths)
    ledger.limit(needed)
    for turn in order:
        store, slot = (target, turn) if turn < 6 else (drafter, turn - 6)
        if slot in lengths:
            drafted = {slot + 50: (min(lengths[slot] + ahead, DRAFTED), 0)}
            store.place({slot: (lengths[slot], 0)} if store is target else drafted)
            assert ledger.held <= needed
    assert ledger.held == sum(bytes_of(store.arrays()) for store in (target, drafter))


def test_a_draft_models_own_calls_stay_within_what_its_lanes_need() -> None:
    model = random_model("llama")
    forward, drafting = both_paths(model).packed, both_paths(random_model("llama", 1)).packed
    source = DraftModel(drafting, DraftModelFacts(VOCABULARY, VOCABULARY, 2048))
    ledger = LaneLedger(forward.store, source.store, source.context_length)
    for length in (240, 256, 500):
        text = prompt_of(length, length, VOCABULARY)
        needed = ledger.needed({0: length, 1: length})
        ledger.limit(needed)
        forward.run([window_of(slot, 0, 8, reach=length, samples=False) for slot in (0, 1)], None)
        source.propose([DraftAsk(name, text, 1, 20) for name in ("a", "b")])
        assert ledger.held <= needed
    source.forget("a")
    source.forget("b")
    forward.reset()
    assert ledger.held == 0


# ---- the budget ------------------------------------------------------------------------------------------------------


@given(
    total=st.integers(0, 1 << 24),
    weights=st.integers(0, 1 << 22),
    fixed=st.integers(0, 1 << 20),
    per_position=st.floats(0, 500),
    context=st.integers(1, 20_000),
)
def test_the_longest_lane_fits_beside_everything_else(
    total: int, weights: int, fixed: int, per_position: float, context: int
) -> None:
    _, _, ledger = two_stores()
    scratch = Scratch(fixed, per_position)
    smallest = ledger.needed({0: min(256, context)})
    least = weights + scratch.at(min(256, context)) + smallest
    if total < least + 2 * ledger.growing(1) * smallest:
        with pytest.raises(NoRoomError, match="raise --memory or take a smaller model"):
            budget_of(total, weights, scratch, ledger, context)
        return
    budget, longest = budget_of(total, weights, scratch, ledger, context)
    assert budget.total == total
    assert ledger.needed({0: longest}) <= budget.pool
    doubled = budget.pool * ledger.growing(longest)
    assert weights + scratch.at(longest) + budget.pool + doubled <= total
    assert longest in (context, capacity_class(longest))


def test_most_held_is_what_an_action_takes_beyond_what_stays() -> None:
    kept: list[mx.array] = []

    def action() -> None:
        gone = mx.ones((1 << 20,))
        mx.eval(gone)
        kept.append(mx.ones((1 << 18,)))
        mx.eval(kept)

    most = most_held(PlainMemory(), action)
    assert 1 << 22 <= most < (1 << 22) + (1 << 16)


@pytest.fixture
def limits_put_back() -> Iterator[None]:
    before = mx.set_memory_limit(1 << 40), mx.set_cache_limit(0)
    mx.set_memory_limit(before[0])
    mx.set_cache_limit(before[1])
    yield
    mx.set_memory_limit(before[0])
    mx.set_cache_limit(before[1])


def silent(_stage: str, _done: int, _total: int | None) -> None:
    """Nobody watches it load."""


SMALL = LargestRound(rows=32, lanes=2, drafts=3)


@pytest.mark.usefixtures("limits_put_back")
def test_a_loaded_backend_keeps_its_budget(tmp_path: Path) -> None:
    write_folder(tmp_path, {"max_position_embeddings": 4096}, dtype=mx.float32)
    free = load_backend(str(tmp_path), tmp_path, "float32", silent, "here")
    assert free.info.budget is None
    lane = free.memory.needed({0: 4096})
    weights = mx.get_active_memory()

    def loaded(size: int) -> tuple[Budget, int]:
        gc.collect()  # what an earlier load left in cycles would count as weights
        backend = load_backend(
            str(tmp_path), tmp_path, "float32", silent, "here", memory=MemoryLimit(size), largest=SMALL
        )
        assert backend.info.budget is not None
        assert backend.memory.held == 0
        context = backend.info.context_length
        assert backend.memory.needed({0: context}) <= backend.info.budget.pool
        backend.verify([Window(0, "a", 0, (1, 2, 3), True, Sampling(), context)]).read()
        assert backend.memory.held <= backend.info.budget.pool
        assert backend.use().active <= size
        return backend.info.budget, context

    budget, context = loaded(2 * weights + 100 * lane)
    assert (budget.total, context) == (2 * weights + 100 * lane, 4096)
    assert budget.weights >= weights
    assert budget.scratch > 0
    assert 70 * lane < budget.pool < 100 * lane
    assert mx.set_memory_limit(budget.total) == budget.total
    assert loaded(budget.weights + lane)[1] in (256, 512, 1024, 2048)
    with pytest.raises(
        LoadError, match=r"weights of .* MB.* do not fit into 1 MB: raise --memory or take a smaller model"
    ):
        loaded(1_000_000)


# ---- the device ------------------------------------------------------------------------------------------------------


class FakeDevice:
    """Implements `DeviceMemory`: notes what it is told."""

    def __init__(self) -> None:
        self.limits: list[tuple[int, int]] = []
        self.wired = 7
        self.cleared = 0
        self.given_back = 0

    def limit(self, total: int, cached: int) -> None:
        self.limits.append((total, cached))

    def wire(self, most: int) -> int:
        before, self.wired = self.wired, most
        return before

    def clear(self) -> None:
        self.cleared += 1

    def give_back(self) -> None:
        self.given_back += 1

    def use(self) -> MemoryUse:
        return MemoryUse(1, 2, 3)

    def forget_peak(self) -> None:
        """There is none."""


class Resting(RuleBasedStateMachine):
    """Whatever comes in whatever order: wired while lanes run, as far as the budget goes, and as before at rest."""

    @initialize(bounded=st.booleans())
    def start(self, bounded: bool) -> None:
        self.device = FakeDevice()
        self.budget = Budget(1000, 100, 200) if bounded else None
        self.residence = Residence(self.device, self.budget)
        self.running = False
        assert self.device.limits == ([(1000, 100)] if bounded else [])

    @rule()
    def run(self) -> None:
        self.residence.run()
        self.running = True

    @rule()
    def rest(self) -> None:
        given_back = self.device.given_back
        self.residence.rest()
        self.running = False
        assert self.device.given_back == given_back + 1

    @rule()
    def prefill(self) -> None:
        cleared, given_back = self.device.cleared, self.device.given_back
        self.residence.prefilled()
        assert (self.device.cleared, self.device.given_back) == (cleared + 1, given_back)

    @invariant()
    def wired_while_it_runs(self) -> None:
        assert self.device.wired == (1000 if self.running and self.budget is not None else 7)
        assert self.residence.use() == MemoryUse(1, 2, 3)


TestResting = Resting.TestCase


def test_only_metal_wires_and_never_more_than_it_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    wired: list[int] = []

    def set_wired_limit(limit: int) -> int:
        wired.append(limit)
        return 0

    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    metal = device_memory("metal", 500)
    assert isinstance(metal, MetalMemory)
    assert [metal.wire(most) for most in (400, 600, 0)] == [0, 0, 0]
    assert wired == [400, 500, 0]
    for kind in ("cpu", "cuda"):
        device_memory(kind, 500).wire(400)  # type: ignore[arg-type]
    assert len(wired) == 3


def test_mlx_counts_what_is_held() -> None:
    device = PlainMemory()
    before = device.use()
    held = mx.ones((1 << 20,))
    mx.eval(held)
    device.forget_peak()
    now = device.use()
    assert now.active - before.active >= 1 << 22
    assert now.peak >= now.active
    del held
    device.clear()
    assert device.use().active == before.active
    assert device.use().buffer_cache == 0


# ---- what there is ---------------------------------------------------------------------------------------------------


def test_a_share_is_of_what_the_device_recommends_or_else_of_ram() -> None:
    gpu, cpu = Device("metal", "any", 1000, 600), Device("cpu", "any", 1000, None)
    assert [MemoryLimit().of(device) for device in (gpu, cpu)] == [450, 750]
    assert MemoryLimit(share=0.5).of(gpu) == 300
    assert MemoryLimit(bytes=123).of(gpu) == 123


def files(**contents: str) -> Callable[[str], str | None]:
    named = {name.replace("__", "/"): text for name, text in contents.items()}
    return lambda file: named.get(file.removeprefix("/sys/fs/cgroup/").removeprefix("/proc/self/"))


@pytest.mark.parametrize(
    ("told", "limit"),
    [
        ({}, None),
        ({"cgroup": "0::/\n", "memory.max": "max\n"}, None),
        ({"cgroup": "0::/\n", "memory.max": "4096\n"}, 4096),
        ({"cgroup": "0::/a/b\n", "a__b__memory.max": "max\n", "a__memory.max": "8192\n", "memory.max": "9000"}, 8192),
        ({"cgroup": "0::/not/mounted\n", "memory.max": "4096\n"}, 4096),
        ({"cgroup": "1:cpu:/\n4:memory:/x\n0::/\n", "memory__x__memory.limit_in_bytes": "5000\n"}, 5000),
        ({"cgroup": "4:hugetlb,memory:/x\n", "memory__memory.limit_in_bytes": "6000\n"}, 6000),
        ({"cgroup": "4:memory:/\n", "memory__memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ({"cgroup": "3:name=systemd:/memory\n", "memory.max": "4096\n"}, None),
        ({"cgroup": "4:memory:/a:b\n", "memory__a:b__memory.limit_in_bytes": "7000\n"}, 7000),
        ({"cgroup": "nonsense\n\n::\n"}, None),
    ],
)
def test_control_groups_limit_what_there_is(told: dict[str, str], limit: int | None) -> None:
    assert memory_limit(files(**told)) == limit


@given(st.text())
def test_what_a_limit_file_says_is_a_size_or_no_limit(text: str) -> None:
    limit = parse_limit(text)
    assert limit is None or 0 <= limit < 1 << 60
