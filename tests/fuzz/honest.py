"""Honest inputs of every format, small and made once, which the mutators start from."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from ampaudit.ci.judge import known_target, measured_in
from ampaudit.export.convert import convert
from ampaudit.recording.calls import record
from ampaudit.render.json import to_json
from ampaudit.render.render import as_file
from ampaudit.report.check import Baseline, Budgets
from ampaudit.source import Batch, ModelSource
from tests.fuzz.mutators import Files
from tests.linter.corpora import read_set
from tests.support.paths import ROOT
from tests.support.recorded import Colour, Pair, Points, Sink
from tests.support.rule_file import GOOD
from tests.support.saved import SAMPLES, sample, saved_report

Pickle = dict[str, torch.Tensor]


class Small(nn.Module):
    """A buffer, a keyword input, a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": torch.softmax(self.linear(x) * self.scale, -1) + y}


class Shaped(nn.Module):
    """A constant, an embedding, lists, and sizes that are expressions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.constant = torch.full((4,), 2.0)

    def forward(self, parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.table(parts[0]) * self.constant
        return found.reshape(-1, 2), torch.cat([found, found]).sum(0)


def get_model() -> nn.Module:
    """Make the model for inputs in files; this module is named by its import path."""
    return Small()


def example_inputs() -> dict[str, torch.Tensor]:
    """Return the inputs of ``get_model``."""
    return {"x": torch.randn(2, 4), "y": torch.ones(4)}


def _saved(write: Callable[[Any, Any], Any], value: Any) -> bytes:
    out = io.BytesIO()
    write(value, out)
    return out.getvalue()


def _under(folder: Path) -> Files:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@cache
def exported() -> list[Files]:
    """Return exported programs."""
    torch.manual_seed(0)
    size = torch.export.Dim("size", min=2, max=64)
    programs = (
        torch.export.export(Small(), (torch.randn(2, 4),), {"y": torch.ones(4)}),
        torch.export.export(Shaped(), ([torch.tensor([1, 2, 3])],), dynamic_shapes=([{0: size}],)),
    )
    return [{"m.pt2": _saved(torch.export.save, program)} for program in programs]


@cache
def graphs() -> list[Files]:
    """Return ONNX files: plain, with a body, a constant and a large initializer, and with external data."""
    from tests.support.onnx_graphs import external, initializer, mlp, model_of, node, value

    large = initializer("w", torch.ones(4, 1100).numpy())
    branch = _branch()
    sizes = node("Constant", [], ["k"], value_floats=[1.0, 2.0, 3.0, 4.0])
    nodes = [sizes, node("Add", ["x", "k"], ["a"]), branch, node("MatMul", ["b", "w"], ["y"], name="last")]
    bodies = model_of(nodes, [large, initializer("c", torch.tensor(True).numpy())], [value("x", "n", 4)])
    outside = model_of([node("MatMul", ["x", "w"], ["y"])], [external("w.bin")])
    data = bytes(torch.ones(4, 4).numpy().data)
    return [
        {"m.onnx": mlp().SerializeToString()},
        {"m.onnx": bodies.SerializeToString()},
        {"m.onnx": outside.SerializeToString(), "w.bin": data},
    ]


def _branch() -> Any:
    """Return a node with two bodies."""
    from onnx import helper

    from tests.support.onnx_graphs import node, value

    bodies = [helper.make_graph([node(op, ["a"], ["o"])], op, [], [value("o")]) for op in ("Relu", "Neg")]
    return node("If", ["c"], ["b"], name="if", then_branch=bodies[0], else_branch=bodies[1])


def _state() -> Pickle:
    torch.manual_seed(0)
    return {
        "layer.weight": torch.randn(3, 4),
        "layer.bias": torch.ones(3).half(),
        "count": torch.tensor(7),
        "part": torch.arange(12.0)[::2],
    }


@cache
def checkpoints() -> list[Files]:
    """Return pickled checkpoints: as a zip archive, wrapped, and as torch wrote them before 1.6."""

    def legacy(value: Any, out: Any) -> None:
        torch.save(value, out, _use_new_zipfile_serialization=False)

    wrapped = {"state_dict": _state(), "epoch": 3}
    saved = (_saved(torch.save, _state()), _saved(torch.save, wrapped), _saved(legacy, _state()))
    return [{"m.pt": data} for data in saved]


@cache
def safetensors_files() -> list[Files]:
    """Return a safetensors file."""
    state = {name: tensor.contiguous() for name, tensor in _state().items()}
    return [{"m.safetensors": safetensors.torch.save(state, {"format": "pt"})}]


@cache
def shards() -> list[Files]:
    """Return two shards and their index."""
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(_state())}
    index = {"metadata": {"total_size": 100}, "weight_map": names}
    files: Files = {"model.safetensors.index.json": json.dumps(index).encode()}
    for shard in set(names.values()):
        files[shard] = safetensors.torch.save(
            {name: t.contiguous() for name, t in _state().items() if names[name] == shard}
        )
    return [files]


@cache
def huggingface() -> list[Files]:
    """Return directories of a tiny language model and a tiny image model."""
    from transformers import BertConfig, BertModel, ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    text = BertConfig(vocab_size=20, max_position_embeddings=16, **sizes)
    image = ViTConfig(image_size=8, patch_size=4, num_channels=1, **sizes)
    made = []
    for model in (BertModel(text), ViTForImageClassification(image)):
        with tempfile.TemporaryDirectory() as place:
            model.save_pretrained(place)
            made.append({f"d/{name}": data for name, data in _under(Path(place)).items()})
    return made


@cache
def converted() -> list[Files]:
    """Return a directory that ``convert`` wrote."""
    torch.manual_seed(0)
    source = ModelSource("m.py", "python", Small().eval(), (Batch((), example_inputs()),), None)
    with tempfile.TemporaryDirectory() as place:
        convert(source, None, Path(place) / "d", fail_on="never")
        return [_under(Path(place))]


@cache
def rule_files() -> list[Files]:
    """Return rule files, among them the plan of a conversion."""
    shipped = ("apex-o1", "torch-tensorrt", "paddle-o2", "as-is")
    texts = [GOOD.encode(), *((ROOT / "rules" / f"{name}.yaml").read_bytes() for name in shipped)]
    plan = converted()[0]["d/plan.yaml"]
    return [{"rules.yaml": text} for text in (*texts, plan)]


@cache
def reports() -> list[Files]:
    """Return a saved document of every kind."""
    documents = (as_file(sample(kind), "json") for kind in SAMPLES if kind != "comparison")
    return [{"report.json": text.encode()} for text in documents]


def baselines() -> list[Files]:
    """Return what is accepted of one target."""
    report = saved_report()
    known = known_target("model.py", report, measured_in(report), Budgets())
    return [{"baseline.json": to_json(Baseline(targets=(known,))).encode()}]


def configurations() -> list[Files]:
    """Return a pyproject.toml, with a script that it is about."""
    text = """\
