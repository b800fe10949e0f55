"""Changes one thing at one node of an ONNX model: a weight, a number, an attribute or the operator."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

SWAPS = {
    "Add": "Sub",
    "Sub": "Add",
    "Mul": "Div",
    "Div": "Mul",
    "Sqrt": "Abs",
    "Erf": "Tanh",
    "Softmax": "LogSoftmax",
}
KINDS = ("weight", "number", "attribute", "operator", "operands")


@dataclass(frozen=True)
class Mutant:
    """A changed model, the node that is wrong in it, and how."""

    model: onnx.ModelProto
    node: str
    what: str


class _Mutation:
    def __init__(self, model: onnx.ModelProto, seed: int) -> None:
        self.model = onnx.ModelProto.FromString(model.SerializeToString())
        self.graph = self.model.graph
        self.random = random.Random(seed)
        self.arrays = {t.name: numpy_helper.to_array(t) for t in self.graph.initializer}
        for node in self.graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.arrays[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)

    def made(self) -> Mutant | None:
        change = getattr(self, self.random.choice(KINDS))
        nodes = [node for node in self.graph.node if node.op_type not in ("Constant", "Identity")]
        self.random.shuffle(nodes)
        for node in nodes:
            if what := change(node):
                return Mutant(self.model, node.name, what)
        return None

    def stored(self, node: onnx.NodeProto, *, single: bool) -> list[int]:
        found = ((i, self.arrays.get(name)) for i, name in enumerate(node.input))
        return [i for i, a in found if a is not None and a.dtype == np.float32 and (a.size == 1) == single]

    def replace(self, node: onnx.NodeProto, place: int, array: np.ndarray) -> None:
        name = f"{node.input[place]}_changed"
        self.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        node.input[place] = name

    def weight(self, node: onnx.NodeProto) -> str:
        places = self.stored(node, single=False)
        if not places:
            return ""
        place, how = (
            self.random.choice(places),
            self.random.choice(("transposed", "scaled", "one element", "noise")),
        )
        array = self.arrays[node.input[place]].copy()
        if how == "transposed" and array.ndim == 2 and array.shape[0] == array.shape[1]:
            array = array.T
        elif how == "one element":
            array.flat[self.random.randrange(array.size)] += np.float32(2)
        elif how == "noise":
            array += np.float32(0.1) * np.random.default_rng(0).standard_normal(array.shape, dtype=np.float32)
        else:
            array = array * np.float32(1.3) + np.float32(0.01)
        self.replace(node, place, array)
        return f"weight {how}"

    def number(self, node: onnx.NodeProto) -> str:
        places = self.stored(node, single=True)
        if not places:
            return ""
        place = self.random.choice(places)
        old = self.arrays[node.input[place]]
        self.replace(node, place, (old * np.float32(1.5) + np.float32(0.01)).astype(np.float32))
        return f"number {old}"

    def attribute(self, node: onnx.NodeProto) -> str:
        for attribute in node.attribute:
            if attribute.name == "axis" and node.op_type == "Softmax":
                attribute.i = -2
                return "axis"
            if attribute.name == "perm":
                one, other = self.random.sample(range(len(attribute.ints)), 2)
                order = list(attribute.ints)
                order[one], order[other] = order[other], order[one]
                attribute.ints[:] = order
                return "perm"
            if attribute.name == "epsilon":
                attribute.f = 0.1
                return "epsilon"
        return ""

    def operator(self, node: onnx.NodeProto) -> str:
        if node.op_type not in SWAPS:
            return ""
        old, node.op_type = node.op_type, SWAPS[node.op_type]
        return f"{node.op_type} for {old}"

    def operands(self, node: onnx.NodeProto) -> str:
        if node.op_type not in ("Sub", "Div", "MatMul") or any(name in self.arrays for name in node.input):
            return ""
        node.input[:] = list(node.input)[::-1]
        return "operands swapped"


def mutants(model: onnx.ModelProto, seeds: range) -> list[Mutant]:
    """Return the changed models whose shapes are still valid."""
    found = (_Mutation(model, seed).made() for seed in seeds)
    valid = []
    for mutant in found:
        if mutant is None:
            continue
        try:
            onnx.shape_inference.infer_shapes(mutant.model, strict_mode=True)
        except onnx.shape_inference.InferenceError:
            continue
        valid.append(mutant)
    return valid
