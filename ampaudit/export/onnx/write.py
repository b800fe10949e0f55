"""Writes an ONNX model and checks the file: its structure, its types, and that a runtime takes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ampaudit.core.errors import RunFailed, first_line

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["casts_in", "check_file", "run_onnx", "write_model"]

_ONE_FILE = 1 << 30  # bytes: from there on, weights are in a file of their own
_FLOATS = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}


def write_model(model: ir.Model, path: Path) -> None:
    """Write a model in topological order; large weights go to a file beside it.

    Raises:
        RunFailed: it is not a valid model.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import TopologicalSortPass

    TopologicalSortPass()(model)
    size = sum(
        value.const_value.nbytes
        for graph in (model.graph, *model.graph.subgraphs())
        for value in graph.initializers.values()
        if value.const_value is not None
    )
    ir.save(model, path, external_data=f"{path.name}.data" if size > _ONE_FILE else None)
    check_file(path)


def check_file(path: Path) -> None:
    """Check a file in full: structure, order of nodes, and inferred types against those it states.

    Raises:
        RunFailed: onnx finds it invalid.
    """
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # several kinds, which share no base
        what = first_line(error)
        raise RunFailed(f"{path.name} is not valid: {what}", hint="report it with the model") from error


def casts_in(model: ir.Model) -> Counter[str]:
    """Count casts between float formats by the format that they cast to."""
    import onnx_ir as ir

    found: Counter[str] = Counter()
    for node in model.graph.all_nodes():
        if node.op_type == "Cast" and node.domain in ("", "ai.onnx") and node.inputs[0] is not None:
            given, to = node.inputs[0].dtype, ir.DataType(node.attributes["to"].value)
            if to.name in _FLOATS and given is not None and given.name in _FLOATS:
                found[_FLOATS[to.name]] += 1
    return found


def run_onnx(path: Path, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run a file with ONNX Runtime on the CPU, without its optimizations."""
    session: Any = open_session(path)
    given = zip(session.get_inputs(), inputs, strict=True)
    feeds = {place.name: tensor.detach().cpu().numpy() for place, tensor in given}
    return tuple(torch.from_numpy(found) for found in session.run(None, feeds))


def open_session(path: Path) -> Any:
    """Open a file with ONNX Runtime, which checks types, names and operators."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
