"""A drafter's file is read as it was written, or not at all; and what tells a target's weights from all others."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from backends.mlx.drafts.eagle import Eagle, EagleShape, parameters_of
from backends.mlx.drafts.files import (
    DrafterError,
    DrafterHeader,
    find_drafter,
    load_drafter,
    read_header,
    save_drafter,
)
from backends.mlx.fingerprint import weights_identity

SHAPE = EagleShape(
    dims=8, heads=2, kv_heads=1, head_dim=4, intermediate=12, taps=(0, 3, "head"), window=16, rope_base=5e5
)
HEADER = DrafterHeader(
    shape=SHAPE,
    target="0123456789abcdef" * 2,
    target_name="Tiny Llama",
    tokenizer="fedcba9876543210" * 2,
    acceptance=(0.75, 0.1 + 0.2, 1 / 3),
    trained="on nothing, by nobody: „kein Wort“",
)
Arrays = dict[str, np.ndarray]


def arrays_of(seed: int = 0) -> Arrays:
    """As a network has them, in several types; one lies in memory the other way round."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: rng.normal(size=value.shape).astype(np.float16) for name, value in parameters_of(Eagle(SHAPE)).items()
    }
    arrays["fuse.weight"] = np.asfortranarray(arrays["fuse.weight"])
    arrays["norm.weight"] = arrays["norm.weight"].astype(np.float32)
    return arrays | {"ids": np.arange(3, 30, 2, dtype=np.uint32)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole one, which nobody changes."""
    file = tmp_path_factory.mktemp("drafters") / "tiny.safetensors"
    save_drafter(file, HEADER, arrays_of())
    return file


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one is put that is not whole."""
    return tmp_path_factory.mktemp("spoiled") / "spoiled drafter.safetensors"


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
        and np.array_equal(one[name], other[name])
        for name in one
    )


def refused(read: Callable[[Path], object], file: Path) -> str:
    """Why a file is; the message names it."""
    with pytest.raises(DrafterError) as failure:
        read(file)
    assert str(file) in str(failure.value)
    return str(failure.value)


# ---- written and read ------------------------------------------------------------------------------------------------


def test_what_was_saved_is_read(file: Path) -> None:
    header, arrays = load_drafter(file)
    assert msgspec.structs.replace(header, checksum="") == HEADER
    assert header.checksum
    assert same(arrays, arrays_of())
    assert read_header(file) == header


def test_nothing_else_is_left_behind_and_what_was_there_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    for seed in range(2):
        save_drafter(file, HEADER, arrays_of(seed))
        assert same(load_drafter(file)[1], arrays_of(seed))
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_written_leaves_the_old_one_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    save_drafter(file, HEADER, arrays_of())
    with pytest.raises(Exception, match="complex128"):
        save_drafter(file, HEADER, arrays_of(1) | {"odd": np.zeros(2, dtype=np.complex128)})
    assert same(load_drafter(file)[1], arrays_of())


# ---- damaged ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(data=st.data())
def test_a_file_that_was_cut_off_anywhere_is_refused(file: Path, spoiled: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    places = [0, 7, 8, 8 + length - 1, 8 + length, len(whole) - 1]
    kept = data.draw(st.sampled_from(places) | st.integers(0, len(whole) - 1))
    spoiled.write_bytes(whole[:kept])
    refused(load_drafter, spoiled)
    refused(read_header, spoiled)


@settings(max_examples=150)
@given(data=st.data(), flip=st.integers(1, 255))
def test_a_file_with_another_byte_anywhere_is_refused_or_says_the_same(
    file: Path, spoiled: Path, data: st.DataObject, flip: int
) -> None:
    """The same it says where a blank that fills up the header becomes another blank."""
    whole = bytearray(file.read_bytes())
    length = int.from_bytes(whole[:8], "little")
    place = data.draw(st.integers(0, 8 + length - 1) | st.integers(8 + length, len(whole) - 1))
    whole[place] ^= flip
    spoiled.write_bytes(whole)
    try:
        header, arrays = load_drafter(spoiled)
    except DrafterError as error:
        assert str(spoiled) in str(error)  # noqa: PT017 (most are refused, not all)
    else:
        assert header == load_drafter(file)[0]
        assert same(arrays, arrays_of())


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        ('"window":16', '"window":17'),
        ('"rope_base":500000.0', '"rope_base":900000.0'),
        ('"taps":[0,3,', '"taps":[0,2,'),
        ('"acceptance":[0.75', '"acceptance":[0.85'),
        ('"target":"0', '"target":"1'),
        ('"kind":"eagle"', '"kind":"eager"'),
    ],
)
def test_what_a_file_says_of_itself_is_part_of_what_is_checked(
    file: Path, spoiled: Path, said: str, instead: str
) -> None:
    whole = file.read_bytes()
    one, other = (json.dumps(each)[1:-1].encode() for each in (said, instead))
    assert whole.count(one) == 1
    spoiled.write_bytes(whole.replace(one, other))
    assert "damaged" in refused(load_drafter, spoiled)


