"""Runs the node tests of the `onnx` package through our importer, and sorts what came of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ampaudit.core.errors import AuditError
from ampaudit.source.onnx.files import OnnxFile
from ampaudit.source.onnx.model import OnnxModel

FLOATS = {"FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"}


@dataclass(frozen=True)
class NodeTest:
    """A test of the `onnx` package: a small model, inputs, and the outputs that they give."""

    name: str
    proto: Any
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    rtol: float
    atol: float

    @property
    def floats(self) -> bool:
        """Whether an input or output has a floating-point type that torch has."""
        from onnx import TensorProto

        graph = self.proto.graph
        kinds = {value.type.tensor_type.elem_type for value in [*graph.input, *graph.output]}
        return bool({TensorProto.DataType.Name(kind) for kind in kinds} & FLOATS)

    @property
    def operators(self) -> set[tuple[str, str]]:
        """Domain and name of each operator, except in bodies."""
        nodes = [*self.proto.graph.node, *(n for f in self.proto.functions for n in f.node)]
        return {("" if n.domain == "ai.onnx" else n.domain, n.op_type) for n in nodes}

    def model(self) -> OnnxModel:
        """Open the model."""
        import onnx_ir as ir

        model = ir.from_proto(copy.deepcopy(self.proto))
        return OnnxModel(OnnxFile(Path(f"{self.name}.onnx"), model))

    def given(self, model: OnnxModel) -> dict[str, Any]:
        """Return the inputs by name."""
        names = [str(value.name) for value in self.proto.graph.input]
        return dict(zip(names, torch_values(self.inputs), strict=False))

    def failure(self) -> str | None:
        """Run it; return what is wrong with the outputs, or ``None``."""
        try:
            torch.manual_seed(0)
            model = self.model()
            with torch.no_grad():
                found = model(**self.given(model))
        except AuditError as error:
            return f"refused: {error}"
        except Exception as error:  # a crash is a result here
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        names = [str(value.name) for value in self.proto.graph.output]
        return same([found[name] for name in names], self.outputs, self.rtol, self.atol)


@cache
def node_tests() -> tuple[NodeTest, ...]:
    """Return the tests of operators."""
    from onnx.backend.test.loader import load_model_tests

    made = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, where the package computes the expected values
        cases = load_model_tests(kind="node")
    for case in cases:
        ((inputs, outputs),) = case.data_sets
        made.append(NodeTest(case.name, case.model, inputs, outputs, case.rtol, case.atol))
    return tuple(made)


def torch_values(values: Sequence[Any]) -> list[Any]:
    """Return arrays, and lists of them, as tensors."""
    return [_torch_value(value) for value in values]


def _torch_value(value: Any) -> Any:
    from onnx import TensorProto, numpy_helper

    if value is None or isinstance(value, list | tuple):
        return None if value is None else torch_values(value)
    array = numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)
    if array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        dtype = getattr(torch, array.dtype.name)
        if not array.size:
            return torch.empty(array.shape, dtype=dtype)
        return torch.frombuffer(bytearray(array.tobytes()), dtype=dtype).reshape(array.shape)
    if array.dtype.kind == "V" or array.dtype.name in ("int4", "uint4", "int2", "uint2"):
        return torch.from_numpy(array.astype(np.int8))
    return torch.from_numpy(array.copy())


def as_arrays(values: Sequence[Any]) -> list[Any]:
    """Return tensors, and lists of them, as arrays; bfloat16 and float8 as float32."""
    return [as_arrays(v) if isinstance(v, list | tuple) else None if v is None else _array(v) for v in values]


def _array(value: torch.Tensor) -> Any:
    small = value.dtype.is_floating_point and value.dtype.itemsize < 4 and value.dtype != torch.float16
    return (value.float() if small else value).detach().numpy()


def same(found: Sequence[Any], wanted: Sequence[Any], rtol: float, atol: float) -> str | None:
    """Return how outputs differ from the expected ones, or ``None``."""
    for got, want in zip(as_arrays(found), wanted, strict=True):
        if isinstance(want, list | tuple):
            if not isinstance(got, list) or len(got) != len(want):
                return "another sequence"
            inner = same(torch_values(got), want, rtol, atol)
            if inner is not None:
                return inner
            continue
        if want is None or got is None:
            if want is not got:
                return "another optional"
            continue
        expected = np.asarray(as_arrays(torch_values([want]))[0])
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return f"{got.dtype}{list(got.shape)}, not {expected.dtype}{list(expected.shape)}"
        # as the runner of the onnx package does: two units in the last place of bfloat16
        near = max(rtol, 2**-6) if np.asarray(want).dtype.name == "bfloat16" else rtol
        try:
            np.testing.assert_allclose(got, expected, rtol=near, atol=atol)
        except AssertionError as error:
            return " ".join(str(error).split())[:150]
    return None
