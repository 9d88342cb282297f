"""The SSD tier: whatever happens to the disk or the process, a read gives the bytes that were written, or none."""

import errno
import fcntl
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, permutations
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from backends import spill_directory
from backends.spill import Content, Spill, SpillStats
from backends.spill_directory import Survey
from backends.spill_folder import FAULT_POINTS, block_name, folder_name
from backends.spill_format import MOST_HEADER_BYTES, VERSION, DamagedError, Head, make_head, read_head
from backends.spill_scan import Found, parents_first
from backends.spill_worker import Pause, Throttle, Worker
from scheduler.pieces import Key, Piece
from scheduler.prefix import PrefixIndex, Tier
from tests.backends.spill_child import META, PATIENCE, content, key_of, piece

ROOT = Path(__file__).parents[2]
ENOUGH = 1 << 30


def counted(verified: tuple[int, tuple[Key, ...]]) -> tuple[int, int]:
    """How many files were good, and how many damaged."""
    good, damaged = verified
    return good, len(damaged)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Place:
    """Opens spills over one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.warned: list[str] = []
        self.opened: list[Spill] = []

    def open(self, namespace: str = "a", **settings: Any) -> Spill:
        defaults: dict[str, Any] = {"most_bytes": ENOUGH, "bytes_per_second": 0, "warn": self.warned.append}
        spill = Spill(self.directory, namespace, **(defaults | settings))
        self.opened.append(spill)
        return spill

    def filled(self, *numbers: int, namespace: str = "a") -> list[int]:
        """Write pieces, and close; their files' sizes."""
        spill = self.open(namespace)
        for number in numbers:
            assert put(spill, number)
        spill.close(PATIENCE)
        return [self.file(number, namespace).stat().st_size for number in numbers]

    def folder(self, namespace: str = "a") -> Path:
        return self.directory / folder_name(namespace)

    def file(self, number: int, namespace: str = "a") -> Path:
        return self.folder(namespace) / block_name(key_of(number))

    def names(self, namespace: str = "a") -> set[str]:
        return {path.name for path in self.folder(namespace).iterdir()} - {"lock"}


@pytest.fixture
def tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Place]:
    """Nothing goes wrong that nobody expected: a test that does expects it by emptying what it looked at."""
    tier = Place(tmp_path / "cache")
    yield tier
    for spill in tier.opened:
        spill.close(0)
    assert tier.warned == []
    assert [record.getMessage() for record in caplog.get_records("call") if record.name == "paceline.spill"] == []


def view(data: bytes) -> memoryview:
    return memoryview(data)


def put(spill: Spill, number: int, data: bytes | None = None, meta: bytes = META) -> bool:
    answers: SimpleQueue[bool] = SimpleQueue()
    data = content(number) if data is None else data
    return spill.write(piece(number), meta, [view(data)], answers.put) and answers.get(timeout=PATIENCE)


def get(spill: Spill, number: int) -> Content | None:
    answers: SimpleQueue[Content | None] = SimpleQueue()
    spill.read(key_of(number), answers.put)
    return answers.get(timeout=PATIENCE)


def holds(spill: Spill, number: int) -> bool:
    """False: it is not there. Anything but the right bytes is an error."""
    read = get(spill, number)
    if read is not None:
        assert read.piece == piece(number)
        assert read.meta == META
        assert bytes(read.data) == content(number)
    return read is not None


def found(spill: Spill) -> list[int]:
    """Which pieces, by number."""
    return [each.piece.start // 64 for each in spill.found]


# ---- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [[], [b""], [b"one"], [b"", b"two", b"", b"parts", b""], [bytes(range(256)) * 5000, b"x" * (1 << 20), b"y"]],
    ids=["none", "empty", "one", "with empty ones", "large"],
)
def test_what_was_written_is_read(tier: Place, parts: list[bytes]) -> None:
    spill = tier.open()
    answers: SimpleQueue[bool] = SimpleQueue()
    checkpoint = Piece(b"k" * 16, b"p" * 16, 64, 77, checkpoint=True)
    assert spill.write(checkpoint, b"\x81meta", [view(part) for part in parts], answers.put)
    assert answers.get(timeout=PATIENCE)
    again: SimpleQueue[Content | None] = SimpleQueue()
    spill.read(b"k" * 16, again.put)
    read = again.get(timeout=PATIENCE)
    assert read is not None
    assert (read.piece, read.meta, bytes(read.data)) == (checkpoint, b"\x81meta", b"".join(parts))
    size = spill.size(checkpoint, b"\x81meta", len(b"".join(parts)))
    path = tier.folder() / block_name(b"k" * 16)
    assert path.stat().st_size == size
    expected = SpillStats(
        files=1,
        bytes=size,
        written=1,
        written_bytes=size,
        read=1,
        read_bytes=len(b"".join(parts)),
        failed_writes=0,
        failed_reads=0,
        damaged=0,
        dropped=0,
        writable=True,
    )
    assert spill.stats == expected


def test_parts_are_of_any_format_and_shape(tier: Place) -> None:
    arrays = [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.zeros((0, 5), np.float16),
        np.array(7, np.uint16),
        np.arange(6, dtype=np.float16),
        np.arange(3, dtype=np.int64),
    ]
    spill = tier.open()
    answers: SimpleQueue[bool] = SimpleQueue()
    assert spill.write(piece(0), b"", [memoryview(array) for array in arrays], answers.put)
    assert answers.get(timeout=PATIENCE)
    read = get(spill, 0)
    assert read is not None
    assert bytes(read.data) == b"".join(array.tobytes() for array in arrays)


def test_data_is_aligned_for_any_format(tier: Place) -> None:
    spill = tier.open()
    assert put(spill, 0, np.arange(5.0).tobytes(), meta=b"odd")
    read = get(spill, 0)
    assert read is not None
    array = np.frombuffer(read.data, np.float64)
    assert array.flags.aligned
    assert array.tolist() == [0, 1, 2, 3, 4]


def test_the_format_is_what_it_says(tier: Place) -> None:
    """An oracle: whoever changes what is written changes the version, too."""
    spill = tier.open("some namespace")
    assert put(spill, 3, b"data")
    header = msgspec.msgpack.encode([key_of(3), key_of(2), 192, 256, False, "some namespace", META, 4])
    summed = b"PACELINE" + struct.pack("<II", 1, len(header)) + header
    head_sum = zlib.crc32(summed)
    expected = summed + struct.pack("<I", head_sum) + b"data" + struct.pack("<I", zlib.crc32(b"data", head_sum))
    assert tier.file(3, "some namespace").read_bytes() == expected


