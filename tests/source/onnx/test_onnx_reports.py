"""Reports of ONNX models: layers and modules, advice, suppressions, rules by layer, and comparisons."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from ampaudit import diff, scan
from ampaudit.findings.finding import Finding, Severity
from ampaudit.render.json import to_json
from ampaudit.report.model import Report
from tests.support.onnx_graphs import initializer, mlp, model_of, node, value

ONES = torch.ones(2, 4)


def scanned(tmp_path: Path, model: Any, *inputs: torch.Tensor, **options: Any) -> Report:
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    report = scan(path, inputs or None, **options)
    assert isinstance(report, Report)
    return report


def errors_of(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity is Severity.ERROR and not f.suppressed]


def squares(*names: str, stack: str = "") -> Any:
    """Multiply by 300 twice, which float16 holds once."""
    nodes = [node("Mul", ["x", "k"], ["a"], name=names[0]), node("Mul", ["a", "k"], ["y"], name=names[1])]
    if stack:
        entry = nodes[1].metadata_props.add()
        entry.key, entry.value = "pkg.torch.onnx.stack_trace", stack
    return model_of(nodes, [initializer("k", np.full(4, 300, np.float32))])


def test_a_layer_is_the_whole_name_of_a_node(tmp_path: Path) -> None:
    nodes = [
        node("Relu", ["x"], ["a"], name="a@1"),
        node("Relu", ["a"], ["b"], name="a@2"),
        node("Exp", ["b"], ["y"], name="audited_model.x@y"),
    ]
    report = scanned(tmp_path, model_of(nodes), ONES)
    assert [site.layer for site in report.sites] == ["a@1", "a@2", "audited_model.x@y"]
    assert [site.site for site in report.sites] == ["a@1/relu", "a@2/relu", "audited_model.x@y/exp"]


def test_the_module_that_a_node_was_exported_from_is_in_the_report(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        torch.onnx.export(model, (ONES,), str(tmp_path / "m.onnx"), dynamo=True, verbose=False)
    report = scan(tmp_path / "m.onnx", (ONES,), policy="half")
    assert isinstance(report, Report)
    assert [site.layer_type for site in report.sites] == ["Gemm of 0.0", "Relu of 0.1", "Gemm of 1"]


def test_an_operator_of_onnx_runtime_gets_advice_for_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    nodes = [
        node("Reshape", ["x", "n"], ["z"]),
        node("MaxRoiPool", ["z", "r"], ["y"], name="pool", pooled_shape=[1, 1]),
    ]
    stored = [
        initializer("n", np.array([1, 1, 2, 4])),
        initializer("r", np.array([[0, 0, 0, 1, 1]], np.float32)),
    ]
    (found,) = (f for f in scanned(tmp_path, model_of(nodes, stored), ONES).findings if f.code == "AMP904")
    assert found.layer == "pool"
    assert "docs/onnx-operators.md" in found.advice
    assert "twin" not in found.advice


def test_sizes_from_inputs_in_a_body_are_followed_along_the_path(tmp_path: Path) -> None:
    """The general trace fails in the body; the If around it is not to blame."""
    branch = helper.make_graph(
        [node("Expand", ["x", "sizes"], ["out"], name="grow")], "branch", [], [value("out")]
    )
    choice = node("If", ["yes"], ["y"], name="choice", then_branch=branch, else_branch=branch)
    yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    sizes = value("sizes", 3, dtype=TensorProto.INT64)
    model = model_of([choice, node("Exp", ["y"], ["z"])], [yes], [value("x", 2, 4), sizes], [value("z")])
    report = scanned(tmp_path, model, ONES, torch.tensor([3, 2, 4]))
    assert report.verdict == "pass"
    assert next(site.shape for site in report.sites if site.op.startswith("aten.exp")) == (3, 2, 4)


def test_a_comment_in_a_stored_line_suppresses_nothing(tmp_path: Path) -> None:
    """Only a file on this machine may; the text in a model is somebody else's."""
    code = "return x * k  # ampaudit: ignore[AMP101]"
    stack = f'File "{tmp_path / "gone.py"}", line 3, in forward\n    {code}\n'
    report = scanned(tmp_path, squares("one", "two", stack=stack), ONES, policy="half")
    (found,) = errors_of(report)
    assert found.source is not None
    assert found.source.code == code
    assert found.layer == "two"


def test_findings_are_ignored_by_code(tmp_path: Path) -> None:
    report = scanned(tmp_path, squares("one", "two"), ONES, policy="half", ignore=("AMP1",))
    assert not errors_of(report)
    assert report.verdict == "pass"


@pytest.mark.parametrize(
    ("pattern", "wide"), [("/a/*", ["/a/b/Mul", "/a/c/Mul"]), ("/a/c/*", ["/a/c/Mul"]), ("a/*", [])]
)
def test_rules_name_layers_with_slashes(pattern: str, wide: list[str], tmp_path: Path) -> None:
    rules = tmp_path / "own.yaml"
    rules.write_text(
        "name: own\ntitle: half, but for some layers\nextends: [half]\nrules:\n"
        f"  - id: kept\n    match: {{layer: ['{pattern}']}}\n    cast: float32\n"
        "    reason: range\n    why: it overflows.\n    source: this test\n"
    )
    report = scanned(tmp_path, squares("/a/b/Mul", "/a/c/Mul"), ONES, policy=str(rules))
    kept = [s.layer for s in report.sites if s.precision == "float32" and s.op.startswith("aten.mul")]
    assert kept == wide


def test_reports_of_two_versions_are_compared(tmp_path: Path) -> None:
    inputs = torch.ones(2, 8)
    before = scanned(tmp_path, mlp(), inputs, policy="half")
    after = scanned(tmp_path, mlp(200.0), inputs, policy="half")
    found = diff(before, after)
    assert found.exit_code == 1
    assert "/out/MatMul" in to_json(found)
