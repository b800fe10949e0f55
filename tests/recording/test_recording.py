"""What is recorded comes back as it was before the call, and the program does not notice."""

from __future__ import annotations

import copy
import enum
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ampaudit
from ampaudit.core.errors import OutputError, UsageError
from ampaudit.recording.calls import record_named
from ampaudit.recording.config import RecordConfig
from ampaudit.source import Batch
from ampaudit.source.inputs import recorded_calls
from tests.support.paths import ROOT
from tests.support.recorded import Colour, Pair, Points, Sink, tensors_in

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex64, torch.complex128]


def replayed(module: nn.Module, where: Path) -> list[Batch]:
    batches, _ = recorded_calls(where, None, module)
    return list(batches)


def same(first: Any, second: Any) -> bool:
    """Compare bit by bit, with types, strides and dtypes."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        alike = (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
        raw = [t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (first, second)]
        return alike and torch.equal(*raw)
    if isinstance(first, np.ndarray):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and first.tobytes() == second.tobytes()
        )
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if hasattr(first, "__dict__") and not callable(first) and not isinstance(first, Colour):
        return same(vars(first), vars(second))
    return first == second or repr(first) == repr(second)


def round_trip(where: Path, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    sink = Sink()
    with ampaudit.record(sink, where) as recording:
        sink(*args, **kwargs)
    assert (recording.calls, recording.recorded) == (1, 1), recording.skipped
    (batch,) = replayed(sink, where)
    return batch.args, batch.kwargs


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHT_BITS, *OTHERS], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)], ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    value = (torch.randn(shape) * 3).to(dtype)
    before = value.clone()
    (found,), _ = round_trip(tmp_path / "calls", value)
    assert same(found, before)


LAYOUTS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "transposed": lambda: [torch.randn(4, 6).t()],
    "channels last": lambda: [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    "expanded": lambda: [torch.randn(3, 1, 1).expand(3, 500, 700)],
    "a part of a large tensor": lambda: [torch.randn(1000, 1000)[3:5]],
    "conjugate": lambda: [torch.randn(3, dtype=torch.complex64).conj()],
    "windows": lambda: [torch.randn(2000).unfold(0, 400, 160)],
    "two halves": lambda: list(torch.randn(4, 6).chunk(2, -1)),
    "the same": lambda: [torch.ones(3)] * 2,
    "another dtype": lambda: (lambda x: [x, x[1:].view(torch.int16)])(torch.randn(5)),
    "a parameter": lambda: [nn.Parameter(torch.randn(2)).detach()],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_and_shared_memory(name: str, tmp_path: Path) -> None:
    made = LAYOUTS[name]()
    before = [item.clone() if item.is_contiguous() else copy.deepcopy(item) for item in made]
    found, _ = round_trip(tmp_path / "calls", *made)
    assert all(map(same, found, before))
    shared = [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in made] for a in made]
    again = [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in found] for a in found]
    if name != "conjugate":
        assert again == shared or len(made) == 1
    stored = sum(
        t.numel() * t.element_size() for t in load_file(tmp_path / "calls/call-000001.safetensors").values()
    )
    logical = sum(t.numel() * t.element_size() for t in made)
    assert stored <= logical, "shared memory is stored once, and nothing beside it"


def test_overlapping_tensors_are_one_memory_again(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    (whole, column), _ = round_trip(tmp_path / "calls", base, base[:, 1])
    column.fill_(-1.0)
    assert whole[:, 1].eq(-1).all()


def test_columns_of_a_large_tensor_are_stored_without_the_rest(tmp_path: Path) -> None:
    columns = torch.randn(500, 2000)[:, 7:9]
    before = columns.clone()
    (found,), _ = round_trip(tmp_path / "calls", columns)
    assert torch.equal(found, before)
    assert (tmp_path / "calls/call-000001.safetensors").stat().st_size < 2 * before.nbytes


def test_every_kind_of_argument(tmp_path: Path) -> None:
    tensor = torch.randn(2, 2)
    args = (
        *(None, True, False, 0, -(2**63) + 1, 1.5, -0.0, float("inf"), "ü\n", b"\x00\xff", 1 + 2j),
        *(torch.float16, torch.device("cpu"), torch.strided, torch.channels_last, torch.Size([2, 3])),
        *([1, [tensor, (tensor, None)]], {"a": {1: tensor, None: [], (1, "x"): 2.0}}, {3, 1}, frozenset("a")),
        *(slice(1, None, 2), range(3, 9, 2), Colour.BLUE, Pair(tensor, {"k": Colour.RED})),
        *(np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2], np.float64(2.5), np.int8(3)),
        Points(torch.arange(3.0), ["a", "b"], 0.25),
        torch.nn.utils.rnn.pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([3, 2]), batch_first=True),
    )
    kwargs = {"mask": tensor > 0, "pairs": [Pair(tensor)] * 2, "nan": float("nan")}
    before = copy.deepcopy((args, kwargs))
    found = round_trip(tmp_path / "calls", *args, **kwargs)
    for one, other in zip(found[0], before[0], strict=True):
        if not isinstance(one, np.ndarray):
            assert same(one, other), (one, other)
    assert np.array_equal(found[0][-5], np.array([[0, 2], [3, 5]], dtype=np.float32))
    assert same(found[1], before[1])


def test_a_generator_and_a_device_are_noted(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(1234)
    torch.rand(3, generator=made)
    (found, device), _ = round_trip(tmp_path / "calls", made, torch.device("cuda:1"))
    assert found.initial_seed() == 1234
    assert device == torch.device("cpu"), "where the tensors of a recording are"


class Lookup:
    """Looks up every attribute that it does not have, and raises another error than Python does."""

    def __getattr__(self, name: str) -> Any:
        return {}[name]


class Plain:
    """An object of a user."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda x: x, "is a function"),
        (Plain(), "of type Plain"),
        (Lookup(), "of type Lookup"),
        (sys.stdout, "of type"),
        (10**30, "64 bits"),
        (torch.ones(2, 2).to_mkldnn(), "storage of its own"),
        (torch.empty(2, device="meta"), "without values"),
        (np.array(["a"]), "NumPy array of"),
        (iter([1]), "of type list_iterator"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_stored_is_named_and_counted(
    value: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Takes(nn.Module):
        def forward(self, x: torch.Tensor, deep: Any) -> torch.Tensor:
            return x + 1

    module = Takes()
    with ampaudit.record(module, tmp_path / "calls") as recording:
        for held in (value, 1, value):
            assert module(torch.ones(2), deep={"a": [0, held]}).sum() == 4
    assert (recording.calls, recording.recorded, recording.skipped.total()) == (3, 1, 2)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1, "a reason is told once"
    assert told[0].startswith("ampaudit: call 1 of Takes is not recorded: deep['a'][1] ")
    assert words in told[0]
    described = json.loads((tmp_path / "calls/recording.json").read_text())
    assert described["calls"]["made"] == 3
    assert list(described["calls"]["skipped"].values()) == [2]


def _program(where: Path | None) -> tuple[list[torch.Tensor], list[Any]]:
    """Train and draw; return every result, and the state of each generator."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    results = []

    def run() -> None:
        for _ in range(4):
            x = torch.randn(3, 4, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x * 2).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            results.extend([loss.detach(), x.grad.clone(), torch.rand(2)])  # type: ignore[union-attr]
            results.append(torch.tensor([random.random(), np.random.rand()]))
        with torch.inference_mode():
            results.append(model(torch.randn(1, 4)).clone())

    if where is None:
        run()
    else:
        with ampaudit.record({"all": model, "inner": model[2]}, where):
            run()
    results += [p.detach().clone() for p in model.parameters()]
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert pickle.dumps(model)
    return results, [torch.get_rng_state(), random.getstate(), np.random.get_state()]


def test_results_and_random_numbers_are_those_without_a_recording(tmp_path: Path) -> None:
    original = nn.Module.__call__
    expected, states = _program(None)
    found, after = _program(tmp_path / "calls")
    assert len(found) == len(expected) > 10
    assert all(map(same, found, expected))
    assert torch.equal(states[0], after[0])
    assert repr(states[1:]) == repr(after[1:])
    assert nn.Module.__call__ is original
    call = json.loads((tmp_path / "calls/all/call-000001.json").read_text())
    assert (call["training"], call["grad"], call["autocast"]) == (True, True, {"cpu": "bfloat16"})
    last = json.loads((tmp_path / "calls/all/call-000005.json").read_text())
    assert (last["grad"], last["autocast"]) == (False, {})


def test_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(1000, 1)

    def calls(name: str, **options: Any) -> list[str]:
        with ampaudit.record(model, tmp_path / name, **options) as recording:
            for number in range(10):
                model(torch.full((1, 1000), float(number)))
        assert recording.calls == 10
        files = sorted(tmp_path.glob(f"{name}/call-*.json"))
        assert len(files) == len(list(tmp_path.glob(f"{name}/call-*.safetensors"))) == recording.recorded
        values = [load_file(file.with_suffix(".safetensors"))["0"][0, 0].item() for file in files]
        assert [f"call-{int(value) + 1:06d}" for value in values] == [file.stem for file in files]
        return [file.stem[-2:] for file in files]

    assert calls("all") == [f"{n:02d}" for n in range(1, 11)]
    assert calls("every", every=4) == ["01", "05", "09"]
    assert calls("first", first=3) == ["01", "02", "03"]
    assert calls("both", first=2, every=3) == ["01", "04"]
    assert not capsys.readouterr().err
    assert calls("bytes", max_bytes="13kB") == ["01", "02", "03"]
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "recording of Linear stops at call 4" in told
    assert "--max-bytes" in told


def test_a_full_disk_stops_the_recording_and_not_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 2)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("ampaudit.recording.calls.shutil.disk_usage", lambda path: usage)
    with ampaudit.record(model, tmp_path / "calls") as recording:
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert recording.recorded == 0
    assert "the disk" in recording.stopped
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "calls").exists()


def test_a_directory_that_disappears_stops_the_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 2)
    with ampaudit.record(model, tmp_path / "calls") as recording:
        model(torch.ones(1, 2))
        for file in (tmp_path / "calls").iterdir():
            file.unlink()
        (tmp_path / "calls").rmdir()
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert recording.recorded == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("first", [False, True])
def test_a_program_may_change_its_working_directory(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, elsewhere = tmp_path / "started", tmp_path / "elsewhere"
    started.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(started)
    model = nn.Linear(2, 2)
    with ampaudit.record(model, "calls") as recording:
        if first:
            monkeypatch.chdir(elsewhere)
        model(torch.ones(1, 2))
        monkeypatch.chdir(elsewhere)
        model(torch.ones(1, 2))
    assert recording.summary.startswith("2 of 2 calls")
    assert len(list((started / "calls").glob("call-*.json"))) == 2
    assert json.loads((started / "calls" / "recording.json").read_text())["calls"]["made"] == 2
    assert not list(elsewhere.iterdir())


def test_directories_that_are_not_replaced(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("x")
    with pytest.raises(OutputError, match="was not written by ampaudit"):
        ampaudit.record(model, tmp_path / "mine", force=True)
    with ampaudit.record(model, tmp_path / "calls"):
        [model(torch.ones(1, 2)) for _ in range(3)]
    with pytest.raises(OutputError, match="--force"):
        ampaudit.record(model, tmp_path / "calls")
    with ampaudit.record(model, tmp_path / "calls", force=True):
        model(torch.ones(1, 2))
    assert [file.name for file in sorted((tmp_path / "calls").glob("call*"))] == [
        "call-000001.json",
        "call-000001.safetensors",
    ]
    with pytest.raises(OutputError, match="no such directory"):
        ampaudit.record(model, tmp_path / "missing/calls")
    with pytest.raises(UsageError, match="type str"):
        ampaudit.record("model", tmp_path / "x")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="no module"):
        ampaudit.record({}, tmp_path / "x")
    with pytest.raises(UsageError, match="same name"):
        ampaudit.record({"a/b": model, "a_b": model}, tmp_path / "x")


def test_recordings_side_by_side(tmp_path: Path) -> None:
    """They end in any order, and copies of a module are other modules."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    original = nn.Module.__call__
    one, other = ampaudit.record(first, tmp_path / "a"), ampaudit.record(second, tmp_path / "b")
    recordings = [one.__enter__(), other.__enter__()]
    second(first(torch.ones(1, 2)))
    copy.deepcopy(first)(torch.ones(1, 2))
    one.__exit__(None, None, None)
    second(first(torch.ones(1, 2)))
    other.__exit__(None, None, None)
    assert nn.Module.__call__ is original
    assert [recording.calls for recording in recordings] == [1, 2]


def test_compiled_modules(tmp_path: Path) -> None:
    """A compiled module is recorded; one inside a compiled region is not, and the graph stays whole."""
    inner = nn.Linear(2, 2)
    model = nn.Sequential(inner, nn.ReLU())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with ampaudit.record({"outer": compiled, "inner": inner}, tmp_path / "calls") as recordings:  # type: ignore[dict-item]
        expected = compiled(torch.ones(1, 2))
    assert torch.equal(expected, model(torch.ones(1, 2)))
    assert recordings["outer"].recorded == 1
    assert recordings["inner"].calls == 0
    assert len(replayed(model, tmp_path / "calls/outer")) == 1, "of the module inside"


KILLED = """
import os, signal, sys, torch, ampaudit
from torch import nn
from ampaudit.recording import calls
model = nn.Linear(3, 3)
placed, left = calls._atomic_file, int(sys.argv[2])
def dying(path):
    global left
    left -= 1
    if left == 0:
        path.with_name("." + path.name + ".part").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return placed(path)
calls._atomic_file = dying
with ampaudit.record(model, sys.argv[1]):
    for number in range(5):
        model(torch.full((1, 3), float(number)))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
@pytest.mark.parametrize("files", [5, 6])
def test_a_killed_program_leaves_the_calls_that_are_finished(files: int, tmp_path: Path) -> None:
    """It dies before the tensors, or before the JSON of the third call."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "calls"), str(files)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    found = replayed(nn.Linear(3, 3), tmp_path / "calls")
    assert [batch.name for batch in found] == ["call 1", "call 2"]
    assert [batch.args[0][0, 0].item() for batch in found] == [0.0, 1.0]
    with ampaudit.record(model := nn.Linear(3, 3), tmp_path / "calls", force=True):
        model(torch.ones(1, 3))
    assert len(list((tmp_path / "calls").iterdir())) == 3, "what was left is removed"


def test_a_transform_of_torch_has_no_values(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with ampaudit.record(model, tmp_path / "calls") as recording:
        found = torch.vmap(model)(torch.ones(4, 3))
    assert torch.allclose(found, model(torch.ones(4, 3)))
    assert list(recording.skipped) == ["input[0] is a tensor without a storage of its own"]


def _nested(depth: int) -> Any:
    value: Any = torch.ones(1)
    for number in range(depth):
        value = {"k": value} if number % 2 else [value]
    return value


def test_depth(tmp_path: Path) -> None:
    (found,), _ = round_trip(tmp_path / "calls", _nested(24))
    assert len(tensors_in(found)) == 1
    sink = Sink()
    endless: list[Any] = []
    endless.append(endless)
    with (
        ampaudit.record(nn.Identity(), tmp_path / "more"),
        ampaudit.record(sink, tmp_path / "deep") as recording,
    ):
        sink.forward = lambda *_: torch.ones(1)  # type: ignore[method-assign]
        sink(_nested(30))
        sink(endless)
    assert recording.skipped.total() == 2
    assert all("nested more than" in reason for reason in recording.skipped)


class Difficult:
    """An object whose attributes cannot be read."""

    @property
    def unet(self) -> nn.Module:
        raise RuntimeError("not yet")


def test_what_names_lead_to_may_raise(tmp_path: Path) -> None:
    pipe = Difficult()
    model = nn.Linear(2, 2)
    with record_named(["pipe.unet"], tmp_path / "calls", RecordConfig()) as watcher:
        model(torch.ones(1, 2))
    assert isinstance(pipe, Difficult)
    assert watcher.unresolved.keys() == {"pipe.unet"}
    assert watcher.called == {"Linear": 1}


def test_values_that_no_reader_would_accept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampaudit.recording.calls._MAX_JSON", 1000)  # millions of numbers take long

    class Flags(enum.Flag):
        A = 1
        B = 2

    sink = Sink()
    with ampaudit.record(sink, tmp_path / "calls") as recording:
        sink(list(range(1000)))
        sink(Flags.A | Flags.B)
        sink(1)
    assert recording.recorded == 1
    assert any("texts and numbers need" in reason for reason in recording.skipped)
    assert any("of type Flags" in reason for reason in recording.skipped)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_child_writes_no_calls(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with ampaudit.record(model, tmp_path / "calls") as recording:
        model(torch.ones(1, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks while threads run
            child = os.fork()
        if not child:
            model(torch.zeros(1, 2))
            os._exit(recording.calls)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert len(list((tmp_path / "calls").glob("call-*.json"))) == 1


def test_more_calls_than_a_name_has_digits_for(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with ampaudit.record(model, tmp_path / "calls") as recording:
        for number in (999_998, 999_999):
            recording.calls = number
            model(torch.full((1, 2), float(number)))
    assert [batch.name for batch in replayed(model, tmp_path / "calls")] == ["call 999999", "call 1000000"]
