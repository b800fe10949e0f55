"""Precision notes in an ONNX file: on the right nodes, with the numbers of the report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.core.text import format_number
from ampaudit.export.onnx.torch_export import PREFIX


class Block(nn.Module):
    """Two linears of different size, a product, and a loss that the exporter takes apart into products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        apart = nn.functional.huber_loss(x, y, reduction="none")
        return x + self.down(nn.functional.silu(self.up(y))) * 2.0 - apart


def notes_of(node: onnx.NodeProto) -> dict[str, str]:
    found = {p.key: p.value for p in node.metadata_props}
    return {key.removeprefix(PREFIX): text for key, text in found.items() if key.startswith(PREFIX)}


@pytest.fixture(scope="module", params=["torch-cuda", "half"])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).eval()
    out = tmp_path_factory.mktemp("onnx") / "out"
    options = ampaudit.ConvertConfig(policy=request.param, onnx=True)
    ampaudit.convert(model, torch.randn(4, 8), out, config=options)
    return out


def test_notes_stand_on_the_node_that_they_are_about(converted: Path) -> None:
    model = onnx.load(converted / "model.onnx")
    weights = {init.name: list(init.dims) for init in model.graph.initializer}
    sites = {site["site"]: site for site in json.loads((converted / "report.json").read_text())["sites"]}
    linears = [n for n in model.graph.node if notes_of(n).get("site", "").endswith("/linear")]
    assert {notes_of(n)["site"] for n in linears} == {s for s in sites if s.endswith("/linear")}
    assert len({notes_of(n)["site"] for n in linears}) == 4
    for node in linears:
        said = notes_of(node)
        for name in node.input:  # its weight is that of its layer
            if name in weights and name.endswith("weight"):
                assert name == f"{said['site'].removesuffix('/linear')}.weight"
    for node in model.graph.node:
        said = notes_of(node)
        if said:
            site = sites[said["site"]]
            assert said["precision"] == site["precision"]
            assert said["verdict"] == site["verdict"]
            if site["forward"]:
                assert said["peak"] == format_number(site["forward"]["peak"])


def test_a_note_is_on_the_op_that_its_name_says(converted: Path) -> None:
    kinds = {
        "silu": {"Sigmoid", "Mul", "Swish"},
        "mul": {"Mul"},
        "add": {"Add"},
        "linear": {"Gemm", "MatMul", "Add"},
    }
    model = onnx.load(converted / "model.onnx")
    seen = set()
    for node in model.graph.node:
        op = notes_of(node).get("site", "").rpartition("/")[2].partition("#")[0]
        if op in kinds and node.op_type not in ("Cast", "Constant", "Transpose", "CastLike", "Reshape"):
            seen.add(op)
            assert node.op_type in kinds[op], (op, node.op_type)
    assert seen >= {"silu", "mul", "add", "linear"}


def test_ops_that_the_exporter_takes_apart_keep_their_own_site(converted: Path) -> None:
    """Their parts are given names that other ops had before: a name alone would lead to the wrong note."""
    model = onnx.load(converted / "model.onnx")
    kinds = [n.op_type for n in model.graph.node if "huber_loss" in notes_of(n).get("site", "")]
    assert {"Abs", "Less", "Where"} <= set(kinds)
    assert kinds.count("Mul") == 2 * 3  # two blocks
    products = [n for n in model.graph.node if re.search(r"/mul(#\d+)?$", notes_of(n).get("site", ""))]
    assert "Where" not in {n.op_type for n in products}
    assert all(n.op_type != "Abs" for n in products)


def test_the_whole_model_says_under_what_it_was_audited(converted: Path) -> None:
    about = {p.key: p.value for p in onnx.load(converted / "model.onnx").metadata_props}
    assert about["ampaudit.policy"] in ("torch-cuda", "half")
    assert about["ampaudit.dtype"] == "float16"
    assert about["ampaudit.verdict"] == "pass"
    assert " bits at " in about["ampaudit.least_headroom"]


def test_the_file_is_still_valid_and_the_directory_verifies(converted: Path) -> None:
    onnx.checker.check_model(str(converted / "model.onnx"), full_check=True)
    assert ampaudit.verify(converted).problems == ()
