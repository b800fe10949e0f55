"""Files of torch.save: honest ones hold bit for bit what torch.load finds, hostile ones run nothing."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import subprocess
import sys
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ampaudit.checkpoint.pickled import read_state_dict
from ampaudit.checkpoint.safetensors import InMemory, write_part
from ampaudit.core.errors import WeightsError
from ampaudit.core.untrusted import MAX_MESSAGE
from tests.support.clock import soon

DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
]
# written as untyped storages
NEW_DTYPES = [
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    if dtype is torch.bool:
        return (torch.arange(count) % 3 == 0).reshape(shape)
    return (torch.arange(count) % 251).to(torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def saved(path: Path, value: object, **options: Any) -> Path:
    torch.save(value, path / "x.pt", **options)
    return path / "x.pt"


def assert_as_torch_loads(path: Path, inner: Callable[[Any], Any] = lambda loaded: loaded) -> None:
    expected = inner(torch.load(path, weights_only=True))
    found = read_state_dict(path)
    assert list(found) == list(expected)
    assert found
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        if not tensor.is_conj() and not tensor.is_neg():
            assert found[name].stride() == tensor.stride()
        assert bits(found[name]) == bits(tensor)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight


def state_of_every_dtype(dtypes: list[torch.dtype]) -> dict[str, torch.Tensor]:
    made = {f"{dtype}".removeprefix("torch."): values(dtype, 3, 4) for dtype in dtypes}
    return made | {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "ünï": torch.ones(1)}


def honest() -> dict[str, Any]:
    base = torch.arange(60.0)
    attributed = nn.Parameter(torch.ones(3))
    attributed.note = "attributes are pickled beside the tensor"  # type: ignore[attr-defined]
    return {
        "every dtype": state_of_every_dtype(DTYPES),
        "a module": Net().state_dict(),
        "parameters": dict(Net().named_parameters()) | {"attributed": attributed},
        "views": {"all": base, "slice": base[7:20], "strided": base[::7], "square": base[:49].view(7, 7).T},
        "expanded": {"a": torch.ones(1).expand(1000), "b": torch.arange(3.0).expand(5, 3)},
        "ordered": OrderedDict(b=base, a=base * 2),
        "pending": {"conjugate": base.to(torch.complex64).conj(), "negative": (base * 1j).conj().imag},
        "one tensor": {"w": torch.ones(2, 3)},
    }  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("case", honest())
def test_a_state_dict_is_what_torch_loads(tmp_path: Path, case: str, zipped: bool) -> None:
    path = saved(tmp_path, honest()[case], _use_new_zipfile_serialization=zipped)
    assert_as_torch_loads(path)


def test_dtypes_without_a_storage_class_of_their_own(tmp_path: Path) -> None:
    assert_as_torch_loads(saved(tmp_path, state_of_every_dtype(NEW_DTYPES)))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_every_protocol_that_torch_can_be_told_to_write(tmp_path: Path, protocol: int) -> None:
    state = Net().state_dict() | state_of_every_dtype(DTYPES)
    path = saved(tmp_path, state, pickle_protocol=protocol)
    found = read_state_dict(path)
    assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(t) for n, t in state.items()}


def training_checkpoint() -> dict[str, Any]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    net.head(net.embed(torch.arange(4))).sum().backward()
    optimizer.step()
    return {
        "epoch": 3,
        "best": float("-inf"),
        "done": False,
        "state_dict": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "scaler": {"scale": 65536.0, "_growth_tracker": 7},
        "rng": torch.get_rng_state(),
        "config": {
            "name": "ünï\x1b[31m",
            "sizes": [1, 2.5, None, 2**100, -(2**70)],
            "nested": ((1, (2,)), [[]]),
            "size": torch.Size([2, 3]),
            "device": torch.device("cpu"),
            "dtype": torch.bfloat16,
            "bytes": b"\xff\x00",
            "set": {1, 2},
            "complex": 1j,
            "counted": Counter("aab"),
        },
        "sparse": torch.eye(3).to_sparse(),
    }


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_the_weights_of_a_training_checkpoint(tmp_path: Path, zipped: bool, protocol: int) -> None:
    torch.manual_seed(0)
    checkpoint = training_checkpoint()
    path = saved(tmp_path, checkpoint, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    found = read_state_dict(path)
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in checkpoint["state_dict"].items()
    }
    if protocol == 2 and zipped:
        assert_as_torch_loads(path, lambda loaded: loaded["state_dict"])


def test_one_element_may_have_any_stride(tmp_path: Path) -> None:
    path = archive_of(tmp_path, tensor_pickle((1,), (0,), 3), bytes(range(80)))
    part = InMemory("x.pt", read_state_dict(path), {})
    assert write_part(tmp_path / "y.safetensors", part).crc32 == {"w": zlib.crc32(bytes(range(12, 16)))}


def test_both_wrappers_are_opened(tmp_path: Path) -> None:
    path = saved(tmp_path, {"state_dict": {"model": {"w": torch.ones(2)}}})
    assert list(read_state_dict(path)) == ["w"]


def test_tied_weights_stay_tied_and_the_file_as_it_was(tmp_path: Path) -> None:
    path = saved(tmp_path, Net().state_dict())
    before = path.read_bytes()
    found = read_state_dict(path)
    found["head.weight"].add_(1)
    assert torch.equal(found["embed.weight"], found["head.weight"])
    assert found["embed.weight"].untyped_storage()._cdata == found["head.weight"].untyped_storage()._cdata
    assert path.read_bytes() == before


@given(
    st.lists(st.integers(0, 4), max_size=4).flatmap(
        lambda size: st.tuples(
            st.just(tuple(size)),
            st.lists(st.integers(0, 9), min_size=len(size), max_size=len(size)).map(tuple),
            st.integers(0, 30),
        )
    )
)
def test_a_tensor_lies_in_its_storage_exactly_if_torch_says_so(
    tmp_path_factory: pytest.TempPathFactory,
    layout: tuple[tuple[int, ...], tuple[int, ...], int],
) -> None:
    size, stride, offset = layout
    path = archive_of(tmp_path_factory.getbasetemp(), tensor_pickle(size, stride, offset), bytes(range(80)))
    try:
        expected = torch.load(path, weights_only=True)["w"]
    except RuntimeError:
        with pytest.raises(WeightsError):
            read_state_dict(path)
        return
    if expected.numel() or offset <= 20:
        assert bits(read_state_dict(path)["w"]) == bits(expected)


class Record:
    """Writes a call that torch's unpickler would make."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.key if isinstance(value, Stored) else None


