"""model.onnx, judged by onnx's checker, ONNX Runtime and the program's own casts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from ampaudit.core.errors import RunFailed
from ampaudit.export.convert import convert
from ampaudit.export.onnx import torch_export
from tests.support.converted import load, tied


def exported(tmp_path: Path, policy: str) -> tuple[Path, object]:
    _, made = convert(tied(), None, tmp_path / "out", policy=policy, onnx=True)
    assert made is not None
    return tmp_path / "out", made


@pytest.mark.parametrize("policy", ["torch-cuda", "half", "tensorflow"])
def test_onnx_keeps_casts_and_islands_and_means_the_same(tmp_path: Path, policy: str) -> None:
    """Oracles: onnx's checker and shapes; ONNX Runtime; the program's own casts, counted."""
    out, made = exported(tmp_path, policy)
    model = onnx.load(out / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    values = onnx.shape_inference.infer_shapes(model).graph
    kinds = {
        v.name: v.type.tensor_type.elem_type for v in [*values.value_info, *values.output, *values.input]
    }
    kinds |= {i.name: i.data_type for i in values.initializer}
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    (norm,) = [n for n in model.graph.node if n.op_type == "LayerNormalization"]
    assert {kinds[name] for name in norm.input} == {half if policy == "half" else single}
    products = [n for n in model.graph.node if n.op_type in ("MatMul", "Gemm")]
    assert {kinds[n.output[0]] for n in products} == {half}
    program = torch.export.load(out / "model.pt2")
    casts = [n for n in program.graph.nodes if "aten.to" in str(n.target) or "_to_copy" in str(n.target)]
    given = [(n.meta["val"], n.all_input_nodes[0].meta["val"]) for n in casts]
    wanted = sum(a.is_floating_point() and a.dtype != b.dtype for a, b in given)
    adds = [n for n in program.graph.nodes if str(n.target) == "aten.add.Tensor"]
    promoted = sum(len({i.meta["val"].dtype for i in n.all_input_nodes}) == 2 for n in adds)
    assert made.onnx_casts == wanted + promoted  # ONNX has no promotion: it is a Cast there
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    found = session.run(["logits"], {"ids": torch.arange(12).view(2, 6).numpy()})[0]
    recorded = load(out / "reference.safetensors")["output[0]"]
    two_ulps = 2 * 2.0**-10 * float(recorded.abs().max())
    assert abs(torch.from_numpy(found).float() - recorded.float()).max() <= two_ulps
    assert made.onnx_error <= two_ulps


def test_convolutions_in_bfloat16_are_exported(tmp_path: Path) -> None:
    """Older operator sets than 22 have no convolution, pooling or resizing in the format."""
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Upsample(scale_factor=2)]
    model, inputs = nn.Sequential(*layers).eval(), (torch.randn(1, 3, 8, 8),)
    convert(model, inputs, tmp_path / "out", policy="half", dtype="bfloat16", onnx=True)
    written = onnx.load(tmp_path / "out" / "model.onnx")
    onnx.checker.check_model(written, full_check=True)
    values = onnx.shape_inference.infer_shapes(written).graph
    kinds = {v.name: v.type.tensor_type.elem_type for v in [*values.value_info, *values.output]}
    layers_of = {n.op_type: kinds[n.output[0]] for n in written.graph.node if n.op_type != "Constant"}
    assert layers_of.keys() >= {"Conv", "BatchNormalization", "MaxPool", "Resize"}
    assert set(layers_of.values()) == {onnx.TensorProto.BFLOAT16}


def test_masters_that_nothing_reads_get_no_cast(tmp_path: Path) -> None:
    """A tied weight is read under one of its names only; the exporter would drop the cast of the other."""
    _, made = convert(tied(), None, tmp_path / "out", policy="keep-fp32-modules", mode="train", onnx=True)
    assert made is not None
    program = torch.export.load(tmp_path / "out" / "model.pt2")
    casts = [n for n in program.graph.nodes if "aten.to" in str(n.target) or "_to_copy" in str(n.target)]
    assert casts
    assert all(n.users for n in casts)


def test_an_onnx_file_that_means_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = torch_export.run_onnx
    monkeypatch.setattr(torch_export, "run_onnx", lambda *given: tuple(t * 1.2 for t in run(*given)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the audit is kept
    with pytest.raises(RunFailed, match="computes something else"):
        exported(tmp_path, "torch-cuda")
    assert not (tmp_path / "out").exists()


class Lists(nn.Module):
    """Joins a product in 16 bits and a norm in float32, and takes parts of a product."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.product, self.norm, self.op = nn.Linear(8, 8), nn.LayerNorm(8), op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, wide = self.product(x), self.norm(x)
        results = {
            "stack": lambda: torch.stack([low, wide], 1),
            "concat": lambda: torch.concat([wide, low], -1),
            "column_stack": lambda: torch.column_stack([low, wide]),
            "split": lambda: low.split(3, -1)[1] * low.split([3, 2, 3], -1)[2],
            "chunk": lambda: low.chunk(3, -1)[-1],
            "unbind": lambda: low.unbind(1)[3] - low.unbind()[1].sum(),
            "tensor_split": lambda: torch.tensor_split(low, 3, dim=1)[1],
            "topk": lambda: low.topk(3)[0],
            "sort": lambda: low.sort(-1)[0],
            "einsum": lambda: torch.einsum("ij,kj->ik", low, low),
            "stack_of_whole_numbers": lambda: torch.stack([low, torch.arange(8).expand(4, 8)]),
        }
        result: torch.Tensor = results[self.op]()
        return result


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "op",
    [
        *("stack", "concat", "column_stack", "split", "chunk", "unbind", "tensor_split", "topk", "sort"),
        *("einsum", "stack_of_whole_numbers"),
    ],
)
def test_lists_and_operators_without_bfloat16_mean_the_same(op: str, dtype: str, tmp_path: Path) -> None:
    """Oracles: onnx's checker, and its own evaluator, which runs both formats."""
    torch.manual_seed(0)
    model, x = Lists(op).eval(), torch.randn(4, 8)
    _, conversion = convert(model, x, tmp_path / "out", policy="torch-cuda", dtype=dtype, onnx=True)
    assert conversion is not None
    file = onnx.load(tmp_path / "out" / "model.onnx")
    onnx.checker.check_model(file, full_check=True)
    (result,) = ReferenceEvaluator(file).run(None, {"x": x.numpy()})
    expected = load(tmp_path / "out" / "reference.safetensors")["output[0]"].float()
    error = (torch.from_numpy(result.astype("float32")) - expected).abs().max()
    assert error <= 2 * torch.finfo(getattr(torch, dtype)).eps * expected.abs().max()


