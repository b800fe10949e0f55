"""The exported program: what it computes, trains and returns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as torch_map
from torch.export.passes import move_to_device_pass
from torch.nn.attention.flex_attention import flex_attention

from ampaudit.audit.inputs import as_source
from ampaudit.core.errors import RunFailed, UsageError
from ampaudit.export.convert import convert
from ampaudit.export.manifest import read_manifest
from ampaudit.export.program import compare_output
from ampaudit.export.verify import verify
from ampaudit.source import Batch, ModelSource
from tests.support.converted import Tied, converted, load, same_bits, tied
from tests.support.planted import SelfAttention


@pytest.mark.parametrize("policy", ["torch-cuda", "half", "keep-fp32-modules", "tensorflow", "onnx"])
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_the_program_computes_what_the_plan_says(tmp_path: Path, policy: str, mode: str) -> None:
    """Oracles: the recorded FP32 outputs are the model's; half() gives the same bits; the rest is near."""
    source = tied()
    if mode == "train" and policy == "onnx":
        with pytest.raises(UsageError, match="clips weights"):
            converted(source, tmp_path / "out", policy=policy, mode=mode)
        return
    out = converted(source, tmp_path / "out", policy=policy, mode=mode)
    program = torch.export.load(out / "model.pt2")
    batch = source.batches[0]
    with torch.no_grad():
        found = program.module()(*batch.args)
        exact = source.model(*batch.args)
        native = None
        if policy == "half":
            half = Tied().eval()
            half.load_state_dict(source.model.state_dict())
            native = half.half()(*batch.args)
    recorded = load(out / "reference.safetensors")
    for index, name in enumerate(("logits", "hidden")):
        assert same_bits(recorded[f"fp32[{index}]"], exact[name])
        assert same_bits(recorded[f"output[{index}]"], found[name])
        assert (found[name].float() - exact[name]).abs().max() < 0.02
        if native is not None:
            assert same_bits(native[name], found[name])
    stored = {t.dtype for t in program.state_dict.values() if t.is_floating_point() and t.dtype.itemsize > 1}
    if mode == "train":
        assert stored == {torch.float32}
        assert any(p.requires_grad for p in program.parameters())
    else:
        assert torch.float16 in stored


def test_two_conversions_write_the_same_program(tmp_path: Path) -> None:
    first, second = (converted(tied(), tmp_path / name, policy="torch-cuda") for name in ("first", "second"))
    assert (first / "model.pt2").read_bytes() == (second / "model.pt2").read_bytes()


def test_training_keeps_masters_that_learn(tmp_path: Path) -> None:
    out = converted(tied(), tmp_path / "out", policy="torch-cuda", mode="train")
    module = torch.export.load(out / "model.pt2").module()
    weight = dict(module.named_parameters())["inner.weight"]
    module(torch.arange(12).view(2, 6))["logits"].float().square().sum().backward()
    assert weight.dtype is torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32
    assert weight.grad.abs().sum() > 0


class Caching(nn.Module):
    """Returns what its program does not: a cache, in front of what both return."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.config = nn.Linear(8, 8), type("Config", (), {"use_cache": True})()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        extra = {"cache": x * 2} if self.config.use_cache else {}
        return {**extra, "hidden": self.inner(x)}


def test_outputs_are_matched_by_name(tmp_path: Path) -> None:
    source = ModelSource("m", "object", Caching(), (Batch((torch.randn(4, 8),)),))
    out = converted(source, tmp_path / "out", policy="half")
    (output,) = read_manifest(out).outputs
    assert output.name == "output.hidden"
    assert output.sqnr_db is not None
    assert output.sqnr_db > 50


def attention() -> ModelSource:
    return as_source(SelfAttention().eval(), batches=[torch.randn(3, 5, 16)])


def test_a_program_has_no_view_that_another_device_may_refuse(tmp_path: Path) -> None:
    """Attention's output has other strides there, and the copy before a view was not traced here."""
    out = converted(attention(), tmp_path / "out", policy="half")
    targets = {node.target for node in torch.export.load(out / "model.pt2").graph.nodes}
    assert torch.ops.aten.scaled_dot_product_attention.default in targets
    assert torch.ops.aten.view.default not in targets