def test_a_header_is_bounded(tier: Place) -> None:
    spill = tier.open()
    with pytest.raises(ValueError, match="header"):
        spill.write(piece(0), bytes(MOST_HEADER_BYTES), [], lambda _written: None)
    assert put(spill, 0, b"x", meta=bytes(MOST_HEADER_BYTES - 200))
    assert get(spill, 0) is not None


def test_a_later_write_of_a_key_is_what_is_read(tier: Place) -> None:
    spill = tier.open()
    for data in (b"first", b"the second"):
        assert put(spill, 0, data)
    read = get(spill, 0)
    assert read is not None
    assert bytes(read.data) == b"the second"
    assert (spill.stats.files, spill.stats.bytes) == (1, tier.file(0).stat().st_size)


def test_removals_stand_in_line_with_writes(tier: Place) -> None:
    spill = tier.open()
    gone, kept = content(0), content(1)
    spill.write(piece(0), META, [view(gone)], lambda _written: None)
    spill.remove([key_of(0), key_of(1), key_of(99)])
    spill.write(piece(1), META, [view(kept)], lambda _written: None)
    assert spill.flush(PATIENCE)
    assert not holds(spill, 0)
    assert holds(spill, 1)
    assert (spill.stats.files, spill.stats.bytes) == (1, tier.file(1).stat().st_size)


@pytest.mark.parametrize("umask", [0, 0o777])
def test_nobody_else_may_read(tier: Place, umask: int) -> None:
    before = os.umask(umask)
    try:
        spill = tier.open()
        assert put(spill, 0)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tier.directory, *tier.directory.rglob("*"))}
    folders = {tier.directory, tier.folder()}
    assert modes == {path: 0o700 if path in folders else 0o600 for path in modes}
    assert set(modes) == folders | {tier.file(0), tier.folder() / "lock"}


def test_wider_modes_are_tightened(tier: Place) -> None:
    tier.filled(0)
    wide = {tier.directory: 0o755, tier.folder(): 0o770, tier.file(0): 0o640, tier.folder() / "lock": 0o666}
    for path, mode in wide.items():
        path.chmod(mode)
    tier.open()
    assert [stat.S_IMODE(path.stat().st_mode) for path in wide] == [0o700, 0o700, 0o600, 0o600]


def test_a_directory_that_holds_other_things_is_left_as_it_is(tier: Place) -> None:
    tier.directory.mkdir(mode=0o755)
    (tier.directory / "notes.txt").write_text("for all to read")
    tier.directory.chmod(0o755)
    tier.open()
    assert stat.S_IMODE(tier.directory.stat().st_mode) == 0o755
    assert stat.S_IMODE(tier.folder().stat().st_mode) == 0o700


# ---- what is there at the start --------------------------------------------------------------------------------------


def test_a_restart_finds_everything(tier: Place) -> None:
    sizes = tier.filled(0, 1, 2)
    spill = tier.open()
    assert spill.found == [Found(piece(number), size) for number, size in enumerate(sizes)]
    assert (spill.stats.files, spill.stats.bytes) == (3, sum(sizes))
    assert all(holds(spill, number) for number in range(3))
    index = PrefixIndex(ENOUGH, ENOUGH)
    assert all(index.found(each.piece, each.size) for each in spill.found)
    assert index.stats(Tier.SSD).bytes == spill.stats.bytes


@pytest.mark.parametrize("ages", [*permutations(range(4))], ids=str)
def test_parents_come_before_children_and_else_the_oldest_first(tier: Place, ages: tuple[int, ...]) -> None:
    """Pieces 0 and 1 are a line, 5 and 6 another; nothing is known of what 5 hangs under."""
    numbers = (0, 1, 5, 6)
    tier.filled(*numbers)
    for number, age in zip(numbers, ages, strict=True):
        os.utime(tier.file(number), ns=(age * 10**9, age * 10**9))
    order = found(tier.open())
    assert sorted(order) == sorted(numbers)
    assert order.index(0) < order.index(1)
    assert order.index(5) < order.index(6)
    oldest = {0: min(ages[:2]), 1: ages[1], 5: min(ages[2:]), 6: ages[3]}
    for one, other in pairwise(order):
        assert oldest[one] <= oldest[other]


def test_files_that_hang_in_a_circle_are_listed_once() -> None:
    one, other, own = Piece(b"1", b"2", 0, 1), Piece(b"2", b"1", 0, 1), Piece(b"3", b"3", 0, 1)
    listed = parents_first([(3, Found(one, 1)), (2, Found(other, 1)), (1, Found(own, 1))])
    assert sorted(each.piece.key for each in listed) == [b"1", b"2", b"3"]


def test_a_long_line_of_files_is_ordered() -> None:
    line = [Found(piece(number), 1) for number in range(5000)]
    assert parents_first([(-each.piece.end, each) for each in line]) == line


@pytest.mark.parametrize("way", ["read", "touched"])
def test_last_use_outlives_a_restart(tier: Place, way: str) -> None:
    numbers = (0, 2, 4)
    tier.filled(*numbers)
    for number in numbers:
        os.utime(tier.file(number), ns=(number, number))
    spill = tier.open()
    assert found(spill) == [0, 2, 4]
    if way == "read":
        assert holds(spill, 2)
    else:
        spill.touch([key_of(2)])
        spill.touch([key_of(2), key_of(99)])
    assert spill.flush(PATIENCE)
    spill.close(PATIENCE)
    assert found(tier.open()) == [0, 4, 2]


def test_what_is_not_ours_is_left_alone(tier: Place) -> None:
    tier.filled(0)
    (tier.folder() / "notes.txt").write_text("x")
    (tier.folder() / "folder.block").mkdir()
    os.mkfifo(tier.folder() / block_name(key_of(7)))
    os.mkfifo(tier.folder() / "fifo.partial")
    others = tier.names() - {tier.file(0).name}
    spill = tier.open()
    assert found(spill) == [0]
    assert not holds(spill, 7)
    spill.remove([key_of(7)])
    assert spill.flush(PATIENCE)
    assert tier.names() == others | {tier.file(0).name}
    assert spill.stats.damaged == 0


# ---- damage ----------------------------------------------------------------------------------------------------------


@st.composite
def damages(draw: st.DrawFn, whole: bytes) -> bytes:
    """Another file in a whole one's place."""
    kind = draw(st.sampled_from(["flip", "truncate", "append", "zeros", "anything"]))
    if kind == "flip":
        bit = draw(st.integers(0, 8 * len(whole) - 1))
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)
    if kind == "truncate":
        return whole[: draw(st.integers(0, len(whole) - 1))]
    if kind == "append":
        return whole + draw(st.binary(min_size=1, max_size=9))
    start = draw(st.integers(0, len(whole) - 1))
    if kind == "zeros":
        return whole[:start] + bytes(len(whole) - start)  # as after a loss of power
    return draw(st.binary(max_size=2 * len(whole)))