@pytest.mark.parametrize("name", ["ids", "norm.weight"])
def test_numbers_that_are_missing_or_have_another_name_or_type(file: Path, spoiled: Path, name: str) -> None:
    told = {"drafter": msgspec.json.encode(read_header(file)).decode()}
    arrays = load_file(file)
    moved = {**arrays, f"{name}2": arrays[name]}
    moved.pop(name)
    less = {key: value for key, value in arrays.items() if key != name}
    for changed in (less, moved, arrays | {name: arrays[name].view(np.int32)}, arrays | {name: arrays[name][None]}):
        save_file(changed, spoiled, metadata=told)
        assert "damaged" in refused(load_drafter, spoiled)
    save_file(arrays, spoiled, metadata=told)
    assert same(load_drafter(spoiled)[1], arrays_of())


# ---- none of ours ----------------------------------------------------------------------------------------------------


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.safetensors"
    for metadata in (None, {}, {"format": "mlx"}):
        save_file(arrays_of(), foreign, metadata=metadata)
        assert "no drafter" in refused(load_drafter, foreign)
        assert "no drafter" in refused(read_header, foreign)
    for content in (b"", b"{}", b"GGUF" + bytes(100), bytes(100), b"\xff" * 100, os.urandom(1000)):
        foreign.write_bytes(content)
        refused(load_drafter, foreign)
        refused(read_header, foreign)
    for nowhere in (tmp_path / "nowhere.safetensors", tmp_path):
        refused(load_drafter, nowhere)
        refused(read_header, nowhere)


def header_with(**changed: Any) -> dict[str, Any]:
    """As JSON has it; of what is None nothing is said."""
    header = msgspec.json.decode(msgspec.json.encode(HEADER)) | changed
    return {name: value for name, value in header.items() if value is not None}


def shape_with(**changed: Any) -> dict[str, Any]:
    shape = msgspec.json.decode(msgspec.json.encode(SHAPE)) | changed
    return {"shape": {name: value for name, value in shape.items() if value is not None}}


NONSENSE: list[Any] = [
    header_with(shape=None),
    header_with(target=None),
    header_with(target=5),
    header_with(acceptance="much"),
    header_with(shape=[1, 2, 3]),
    *(header_with(**shape_with(**{name: size})) for name in ("dims", "heads", "window") for size in (-1, 0, 1.5, "8")),
    header_with(**shape_with(kv_heads=0)),
    header_with(**shape_with(heads=3, kv_heads=2)),
    header_with(**shape_with(head_dim=5)),
    header_with(**shape_with(taps=[])),
    header_with(**shape_with(taps=["tail"])),
    header_with(**shape_with(taps=None)),
    header_with(**shape_with(rope_base="large")),
    [],
    "drafter",
    None,
]


def put(told: str, file: Path) -> None:
    save_file(arrays_of(), file, metadata={"drafter": told})


@pytest.mark.parametrize("header", NONSENSE)
def test_a_header_of_nonsense_is_refused(spoiled: Path, header: Any) -> None:
    put(json.dumps(header), spoiled)
    assert "not understood" in refused(read_header, spoiled)
    assert "not understood" in refused(load_drafter, spoiled)


@pytest.mark.parametrize("told", ["", "{", "\x00", "nan", "[" * 100_000, '{"shape":' * 100_000, '{"x":' * 100_000])
def test_a_header_that_is_no_json_is_refused(spoiled: Path, told: str) -> None:
    put(told, spoiled)
    assert "not understood" in refused(read_header, spoiled)


@pytest.mark.parametrize("told", ["paceline drafter 2", "paceline drafter", ""])
def test_another_format_is_told_of(spoiled: Path, told: str) -> None:
    """Whatever else that format may say."""
    for header in (header_with(format=told), header_with(format=told, shape=None, layers=3)):
        put(json.dumps(header), spoiled)
        said = refused(read_header, spoiled)
        assert repr(told) in said
        assert "'paceline drafter 1'" in said


# ---- found -----------------------------------------------------------------------------------------------------------