def test_a_program_that_the_cpu_cannot_run_is_exported(tmp_path: Path) -> None:
    """Average pooling in three dimensions has no float16 kernel here, so there is nothing to compare with."""
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.LocalResponseNorm(2)).eval()
    x = torch.randn(2, 4, 8, 8)
    _, conversion = convert(model, x, tmp_path / "out", policy="half", onnx=True)
    assert conversion is not None
    (result,) = ReferenceEvaluator(onnx.load(tmp_path / "out" / "model.onnx")).run(None, {"input": x.numpy()})
    assert abs(torch.from_numpy(result).float() - model(x)).max() < 1e-2


class Bags(nn.Module):
    """Means of bags of rows, which the exporter writes as nested branches in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.product = nn.EmbeddingBag(20, 8, mode="mean"), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.product(self.rows(ids, starts))
        return result


def test_bags_load_with_all_optimizations(tmp_path: Path) -> None:
    """ONNX Runtime crashes where it has to inline nested branches in a loop, so it loads them in a child."""
    model, args = Bags().eval(), (torch.arange(9), torch.tensor([0, 4, 6]))
    convert(model, args, tmp_path / "out", policy="torch-cuda", onnx=True)
    path, found = tmp_path / "out" / "model.onnx", tmp_path / "found.npy"
    code = (
        "import numpy, onnxruntime\n"
        f"session = onnxruntime.InferenceSession({str(path)!r})\n"
        "starts = numpy.array([0, 4, 6])\n"
        f"numpy.save({str(found)!r}, session.run(None, dict(ids=numpy.arange(9), starts=starts))[0])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    expected = model(*args)
    assert (torch.from_numpy(np.load(found)) - expected).abs().max() <= 2 * 2.0**-10 * expected.abs().max()


@pytest.mark.parametrize("policy", ["half", "torch-cuda"])
@pytest.mark.parametrize("tracks", [True, False])
def test_batch_norm_in_training_reads_the_statistics_of_its_batch(
    policy: str, tracks: bool, tmp_path: Path
) -> None:
    """Oracle: the model itself in training; its running statistics are far from those of the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=tracks), nn.ReLU6())
    x = torch.randn(4, 3, 8, 8) + 2
    _, conversion = convert(model, x, tmp_path / "out", policy=policy, onnx=True)
    assert conversion is not None
    assert conversion.onnx_error is not None
    session = onnxruntime.InferenceSession(
        tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"]
    )
    expected, found = model(x), torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    assert (found.float() - expected).abs().max() <= 1e-2


