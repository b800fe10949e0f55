"""Runs unsupported nodes through ONNX Runtime in float32, as one op each."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from ampaudit.core.untrusted import describe
from ampaudit.source.onnx.files import torch_dtype_of
from ampaudit.source.onnx.names import plain_domain
from ampaudit.source.onnx.values import NodeCall, Operand, Unsupported, onnx_type_of, with_values
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["opaque_results"]

_SESSIONS = 64
_NEWEST_IR = 10
# tells the tracer to run the op on the values of this trace
_BY_VALUES = "no fake impl registered: the sizes of its outputs depend on values"


def opaque_results(call: NodeCall, why: str) -> list[Operand]:
    """Compute a node with ONNX Runtime, through a torch op named after its operator.

    Args:
        call: Call of the node.
        why: Reason why no function here computes it.

    Raises:
        Unsupported: ONNX Runtime is not installed, or does not run the node either.
    """
    node = call.node
    if any(isinstance(value, list) for value in call.inputs):
        raise Unsupported(f"{why}, and ONNX Runtime runs no sequences here")
    tensors = [call.tensor(value) for value in call.inputs if value is not None]
    low = next((tensor.dtype for tensor in tensors if tensor.dtype in LOW_PRECISION_DTYPES), None)
    tensors = [tensor.float() if tensor.dtype == low else tensor for tensor in tensors]
    model = base64.b64encode(_model_of(call)).decode()
    try:
        _session(model)
    except ImportError:
        raise Unsupported(
            f"{why}; ONNX Runtime, which is not installed, may run it",
            hint="pip install 'ampaudit[onnx]'",
        ) from None
    except Exception as error:  # whatever ONNX Runtime raises
        raise Unsupported(f"{why}, and ONNX Runtime does not run it: {describe(error, 150)}") from error
    domain = plain_domain(node.domain)
    results = _op(re.sub(r"\W", "_", f"{domain}_{node.op_type}" if domain else node.op_type))(tensors, model)
    iterator = iter(t.to(low) if low is not None and t.dtype == torch.float32 else t for t in results)
    return [next(iterator) if output.name else None for output in node.outputs]


def _model_of(call: NodeCall) -> bytes:
    """Serialize a model with the node as its only one."""
    import onnx
    import onnx_ir as ir

    node = ir.serde.serialize_node(with_values(call))
    inputs = []
    for name, value in zip(node.input, call.inputs, strict=True):
        if name:
            kind = onnx_type_of(value)
            kind.tensor_type.ClearField("shape")
            if kind.tensor_type.elem_type in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16):
                kind.tensor_type.elem_type = onnx.TensorProto.FLOAT
            inputs.append(onnx.helper.make_value_info(name, kind))
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = onnx.helper.make_graph([node], "node", inputs, outputs)
    versions = {"": 21, call.node.domain: call.version}
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in versions.items()]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=_NEWEST_IR)
    return bytes(model.SerializeToString())


@lru_cache(_SESSIONS)
def _session(model: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 4
    data = base64.b64decode(model)
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


@cache
def _op(name: str) -> Any:
    """Return the torch op that runs one-node models of an operator."""

    def run(inputs: Sequence[torch.Tensor], model: str) -> list[torch.Tensor]:
        session = _session(model)
        arrays = {}
        for place, tensor in zip(session.get_inputs(), inputs, strict=True):
            if place.type == "tensor(float)" and tensor.dtype is not torch.float32:
                raise RuntimeError(f"{name} runs in float32, not {tensor.dtype}")
            arrays[place.name] = tensor.detach().cpu().contiguous().numpy()
        return [torch.from_numpy(array.copy()) for array in session.run(None, arrays)]

    op = torch.library.custom_op(
        f"onnxruntime::{name}", run, mutates_args=(), schema="(Tensor[] inputs, str model) -> Tensor[]"
    )
    op.register_fake(_fake_results)
    return op


def _fake_results(inputs: Sequence[torch.Tensor], model: str) -> list[torch.Tensor]:
    """Return empty tensors with the shapes that ONNX infers from those of the inputs."""
    inferred = _infer(model, tuple(tuple(map(int, tensor.shape)) for tensor in inputs))
    if inferred is None:
        raise NotImplementedError(_BY_VALUES)
    return [torch.empty(sizes, dtype=dtype) for sizes, dtype in inferred]


@lru_cache(_SESSIONS)
def _infer(model: str, shapes: tuple[tuple[int, ...], ...]) -> list[tuple[list[int], torch.dtype]] | None:
    import onnx
    import onnx_ir as ir

    proto = onnx.ModelProto.FromString(base64.b64decode(model))
    for place, sizes in zip(proto.graph.input, shapes, strict=True):
        dims = place.type.tensor_type.shape.dim
        for size in sizes:
            dims.add().dim_value = size
        if not sizes:
            place.type.tensor_type.shape.SetInParent()
    try:
        inferred = onnx.shape_inference.infer_shapes(proto).graph.output
    except Exception:  # an operator that it does not know
        return None
    tensors = []
    for output in inferred:
        kind = output.type.tensor_type
        dtype = torch_dtype_of(ir.DataType(kind.elem_type))
        static = all(dim.HasField("dim_value") for dim in kind.shape.dim)
        if dtype is None or not kind.HasField("shape") or not static:
            return None
        tensors.append(([dim.dim_value for dim in kind.shape.dim], dtype))
    return tensors