def test_a_drafter_is_found_by_its_target(tmp_path: Path) -> None:
    """The first folder goes first, and in it the first name; what cannot be read is passed over."""
    first, second = tmp_path / "first", tmp_path / "second"
    folders = (tmp_path / "nowhere", first, second)
    for folder in (first, second):
        folder.mkdir()
    assert find_drafter(iter(folders), "one") is None

    def save(file: Path, target: str) -> Path:
        save_drafter(file, msgspec.structs.replace(HEADER, target=target), arrays_of())
        return file

    other = save(second / "a.safetensors", "other")
    late = save(second / "z.safetensors", "one")
    assert find_drafter(iter(folders), "one") == late
    early = save(second / "m.safetensors", "one")
    assert find_drafter(iter(folders), "one") == early
    (first / "a.safetensors").write_bytes(b"nothing")
    (first / "b.safetensors").write_bytes(early.read_bytes()[:200])
    (first / "c.safetensors").mkdir()
    (first / "d.safetensors").symlink_to(tmp_path / "nowhere")
    save_file(arrays_of(), first / "e.safetensors")
    put("[" * 100_000, first / "f.safetensors")
    save(first / "g.bin", "one")
    assert find_drafter(iter(folders), "one") == early
    best = save(first / "g.safetensors", "one")
    assert find_drafter(iter(folders), "one") == best
    assert find_drafter(iter(folders), "other") == other
    assert find_drafter(iter(folders), "nobody's") is None


# ---- whose weights ---------------------------------------------------------------------------------------------------


def weights(seed: int = 1) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "model.embed_tokens.weight": rng.normal(size=(40, 16)).astype(np.float32),
        "model.norm.weight": rng.normal(size=16).astype(np.float16),
        "model.scale": np.array(3.5, dtype=np.float32),
        "model.none": np.zeros((0, 4), dtype=np.float32),
        "lm_head.weight": rng.normal(size=(40, 16)).astype(np.float32),
    }


def folder_of(folder: Path, *shards: Arrays, metadata: dict[str, str] | None = None) -> Path:
    folder.mkdir()
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"model-{number}.safetensors", metadata=metadata)
    return folder


def test_weights_are_the_same_wherever_and_however_they_lie(tmp_path: Path) -> None:
    """In a copy with other times, metadata and names, beside other files, in more shards."""
    whole = weights()
    identity = weights_identity(folder_of(tmp_path / "one", whole))
    assert len(bytes.fromhex(identity)) == 16
    again = folder_of(tmp_path / "two", whole, metadata={"format": "mlx", "by": "somebody else"})
    os.utime(again / "model-0.safetensors", ns=(10**18, 10**18))
    (again / "config.json").write_text("{}")
    save_file(weights(2), again / "adapters.safetensors")
    assert weights_identity(again) == identity
    names = sorted(whole)
    halves = [{name: whole[name] for name in part} for part in (names[3:], names[:3])]
    assert weights_identity(folder_of(tmp_path / "three", *halves)) == identity


def test_a_header_that_is_written_otherwise_says_the_same(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "one", weights())
    identity = weights_identity(folder)
    file = folder / "model-0.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    turned = dict(reversed(header.items())) | {"__metadata__": {"a": "b"}}
    written = json.dumps(turned, indent=3).encode() + b" " * 77
    file.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + length :])
    assert weights_identity(folder) == identity


def changes(name: str) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    def at(place: int) -> Callable[[np.ndarray], np.ndarray]:
        def change(array: np.ndarray) -> np.ndarray:
            changed = array.copy()
            changed.reshape(-1).view(np.uint8)[place] ^= 1
            return changed

        return change

    size = weights()[name].nbytes
    return {
        "first byte": at(0),
        "middle": at(size // 2),
        "last byte": at(size - 1),
        "shape": lambda array: array[None],
        "type": lambda array: array.view(np.int16),
    }


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_other_numbers_shapes_types_and_names_are_other_weights(tmp_path: Path, name: str) -> None:
    whole = weights()
    identities = [weights_identity(folder_of(tmp_path / "whole", whole))]
    for how, change in changes(name).items():
        identities.append(weights_identity(folder_of(tmp_path / how, whole | {name: change(whole[name])})))
    renamed = {(f"{key}s" if key == name else key): value for key, value in whole.items()}
    without = {key: value for key, value in whole.items() if key != name}
    for place, changed in enumerate((renamed, without, whole | {"more": whole[name]})):
        identities.append(weights_identity(folder_of(tmp_path / str(place), changed)))
    assert len(set(identities)) == len(identities) == 9


def test_weights_that_are_swapped_are_other_weights(tmp_path: Path) -> None:
    whole = weights()
    one, other = "model.embed_tokens.weight", "lm_head.weight"
    swapped = whole | {one: whole[other], other: whole[one]}
    assert weights_identity(folder_of(tmp_path / "a", whole)) != weights_identity(folder_of(tmp_path / "b", swapped))


def headed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF" + bytes(100),
        b"\xff" * 100,
        headed(b"{}")[:-1],
        headed(b"[]"),
        headed(b'{"a": 1}'),
        headed(b'{"a": {}}'),
        headed(b'"\xff\xff"'),
        headed(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-500, -496]}}'),
        headed(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}') + bytes(3),
        headed(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}') + bytes(8),
        headed(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["first", "last"]}}'),
        headed(b'{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}'),
        headed(b"[" * 100_000),
    ],
)
def test_files_that_are_no_safetensors_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        weights_identity(tmp_path)