def test_a_file_that_draws_numbers_is_not_compared(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout()).train()
    _, conversion = convert(model, torch.ones(2, 8), tmp_path / "out", policy="half", onnx=True)
    assert conversion is not None
    assert conversion.onnx_casts is not None
    assert conversion.onnx_error is None


class Named(nn.Module):
    """Outputs are called like an input, an op and a weight; one input is called like an op."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, sample: torch.Tensor, relu: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.inner(sample)
        return {"sample": made.relu() + relu, "linear": made * 2, "weight": made * self.weight}


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_names_that_occur_twice_are_told_apart(policy: str, tmp_path: Path) -> None:
    """Oracle: the model itself; an input and an output of one name cannot both keep it."""
    torch.manual_seed(0)
    model, (sample, relu) = Named().eval(), torch.randn(2, 2, 8)
    convert(model, (sample, relu), tmp_path / "out", policy=policy, onnx=True)
    onnx.checker.check_model(tmp_path / "out" / "model.onnx", full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    found = session.run(None, {"sample": sample.numpy(), "relu": relu.numpy()})
    assert [output.name for output in session.get_outputs()][1:] == ["linear", "weight"]
    with torch.no_grad():
        expected = model(sample, relu).values()
    for ours, theirs in zip(found, expected, strict=True):
        assert (torch.from_numpy(ours).float() - theirs).abs().max() < 0.02


class Squeezing(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return y.squeeze(1) * 2, x.squeeze(-1), y.squeeze(1), y.squeeze(0), (y * 2).squeeze_(1)


def test_a_squeeze_of_another_size_than_one_is_exported(tmp_path: Path) -> None:
    """Oracle: torch, which returns the tensor as it is; ONNX does not allow it."""
    x = torch.randn(2, 4, 1)
    convert(Squeezing().eval(), (x,), tmp_path / "out", policy="half", onnx=True)
    onnx.checker.check_model(tmp_path / "out" / "model.onnx", full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    assert len({output.name for output in session.get_outputs()}) == 5
    for ours, theirs in zip(session.run(None, {"x": x.numpy()}), Squeezing()(x), strict=True):
        assert ours.shape == theirs.shape
        assert (torch.from_numpy(ours).float() - theirs).abs().max() < 0.01


class Returning(nn.Module):
    """Returns its inputs, and one tensor under several keys."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, sample: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        made = self.inner(sample) * mask
        return {"made": made, "states": [sample, made], "mask": mask, "same": made.detach(), "again": sample}


def test_inputs_and_outputs_that_are_one_value_keep_their_names(tmp_path: Path) -> None:
    """Oracle: the model itself."""
    model, (sample, mask) = Returning().eval(), torch.randn(2, 2, 8)
    convert(model, (sample, mask), tmp_path / "out", policy="torch-cuda", onnx=True)
    onnx.checker.check_model(tmp_path / "out" / "model.onnx", full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    names = [output.name for output in session.get_outputs()]
    assert names == ["made", "states[0]", "states[1]", "mask", "same", "again"]
    found = session.run(None, {"sample": sample.numpy(), "mask": mask.numpy()})
    with torch.no_grad():
        made = model(sample, mask)["made"]
    for ours, theirs in zip(found, [made, sample, made, mask, made, sample], strict=True):
        assert (torch.from_numpy(ours).float() - theirs).abs().max() < 0.02