@given(st.data(), st.binary(max_size=200), st.binary(max_size=20), st.booleans())
def test_damage_is_never_read(data: st.DataObject, payload: bytes, meta: bytes, while_open: bool) -> None:
    with TemporaryDirectory() as directory:
        tier = Place(Path(directory) / "cache")
        spill = tier.open()
        assert put(spill, 0, payload, meta)
        if not while_open:
            spill.close(PATIENCE)
        whole = tier.file(0).read_bytes()
        damaged = data.draw(damages(whole).filter(lambda each: each != whole))
        tier.file(0).write_bytes(damaged)
        if not while_open:
            spill = tier.open()
        assert get(spill, 0) is None
        assert tier.names() == set()
        assert (spill.stats.files, spill.stats.bytes, spill.stats.damaged) == (0, 0, 1)
        assert put(spill, 0)
        assert holds(spill, 0)
        spill.close(PATIENCE)


def test_every_single_bit_counts(tmp_path: Path) -> None:
    tier = Place(tmp_path)
    spill = tier.open()
    assert put(spill, 0, b"payload")
    whole = tier.file(0).read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        tier.file(0).write_bytes(damaged)
        assert get(spill, 0) is None, bit
        assert tier.names() == set(), bit
    spill.close(PATIENCE)


def foreign(tier: Place) -> None:
    """A file of another namespace under this one's name."""
    tier.filled(0, namespace="b")
    shutil.copy(tier.file(0, "b"), tier.file(0))


def renamed(tier: Place) -> None:
    tier.filled(1)
    tier.file(1).rename(tier.file(0))


def other_version(tier: Place, version: int) -> None:
    """Whole, but for that it is of another version."""
    whole = tier.file(0).read_bytes()
    data = content(0)
    head = whole[:8] + struct.pack("<I", version) + whole[12 : -len(data) - 8]
    head_sum = zlib.crc32(head)
    tier.file(0).write_bytes(head + struct.pack("<I", head_sum) + data + struct.pack("<I", zlib.crc32(data, head_sum)))


def older(tier: Place) -> None:
    other_version(tier, VERSION - 1)


def newer(tier: Place) -> None:
    other_version(tier, VERSION + 1)


def data_of_another(tier: Place) -> None:
    """The head of one file before the data of another of the same length: both parts are whole."""
    spill = tier.open()
    for number in (0, 1):
        assert put(spill, number, b"%d" % number)
    spill.close(PATIENCE)
    one, other = tier.file(0).read_bytes(), tier.file(1).read_bytes()
    tier.file(1).unlink()
    tier.file(0).write_bytes(one[:-5] + other[-5:])


WRONG = [foreign, renamed, older, newer]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_belong_is_gone_after_a_start(tier: Place, wrong: Callable[[Place], None]) -> None:
    tier.filled(0)
    wrong(tier)
    spill = tier.open()
    assert found(spill) == []
    assert tier.names() == set()
    assert spill.stats.damaged == 1


@pytest.mark.parametrize("wrong", [*WRONG, data_of_another])
def test_what_does_not_belong_is_not_read(tier: Place, wrong: Callable[[Place], None]) -> None:
    tier.filled(0)
    wrong(tier)
    whole = tier.file(0).read_bytes()
    tier.file(0).unlink()
    spill = tier.open()
    assert found(spill) == []
    tier.file(0).write_bytes(whole)
    assert not holds(spill, 0)
    assert tier.names() == set()
    assert spill.stats.damaged == 1


def test_a_files_name_that_is_no_key(tier: Place) -> None:
    tier.filled(0)
    tier.file(0).rename(tier.folder() / "mine.block")
    assert found(tier.open()) == []
    assert tier.names() == set()


def test_verify_reads_everything(tier: Place) -> None:
    tier.filled(*range(5))
    spill = tier.open()
    for number in (1, 3):
        with tier.file(number).open("r+b") as file:
            file.seek(-9, os.SEEK_END)
            file.write(b"damage")
    tier.file(4).unlink()
    assert counted(spill.verify()) == (2, 2)
    assert tier.names() == {tier.file(0).name, tier.file(2).name}
    assert spill.stats.files == 2
    assert counted(spill.verify()) == (2, 0)
    spill.close(PATIENCE)
    assert counted(spill.verify()) == (0, 0)


def test_verify_lets_a_write_be(tier: Place) -> None:
    tier.filled(0)
    gate = Gate("half")
    spill = tier.open(faults=gate)
    answer = queued(spill, 1, b"data")
    gate.wait_until_there()
    assert counted(spill.verify()) == (1, 0)
    gate.open()
    assert answer.get(timeout=PATIENCE)
    assert counted(spill.verify()) == (2, 0)


@pytest.mark.parametrize(
    ("beginning", "reason"),
    [
        (b"PACELIME" + struct.pack("<II", VERSION, 9), "begin"),
        (b"PACELINE" + struct.pack("<II", VERSION, -1 % (1 << 32)), "long"),
    ],
    ids=["another kind of file", "a header without end"],
)
def test_a_head_that_cannot_be_is_not_read_to_its_end(tmp_path: Path, beginning: bytes, reason: str) -> None:
    (tmp_path / "file").write_bytes(beginning)
    with (tmp_path / "file").open("rb", buffering=0) as file, pytest.raises(DamagedError, match=reason):
        read_head(file)


# ---- the process dies ------------------------------------------------------------------------------------------------


