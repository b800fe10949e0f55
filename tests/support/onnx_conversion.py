"""Converts ONNX files in place, and checks what was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from ampaudit.core.source_config import SourceConfig
from ampaudit.export.convert import convert
from ampaudit.report.conversion import Conversion
from ampaudit.source.open import open_source
from tests.support.onnx_models.case import Arrays

FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
CLOSE = 2e-2  # of the largest value of an output


def converted(path: Path, inputs: Arrays, output: Path, **options: Any) -> Conversion:
    arrays = path.with_name("inputs.npz")
    np.savez(arrays, **inputs)
    source = open_source(str(path), SourceConfig(inputs=arrays))
    report, made = convert(source, None, output, **options)
    assert made is not None, report.headline
    return made


def converted_graph(model: onnx.ModelProto, inputs: Arrays, folder: Path, **options: Any) -> Conversion:
    """Write a graph to ``before.onnx``, and convert it into ``out``."""
    before = folder / "before.onnx"
    onnx.save(model, before)
    return converted(before, inputs, folder / "out", **options)


def close(expected: Arrays, found: Arrays) -> None:
    assert list(expected) == list(found)
    for name, exact in expected.items():
        assert exact.shape == found[name].shape
        if exact.dtype.kind == "f" and exact.size:
            scale = max(float(np.abs(exact[np.isfinite(exact)]).max(initial=0)), 1e-30)
            np.testing.assert_allclose(found[name].astype(np.float32), exact, rtol=0, atol=CLOSE * scale)


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs(attribute.g)


def types(model: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    graph = inferred.graph
    found = {v.name: v.type.tensor_type.elem_type for v in [*graph.value_info, *graph.input, *graph.output]}
    return found | {made.name: made.data_type for made in graph.initializer}


def check_structure(before: Path, after: Path) -> None:
    """Same nodes, inputs and outputs; casts once for each value and type, none back, none after another."""
    old, new = onnx.load(before), onnx.load(after)
    onnx.checker.check_model(str(after), full_check=True)
    assert [v.name for v in new.graph.input] == [v.name for v in old.graph.input]
    assert [v.name for v in new.graph.output] == [v.name for v in old.graph.output]
    if not old.functions:
        kept = [node.op_type for node in new.graph.node if node.op_type != "Cast"]
        assert Counter(kept) == Counter(node.op_type for node in old.graph.node if node.op_type != "Cast")
        named = {node.name for node in old.graph.node if node.name and node.op_type != "Cast"}
        assert named <= {node.name for node in new.graph.node}
    found = types(new)
    stated = {v.name: v.type.tensor_type.elem_type for v in new.graph.value_info}
    assert all(found[name] == kind for name, kind in stated.items() if kind)
    for graph in graphs(new.graph):
        casts = [node for node in graph.node if node.op_type == "Cast"]
        moved = [c for c in casts if found.get(c.input[0]) in FLOATS and c.attribute[0].i in FLOATS]
        assert len({(cast.input[0], cast.attribute[0].i) for cast in moved}) == len(moved)
        made = {cast.output[0] for cast in moved if cast.name.startswith("Cast_")}
        assert not [cast.name for cast in moved if cast.input[0] in made]
