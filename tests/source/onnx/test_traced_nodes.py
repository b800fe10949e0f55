"""What the traced graph of an ONNX model computes is what the model computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.utils import _pytree as pytree

from ampaudit.core.formats import FLOAT16
from ampaudit.policy import plain_fp32
from ampaudit.source.onnx.files import OnnxFile
from ampaudit.source.onnx.model import OnnxModel
from ampaudit.trace.capture import TraceConfig
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.path.recorder import PathTracing
from ampaudit.trace.tracing import trace
from tests.support.native import run_converted
from tests.support.onnx_known_failures import KNOWN_FAILURES
from tests.support.onnx_nodes import NodeTest, node_tests, same

EVERY = 36  # of the tests, in each of the shards
SHARDS = 4


def traced_failure(test: NodeTest) -> str | None:
    """Trace a test's model in FP32; return how the graph's outputs differ from the expected ones."""
    model = test.model().eval()
    given = test.given(model)
    rules = plain_fp32()
    torch.manual_seed(0)
    traced = trace(model, (), given, TraceConfig(rules, rules, FLOAT16, path=PathTracing.FALLBACK))
    with torch.no_grad():
        found = run_converted(traced, tensor_leaves((), given))
    return same(list(pytree.tree_leaves(found)), test.outputs, test.rtol, test.atol)


def plain(test: NodeTest) -> bool:
    """Whether it passes eagerly, and all inputs and outputs are tensors with values."""
    arrays = [*test.inputs, *test.outputs]
    return test.floats and test.name not in KNOWN_FAILURES and all(hasattr(a, "shape") for a in arrays)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_the_trace_computes_the_same(shard: int) -> None:
    chosen = [test for test in node_tests() if plain(test)][shard * EVERY // SHARDS :: EVERY]
    assert len(chosen) > 20
    assert {test.name: said for test in chosen if (said := traced_failure(test)) is not None} == {}


def test_known_values_leave_no_trace() -> None:
    """Sizes and constants are computed aside: what is recorded is one op, and no mode of autograd."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "last"], ["size"]),
        helper.make_node("Cast", ["size"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Sqrt", ["wide"], ["root"]),
        helper.make_node("Reshape", ["x", "flat"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    stored = [numpy_helper.from_array(np.array(1), "last"), numpy_helper.from_array(np.array([-1]), "flat")]
    graph = helper.make_graph(nodes, "graph", [x], [onnx.ValueInfoProto(name="y")], stored)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model = OnnxModel(OnnxFile(Path("model.onnx"), ir.from_proto(proto))).eval()
    program = torch.export.export(model, (torch.ones(2, 3),), strict=False)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called in (["aten.reshape.default"], ["aten.view.default"])


@pytest.mark.parametrize(
    ("op", "attributes", "mean", "spread"),
    [
        ("RandomUniformLike", {}, 0.5, 12**-0.5),
        ("RandomUniformLike", {"high": 3.0}, 1.5, 3 * 12**-0.5),
        ("RandomUniformLike", {"low": 1.0, "high": 2.0}, 1.5, 12**-0.5),
        ("RandomNormalLike", {}, 0.0, 1.0),
        ("RandomNormalLike", {"mean": 5.0, "scale": 2.0}, 5.0, 2.0),
    ],
)
def test_random_numbers_have_the_distribution_that_the_node_names(
    op: str, attributes: dict[str, float], mean: float, spread: float
) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [100_000])
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["y"], **attributes)], "graph", [x], [onnx.ValueInfoProto(name="y")]
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    torch.manual_seed(0)
    made = pytree.tree_leaves(
        OnnxModel(OnnxFile(Path("model.onnx"), ir.from_proto(proto)))(torch.ones(100_000))
    )
    assert float(made[0].mean()) == pytest.approx(mean, abs=0.02 * spread)
    assert float(made[0].std()) == pytest.approx(spread, rel=0.02)
