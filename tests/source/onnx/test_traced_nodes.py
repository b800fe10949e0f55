"""What the traced graph of an ONNX model computes is what the model computes."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from ampaudit.core.formats import FLOAT16
from ampaudit.policy import plain_fp32
from ampaudit.trace.converted import attach_weights
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.path.recorder import PathTracing
from ampaudit.trace.tracing import trace
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
    traced = trace(model, (), given, rules, rules, FLOAT16, path=PathTracing.FALLBACK)
    converted = attach_weights(traced)
    with torch.no_grad():
        found = converted.graph_module()(*converted.arguments(tensor_leaves((), given)))
    return same(list(pytree.tree_leaves(found)), test.outputs, test.rtol, test.atol)


def plain(test: NodeTest) -> bool:
    """Whether it passes eagerly, and all inputs and outputs are tensors with values."""
    arrays = [*test.inputs, *test.outputs]
    return test.floats and test.name not in KNOWN_FAILURES and all(hasattr(a, "shape") for a in arrays)


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_the_trace_computes_the_same(shard: int) -> None:
    chosen = [test for test in node_tests() if plain(test)][shard * EVERY // SHARDS :: EVERY]
    assert len(chosen) > 20
    assert {test.name: said for test in chosen if (said := traced_failure(test)) is not None} == {}
