"""``--stream``: weights stay on disk, and nothing else changes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from ampaudit.audit.scan import scan
from ampaudit.checkpoint.safetensors import TensorEntry, header_bytes
from ampaudit.core.errors import AuditError, UsageError, WeightsError
from ampaudit.core.source_config import SourceConfig
from ampaudit.export.convert import convert
from ampaudit.export.manifest import read_manifest
from ampaudit.report.model import Report
from ampaudit.source.interface import ModelSource
from ampaudit.source.open import open_source
from tests.support import zoo

MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.body = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("scale", torch.arange(32.0), persistent=False)
    def forward(self, ids):
        return self.head(self.body(self.table(ids) * self.scale) + self.steps)
def get_model(): return Net().eval()
def example_inputs(): return torch.arange(20).view(2, 10)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m.py").write_text(MODEL)
    torch.manual_seed(5)
    made = open_source(str(tmp_path / "m.py"), SourceConfig()).model
    made.steps.fill_(0.5)
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    safetensors.torch.save_model(made, str(tmp_path / "w.safetensors"))
    return tmp_path / "m.py"


def opened(path: Path, *, stream: bool, **options: Any) -> ModelSource:
    return open_source(str(path), SourceConfig(stream=stream, **options))


def without_timings(report: Report) -> Report:
    return dataclasses.replace(report, timings={})


@pytest.mark.parametrize("policy", ["ampaudit", "torch-cuda", "half"])
def test_the_report_is_the_same(model: Path, policy: str) -> None:
    weights = model.with_name("w.safetensors")
    reports = [
        without_timings(scan(opened(model, stream=stream, weights=weights), policy=policy, dtype="float16"))
        for stream in (False, True)
    ]
    assert reports[0] == reports[1]
    assert reports[0].sites


def test_ties_buffers_and_values_are_those_of_a_loaded_model(model: Path) -> None:
    weights = model.with_name("w.safetensors")
    plain, streamed = (opened(model, stream=s, weights=weights).model for s in (False, True))
    assert streamed.head.weight is streamed.table.weight
    assert {n: t.tolist() for n, t in streamed.state_dict().items()} == {
        n: t.tolist() for n, t in plain.state_dict().items()
    }
    assert torch.equal(streamed.scale, plain.scale)


@pytest.mark.parametrize("architecture", ["bert", "t5", "llama"])
def test_hugging_face_directories(tmp_path: Path, architecture: str) -> None:
    torch.manual_seed(0)
    zoo.ZOO[architecture]().model.save_pretrained(tmp_path)
    reports = [
        without_timings(scan(opened(tmp_path, stream=s), policy="torch-cuda", dtype="float16"))
        for s in (False, True)
    ]
    assert reports[0] == reports[1]


@pytest.mark.parametrize("equal", [True, False])
def test_weights_are_tied_where_transformers_ties_them(tmp_path: Path, equal: bool) -> None:
    torch.manual_seed(0)
    zoo.gpt2().model.save_pretrained(tmp_path)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    embedding, decoder = "transformer.wte.weight", "lm_head.weight"
    state[decoder] = state[embedding].clone() if equal else state[embedding] + 1
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    models = [opened(tmp_path, stream=stream).model for stream in (False, True)]
    for made in models:
        assert (made.get_parameter(embedding) is made.get_parameter(decoder)) is equal
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(models[1].state_dict()[name], tensor), name


def test_given_weights_go_before_those_of_the_directory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = zoo.bert().model
    made.save_pretrained(tmp_path / "hf")
    state = {name: tensor * 2 for name, tensor in made.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    weights = tmp_path / "w.safetensors"
    plain, streamed = (opened(tmp_path / "hf", stream=s, weights=weights).model for s in (False, True))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(streamed.state_dict()[name], tensor)
        assert torch.equal(tensor, state[name])


def test_16_bit_checkpoints_are_widened_on_disk(model: Path, tmp_path: Path) -> None:
    state = safetensors.torch.load_file(tmp_path / "w.safetensors")
    lower = {n: t.bfloat16() if t.is_floating_point() else t for n, t in state.items()}
    safetensors.torch.save_file(lower, tmp_path / "low.safetensors")
    weights = tmp_path / "low.safetensors"
    plain, streamed = (opened(model, stream=s, weights=weights).model for s in (False, True))
    assert streamed.table.weight.dtype is torch.float32
    assert torch.equal(streamed.table.weight, plain.table.weight)


ODD = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = nn.Linear(8, 8).to(torch.bfloat16)
        self.upper = nn.Linear(8, 8).to(torch.float64)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.normed = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.old = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.order = nn.Parameter(torch.arange(8), requires_grad=False)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.again = self.upper
        self.register_buffer("largest", self.normed.weight.detach().abs().amax())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self._register_load_state_dict_pre_hook(self.negated)
    def negated(self, state, *_):
        state["recurrent.bias_hh_l0"] = -state["recurrent.bias_hh_l0"]
    def load_state_dict(self, state, strict=True):
        return super().load_state_dict({name.removeprefix("model."): t for name, t in state.items()}, strict)
    def forward(self, x):
        self.count += 1
        x = self.old(self.normed(x)) / self.largest + self.order[self.order.argsort()]
        x = self.lower(self.recurrent(x[None])[0].bfloat16()).double()
        return self.again(self.upper(x)) * (self.turn * x).abs()
def get_model(): return Net().eval()
def example_inputs(): return torch.randn(4, 8)
"""


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float64"])
def test_a_streamed_model_is_one_that_load_state_dict_has_filled(tmp_path: Path, stored: str) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    torch.manual_seed(5)
    filled = open_source(str(tmp_path / "odd.py"), SourceConfig(seed=1)).model
    state = {name: tensor.detach() for name, tensor in filled.state_dict().items()}
    floats = {name: t.to(getattr(torch, stored)) for name, t in state.items() if t.is_floating_point()}
    floats["order"], floats["turn"] = state["order"].flip(0), state["turn"] * 2
    for number, old in enumerate(("old.weight_g", "old.weight_v")):
        floats[old] = floats.pop(f"old.parametrizations.weight.original{number}")
    floats = {f"model.{name}": tensor for name, tensor in floats.items()}
    torch.save({"count": state["count"]} | floats, tmp_path / "w.pt")
    filled.load_state_dict(torch.load(tmp_path / "w.pt"))  # the oracle
    streamed = opened(tmp_path / "odd.py", stream=True, weights=tmp_path / "w.pt")
    assert streamed.model.again is streamed.model.upper
    assert streamed.model.state_dict().keys() == filled.state_dict().keys()
    for name, tensor in streamed.model.state_dict().items():
        assert tensor.dtype is filled.state_dict()[name].dtype, name
        assert torch.equal(tensor, filled.state_dict()[name]), name
    plain = opened(tmp_path / "odd.py", stream=False, weights=tmp_path / "w.pt")
    reports = [
        without_timings(scan(each, policy="torch-cuda", dtype="float16")) for each in (plain, streamed)
    ]
    assert reports[0] == reports[1]