class Stored:
    def __init__(self, *key: Any) -> None:
        self.key = key


def pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    Pickler(stream, 2).dump(value)
    return stream.getvalue()


def tensor_pickle(size: Any, stride: Any, offset: Any, count: Any = 20, kind: Any = None) -> bytes:
    storage = Stored("storage", kind or torch.FloatStorage, "0", "cpu", count)
    rebuild = torch._utils._rebuild_tensor_v2  # type: ignore[attr-defined]
    return pickled({"w": Record(rebuild, storage, offset, size, stride, False, OrderedDict())})


def archive_of(folder: Path, data: bytes, storage: bytes = bytes(80), **more: bytes) -> Path:
    path = folder / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"data.pkl": data, "data/0": storage, "version": b"3\n", **more}.items():
            archive.writestr(f"r/{name}", content)
    return path


def refusal(path: Path) -> str:
    with soon(), pytest.raises(WeightsError) as caught:
        read_state_dict(path)
    message = str(caught.value.args[0])
    assert len(message) <= MAX_MESSAGE
    assert message.isprintable()
    assert message.startswith(str(path))
    return message


HOSTILE_TENSORS = {
    "9 GB of one element": ((3, 10**9), (0, 0), 0),
    "negative": ((-1,), (1,), 0),
    "negative stride": ((3,), (-1,), 5),
    "negative offset": ((3,), (1,), -2),
    "beyond": ((21,), (1,), 0),
    "offset beyond": ((1,), (1,), 20),
    "400,000 dimensions": ((1,) * 400_000, (1,) * 400_000, 0),
    "65 dimensions": ((1,) * 65, (1,) * 65, 0),
    "overflow": ((2**62, 4), (1, 1), 0),
    "huge integers": ((10**5000,), (0,), 0),
    "a fraction": ((2.0,), (1,), 0),
    "true": ((True,), (1,), 0),
    "lists": ([2], [1], 0),
    "lengths": ((2,), (1, 1), 0),
    "none": (None, None, None),
}


