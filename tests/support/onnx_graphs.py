"""Makes small ONNX models, and writes them as a file says they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

OPSET = 18
node = helper.make_node


def value(name: str, *sizes: int | str, dtype: int = TensorProto.FLOAT) -> Any:
    """Declare a tensor of these sizes."""
    return helper.make_tensor_value_info(name, dtype, list(sizes))


def initializer(name: str, array: Any) -> Any:
    """Store an array."""
    return numpy_helper.from_array(np.asarray(array), name)


def tensor(sizes: Sequence[int], data: bytes, dtype: int = TensorProto.FLOAT, name: str = "w") -> Any:
    """Store bytes as a tensor of any sizes and type."""
    made = TensorProto(name=name, data_type=dtype, raw_data=data)
    made.dims.extend(sizes)
    return made


def external(location: str | None, offset: Any = 0, length: Any = 64, sizes: Sequence[int] = (4, 4)) -> Any:
    """Store a tensor in another file."""
    made = TensorProto(name="w", data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    made.dims.extend(sizes)
    for key, item in (("location", location), ("offset", offset), ("length", length)):
        if item is not None:
            entry = made.external_data.add()
            entry.key, entry.value = key, str(item)
    return made


def model_of(
    nodes: Sequence[Any],
    stored: Sequence[Any] = (),
    inputs: Sequence[Any] | None = None,
    outputs: Sequence[Any] | None = None,
    functions: Sequence[Any] = (),
    opset: int = OPSET,
) -> Any:
    """Make a model of ``x``, which has the sizes 2 and 4, that computes ``y``."""
    graph = helper.make_graph(
        list(nodes), "graph", list(inputs or [value("x", 2, 4)]), list(outputs or [value("y")]), list(stored)
    )
    domains = {function.domain for function in functions}
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=10)


def mlp(scale: float = 1.0) -> Any:
    """Two products with a ReLU between them, as a PyTorch exporter names them."""
    random = np.random.default_rng(0)
    first, second = (random.standard_normal(s).astype(np.float32) * scale for s in ((8, 16), (16, 4)))
    return model_of(
        [
            node("MatMul", ["x", "fc.weight"], ["a"], name="/fc/MatMul"),
            node("Add", ["a", "fc.bias"], ["b"], name="/fc/Add"),
            node("Relu", ["b"], ["c"], name="/act/Relu"),
            node("MatMul", ["c", "out.weight"], ["y"], name="/out/MatMul"),
        ],
        [
            initializer("fc.weight", first),
            initializer("fc.bias", np.zeros(16, np.float32)),
            initializer("out.weight", second),
        ],
        [value("x", "batch", 8)],
        [value("y", "batch", 4)],
    )


def written(folder: Path, model: Any, name: str = "m.onnx") -> Path:
    """Write a model."""
    path = folder / name
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path
