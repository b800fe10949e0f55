"""Converted directories, judged by safetensors and torch itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from ampaudit.audit.scan import scan
from ampaudit.checkpoint import MANIFEST
from ampaudit.core.errors import SourceError, UsageError, WeightsError
from ampaudit.core.source_config import SourceConfig
from ampaudit.export.convert import convert
from ampaudit.export.manifest import read_manifest
from ampaudit.source import Batch, ModelSource
from ampaudit.source.open import open_source
from tests.support.converted import Tied, converted, load, same_bits, tied

Cli = Callable[..., subprocess.CompletedProcess[str]]


def test_the_directory_is_complete_and_described(tmp_path: Path) -> None:
    out = converted(tied(), tmp_path / "out", policy="torch-cuda")
    names = {p.name for p in out.iterdir()}
    assert names == {
        *("model.safetensors", "master.safetensors", "model.pt2", "plan.yaml", "report.json"),
        *("reference.safetensors", MANIFEST),
    }
    manifest = read_manifest(out)
    assert set(manifest.files) == names - {MANIFEST}
    for name, record in manifest.files.items():
        done = subprocess.run(["sha256sum", out / name], capture_output=True, text=True, check=True)
        assert done.stdout.split()[0] == record.sha256
        assert (out / name).stat().st_size == record.size
    assert json.loads((out / "report.json").read_text())["verdict"] == "pass"


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("policy", ["torch-cuda", "half", "ampaudit"])
def test_working_weights_are_the_masters_rounded(tmp_path: Path, policy: str, mode: str) -> None:
    source = tied()
    out = converted(source, tmp_path / "out", policy=policy, mode=mode)
    working, masters = load(out / "model.safetensors"), load(out / "master.safetensors")
    state = source.model.state_dict()
    # autocast casts what linear takes, and not what an embedding or a norm takes
    floats = {n for n, t in state.items() if t.dtype is torch.float32} - {"head.weight"}
    lowered = floats if policy == "half" else {"inner.weight", "inner.bias"}
    assert {n for n, t in working.items() if t.dtype is torch.float16} == lowered
    for name, tensor in working.items():
        assert same_bits(tensor, state[name].to(tensor.dtype))
        if tensor.dtype != state[name].dtype:
            assert same_bits(masters[name], state[name])
    assert set(masters) == {n for n, t in working.items() if t.dtype is torch.float16}


def test_tied_weights_are_there_once_and_load_as_the_library_does(tmp_path: Path) -> None:
    source = tied()
    out = converted(source, tmp_path / "out", policy="half")
    with safe_open(out / "model.safetensors", "pt") as opened:
        assert "head.weight" not in set(opened.keys())
        assert opened.metadata()["head.weight"] == "table.weight"
    model = Tied().half()
    missing, unexpected = safetensors.torch.load_model(model, out / "model.safetensors")
    assert not missing
    assert not unexpected
    assert model.head.weight.data_ptr() == model.table.weight.data_ptr()
    assert same_bits(model.head.weight.detach(), source.model.head.weight.detach().half())


def test_the_plan_file_converts_the_model_to_the_same_weights(tmp_path: Path) -> None:
    first = converted(tied(), tmp_path / "first", policy="ampaudit")
    again = converted(tied(), tmp_path / "again", policy=str(first / "plan.yaml"))
    assert read_manifest(again).files["model.safetensors"] == read_manifest(first).files["model.safetensors"]
    assert [o.sha256 for o in read_manifest(again).outputs] == [
        o.sha256 for o in read_manifest(first).outputs
    ]


def test_a_model_that_breaks_is_not_converted(tmp_path: Path) -> None:
    class Large(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 300 * x

    source = ModelSource("large.py", "python", Large(), (Batch((torch.full((4,), 100.0),)),))
    report, made = convert(source, None, tmp_path / "out", policy="half")
    assert made is None
    assert report.exit_code == 1
    assert not (tmp_path / "out").exists()
    _, made = convert(source, None, tmp_path / "out", policy="half", fail_on="never")
    assert made is not None
    assert made.outputs[0].max_error is None


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.inner(x)))


def test_the_fp32_outputs_are_those_without_the_models_own_autocast(tmp_path: Path) -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.float16):
                h = self.inner(x)
                return (h * h.half()).float() / 1000

    model, x = Region(), torch.full((4, 8), 3000.0)
    with torch.no_grad():
        exact = model.inner(x).square() / 1000
        assert not model(x).isfinite().all()
    convert(model, x, tmp_path / "out", policy="ampaudit", fail_on="never")
    stored = safetensors.torch.load_file(tmp_path / "out" / "reference.safetensors")["fp32[0]"]
    assert torch.allclose(stored, exact, rtol=1e-3)


def test_a_model_in_training_mode_is_not_changed(tmp_path: Path) -> None:
    model = Trained().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    source = ModelSource("m", "object", model, (Batch((torch.randn(16, 8),)),))
    expected = torch.get_rng_state()
    out = converted(source, tmp_path / "out", policy="torch-cuda", mode="train")
    assert torch.equal(torch.get_rng_state(), expected)
    assert not torch.equal(state, expected)
    assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())
    stored = load(out / "model.safetensors")
    assert same_bits(stored["norm.running_mean"], before["norm.running_mean"])


def test_weights_that_do_not_match_the_model(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def get_model(): return nn.Linear(4, 4)\ndef example_inputs(): return torch.randn(2, 4)\n"
    )
    weights = {"weight": torch.ones(5, 4), "bias": torch.ones(4)}
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match="does not match the model"):
        open_source(str(tmp_path / "m.py"), SourceConfig(weights=tmp_path / "w.safetensors"))


def test_the_type_of_the_floats_of_a_graph_is_for_onnx_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--io float16 is for \.onnx files"):
        convert(nn.Linear(3, 3).eval(), torch.zeros(2, 3), tmp_path / "out", io="float16")
    assert not (tmp_path / "out").exists()


def test_a_converted_directory_is_not_converted_again(tmp_path: Path) -> None:
    out = converted(tied(), tmp_path / "out", policy="half")
    source = open_source(str(out), SourceConfig())
    assert source.kind == "converted"
    with pytest.raises(SourceError, match="converted already"):
        convert(source, None, tmp_path / "again")


def test_a_converted_directory_can_be_scanned_as_it_is(tmp_path: Path) -> None:
    out = converted(tied(), tmp_path / "out", policy="torch-cuda")
    report = scan(open_source(str(out), SourceConfig()), policy="as-is", dtype="float16")
    assert report.verdict == "pass"
    inner = next(site for site in report.sites if site.site == "inner/linear")
    assert inner.precision == "float16"
    assert next(s for s in report.sites if s.site == "norm/layer_norm").precision == "float32"


def test_the_program_scans_a_converted_directory_in_its_own_format(tmp_path: Path, cli: Cli) -> None:
    out = converted(tied(), tmp_path / "out", policy="torch-cuda", dtype="bfloat16")
    done = cli("scan", out, "--format", "json")
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)["run"]
    assert (run["policy"], run["dtype"]) == ("as-is", "bfloat16")
