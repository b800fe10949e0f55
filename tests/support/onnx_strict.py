"""Runs ONNX files through ONNX Runtime with every 16-bit value rounded, and none of the package's code.

ONNX Runtime's CPU provider computes most float16 nodes in float32 and drops the casts between them, which
hides overflow. Here the graph is float32, and each 16-bit value passes through a pair of casts that stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
from numpy.typing import NDArray
from onnx import TensorProto, helper

HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
Arrays = dict[str, NDArray]


def float_types(graph: onnx.GraphProto, outer: dict[str, int] | None = None) -> dict[str, int]:
    """Element types by name after shape inference, for a graph that sees the names of an outer one."""
    values = [*graph.value_info, *graph.output, *graph.input]
    found = {v.name: v.type.tensor_type.elem_type for v in values}  # 0 for sequences
    found |= {i.name: i.data_type for i in graph.initializer}
    known = {**(outer or {}), **found}
    for node in graph.node:  # ops that inference does not know keep the type of their first input
        guess = next((known[n] for n in node.input if known.get(n)), 0)
        for name in node.output:
            known.setdefault(name, guess)
    return known


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


@dataclass
class Rounding:
    """Rewrites one graph; ``assume`` is the type that float32 values are rounded to, where it is given.

    A node that makes 16 bits whatever its inputs are (Cast, Constant) is followed by the same pair as any
    other, whose first cast then changes nothing.
    """

    assume: int | None = None

    def kind(self, known: dict[str, int], name: str) -> int | None:
        kind = known.get(name)
        if kind == TensorProto.FLOAT and self.assume is not None:
            return self.assume
        return kind if kind in HALF else None

    def pair(self, name: str, kind: int, source: str) -> list[onnx.NodeProto]:
        """Round ``source`` into ``name``."""
        narrow = f"{name}//narrow"
        return [
            helper.make_node("Cast", [source], [narrow], name=f"{narrow}//cast", to=kind),
            helper.make_node("Cast", [narrow], [name], name=f"{name}//widen", to=TensorProto.FLOAT),
        ]

    def rewrite(self, graph: onnx.GraphProto, outer: dict[str, int], *, body: bool) -> None:
        known = float_types(graph, outer)
        nodes = [n for name in self.stored(graph) for n in self.widened(name, known[name])]
        for declared in graph.input:
            kind = self.kind(known, declared.name)
            if not body and kind is not None:
                nodes += self.pair(declared.name, kind, f"{declared.name}//given")
                declared.name = f"{declared.name}//given"
        for node in graph.node:
            for inner in subgraphs(node):
                self.rewrite(inner, known, body=True)
            nodes += self.rounded(node, known)
        for declared in [*graph.input, *graph.output]:
            widen_type(declared.type)
        del graph.node[:], graph.value_info[:]
        graph.node.extend(nodes)

    def stored(self, graph: onnx.GraphProto) -> Iterator[str]:
        """Rename the initializers that are rounded or stored in 16 bits."""
        for made in graph.initializer:
            if made.data_type in HALF or (made.data_type == TensorProto.FLOAT and self.assume is not None):
                name, made.name = made.name, f"{made.name}//stored"
                yield name

    def widened(self, name: str, kind: int) -> list[onnx.NodeProto]:
        if kind not in HALF:
            assert self.assume is not None
            return self.pair(name, self.assume, f"{name}//stored")
        return [helper.make_node("Cast", [f"{name}//stored"], [name], to=TensorProto.FLOAT)]

    def rounded(self, node: onnx.NodeProto, known: dict[str, int]) -> list[onnx.NodeProto]:
        after: list[onnx.NodeProto] = []
        for index, name in enumerate(node.output):
            kind = self.kind(known, name) if name else None
            if kind is not None:
                node.output[index] = f"{name}//wide"
                after += self.pair(name, kind, f"{name}//wide")
        return [node, *after]


def widen_type(kind: onnx.TypeProto) -> None:
    while kind.HasField("sequence_type") or kind.HasField("optional_type"):
        inner = kind.sequence_type if kind.HasField("sequence_type") else kind.optional_type
        kind = inner.elem_type
    if kind.HasField("tensor_type") and kind.tensor_type.elem_type in HALF:
        kind.tensor_type.elem_type = TensorProto.FLOAT


def strict_model(
    model: onnx.ModelProto, *, assume: int | None = None, every: bool = False
) -> onnx.ModelProto:
    """Return a model of float32 nodes in which every 16-bit value is rounded by a pair of casts.

    With ``assume``, float32 values are rounded to that type as well: what a model wholly in 16 bits would do.
    With ``every``, all tensors of the main graph are outputs.
    """
    model = onnx.inliner.inline_local_functions(model)
    del model.graph.value_info[:]  # may be wrong
    inferred = onnx.shape_inference.infer_shapes(model)
    stored = {made.name for made in inferred.graph.initializer}
    given = [i for i in inferred.graph.input if i.name not in stored]
    del inferred.graph.input[:]
    inferred.graph.input.extend(given)
    names = [name for node in model.graph.node for name in node.output if name]
    Rounding(assume).rewrite(inferred.graph, {}, body=False)
    if every:
        present = {o.name for o in inferred.graph.output}
        inferred.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in present)
    return inferred


def run_strict(
    path: Path, inputs: Arrays, *, assume: int | None = None, every: bool = False
) -> dict[str, NDArray]:
    """Run a file strictly; values that were rounded come back as float32, the file's folder is written to."""
    model = strict_model(onnx.load(path, load_external_data=False), assume=assume, every=every)
    given = {i.name: inputs[i.name.removesuffix("//given")] for i in model.graph.input}
    wide = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    given = {n: a.astype(np.float32) if wide[n] == TensorProto.FLOAT else a for n, a in given.items()}
    copy = path.with_name(f"{path.stem}.strict.onnx")  # beside the external data that it names
    onnx.save(model, copy)
    try:
        return run_fp32(copy, given, optimize=False)
    finally:
        copy.unlink()


def run_fp32(
    path: Path, inputs: Arrays, *, optimize: bool = True, outputs: Iterable[str] | None = None
) -> dict[str, NDArray]:
    """Run a file as it is."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = list(outputs or (o.name for o in session.get_outputs()))
    return dict(zip(names, session.run(names, inputs), strict=True))
