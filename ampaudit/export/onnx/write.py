"""Writes an ONNX model, counts its casts, and runs the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import TopologicalSortPass

from ampaudit.export.onnx.check import open_session
from ampaudit.source.onnx.files import LARGE, OWN_FILE, write_with_values

_ONE_FILE = 1 << 30  # bytes of weights up to which they are in the file of the graph
ONNX_FLOATS = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}


def write_model(model: ir.Model, path: Path) -> None:
    """Write a model in topological order; weights of more than 1 GiB go to a second file."""
    TopologicalSortPass()(model)
    large = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes > LARGE
    }
    if sum(tensor.nbytes for tensor in large.values()) > _ONE_FILE:
        ir.save(model, path, external_data=f"{path.name}.data")
    else:
        _save(model, path, large)


def _save(model: ir.Model, path: Path, large: Mapping[str, ir.TensorProtocol]) -> None:
    """Write one file without holding more than one large tensor in memory."""
    places = model.graph.initializers
    try:
        for number, (name, tensor) in enumerate(large.items()):
            shape = ir.Shape(tensor.shape)  # type: ignore[arg-type]
            places[name].const_value = ir.ExternalTensor(
                OWN_FILE, number, tensor.nbytes, tensor.dtype, shape=shape, name=name
            )
        stripped = ir.to_proto(model).SerializeToString()
    finally:
        for name, tensor in large.items():
            places[name].const_value = tensor
    with path.open("wb") as stream:
        write_with_values(stripped, stream, [tensor.tobytes for tensor in large.values()])


def casts_in(model: ir.Model) -> Counter[str]:
    """Count casts between float formats by target format."""
    casts: Counter[str] = Counter()
    for node in model.graph.all_nodes():
        if node.op_type == "Cast" and not node.domain and node.inputs[0] is not None:
            source, to = node.inputs[0].dtype, ir.DataType(node.attributes["to"].value)
            if to.name in ONNX_FLOATS and source is not None and source.name in ONNX_FLOATS:
                casts[ONNX_FLOATS[to.name]] += 1
    return casts


def run_onnx(path: Path, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run a file with ONNX Runtime on the CPU, without its optimizations."""
    session: Any = open_session(path)
    pairs = zip(session.get_inputs(), inputs, strict=True)
    feeds = {place.name: tensor.detach().cpu().numpy() for place, tensor in pairs}
    return tuple(torch.from_numpy(array) for array in session.run(None, feeds))