class Child:
    """`spill_child.py`, under way."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()


@contextmanager
def child(tier: Place, *, die_at: str = "") -> Iterator[Child]:
    command = [sys.executable, "-m", "tests.backends.spill_child", str(tier.directory), "a", die_at]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, cwd=ROOT) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


@pytest.mark.parametrize("replacing", [False, True], ids=["new", "replacing"])
@pytest.mark.parametrize("point", FAULT_POINTS)
def test_a_write_that_the_process_dies_in(tier: Place, point: str, replacing: bool) -> None:
    tier.filled(0, 1)
    if replacing:
        spill = tier.open()
        assert put(spill, 2, b"older")
        spill.close(PATIENCE)
    with child(tier, die_at=point) as dying:
        assert dying.hear() == "writable"
        dying.tell("write 2")
        assert dying.process.wait(PATIENCE) == -signal.SIGKILL
    named = FAULT_POINTS.index(point) >= FAULT_POINTS.index("renamed")
    leftovers = [name for name in tier.names() if name.endswith(".partial")]
    assert len(leftovers) == (not named)
    spill = tier.open()
    expected = {0, 1, 2} if named or replacing else {0, 1}
    assert set(found(spill)) == expected
    assert tier.names() == {tier.file(number).name for number in expected}
    assert holds(spill, 0)
    assert holds(spill, 1)
    last = get(spill, 2)
    assert (None if last is None else bytes(last.data)) == (content(2) if named else b"older" if replacing else None)
    assert put(spill, 2)
    assert holds(spill, 2)
    assert spill.stats.damaged == 0


# ---- the disk fails --------------------------------------------------------------------------------------------------


class Disk:
    """Fails at a point of a write, while it is told to."""

    def __init__(self) -> None:
        self.fails_at: str | None = None
        self.error: Exception = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __call__(self, point: str) -> None:
        if point == self.fails_at:
            raise self.error


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_a_full_disk(tier: Place, point: str) -> None:
    clock, disk = Clock(), Disk()
    spill = tier.open(faults=disk, clock=clock, retry_seconds=60)
    assert put(spill, 0)
    disk.fails_at = point
    assert not put(spill, 1)
    assert tier.names() == {tier.file(0).name}
    assert (spill.stats.files, spill.stats.bytes) == (1, tier.file(0).stat().st_size)
    (warning,) = tier.warned
    assert os.strerror(errno.ENOSPC) in warning
    assert (spill.stats.failed_writes, spill.stats.dropped, spill.stats.writable) == (1, 0, False)

    assert not spill.write(piece(2), META, [view(b"x")], lambda _written: pytest.fail("it was not taken"))
    assert (spill.stats.failed_writes, spill.stats.dropped) == (1, 1)
    assert holds(spill, 0)
    spill.remove([key_of(0)])
    assert spill.flush(PATIENCE)
    assert tier.names() == set()

    disk.fails_at = None
    clock.now = 60
    assert put(spill, 1)
    assert holds(spill, 1)
    assert spill.stats.writable
    tier.warned.clear()


def test_a_disk_that_stays_full_is_tried_less_and_less_often(tier: Place) -> None:
    clock, disk = Clock(), Disk()
    spill = tier.open(faults=disk, clock=clock, retry_seconds=1000)
    disk.fails_at = "created"
    for pause in (1000, 2000, 3600, 3600):
        assert not put(spill, 0)
        clock.now += pause - 1
        assert not spill.stats.writable
        clock.now += 1
        assert spill.stats.writable
    assert len(tier.warned) == 1
    disk.fails_at = None
    assert put(spill, 0)
    disk.fails_at = "written"
    assert not put(spill, 1)
    assert len(tier.warned) == 2
    clock.now += 1000
    assert spill.stats.writable
    tier.warned.clear()


def test_writes_behind_one_that_failed_are_not_tried(tier: Place) -> None:
    gate = Gate("created")
    spill = tier.open(faults=gate, clock=Clock())
    answers = [queued(spill, number, b"data") for number in range(3)]
    gate.wait_until_there()
    gate.error = OSError(errno.EIO, "the disk is gone")
    gate.open()
    assert [answer.get(timeout=PATIENCE) for answer in answers] == [False] * 3
    assert (spill.stats.failed_writes, spill.stats.dropped) == (1, 2)
    assert gate.passed == 1
    tier.warned.clear()


def test_a_fault_of_our_own_ends_one_write_alone(tier: Place, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    spill = tier.open(faults=disk)
    disk.fails_at, disk.error = "half", RuntimeError("a fault of our own")
    assert not put(spill, 0)
    assert spill.flush(PATIENCE)
    disk.fails_at = None
    assert put(spill, 1)
    assert tier.names() == {tier.file(1).name}
    assert "a fault of our own" in caplog.text
    caplog.clear()


def test_a_callback_that_raises_does_not_end_the_threads(tier: Place, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_answer: object) -> None:
        raise RuntimeError("the caller's fault")

    spill = tier.open()
    assert spill.write(piece(0), META, [view(content(0))], fail)
    spill.read(key_of(0), fail)
    assert put(spill, 1)
    assert holds(spill, 1)
    assert caplog.text.count("RuntimeError: the caller's fault") == 2
    caplog.clear()


def test_a_disk_that_cannot_read(tier: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.filled(0)
    spill = tier.open()

    def broken(*_arguments: object) -> memoryview:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr("backends.spill_folder.read_data", broken)
    assert not holds(spill, 0)
    assert (spill.stats.failed_reads, spill.stats.damaged, spill.stats.files) == (1, 0, 1)
    monkeypatch.undo()
    assert holds(spill, 0)


@pytest.mark.parametrize(("error", "failed"), [(errno.EIO, 1), (errno.ENOENT, 0)], ids=["broken", "gone"])
def test_a_start_on_a_disk_that_cannot_read(
    tier: Place, monkeypatch: pytest.MonkeyPatch, error: int, failed: int
) -> None:
    tier.filled(0)

    def broken(*_arguments: object) -> Head:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("backends.spill_folder.read_head", broken)
    spill = tier.open()
    assert (spill.found, spill.stats.failed_reads, spill.stats.damaged) == ([], failed, 0)
    assert tier.names() == {tier.file(0).name}


def test_what_has_replaced_a_damaged_file_meanwhile_stays(tier: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.filled(0)
    spill = tier.open()

    def replaced_meanwhile(*_arguments: object) -> memoryview:
        assert put(spill, 0)
        raise DamagedError("as it was before")

    monkeypatch.setattr("backends.spill_folder.read_data", replaced_meanwhile)
    assert not holds(spill, 0)
    monkeypatch.undo()
    assert holds(spill, 0)
    assert (spill.stats.files, spill.stats.damaged) == (1, 1)


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[None]:
    """A small file system of memory."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "paceline-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_really_full(tier: Place) -> None:
    with mounted(tier.directory, "8m"):
        clock = Clock()
        spill = tier.open(clock=clock)
        full = next(number for number in range(9) if not put(spill, number))
        assert full in (2, 3)
        (warning,) = tier.warned
        assert os.strerror(errno.ENOSPC) in warning
        assert tier.names() == {tier.file(number).name for number in range(full)}
        assert all(holds(spill, number) for number in range(full))
        spill.remove([key_of(0)])
        assert spill.flush(PATIENCE)
        assert not spill.stats.writable
        clock.now += 60
        assert put(spill, full)
        assert holds(spill, full)
        spill.close(PATIENCE)
        again = tier.open()
        assert set(found(again)) == set(range(1, full + 1))
        again.close(PATIENCE)
    tier.warned.clear()


