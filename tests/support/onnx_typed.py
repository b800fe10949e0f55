"""Small ONNX graphs with inputs of stated types, and what ONNX Runtime computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

F, Arrays = TensorProto.FLOAT, dict[str, np.ndarray[Any, Any]]
RANDOM = np.random.default_rng(0)


def graph(
    nodes: list[onnx.NodeProto],
    inputs: Arrays,
    outputs: list[Any],
    stored: Arrays,
    sizes: dict[str, list[int | str]] | None = None,
    **domains: int,
) -> tuple[onnx.ModelProto, Arrays]:
    """Return a graph that takes such inputs; ``sizes`` are those of its inputs that are not fixed."""
    sizes = sizes or {}
    places = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), sizes.get(name, array.shape)
        )
        for name, array in inputs.items()
    ]
    results = [
        helper.make_tensor_value_info("y", F, list("abcd"[:o])) if isinstance(o, int) else o for o in outputs
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    made = helper.make_model(
        helper.make_graph(nodes, "graph", places, results, initializers),
        opset_imports=[
            helper.make_opsetid("", 17),
            *(helper.make_opsetid(d.replace("_", "."), v) for d, v in domains.items()),
        ],
        ir_version=8,
    )
    return made, inputs


def floats(*sizes: int) -> np.ndarray[Any, Any]:
    return RANDOM.standard_normal(sizes).astype(np.float32)


def node(op: str, inputs: str, outputs: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(
        op, inputs.split(), outputs.split(), name=outputs.split()[0], domain=domain, **attributes
    )


def ran(path: Path, inputs: Arrays) -> list[Any]:
    found: list[Any] = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(
        None, inputs
    )
    return [part for value in found for part in (value if isinstance(value, list) else [value])]
