"""Exported models: every node's output against ONNX Runtime's, and findings against the torch model's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ampaudit import scan
from ampaudit.source.onnx.files import OnnxFile, read_onnx
from ampaudit.source.onnx.model import OnnxModel
from tests.support.planted import WIDTH, TwoBranches

EXPORTERS: dict[str, dict[str, Any]] = {
    "dynamo": {"dynamo": True, "verbose": False},
    "script": {"dynamo": False},
    "script without folding": {"dynamo": False, "do_constant_folding": False},
}


class Images(nn.Module):
    """Convolutions, norms, pooling with padding, resizing, and a squeeze of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.groups = nn.GroupNorm(2, 8)
        self.squeeze = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1)
        self.prelu = nn.PReLU(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(F.relu6(self.norm(self.first(x))), 3, 2, 1)
        y = F.interpolate(y, scale_factor=2.0, mode="bilinear", align_corners=False)
        y = self.groups(y) * F.hardsigmoid(self.squeeze(F.adaptive_avg_pool2d(y, 1)))
        # ratios that float32 holds: of others, ONNX Runtime rounds some places down
        y = self.prelu(self.up(F.interpolate(y, size=(12, 25), mode="nearest")))
        y = F.avg_pool2d(F.pad(y, (1, 2, 0, 1), mode="reflect"), 3, 2, count_include_pad=False)
        return torch.linalg.vector_norm(y, dim=(2, 3)).log_softmax(-1)


class Sequences(nn.Module):
    """Recurrent layers, attention with a mask, norms written by hand, and indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 8, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lstm(x)[0] + self.gru(x)[0]
        mask = torch.full((x.shape[1], x.shape[1]), -1e9).triu(1)
        y = self.norm(y + self.attend(y, y, y, attn_mask=mask, need_weights=False)[0])
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        top, places = y.topk(3, -1)
        chosen = torch.gather(y, -1, places) - top + y[:, ::2].mean(1, keepdim=True)[..., :3]
        return torch.cat([F.gelu(y[:, -1]), chosen.cumsum(1)[:, 0]], -1)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "images": (Images, (2, 3, 32, 40)),
    "sequences": (Sequences, (2, 5, 16)),
}


def export(model: nn.Module, args: tuple[Any, ...], path: Path, exporter: str) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters
        torch.onnx.export(model, args, str(path), **EXPORTERS[exporter])
    return path


def with_all_outputs(proto: Any) -> Any:
    """Make every value of a graph an output."""
    known = {output.name for output in proto.graph.output}
    names = [name for node in proto.graph.node for name in node.output if name and name not in known]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return proto


def differing_nodes(path: Path, inputs: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Return the values that differ from ONNX Runtime's by more than rounding, with the difference."""
    proto = with_all_outputs(onnx.load(str(path)))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    data = proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    given = dict(zip([place.name for place in session.get_inputs()], inputs, strict=True))
    wanted = session.run(None, {name: value.numpy() for name, value in given.items()})
    model = OnnxModel(OnnxFile(path, ir.from_proto(proto))).eval()
    with torch.no_grad():
        found = model(**given)
    names = [output.name for output in session.get_outputs()]
    assert len(names) > 10
    differing = {}
    for name, want in zip(names, wanted, strict=True):
        got = found[name].detach().numpy()
        assert (got.shape, got.dtype) == (want.shape, want.dtype), name
        error, limit = _error(got, want), 2e-5 if want.dtype.kind == "f" else 0.0
        if not error <= limit:
            differing[name] = error
    return differing


def _error(got: Any, want: Any) -> float:
    """Return the largest difference, in units of the largest magnitude."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(got.astype(np.float64) - want)
    same = (got == want) | ((got != got) & (want != want))  # infinities, and NaNs
    largest = np.abs(want[np.isfinite(want)].astype(np.float64)).max(initial=1e-3)
    return float(np.where(same, 0.0, difference).max(initial=0.0) / largest)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", MODELS)
def test_every_node_computes_what_the_runtime_computes(name: str, exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    x = torch.randn(shape)
    path = export(make().eval(), (x,), tmp_path / "model.onnx", exporter)
    assert differing_nodes(path, (x,)) == {}


def transformers_models() -> dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]]:
    import transformers

    small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    small |= {"vocab_size": 64, "attn_implementation": "eager"}

    def gpt2() -> Any:
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32, use_cache=False,
            attn_implementation="eager",
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)

    def made(kind: Any, config: Any) -> Callable[[], Any]:
        return lambda: kind(config)

    llama = transformers.LlamaConfig(**small, num_key_value_heads=2, use_cache=False)
    return {
        "bert": made(transformers.BertModel, transformers.BertConfig(**small)),
        "gpt2": gpt2,
        "llama": made(transformers.LlamaForCausalLM, llama),
    }


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_every_node_of_a_language_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers_models()[name]().eval()  # type: ignore[operator]
    ids = torch.randint(0, 64, (2, 9))
    path = export(model, (ids,), tmp_path / "model.onnx", "dynamo")
    assert differing_nodes(path, (ids,)) == {}


@pytest.mark.parametrize("exporter", ["dynamo", "script"])
def test_a_planted_overflow_is_found_at_its_node(exporter: str, tmp_path: Path) -> None:
    """The same findings as in the torch model, each at the node that stands for the layer."""
    torch.manual_seed(0)
    model, x = TwoBranches(left=3e5).eval(), torch.randn(4, WIDTH)
    path = export(model, (x,), tmp_path / "model.onnx", exporter)
    wanted = scan(model, (x,), policy="torch-cuda")
    found = scan(OnnxModel(read_onnx(path)).eval(), (x,), policy="torch-cuda")
    errors = [(f.code, f.severity) for f in wanted.findings if f.severity.value == "error"]
    assert errors
    assert [(f.code, f.severity) for f in found.findings if f.severity.value == "error"] == errors
