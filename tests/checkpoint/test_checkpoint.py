"""Checkpoint files: what we write the safetensors library reads, and hostile files end in one line."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from ampaudit.checkpoint.open import map_checkpoint, open_checkpoint
from ampaudit.checkpoint.safetensors import (
    PIECE,
    InMemory,
    SafetensorsFile,
    TensorEntry,
    type_name,
    write_safetensors,
)
from ampaudit.core.errors import WeightsError
from ampaudit.core.untrusted import MAX_MESSAGE

DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]


def tensors_of(shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {}
    for index, shape in enumerate(shapes):
        values = torch.randn(shape) * 100
        made[f"t.{index}"] = values.to(DTYPES[index % len(DTYPES)])
    return made


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    part = InMemory(path.name, tensors, metadata)
    pieces = ((name, part.pieces(name)) for name in part.entries)
    write_safetensors(path, list(part.entries.values()), metadata, pieces)


@given(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=14))
def test_the_library_reads_what_we_write(tmp_path_factory: Any, shapes: list[tuple[int, ...]]) -> None:
    path = tmp_path_factory.mktemp("w") / "x.safetensors"
    tensors = tensors_of(shapes)
    write(path, tensors, {"format": "pt", "ünï": 'co"de'})
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "ünï": 'co"de'}
        assert set(opened.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert opened.get_tensor(name).dtype == tensor.dtype
            assert bits(opened.get_tensor(name)) == bits(tensor)


@given(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=14))
def test_we_read_what_the_library_writes(tmp_path_factory: Any, shapes: list[tuple[int, ...]]) -> None:
    path = tmp_path_factory.mktemp("r") / "x.safetensors"
    tensors = tensors_of(shapes)
    safetensors.torch.save_file(tensors, path)
    part = SafetensorsFile(path)
    mapped = map_checkpoint(path)
    for name, tensor in tensors.items():
        assert part.entries[name].shape == tuple(tensor.shape)
        assert b"".join(bits(piece) for piece in part.pieces(name)) == bits(tensor)
        assert bits(mapped.tensors[name]) == bits(tensor)
        mapped.drop(mapped.tensors[name])
        assert bits(mapped.tensors[name]) == bits(tensor)


def test_large_tensors_come_in_pieces(tmp_path: Path) -> None:
    big = torch.arange(PIECE + 5, dtype=torch.float32)
    safetensors.torch.save_file({"big": big}, tmp_path / "x.safetensors")
    sizes = [piece.numel() for piece in SafetensorsFile(tmp_path / "x.safetensors").pieces("big")]
    assert sizes == [PIECE, 5]


def test_mapped_weights_are_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": torch.ones(5000)}, path)
    before = path.read_bytes()
    map_checkpoint(path).tensors["w"].add_(1)
    assert path.read_bytes() == before


def raw(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str = "F32", shape: Any = (2,), at: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": at}


ONE_ENTRY = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
TWICE = b"{" + ONE_ENTRY + b"," + ONE_ENTRY + b"}"
HOSTILE = {
    "empty": (b"", "header of 0 bytes"),
    "header of a gigabyte": (raw({}, length=10**9), "header of 1,000,000,000 bytes in a file"),
    "header beyond 2**63": (raw({}, length=2**64 - 1), "header of"),
    "not JSON": (raw(b"{nonsense"), "header"),
    "deep": (raw(b'{"a":' * 60_000 + b"1" + b"}" * 60_000), "header"),
    "a list": (raw([1, 2]), "not a JSON object"),
    "a name twice": (raw(TWICE, bytes(8)), "'a' occurs twice"),
    "metadata": (raw({"__metadata__": {"a": 1}}), "metadata"),
    "unknown type": (raw({"a": entry("F7")}, bytes(8)), "unknown type 'F7'"),
    "negative": (raw({"a": entry(shape=(-2,))}, bytes(8)), "a.shape.0: Input should be greater than"),
    "a fraction": (raw({"a": entry(shape=(2.0,))}, bytes(8)), "a.shape.0: Input should be a valid integer"),
    "true": (raw({"a": entry("U8", (True,), (0, 1))}, bytes(1)), "a.shape.0: Input should be a valid int"),
    "wrong size": (raw({"a": entry(shape=(3,))}, bytes(8)), "needs 12 bytes, not 8"),
    "overflowing size": (raw({"a": entry(shape=(2**62, 2**62))}, bytes(8)), "needs"),
    "overlap": (raw({"a": entry(), "b": entry()}, bytes(16)), "overlaps another one, or leaves a gap"),
    "gap": (raw({"a": entry(at=(4, 12))}, bytes(12)), "gap"),
    "truncated": (raw({"a": entry(), "b": entry(at=(8, 16))}, bytes(11)), "it ends within tensor 'b'"),
    "more": (raw({"a": entry()}, bytes(11)), "3 bytes after the last tensor"),
    "400,000 dimensions": (raw({"a": entry(shape=(1,) * 400_000, at=(0, 4))}, bytes(4)), "at most 64 items"),
    "beyond 2**63": (raw({"a": entry(shape=(2**63, 0))}), "a.shape.0: Input should be less than"),
    "three offsets": (raw({"a": entry(at=(0, 8, 8))}, bytes(8)), "a.data_offsets: List should have at most"),
    "half a character": (raw({"\ud800": entry()}, bytes(8)), "half of a surrogate pair"),
    "a million lists": (raw(b'{"a":[' + b"[]," * 6_000_000 + b"[]]}"), "more than 2,000,000 objects"),
    "a long name": (raw({"\x1b[31m\u202e" * 9999: entry("F7")}, bytes(8)), "unknown type 'F7'"),
    "no place": (raw({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "a.data_offsets: Field required"),
    "no table": (raw({"a": 7}), "a: Input should be a valid dictionary"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_one_line(tmp_path: Path, case: str) -> None:
    data, message = HOSTILE[case]
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(tmp_path / "x.safetensors")
    assert message in caught.value.args[0]
    assert len(caught.value.args[0]) <= MAX_MESSAGE
    assert caught.value.args[0].isprintable()


def test_a_header_of_a_gigabyte_that_is_there_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", 10**9))
        stream.truncate(10**9 + 100)  # a hole: no bytes on disk
    with pytest.raises(WeightsError, match="100,000,000 are allowed"):
        SafetensorsFile(path)


def test_everything_the_library_refuses_is_refused(tmp_path: Path) -> None:
    """And so is more: the library takes a name that is there twice."""
    for data, _ in HOSTILE.values():
        (tmp_path / "x.safetensors").write_bytes(data)
        try:
            safetensors.torch.load_file(tmp_path / "x.safetensors")
        except Exception:
            continue
        with pytest.raises(WeightsError):
            SafetensorsFile(tmp_path / "x.safetensors")


def shards(path: Path, weight_map: dict[str, str], **files: dict[str, torch.Tensor]) -> Path:
    for name, tensors in files.items():
        safetensors.torch.save_file(tensors, path / f"{name}.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map}))
    return index


ONE, TWO = {"a": torch.ones(1)}, {"b": torch.ones(1)}


def test_shards(tmp_path: Path) -> None:
    index = shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one=ONE, two=TWO)
    for path in (index, tmp_path):
        checkpoint = open_checkpoint(path)
        assert [part.label for part in checkpoint.parts] == ["one.safetensors", "two.safetensors"]
        assert list(checkpoint.entries) == ["a", "b"]
    assert map_checkpoint(index).tensors["b"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "b": "gone.safetensors"}, "the shard gone.safetensors is missing"),
        ({"a": "../one.safetensors"}, "names the shard '../one.safetensors'"),
        ({"a": "/etc/passwd"}, "names the shard '/etc/passwd'"),
        ({"a": "..\\one.safetensors"}, "names the shard"),
        ({"a": ""}, "names the shard ''"),
        ({"a": ".."}, "names the shard '..'"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "'b' is not in one.safetensors"),
        ({"a": "one.safetensors", "b": "two.safetensors", "c": "same.safetensors"}, "is in both"),
        ({"b": "two.safetensors", "c": "one.safetensors"}, "is not in one.safetensors"),
        ({"a": 1}, "weight_map.a: Input should be a valid string"),
    ],
)
def test_hostile_indexes(tmp_path: Path, weight_map: dict[str, str], message: str) -> None:
    index = shards(tmp_path, weight_map, one=ONE, two=TWO, same=ONE)
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(index)
    assert message in caught.value.args[0]


def test_an_unlisted_tensor_is_not_lost_silently(tmp_path: Path) -> None:
    index = shards(tmp_path, {"a": "one.safetensors"}, one={**ONE, **TWO})
    with pytest.raises(WeightsError, match=r"'b' of one\.safetensors is not listed"):
        open_checkpoint(index)


def test_names_in_an_index_are_printed_briefly_and_escaped(tmp_path: Path) -> None:
    long = "\x1b]8;;http:x\x07" * 5000
    for weight_map in (
        {"a": long},
        {long: "one.safetensors"},
        {"a": f"{long}/x"},
        {"a": "one.safetensors\0"},
    ):
        index = shards(tmp_path, weight_map, one=ONE)
        with pytest.raises(WeightsError) as caught:
            open_checkpoint(index)
        assert len(caught.value.args[0]) <= MAX_MESSAGE
        assert caught.value.args[0].isprintable()


@pytest.mark.parametrize("name", ["x.safetensors", "model.safetensors.index.json", "x.pt"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for read in (open_checkpoint, map_checkpoint):
        with pytest.raises(WeightsError, match="not a regular file"):
            read(tmp_path / name)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": 3}', '{"weight_map": {}, "weight_map": {}}'])
def test_indexes_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError):
        open_checkpoint(tmp_path / "model.safetensors.index.json")


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("exploded"),))


def test_a_state_dict_is_read_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"w": torch.ones(3)}}, tmp_path / "good.pt")
    assert open_checkpoint(tmp_path / "good.pt").entries == {"w": TensorEntry("w", "F32", (3,))}
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"w": Bomb()}))
    torch.save({"w": Bomb()}, tmp_path / "new.pt")
    for name in ("old.pt", "new.pt"):
        with pytest.raises(WeightsError):
            open_checkpoint(tmp_path / name)
    assert not (tmp_path / "exploded").exists()


def test_other_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.h5").write_text("")
    for path in (tmp_path / "x.h5", tmp_path, tmp_path / "gone.safetensors", tmp_path / "gone.pt"):
        with pytest.raises(WeightsError):
            open_checkpoint(path)


def test_types_without_a_name_are_refused() -> None:
    with pytest.raises(WeightsError, match="safetensors cannot hold"):
        type_name(torch.complex128, "w")