READS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.bfloat16()
    def forward(self, x):
        h = self.inner(x.to(self.inner.weight.dtype))
        return (h if h.dtype == torch.float32 else h.clamp(-0.1, 0.1)).float()
def get_model(): return Net().eval()
def example_inputs(): return torch.randn(4, 8)
"""


def test_streamed_16_bit_weights_are_compared_with_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reads.py").write_text(READS)
    made = open_source(str(tmp_path / "reads.py"), SourceConfig()).model
    torch.save(made.state_dict(), tmp_path / "w.pt")
    sources = [opened(tmp_path / "reads.py", stream=s, weights=tmp_path / "w.pt") for s in (False, True)]
    reports = [without_timings(scan(each, policy="half", dtype="bfloat16")) for each in sources]
    assert [(f.code, f.severity) for f in reports[0].findings] == [("AMP212", "error")]
    assert reports[0] == reports[1]
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=256, total=1 << 30))
    (found,) = scan(sources[1], policy="half", dtype="bfloat16").findings
    assert found.code == "AMP213"
    assert "do not fit into memory" in found.cause


def test_experts_that_are_put_together_cannot_be_streamed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    zoo.mixtral().model.save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="assembled from several tensors") as caught:
        opened(tmp_path, stream=True)
    assert "leave out --stream" in caught.value.hint


def test_what_cannot_be_streamed_is_one_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no weight files"):
        opened(model, stream=True)
    safetensors.torch.save_file({"table.weight": torch.ones(50, 32)}, tmp_path / "few.safetensors")
    with pytest.raises(WeightsError, match=r"missing: .*body\.0\.weight"):
        opened(model, stream=True, weights=tmp_path / "few.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"12345678")
    with pytest.raises(AuditError):
        opened(model, stream=True, weights=tmp_path / "torn.safetensors")


def test_a_streamed_conversion_writes_the_same_weights(model: Path, tmp_path: Path) -> None:
    weights = model.with_name("w.safetensors")
    manifests, outputs = [], []
    for stream in (False, True):
        source = opened(model, stream=stream, weights=weights)
        out = tmp_path / f"out-{stream}"
        _, made = convert(source, None, out, policy="half", weights=weights)
        assert made is not None
        manifests.append(read_manifest(out))
        with torch.no_grad():
            outputs.append(torch.export.load(out / "model.pt2").module()(*source.batches[0].args))
    assert torch.equal(outputs[0], outputs[1])
    assert outputs[0].dtype is torch.float16
    assert manifests[0].tensors == manifests[1].tensors
    assert "streamed" in manifests[1].notes[-1]


LARGE = """
import sys, torch
from torch import nn
LAYERS, WIDTH = 24, 2048
def get_model(): return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
def example_inputs(): return torch.randn(2, WIDTH)
"""
PEAK = """
import atexit, sys, re, runpy
sys.argv = ["ampaudit", *sys.argv[1:]]
peak = lambda: re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
atexit.register(lambda: print(peak(), file=sys.stderr))
runpy.run_module("ampaudit", run_name="__main__")
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures with /proc")
def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    """400 MB of weights; eight steps of the reference run ahead, each with its weight of 17 MB."""
    (tmp_path / "large.py").write_text(LARGE)
    (tmp_path / "small.py").write_text(LARGE.replace("LAYERS, WIDTH = 24", "LAYERS, WIDTH = 10"))
    peaks = {}
    for name, layers in (("small", 10), ("large", 24)):
        values = {f"{i}.weight": torch.full((2048, 2048), 2.0**-11) for i in range(layers)}
        safetensors.torch.save_file(values, tmp_path / f"{name}.safetensors")
        for stream in ((), ("--stream",)):
            command = [sys.executable, "-c", PEAK, "scan", str(tmp_path / f"{name}.py"), *stream]
            command += ["--weights", str(tmp_path / f"{name}.safetensors"), "--policy", "half", "-q"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
            assert done.returncode == 0, done.stderr
            peaks[name, bool(stream)] = int(done.stderr.split()[-1]) / 1000
    assert peaks["large", False] - peaks["small", False] > 200
    assert peaks["large", True] - peaks["small", True] < 60, json.dumps({str(k): v for k, v in peaks.items()})


def zeros(path: Path, rows: int) -> Path:
    """A checkpoint of one tensor of zeros: a hole in the file, not bytes on the disk."""
    entry = TensorEntry("w", "F32", (rows, 1 << 20))
    head = header_bytes([entry], {})
    with path.open("wb") as stream:
        stream.write(head)
        stream.truncate(len(head) + entry.size)
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures with /proc")
def test_converting_needs_no_more_memory_for_a_larger_file(tmp_path: Path) -> None:
    peaks = []
    for rows in (10, 100):  # 42 and 419 MB, in a single tensor
        path = zeros(tmp_path / f"{rows}.safetensors", rows)
        command = [sys.executable, "-c", PEAK, "convert", str(path), "-o", str(tmp_path / f"out-{rows}")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stderr.split()[-1]) / 1000)
        assert (tmp_path / f"out-{rows}" / "model.safetensors").stat().st_size > rows * (2 << 20)
    assert peaks[1] - peaks[0] < 20