# ---- only reading ----------------------------------------------------------------------------------------------------


def only_reads(tier: Place, spill: Spill, number: int, reason: str) -> None:
    """It says so once, and leaves a file that it can read as it is."""
    (warning,) = tier.warned
    assert reason in warning
    tier.warned.clear()
    assert not spill.stats.writable
    before = tier.file(number).stat()
    names = tier.names()
    assert holds(spill, number)
    assert not spill.write(piece(8), META, [view(b"x")], lambda _written: pytest.fail("it was not taken"))
    spill.touch([key_of(number)])
    spill.remove([key_of(number)])
    assert spill.flush(PATIENCE)
    after = tier.file(number).stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    assert tier.names() == names
    assert spill.stats.dropped == 1


def test_a_second_process_only_reads(tier: Place) -> None:
    tier.filled(0, 1)
    with child(tier) as first:
        assert first.hear() == "writable"
        (tier.folder() / "left.partial").write_bytes(b"")
        (tier.folder() / "damaged.block").write_bytes(b"")
        second = tier.open()
        assert found(second) == [0, 1]
        only_reads(tier, second, 0, "another process")
        assert {"left.partial", "damaged.block"} < tier.names()
        first.tell("remove 0")
        assert first.hear() == "remove 0"
        assert not holds(second, 0)
        assert second.stats.files == 1
        assert second.stats.failed_reads == 0
        first.tell("write 2")
        assert first.hear() == "write 2"
        assert holds(second, 2)
        tier.file(1).write_bytes(b"damaged")
        assert not holds(second, 1)
        assert tier.file(1).exists()
    third = tier.open()
    assert third.stats.writable
    assert found(third) == [2]
    second.close(PATIENCE)
    assert put(third, 0)


def test_a_closed_spill_gives_its_lock_back(tier: Place) -> None:
    first = tier.open()
    second = tier.open()
    assert not second.stats.writable
    first.close(PATIENCE)
    first.close(PATIENCE)
    assert tier.open().stats.writable
    assert len(tier.warned) == 1
    tier.warned.clear()