@pytest.mark.parametrize("case", HOSTILE_TENSORS)
def test_tensors_that_leave_their_storage_are_refused(tmp_path: Path, case: str) -> None:
    assert "'w'" in refusal(archive_of(tmp_path, tensor_pickle(*HOSTILE_TENSORS[case])))


def test_storages_that_are_not_what_the_pickle_says(tmp_path: Path) -> None:
    for count in (19, 21, -20, 20.0, True, None, 10**30):
        refusal(archive_of(tmp_path, tensor_pickle((1,), (1,), 0, count)))
    refusal(archive_of(tmp_path, tensor_pickle((1,), (1,), 0, kind=OrderedDict)))
    refusal(archive_of(tmp_path, tensor_pickle((1,), (1,), 0), b""))


def test_tensors_that_share_their_bytes_too_often(tmp_path: Path) -> None:
    one = torch.zeros(1_000_000)
    assert len(read_state_dict(saved(tmp_path, {str(i): one for i in range(90)}))) == 90
    assert "share" in refusal(saved(tmp_path, {str(i): one for i in range(120)}))


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("exploded"),))


SUBCLASS = b"ctorch._tensor\n_rebuild_from_type_v2\n"
# arguments within arguments: each call would call the next one
NESTED = b"\x80\x02" + SUBCLASS + b"(" + (SUBCLASS + b"N(") * 5_000 + b"tN" * 5_000 + b"tR."
RAW = {
    "os.system": b"cposix\nsystem\nX\x04\x00\x00\x00true\x85R.",
    "builtins.eval": b"\x80\x02c__builtin__\neval\nX\x01\x00\x00\x001\x85R.",
    "a stacked name": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    "INST": b"(S'true'\niposix\nsystem\n.",
    "OBJ": b"(cposix\nsystem\nX\x04\x00\x00\x00trueo.",
    "EXT1": b"\x82\x01.",
    "a persistent id": b"\x80\x02X\x02\x00\x00\x00hiQ.",
    "a text id": b"Phi\n.",
    "a name as a function": b"\x80\x02}X\x01\x00\x00\x00aR.",
    "calling a dtype": b"\x80\x02ctorch\nfloat16\n)R.",
    "attributes of a name": b"\x80\x02ctorch\nSize\n}b.",
    "a control character": b"\x80\x02c\x1b[31mx\n\x07y\n.",
    "torch.storage._load_from_bytes": b"\x80\x02ctorch.storage\n_load_from_bytes\n.",
    "no end": b"\x80\x02}",
    "empty": b"",
    "too few": b"\x80\x02a.",
    "no mark": b"\x80\x02u.",
    "a half pair": b"\x80\x02}(K\x01u.",
    "no memo": b"\x80\x02h\x05.",
    "a tuple of too few": b"\x80\x02K\x01\x87.",
    "a far memo": b"\x80\x02}r\xff\xff\xff\xff.",
    "a wrong dtype": b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v3\n(NNNNNNNtRs.",
    "subclasses of themselves": NESTED,
    "a subclass of nothing": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(NNNNtR.",
    "an integer": b"\x80\x02K\x01.",
    "text": b"\x80\x02X\x01\x00\x00\x00a.",
    "a tensor without a name": b"\x80\x02}K\x01K\x02s.",
    "a tensor that is a number": b"\x80\x02}X\x01\x00\x00\x00aK\x02s.",
    "not UTF-8": b"\x80\x02}X\x01\x00\x00\x00\xffK\x02s.",
    "a length beyond the file": b"\x80\x02X\xff\xff\xff\x7fa.",
    "a gigantic integer": b"\x80\x02\x8b\xff\xff\xff\x7fa.",
}  # fmt: skip


@pytest.mark.parametrize("case", RAW)
def test_other_pickles_are_refused_and_not_run(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "system", lambda command: pytest.fail(command))
    message = refusal(archive_of(tmp_path, RAW[case]))
    if "." in case:
        assert case.replace("os.", "posix.") in message
    (tmp_path / "x.pt").write_bytes(RAW[case])
    refusal(tmp_path / "x.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_runs(tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = {"w": torch.ones(2)}
    for state in (Bomb(), {"w": Bomb()}, {**good, "v": Bomb()}, {"state_dict": good, "extra": Bomb()}):
        path = saved(tmp_path, state, _use_new_zipfile_serialization=zipped)
        assert "which would run code" in refusal(path)
    assert not (tmp_path / "exploded").exists()


def test_a_whole_model_names_its_class_and_what_to_save(tmp_path: Path) -> None:
    path = saved(tmp_path, Net())
    with pytest.raises(WeightsError, match=r"needs tests\.checkpoint\.test_pickled\.Net") as caught:
        read_state_dict(path)
    assert "state_dict()" in caught.value.hint


BOMBS = {
    "dicts": b"\x80\x02" + b"}" * 2_900_000 + b".",
    "more opcodes than allowed": b"\x80\x02" + b")" * 5_000_000 + b".",
    "nested lists": b"\x80\x02" + b"]" * 900_000 + b"a" * 899_999 + b".",
    "tuples of one tuple as a key": b"\x80\x02})" + b"\x85q\x00h\x00\x86" * 300_000 + b"K\x01s.",
}
# 3,000 copies of a dict with 100,000 keys
COPIED = b"(" + b"X\x01\x00\x00\x00aK\x01" * 100_000 + b"uq\x01"
TABLE = b"ccollections\nOrderedDict\nq\x00"
BOMBS["copies of a dict"] = b"\x80\x02" + TABLE + b"}" + COPIED + b"h\x00h\x01\x85R" * 3_000 + b"."
BOMBS["copies by a subclass"] = (
    b"\x80\x02" + TABLE + b"}" + COPIED + (SUBCLASS + b"(h\x00Nh\x01\x85NtR") * 3_000 + b"."
)
BOMBS["a name of 60 MB"] = b"\x80\x02c" + b"a" * 60_000_000 + b"\nb\n."
LOADER = """
import resource, sys, pathlib
from ampaudit.core.errors import WeightsError
from ampaudit.checkpoint.pickled import read_state_dict
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        read_state_dict(pathlib.Path(path))
    except WeightsError:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_bombs_end_within_seconds_and_a_gigabyte(tmp_path: Path) -> None:
    for name in BOMBS:
        (tmp_path / name).mkdir()
    paths = [str(archive_of(tmp_path / name, data)) for name, data in BOMBS.items()]
    done = subprocess.run(
        [sys.executable, "-c", LOADER, *paths], capture_output=True, text=True, timeout=100, check=True
    )
    assert int(done.stdout) < 1_000_000  # kilobytes


def test_other_archives_say_what_to_do(tmp_path: Path) -> None:
    script = torch.jit.trace(nn.Linear(2, 2), torch.ones(2))
    torch.jit.save(script, tmp_path / "x.pt")
    with pytest.raises(WeightsError, match="compressed") as caught:
        read_state_dict(tmp_path / "x.pt")
    assert "state_dict()" in caught.value.hint
    stored = archive_of(tmp_path, b"\x80\x02}.", **{"constants.pkl": b"\x80\x02).", "code/x.py": b""})
    assert "TorchScript" in refusal(stored)
    (tmp_path / "x.pt").write_bytes(bytes(257) + b"ustar" + bytes(500))
    assert "tar file" in refusal(tmp_path / "x.pt")
    os.mkfifo(tmp_path / "fifo.pt")
    refusal(tmp_path / "fifo.pt")


LEGACY = io.BytesIO()
torch.save({"a": torch.arange(5.0), "b": torch.ones(2).half()}, LEGACY, _use_new_zipfile_serialization=False)


@given(st.data())
def test_a_changed_legacy_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(LEGACY.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "legacy.pt"
    path.write_bytes(bytes(raw)[: data.draw(st.integers(0, len(raw)))])
    try:
        found: Mapping[str, torch.Tensor] = read_state_dict(path)
    except WeightsError as error:
        message = str(error.args[0])
    else:
        message = ""
        assert all(isinstance(tensor, torch.Tensor) for tensor in found.values())
    assert message.isprintable()
    assert len(message) <= MAX_MESSAGE


OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]


@given(st.lists(st.one_of(st.sampled_from(OPCODES), st.binary(max_size=4)), max_size=60))
def test_any_pickle_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    path = archive_of(tmp_path_factory.getbasetemp(), b"\x80\x02" + b"".join(parts) + b".")
    try:
        assert not read_state_dict(path)  # an empty dict is the only one that these parts may hold
    except WeightsError:
        refusal(path)
