"""Builds ONNX graphs from nodes, and describes a graph with its example inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Arrays = dict[str, NDArray]
Size = Literal["full", "small"]
Build = Callable[[Path, Size], tuple[Path, Arrays]]
Shape = Sequence[int | str]
OPSET = 18


def kind_of(array: NDArray) -> int:
    return helper.np_dtype_to_tensor_dtype(array.dtype)


def value(name: str, shape: Shape | None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def tensor(name: str, content: object, dtype: object = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(content, dtype=dtype), name)  # type: ignore[arg-type]


def constant(name: str, content: object, dtype: object = np.float32) -> onnx.NodeProto:
    """Make a Constant node that is named after its tensor."""
    return helper.make_node("Constant", [], [name], name=f"{name}_node", value=tensor(name, content, dtype))


@dataclass
class Graph:
    """Collects the nodes, initializers and inputs of one model; every node's name is its output's."""

    inputs: Arrays
    opset: int = OPSET
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    domains: tuple[str, ...] = ()

    def add(self, op: str, inputs: str, output: str, name: str | None = None, **attributes: object) -> str:
        """Append a node; names of tensors are separated by spaces, and ``_`` is an omitted input."""
        given = ["" if n == "_" else n for n in inputs.split()]
        label = output.split()[0] if name is None else name
        self.nodes.append(helper.make_node(op, given, output.split(), name=label or None, **attributes))
        return output.split()[0]

    def keep(self, name: str, content: object, dtype: object = np.float32) -> str:
        """Append an initializer."""
        self.initializers.append(tensor(name, content, dtype))
        return name

    def constant(self, name: str, content: object, dtype: object = np.float32) -> str:
        """Append a Constant node."""
        self.nodes.append(constant(name, content, dtype))
        return name

    def model(self, outputs: dict[str, int] | str, **shapes: Shape) -> onnx.ModelProto:
        """Finish the model; outputs are names, or names with element types, and shapes are inferred."""
        kinds = dict.fromkeys(outputs.split(), TensorProto.FLOAT) if isinstance(outputs, str) else outputs
        graph = helper.make_graph(
            self.nodes,
            "graph",
            [value(name, array.shape, kind_of(array)) for name, array in self.inputs.items()],
            [value(name, shapes.get(name), kind) for name, kind in kinds.items()],
            self.initializers,
        )
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(d, 1) for d in self.domains)]
        model = helper.make_model(graph, opset_imports=opsets, functions=self.functions, ir_version=10)
        inferred = onnx.shape_inference.infer_shapes(model).graph.output
        del model.graph.output[:]
        model.graph.output.extend(inferred)
        return model