def refuse_writes(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """As a mount that is read-only, or a folder without permission, does to root too."""
    really = os.open

    def opened(path: str, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(error, os.strerror(error), path)
        return really(path, flags, *arguments, **named)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_a_directory_that_refuses_writes(tier: Place, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    tier.filled(0)
    refuse_writes(monkeypatch, error)
    spill = tier.open()
    assert found(spill) == [0]
    only_reads(tier, spill, 0, os.strerror(error))


def test_a_lock_that_can_be_had_in_a_folder_that_cannot_be_written(
    tier: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.filled(0)
    really = os.open

    def opened(path: str, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & os.O_CREAT and not str(path).endswith("lock"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
        return really(path, flags, *arguments, **named)

    monkeypatch.setattr(os, "open", opened)
    only_reads(tier, tier.open(), 0, os.strerror(errno.EACCES))
    monkeypatch.undo()
    assert tier.open().stats.writable


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not bind root")
def test_a_folder_without_permission(tier: Place) -> None:
    tier.filled(0)
    (tier.folder() / "lock").chmod(0o400)
    tier.folder().chmod(0o500)
    try:
        only_reads(tier, tier.open(), 0, os.strerror(errno.EACCES))
    finally:
        tier.folder().chmod(0o700)


def test_a_mount_that_is_really_read_only(tier: Place) -> None:
    with mounted(tier.directory, "8m"):
        tier.filled(0)
        subprocess.run(["mount", "-o", "remount,ro", str(tier.directory)], check=True, capture_output=True)
        spill = tier.open()
        only_reads(tier, spill, 0, os.strerror(errno.EROFS))
        assert tier.open("b").found == []
        (warning,) = tier.warned
        assert os.strerror(errno.EROFS) in warning
        tier.warned.clear()
        for each in tier.opened:
            each.close(0)


@pytest.mark.parametrize("place", ["a file", "a dangling link", "below a file"])
def test_a_directory_that_cannot_be(tier: Place, place: str) -> None:
    if place == "a dangling link":
        tier.directory.symlink_to(tier.directory / "nowhere")
    else:
        tier.directory.write_text("x")
    if place == "below a file":
        tier.directory /= "cache"
    spill = tier.open()
    assert len(tier.warned) == 1
    tier.warned.clear()
    assert spill.found == []
    assert not put(spill, 0)
    assert not holds(spill, 0)
    spill.remove([key_of(0)])
    spill.touch([key_of(0)])
    assert spill.flush(PATIENCE)
    assert counted(spill.verify()) == (0, 0)
    assert spill.stats.files == 0
    spill.close(PATIENCE)


def test_a_directory_may_be_a_link(tier: Place, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    tier.directory.symlink_to(tmp_path / "elsewhere")
    spill = tier.open()
    assert put(spill, 0)
    assert holds(spill, 0)


# ---- symlinks --------------------------------------------------------------------------------------------------------


def test_a_link_in_place_of_a_block(tier: Place, tmp_path: Path) -> None:
    tier.filled(0, 1)
    outside = tmp_path / "outside"
    tier.file(0).rename(outside)
    tier.file(0).symlink_to(outside)
    whole, used = outside.read_bytes(), outside.stat().st_mtime_ns
    (tier.folder() / "left.partial").symlink_to(outside)
    spill = tier.open()
    assert found(spill) == [1]
    assert not holds(spill, 0)
    spill.touch([key_of(0)])
    spill.remove([key_of(0)])
    assert spill.flush(PATIENCE)
    assert spill_directory.verify(tier.directory) == (1, 0)
    assert tier.file(0).is_symlink()
    assert (tier.folder() / "left.partial").is_symlink()
    assert put(spill, 0)
    assert holds(spill, 0)
    assert not tier.file(0).is_symlink()
    assert (outside.read_bytes(), outside.stat().st_mtime_ns) == (whole, used)


def test_a_link_in_place_of_a_folder(tier: Place, tmp_path: Path) -> None:
    tier.filled(0)
    outside = tmp_path / "outside"
    tier.folder().rename(outside)
    tier.folder().symlink_to(outside)
    before = {path.name: path.stat().st_mtime_ns for path in outside.iterdir()}
    spill = tier.open()
    assert len(tier.warned) == 1
    tier.warned.clear()
    assert spill.found == []
    assert not put(spill, 1)
    assert not holds(spill, 0)
    other = tier.open("b", most_bytes=1)
    assert not put(other, 0)
    other.close(PATIENCE)
    assert spill_directory.survey(tier.directory) == [Survey(folder_name("b"), folder_name("b"), 0, 0, locked=False)]
    assert spill_directory.clear(tier.directory) == (0, 0)
    assert spill_directory.verify(tier.directory) == (0, 0)
    assert {path.name: path.stat().st_mtime_ns for path in outside.iterdir()} == before


def test_a_link_in_place_of_the_lock(tier: Place, tmp_path: Path) -> None:
    tier.filled(0)
    lock = tier.folder() / "lock"
    lock.unlink()
    lock.symlink_to(tmp_path / "outside")
    only_reads(tier, tier.open(), 0, os.strerror(errno.ELOOP))
    assert not (tmp_path / "outside").exists()
    assert spill_directory.clear(tier.directory) == (0, 0)


# ---- other namespaces ------------------------------------------------------------------------------------------------


def age(tier: Place, namespace: str, *numbers: int) -> None:
    """The higher the number, the later it was used."""
    for number in numbers:
        os.utime(tier.file(number, namespace), ns=(number, number))


def test_the_oldest_of_others_go_first(tier: Place) -> None:
    """Sizes differ by a few bytes at most; there is room for five and a half."""
    size = tier.filled(0, 3, namespace="b")[0]
    tier.filled(1, 2, namespace="c")
    age(tier, "b", 0, 3)
    age(tier, "c", 1, 2)
    (tier.folder("b") / "notes.txt").write_bytes(bytes(ENOUGH >> 8))
    tier.filled(0)
    spill = tier.open(most_bytes=5 * size + size // 2)
    assert tier.names("b") == {tier.file(number).name for number in (0, 3)} | {"notes.txt"}
    left = [("b", 0), ("c", 1), ("c", 2), ("b", 3)]
    for number in range(1, 5):
        assert put(spill, number)
        left = left[-(4 - number) :] if number < 4 else []
        for namespace in "bc":
            expected = {tier.file(each).name for where, each in left if where == namespace}
            assert tier.names(namespace) - {"notes.txt"} == expected, (namespace, number)
    assert put(spill, 4)
    assert not put(spill, 5)
    assert tier.names() == {tier.file(number).name for number in range(5)}
    assert spill.stats.dropped == 1


def test_others_make_room_at_the_start(tier: Place) -> None:
    size = tier.filled(0, 1, 2, namespace="b")[0]
    age(tier, "b", 2, 1, 0)
    (tier.folder("b") / "x.partial").write_bytes(bytes(size))
    os.utime(tier.folder("b") / "x.partial", ns=(5, 5))
    tier.filled(0)
    spill = tier.open(most_bytes=3 * size + size // 2)
    assert tier.names("b") == {tier.file(2).name, "x.partial"}
    assert tier.names() == {tier.file(0).name}
    spill.close(PATIENCE)
    exactly = tier.file(0).stat().st_size + size
    tier.open(most_bytes=exactly)
    assert tier.names("b") == {"x.partial"}


def test_own_files_are_the_callers_to_remove(tier: Place) -> None:
    tier.filled(0, 1)
    tier.filled(0, namespace="b")
    spill = tier.open(most_bytes=1)
    assert found(spill) == [0, 1]
    assert tier.names("b") == set()
    assert not put(spill, 2)
    spill.remove([key_of(0), key_of(1)])
    assert spill.flush(PATIENCE)
    assert spill.stats.bytes == 0


def test_a_write_may_replace_what_fills_all_room(tier: Place) -> None:
    (size,) = tier.filled(0)
    spill = tier.open(most_bytes=size)
    assert put(spill, 0)
    assert not put(spill, 1)


def test_what_a_live_process_serves_is_not_touched(tier: Place) -> None:
    (size,) = tier.filled(0)
    tier.filled(0, namespace="b")
    age(tier, "b", 0)
    clock = Clock()
    with child(tier) as serving:
        assert serving.hear() == "writable"
        spill = tier.open("c", most_bytes=2 * size + size // 2, clock=clock)
        assert put(spill, 0)  # b's counts, a's does not
        assert tier.names("b") == {tier.file(0).name}
        assert put(spill, 1)
        assert tier.names("b") == set()
        assert tier.names() == {tier.file(0).name}
        assert survey_of(tier, "a").locked
        assert spill_directory.clear(tier.directory) == (0, 0)
    clock.now += 59
    assert put(spill, 1)
    assert tier.names() == {tier.file(0).name}
    clock.now += 1
    assert put(spill, 1)
    assert tier.names() == set()


def test_what_has_been_taken_up_meanwhile_is_not_touched(tier: Place) -> None:
    (size,) = tier.filled(0)
    spill = tier.open("b", most_bytes=size + size // 2)
    serving = tier.open()
    assert put(spill, 0)
    assert holds(serving, 0)


def test_a_start_waits_for_whoever_sweeps(tier: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks whether a folder's lock is free has it for a moment: it must not be taken for one who serves it."""
    tier.filled(0)
    waiting = threading.Event()
    really = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            waiting.set()
        really(fd, operation)

    directory = os.open(tier.directory, os.O_RDONLY)
    lock = os.open(tier.folder() / "lock", os.O_RDONLY)
    really(directory, fcntl.LOCK_EX)
    really(lock, fcntl.LOCK_EX)
    monkeypatch.setattr(fcntl, "flock", flock)
    starting = threading.Thread(target=tier.open, daemon=True)
    starting.start()
    assert waiting.wait(PATIENCE)
    os.close(lock)
    os.close(directory)
    starting.join(PATIENCE)
    assert tier.opened[-1].stats.writable


def survey_of(tier: Place, namespace: str) -> Survey:
    (found,) = (each for each in spill_directory.survey(tier.directory) if each.folder == folder_name(namespace))
    return found


def test_survey_clear_and_verify(tier: Place) -> None:
    assert spill_directory.survey(tier.directory) == []
    assert spill_directory.clear(tier.directory) == (0, 0)
    assert spill_directory.verify(tier.directory) == (0, 0)
    assert not tier.directory.exists()
    sizes = tier.filled(0, 1)
    others = tier.filled(0, 1, 2, namespace="b")
    (tier.directory / "notes").mkdir()
    (tier.directory / "notes" / "x.block").write_bytes(b"x")
    (tier.directory / ("f" * 32)).write_bytes(b"not a folder")
    serving = tier.open("b")
    assert survey_of(tier, "a") == Survey(folder_name("a"), "a", 2, sum(sizes), locked=False)
    assert survey_of(tier, "b") == Survey(folder_name("b"), "b", 3, sum(others), locked=True)
    assert len(spill_directory.survey(tier.directory)) == 2
    for path in (tier.file(0), tier.file(1, "b")):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (tier.folder() / "x.partial").write_bytes(b"x")
    assert spill_directory.verify(tier.directory) == (3, 2)
    assert tier.names() == {tier.file(1).name, "x.partial"}
    assert tier.names("b") == {tier.file(number).name for number in range(3)}
    assert spill_directory.clear(tier.directory) == (2, sizes[1] + 1)
    assert tier.names() == set()
    assert survey_of(tier, "a") == Survey(folder_name("a"), folder_name("a"), 0, 0, locked=False)
    serving.close(PATIENCE)
    assert spill_directory.clear(tier.directory) == (3, sum(others))
    assert (tier.directory / "notes" / "x.block").exists()


# ---- the queue -------------------------------------------------------------------------------------------------------


class Gate:
    """Holds the writer at a point, each time until it is let through."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.passed = 0
        self.error: OSError | None = None
        self._there = threading.Semaphore(0)
        self._open = threading.Semaphore(0)

    def __call__(self, point: str) -> None:
        if point == self.point:
            self._there.release()
            assert self._open.acquire(timeout=PATIENCE)
            self.passed += 1
            if self.error is not None:
                raise self.error

    def wait_until_there(self) -> None:
        assert self._there.acquire(timeout=PATIENCE)

    def open(self, times: int = 1) -> None:
        self._open.release(times)


def queued(spill: Spill, number: int, data: bytes) -> "SimpleQueue[bool]":
    answers: SimpleQueue[bool] = SimpleQueue()
    assert spill.write(piece(number), META, [view(data)], answers.put)
    return answers


def test_the_queue_is_bounded(tier: Place) -> None:
    gate = Gate("created")
    size = make_head(piece(0), "a", META, 100).file_bytes
    spill = tier.open(faults=gate, queue_bytes=2 * size + size // 2)
    answers = [queued(spill, number, bytes(100)) for number in (0, 1)]
    gate.wait_until_there()
    refused = view(bytes(100))
    assert not spill.write(piece(2), META, [refused], lambda _written: pytest.fail("it was not taken"))
    assert refused.nbytes == 100, "it is still the caller's"
    assert (spill.stats.dropped, spill.stats.files) == (1, 1)
    assert not spill.flush(0)
    gate.open()
    assert answers[0].get(timeout=PATIENCE)
    answers.append(queued(spill, 3, bytes(100)))
    gate.open(2)
    assert [answer.get(timeout=PATIENCE) for answer in answers[1:]] == [True, True]
    gate.open()
    answers.append(queued(spill, 4, bytes(10 * size)))
    assert answers[-1].get(timeout=PATIENCE), "an empty queue takes anything"
    assert spill.flush(PATIENCE)


def test_reads_do_not_wait_for_writes(tier: Place) -> None:
    tier.filled(0)
    gate = Gate("half")
    spill = tier.open(faults=gate)
    answer = queued(spill, 1, b"data")
    gate.wait_until_there()
    assert holds(spill, 0)
    assert not holds(spill, 1)
    gate.open()
    assert answer.get(timeout=PATIENCE)


@pytest.mark.parametrize("outcome", ["written", "failed", "closed", "dropped"])
def test_views_are_released_before_the_answer(tier: Place, outcome: str) -> None:
    buffers = [bytearray(3 << 20), bytearray(b"x" * 12)]
    views = [memoryview(buffers[0]), memoryview(buffers[1]).cast("I")]
    answers: SimpleQueue[bool] = SimpleQueue()

    def done(written: bool) -> None:
        for buffer in buffers:
            buffer.append(1)  # BufferError while anyone looks at it
        answers.put(written)

    disk, gate = Disk(), Gate("created")
    if outcome == "failed":
        disk.fails_at = "half"
    spill = tier.open(faults=gate if outcome == "dropped" else disk, bytes_per_second=outcome == "closed")
    if outcome == "dropped":
        queued(spill, 1, b"first")
        gate.wait_until_there()
    assert spill.write(piece(0), META, views, done)
    if outcome == "dropped":
        gate.error = OSError(errno.ENOSPC, "full")
        gate.open()
    if outcome == "closed":
        spill.close(0)
    assert answers.get(timeout=PATIENCE) == (outcome == "written")
    assert answers.empty()
    for each in views:
        with pytest.raises(ValueError, match="released"):
            each.tobytes()
    assert bool(tier.warned) == (outcome in ("failed", "dropped"))
    tier.warned.clear()


def test_close_drops_the_rest(tier: Place) -> None:
    """The first write sleeps, and would for years."""
    begun = threading.Event()
    spill = tier.open(bytes_per_second=1e-3, faults=lambda point: begun.set() if point == "half" else None)
    answers = [queued(spill, number, bytes(1 << 20)) for number in range(3)]
    assert begun.wait(PATIENCE)
    spill.close(0)
    assert [answer.get(timeout=PATIENCE) for answer in answers] == [False] * 3
    assert all(answer.empty() for answer in answers)
    assert tier.names() == set()
    assert (spill.stats.dropped, spill.stats.files, spill.stats.writable) == (3, 0, False)
    assert not spill.write(piece(4), META, [view(b"x")], lambda _written: pytest.fail("it was not taken"))
    assert not holds(spill, 0)
    spill.remove([key_of(0)])
    spill.touch([key_of(0)])
    assert spill.flush(0)
    assert tier.open().stats.writable


def test_close_finishes_what_it_can_without_sleeping(tier: Place) -> None:
    spill = tier.open(bytes_per_second=1e-3)
    answers = [queued(spill, number, content(number)) for number in range(3)]
    spill.touch([key_of(0)])
    spill.close(PATIENCE)
    assert [answer.get(timeout=PATIENCE) for answer in answers] == [True] * 3
    spill = tier.open()
    assert found(spill) == [0, 1, 2]
    assert all(holds(spill, number) for number in range(3))


def test_close_answers_every_read(tier: Place) -> None:
    tier.filled(0)
    spill = tier.open()
    entered, leave = threading.Event(), threading.Event()
    answers: SimpleQueue[Content | None] = SimpleQueue()

    def slow(read: Content | None) -> None:
        entered.set()
        assert leave.wait(PATIENCE)
        answers.put(read)

    spill.read(key_of(0), slow)
    assert entered.wait(PATIENCE)
    for _ in range(2):
        spill.read(key_of(0), answers.put)
    verified: SimpleQueue[tuple[int, int]] = SimpleQueue()
    verifying = threading.Thread(target=lambda: verified.put(counted(spill.verify())), daemon=True)
    verifying.start()
    closing = threading.Thread(target=spill.close, args=(0,), daemon=True)
    closing.start()
    leave.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert verified.get(timeout=PATIENCE) in ((0, 0), (1, 0))
    spill.read(key_of(0), answers.put)
    read = [answers.get_nowait() for _ in range(4)]
    assert read[0] is not None
    assert read[-1] is None
    assert answers.empty()


# ---- the worker ------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_stuck_is_left_behind() -> None:
    entered, leave = threading.Event(), threading.Event()
    calls: SimpleQueue[str] = SimpleQueue()

    def stuck() -> None:
        entered.set()
        assert leave.wait(PATIENCE)
        calls.put("stuck has run")

    worker = Worker("test")
    assert worker.put(stuck, lambda: calls.put("stuck was dropped"))
    assert entered.wait(PATIENCE)
    for name in "ab":
        assert worker.put(lambda name=name: calls.put(f"{name} has run"), lambda name=name: calls.put(name))
    worker.finish(0)
    assert not worker.put(lambda: calls.put("too late"))
    assert not worker.stop(0)
    assert [calls.get_nowait(), calls.get_nowait()] == ["a", "b"]
    assert not worker.flush(0)
    leave.set()
    assert worker.stop(PATIENCE)
    assert worker.flush(0)
    assert calls.get_nowait() == "stuck has run"
    assert calls.empty()


def test_a_worker_drops_on_its_own_thread() -> None:
    entered, told = threading.Event(), threading.Event()
    calls: SimpleQueue[str] = SimpleQueue()

    def first() -> None:
        entered.set()
        assert told.wait(PATIENCE)
        while worker.put(lambda: None):  # until it is stopped
            pass

    worker = Worker("test")
    worker.put(first)
    assert entered.wait(PATIENCE)
    worker.put(lambda: calls.put("run"), lambda: calls.put(threading.current_thread().name))
    told.set()
    assert worker.stop(PATIENCE)
    assert calls.get_nowait() == "test"
    assert calls.empty()


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 3)), max_size=20))
def test_bytes_are_spread_over_time(slices: Sequence[tuple[int, float]]) -> None:
    """Whatever else takes time in between, which is not made up for."""
    clock = Clock()

    def sleep(seconds: float) -> None:
        assert seconds >= 0
        clock.now += seconds

    throttle = Throttle(1e6, clock, sleep)
    for count, between in slices:
        clock.now += between
        begun = clock.now
        throttle.spent(count)
        assert clock.now == pytest.approx(begun + count / 1e6)


def test_no_limit_never_sleeps() -> None:
    Throttle(0, Clock(), lambda _seconds: pytest.fail("it slept")).spent(1 << 40)


def test_a_pause_doubles_up_to_an_hour() -> None:
    clock = Clock()
    pause = Pause(60, clock)
    assert pause.over
    lengths = []
    for attempt in range(9):
        assert pause.failed() == (attempt == 0)
        begun = clock.now
        while not pause.over:
            clock.now += 30
        lengths.append(clock.now - begun)
    assert lengths == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    pause.succeeded()
    assert pause.failed()
    clock.now += 60
    assert pause.over


# ---- a life ----------------------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 4)


class Life(RuleBasedStateMachine):
    """Against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.tier = Place(Path(self.folder.name) / "cache")
        self.clock, self.disk = Clock(), Disk()
        self.model: dict[int, bytes] = {}
        self.leftovers = 0
        self.spill = self.opened()

    def opened(self) -> Spill:
        return self.tier.open(clock=self.clock, faults=self.disk)

    @rule(number=NUMBERS, data=st.binary(max_size=300))
    def write(self, number: int, data: bytes) -> None:
        assert put(self.spill, number, data)
        self.model[number] = data

    @rule(number=NUMBERS, data=st.binary(min_size=1, max_size=300), point=st.sampled_from(FAULT_POINTS))
    def fail_to_write(self, number: int, data: bytes, point: str) -> None:
        self.disk.fails_at = point
        assert not put(self.spill, number, data)
        self.disk.fails_at = None
        self.clock.now += 1e6
        if point in ("renamed", "done"):
            self.model.pop(number, None)

    @rule(numbers=st.sets(NUMBERS))
    def remove(self, numbers: set[int]) -> None:
        self.spill.remove([key_of(number) for number in numbers])
        for number in numbers:
            self.model.pop(number, None)

    @rule(number=NUMBERS)
    def touch(self, number: int) -> None:
        self.spill.touch([key_of(number)])

    @rule(number=NUMBERS)
    def read(self, number: int) -> None:
        assert self.spill.flush(PATIENCE)
        read = get(self.spill, number)
        assert (None if read is None else bytes(read.data)) == self.model.get(number)

    @rule(number=NUMBERS, data=st.data())
    def damage(self, number: int, data: st.DataObject) -> None:
        assert self.spill.flush(PATIENCE)
        if number in self.model:
            whole = self.tier.file(number).read_bytes()
            self.tier.file(number).write_bytes(data.draw(damages(whole).filter(lambda each: each != whole)))
            del self.model[number]
            assert get(self.spill, number) is None

    @rule(number=NUMBERS, data=st.binary(max_size=9))
    def leave_behind(self, number: int, data: bytes) -> None:
        self.leftovers += 1
        (self.tier.folder() / f"{key_of(number).hex()}.{self.leftovers}.partial").write_bytes(data)

    @rule()
    def restart(self) -> None:
        self.spill.close(PATIENCE)
        self.spill = self.opened()
        self.leftovers = 0
        order = found(self.spill)
        assert sorted(order) == sorted(self.model)
        assert all(order.index(number - 1) < order.index(number) for number in order if number - 1 in order)

    @rule()
    def verify(self) -> None:
        assert self.spill.flush(PATIENCE)
        assert counted(self.spill.verify()) == (len(self.model), 0)

    @invariant()
    def the_account_is_right(self) -> None:
        assert self.spill.flush(PATIENCE)
        names = {name for name in self.tier.names() if not name.endswith(".partial")}
        assert names == {self.tier.file(number).name for number in self.model}
        assert len(self.tier.names()) == len(names) + self.leftovers
        sizes = [self.tier.file(number).stat().st_size for number in self.model]
        assert (self.spill.stats.files, self.spill.stats.bytes) == (len(sizes), sum(sizes))

    def teardown(self) -> None:
        self.spill.close(PATIENCE)
        self.folder.cleanup()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=25)