[project]
name = "mine"

[tool.ampaudit]
targets = ["models/*.py", "converted"]
policy = "torch-cuda"
dtype = "bfloat16"
fail-on = "warning"
allow = ["AMP106"]
min-headroom = 1.5
max-fp32-share = 0.5
baseline = "base.json"
batches = 2
jobs = 2
timeout = 60
max-memory = "2GB"

[tool.ampaudit.lint]
select = ["AMP8"]
ignore = ["AMP803"]
exclude = ["tests"]
fail-on = "error"
"""
    return [{"pyproject.toml": text.encode(), "train.py": b"import torch\n"}]


@cache
def scripts() -> list[Files]:
    """Return training scripts, and Markdown around them."""
    texts = [script.source.encode() for script in read_set("correct-styles")[::6]]
    plain: list[Files] = [{"train.py": text} for text in texts]
    return [
        *plain,
        *({"README.md": b"# How\n\n```python\n" + text + b"```\n"} for text in texts[:4]),
    ]


@cache
def notebooks() -> list[Files]:
    """Return training scripts as notebooks."""
    made: list[Files] = []
    for script in read_set("correct-styles")[:4]:
        parts = script.source.split("\n\n")
        cells = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": part} for part in parts]
        notebook = {"cells": cells, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4}
        made.append({"train.ipynb": json.dumps(notebook).encode()})
    return made


def _recorded(model: nn.Module, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        with record(model, Path(folder) / "calls"):
            for args, kwargs in calls:
                model(*args, **kwargs)
        return _under(Path(folder))


@cache
def recordings() -> list[Files]:
    """Return calls of ``get_model``."""
    torch.manual_seed(0)
    return [
        _recorded(Small(), ((), example_inputs()), ((torch.ones(1, 4),), {"y": torch.ones(2, 8)[:, ::2]}))
    ]


@cache
def recorded_arguments() -> list[Files]:
    """Return calls with every kind of argument."""
    tensor = torch.randn(2, 3)
    plain = (
        None,
        True,
        -7,
        1.5,
        float("inf"),
        "text",
        b"bytes",
        2j,
        slice(1, 2),
        range(3),
        torch.Generator(),
    )
    of_torch = (torch.float16, torch.device("cuda:1"), torch.channels_last, torch.Size([2]), tensor.bool())
    nested = {"a": [tensor, (tensor.t(), {1: tensor[0]})], (1, "b"): {3}, None: frozenset("x")}
    classes = (Colour.RED, Pair(tensor, [Colour.BLUE]), Points(tensor.half(), ["n"]), tensor.numpy())
    return [_recorded(Sink(), (plain, {}), (of_torch, {"nested": nested}), (classes, {"x": tensor}))]


def inputs() -> list[Files]:
    """Return the inputs of ``get_model`` as a safetensors file."""
    leaves = {f"input[{i}]": tensor for i, tensor in enumerate(example_inputs().values())}
    return [{"inputs.safetensors": safetensors.torch.save(leaves)}]