@pytest.mark.gpu
@pytest.mark.parametrize("source", [tied, attention])
def test_the_program_runs_on_a_gpu(tmp_path: Path, source: Callable[[], ModelSource]) -> None:
    out = converted(source(), tmp_path / "out", policy="torch-cuda")
    program = move_to_device_pass(torch.export.load(out / "model.pt2"), "cuda")
    recorded = load(out / "reference.safetensors")
    with torch.no_grad():
        found = program.module()(recorded["input[0]"].cuda())
    output = found if isinstance(found, torch.Tensor) else found["logits"]
    error, accuracy = compare_output(output.cpu(), recorded["output[0]"])
    assert error == 0 or (accuracy is not None and accuracy > 40)


@pytest.mark.parametrize("name", ["class", "graph"])
def test_layers_with_names_that_torch_reserves_are_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch writes and loads such a program, but makes no module from it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the audit is kept
    model, inputs = nn.Sequential(OrderedDict({name: nn.Linear(4, 4)})).eval(), torch.randn(2, 4)
    with pytest.raises(RunFailed, match="torch cannot run the exported program") as raised:
        convert(model, inputs, tmp_path / "out", policy="half")
    assert "--no-program" in str(raised.value.hint)
    report, made = convert(model, inputs, tmp_path / "out", policy="half", program=False)
    assert made is not None, report.findings


class Branches(nn.Module):
    """Chooses by a value, and maps over rows, in ops with graphs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = torch.cond(x.sum() > 0, self.layer, lambda t: t * 2, (x,))
        mapped: torch.Tensor = torch_map(lambda t: t - self.layer(t), x)
        return chosen + mapped


def test_ops_with_graphs_of_their_own_are_converted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Branches().eval(), torch.randn(3, 4, 8).abs()
    convert(model, x, tmp_path / "out", policy="half")
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    half = Branches().eval()
    half.load_state_dict(model.state_dict())
    for inputs in (x, -x):
        with torch.no_grad():
            assert same_bits(program(inputs), half.half()(inputs.half()))
    assert verify(tmp_path / "out").exit_code == 0


class Flex(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = flex_attention(x, x, x)
        return result


def test_an_op_that_torch_cannot_save_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the audit is kept
    x = torch.randn(1, 1, 32, 16)
    with pytest.raises(RunFailed, match="torch cannot save the converted program") as caught:
        convert(Flex(), x, tmp_path / "out", policy="half")
    assert caught.value.hint == "leave the program out with --no-program"
    assert len(caught.value.args[0]) < 200
    _, conversion = convert(Flex(), x, tmp_path / "out", policy="half", program=False)
    assert conversion is not None


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(query) if query is key else self.inner(query) * key
        return made


def test_a_batch_that_gives_a_tensor_twice_makes_a_program_with_two_inputs(tmp_path: Path) -> None:
    """Oracle: the model itself, called with two tensors."""
    x, model = torch.randn(2, 8), Attending().eval()
    convert(model, (x, x), tmp_path / "out", policy="half")
    query, key = torch.randn(2, 2, 8)
    with torch.no_grad():
        found = torch.export.load(tmp_path / "out" / "model.pt2").module()(query, key)
        assert (found.float() - model(query, key)).abs().max() < 0.02


class Repeating(nn.Module):
    """Returns one tensor several times, as models do whose last hidden state is one of all of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: torch.Tensor) -> Any:
        made = self.inner(x)
        wide, kept = made.float(), nn.functional.dropout(made, 0.5, self.training)  # the same in FP32
        outputs = {"made": made, "states": (x, made), "wide": wide, "kept": kept}
        return outputs if self.kind == "dict" else (made, made, wide, kept)


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_a_program_returns_a_tensor_as_often_as_the_model(tmp_path: Path, kind: str) -> None:
    """Oracle: the model itself."""
    x, model = torch.randn(2, 8), Repeating(kind).eval()
    convert(model, (x,), tmp_path / "out", policy="half")
    with torch.no_grad():
        found, exact = torch.export.load(tmp_path / "out" / "model.pt2").module()(x), model(x)
    if kind == "dict":
        first, second = exact.pop("states")
        exact |= {"states[0]": first, "states[1]": second}
        assert found.keys() == exact.keys()
        found, exact = [found[name] for name in exact], list(exact.values())
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours.float() - theirs).abs().max() < 0.02
    assert verify(tmp_path / "out").exit_code == 0
