"""Runs an ONNX graph node by node as a module, each node under its own name."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import nn

from ampaudit.core.errors import AuditError, InputError, SourceError
from ampaudit.core.untrusted import MAX_MESSAGE, describe, describe_path
from ampaudit.source.interface import Batch
from ampaudit.source.onnx.checks import node_title
from ampaudit.source.onnx.files import OnnxFile, torch_dtype_of
from ampaudit.source.onnx.names import NodeNames, graphs_of, is_constant, layer_name, parameter_place
from ampaudit.source.onnx.ops import OPERATORS
from ampaudit.source.onnx.values import (
    FLOATS,
    MISFITS,
    Known,
    NodeCall,
    Operand,
    RefusedNode,
    Unsupported,
    as_constant,
    as_list,
    check_size,
    has_references,
    misfit_error,
    onnx_type_of,
    operand_tensors,
    resolve_references,
    standard_body,
)
from ampaudit.trace.internals import FakeTensor, without_modes
from ampaudit.trace.replay import replaying
from ampaudit.trace.values import LOW_PRECISION_DTYPES

_SESSIONS = 64
_NEWEST_IR = 10
# the tracer recognizes the first words, and runs the op on the values of this trace
_BY_VALUES = "no fake impl registered: the sizes of its outputs depend on values"
_MAX_FUNCTION_DEPTH = 50  # nested functions
_MAX_BODY_NODES = 20_000  # nodes run in bodies of loops and branches; a trace contains all of them
_MAX_KNOWN = 1 << 20  # elements of values computed outside the trace
_MAX_FOLDED_FLOATS = 64  # elements of a floating-point value computed from shapes
_NEVER_KNOWN = frozenset(
    "RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli If Loop Scan".split()
)
Scope = dict[str, Operand]


@dataclass(frozen=True, slots=True)
class _Frame:
    """The context of the nodes of the graph or of a called function."""

    versions: Mapping[str, int]  # of operator sets by domain
    attributes: Mapping[str, ir.Attr] = field(default_factory=dict)  # of the call, for references to them
    caller: str = ""  # layer of the node that calls the function
    origin: Mapping[str, Any] | None = None  # of all ops, if the function implements one operator
    depth: int = 0  # number of enclosing functions


class OnnxModel(nn.Module):
    """Computes the outputs of an ONNX graph as a dict by name, from inputs by name or position.

    Initializers keep their names; integers and single numbers are buffers, the others parameters.
    """

    def __init__(self, file: OnnxFile) -> None:
        super().__init__()
        program = _Program(file)
        # the only attribute besides tensors, whose names come from the graph
        self._program = program
        for name, tensor in program.tensors():
            owner, path, leaf = parameter_place(self, name)
            if tensor.dtype in FLOATS and tensor.numel() > 1:
                owner.register_parameter(leaf, nn.Parameter(tensor))
            else:
                owner.register_buffer(leaf, tensor)
            program.stored[name] = _Stored(tensor, path, leaf)

    @property
    def file(self) -> OnnxFile:
        """The file of the graph."""
        return self._program.file

    @property
    def names(self) -> NodeNames:
        """The names of the nodes and stored tensors."""
        return self._program.names

    @property
    def inputs(self) -> list[ir.Value]:
        """The inputs that are not initializers."""
        return self._program.inputs

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the graph."""
        names = [str(value.name) for value in self._program.inputs]
        inputs: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        missing = [name for name in names if name not in inputs]
        if missing or len(inputs) > len(names):
            what = f"the graph takes {describe(', '.join(names)) or 'no input'}"
            raise InputError(
                f"{what}; given: {describe(', '.join(inputs)) or 'none'}", hint="pass these by name"
            )
        return _Run(self._program, self).outputs(inputs)

    def dtypes_of(self, batch: Batch) -> dict[ir.Value, torch.dtype]:
        """Run a batch and return the dtype of each tensor that a node returns."""
        dtypes: dict[ir.Value, torch.dtype] = {}
        self._program.dtypes = dtypes
        try:
            with torch.no_grad():
                self(*batch.args, **batch.kwargs)
        finally:
            self._program.dtypes = None
        return dtypes


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the file and the module attribute that holds it."""

    real: torch.Tensor
    owner: str
    leaf: str


class _Program:
    """The graph of a module, shared by its copies; slots keep it out of the module's state."""

    __slots__ = ("dtypes", "file", "inputs", "names", "stored")

    def __init__(self, file: OnnxFile) -> None:
        self.file = file
        graph = file.model.graph
        self.inputs = [value for value in graph.inputs if value.name not in graph.initializers]
        self.names = NodeNames(file.model)
        self.stored: dict[str, _Stored] = {}
        self.dtypes: dict[ir.Value, torch.dtype] | None = None

    def __deepcopy__(self, memo: Any) -> _Program:
        return self

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the initializers and the values of Constant nodes with their storage names."""
        for graph in graphs_of(self.file.model):
            for name, value in getattr(graph, "initializers", {}).items():
                assert value.const_value is not None
                yield self.names.stored(graph, name), self.file.tensor(value.const_value)
        for node in self.file.nodes():
            if is_constant(node) and not has_references(node):
                yield self.names.stored_constant(node), self.file.constant(node)


class _Run:
    """One run of the graph."""

    def __init__(self, program: _Program, module: nn.Module) -> None:
        self._program = program
        self._module = module
        self._body_nodes = 0  # nodes run in bodies so far
        tensors = (*module.parameters(), *module.buffers())
        stored = {t.dtype for t in tensors} - {s.real.dtype for s in program.stored.values()}
        self._float32 = min(stored & set(FLOATS), key=str, default=torch.float32)  # under the policy

    def outputs(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        graph = self._program.file.model.graph
        scope: Scope = dict(inputs)
        self._add_initializers(graph, scope)
        self._run_nodes(graph, scope, _Frame(self._program.file.model.opset_imports))
        return {str(value.name): operand_tensors(scope[str(value.name)]) for value in graph.outputs}

    def _known_tensor(self, name: str) -> Known:
        stored = self._program.stored[name]
        owner = self._module.get_submodule(stored.owner)
        return Known(stored.real, lambda: getattr(owner, stored.leaf), constant=True)

    def _add_initializers(self, graph: Any, scope: Scope) -> None:
        for name in getattr(graph, "initializers", {}):
            if name not in scope:
                scope[name] = self._known_tensor(self._program.names.stored(graph, name))

    def _run_nodes(self, graph: Any, scope: Scope, frame: _Frame) -> None:
        last_use = self._program.names.last_uses(graph)
        for node in graph:
            origin = frame.origin or self._program.names.origin(node, frame.caller)
            with replaying(origin):
                results = self._results(node, scope, frame, origin)
            for output, result in zip(node.outputs, results, strict=False):
                if output.name:
                    scope[output.name] = result
                if self._program.dtypes is not None and isinstance(result, torch.Tensor):
                    self._program.dtypes[output] = result.dtype
            for name in last_use.get(node, ()):
                scope.pop(name, None)

    def _results(
        self, node: ir.Node, scope: Scope, frame: _Frame, origin: Mapping[str, Any]
    ) -> Sequence[Operand]:
        inputs = [None if value is None or not value.name else scope[value.name] for value in node.inputs]

        def body(graph: ir.Graph, values: Sequence[Operand]) -> list[Operand]:
            self._body_nodes += 1 + len(graph)
            if self._body_nodes > _MAX_BODY_NODES:
                raise RefusedNode(f"more than {_MAX_BODY_NODES:,} nodes run in bodies of loops up to here")
            inner = scope | {str(place.name): v for place, v in zip(graph.inputs, values, strict=True)}
            self._add_initializers(graph, inner)
            self._run_nodes(graph, inner, frame)
            return [inner[str(value.name)] for value in graph.outputs]

        version = node.version or frame.versions.get(node.domain, frame.versions.get("", 1))
        call = NodeCall(node, version, inputs, body, attributes=frame.attributes, float32=self._float32)
        if is_constant(node):
            return [self._constant(call)]
        try:
            results = self._compute(call, frame, origin)
            check_size(*(value.shape for value in results if isinstance(value, torch.Tensor)))
            return results
        except (Unsupported, RefusedNode) as error:
            raise self._locate(node, error) from error
        except SourceError:  # located by a node in a body
            raise
        except Exception as error:
            if not getattr(error, "__notes__", ()):  # located by a node in a body
                if isinstance(error, MISFITS) and not any(isinstance(value, FakeTensor) for value in inputs):
                    raise self._locate(node, misfit_error(error, inputs)) from error
                error.add_note(self._title(node))  # tracing may fail where the model runs
            raise

    def _compute(self, call: NodeCall, frame: _Frame, origin: Mapping[str, Any]) -> Sequence[Operand]:
        """Compute a node by a function of the model, of this package, or of the standard: the first there is.

        If there is none, ONNX Runtime computes it.
        """
        node = call.node
        function = self._program.file.model.functions.get((node.domain, node.op_type, node.overload))
        if function is not None:
            caller = frame.caller if frame.origin is not None else layer_name(origin)
            inner = _Frame(function.opset_imports, {}, caller, frame.origin, frame.depth + 1)
            return self._run_function(function, call, inner)
        implementation = OPERATORS.get((node.domain, node.op_type))
        why = f"no operator {describe(node.op_type)}"
        if implementation is not None:
            try:
                constants = self._fold(call, implementation, origin)
                return constants if constants is not None else as_list(implementation(call, *call.inputs))
            except Unsupported as error:
                why = str(error.args[0])
        standard = standard_body(call)
        if standard is None:
            return opaque_results(call, why)
        versions = {**frame.versions, **standard.opset_imports}
        return self._run_function(standard, call, _Frame(versions, {}, "", origin, frame.depth + 1))

    def _run_function(self, function: ir.Function, call: NodeCall, frame: _Frame) -> list[Operand]:
        """Run the body of a function in place of a node."""
        if frame.depth > _MAX_FUNCTION_DEPTH:
            raise Unsupported("functions call each other in a circle, or too deeply")
        attributes = {name: a for name, a in function.attributes.items() if a.value is not None}
        for name, attribute in call.node.attributes.items():
            resolved = call.attributes.get(str(attribute.ref_attr_name)) if attribute.is_ref() else attribute
            if resolved is not None:
                attributes[name] = resolved
        values = [*call.inputs, *([None] * len(function.inputs))]
        scope: Scope = {str(p.name): v for p, v in zip(function.inputs, values, strict=False)}
        self._run_nodes(function, scope, replace(frame, attributes=attributes))
        return [scope[str(value.name)] for value in function.outputs]

    def _constant(self, call: NodeCall) -> Known:
        name = self._program.names.stored_constant(call.node)
        if name in self._program.stored and not has_references(call.node):
            return self._known_tensor(name)
        with without_modes():
            real = self._program.file.constant(resolve_references(call))
        return Known(real, partial(as_constant, real), constant=True)

    def _fold(self, call: NodeCall, function: Any, origin: Mapping[str, Any]) -> list[Operand] | None:
        """Fold a node with known inputs to constants outside the trace; ``None`` if it must be traced."""
        inputs, node = call.inputs, call.node
        shapes_only = node.op_type in ("Shape", "Size") and not node.domain
        plain = all(value is None or isinstance(value, Known) for value in inputs)
        if not (plain or shapes_only) or node.op_type in _NEVER_KNOWN:
            return None
        if shapes_only and not plain:
            with without_modes():
                results = as_list(function(call, *inputs))
            return [Known(results[0], partial(as_constant, results[0]))]
        real = NodeCall(node, call.version, inputs, call.run_body, real=True, attributes=call.attributes)
        with without_modes():  # rather than no_grad, which a trace records
            if sum(v.real.numel() for v in inputs if isinstance(v, Known)) > _MAX_KNOWN:
                return None
            results = as_list(function(real, *inputs))
        if not all(isinstance(t, torch.Tensor) and t.numel() <= _MAX_KNOWN for t in results):
            return None
        if all(not t.is_floating_point() for t in results):
            return [Known(t, partial(as_constant, t)) for t in results]
        if any(t.numel() > _MAX_FOLDED_FLOATS for t in results):
            return None

        @cache
        def traced() -> list[torch.Tensor]:
            with replaying(origin):
                return as_list(function(call, *inputs))

        return [Known(t, partial(lambda index: traced()[index], i)) for i, t in enumerate(results)]

    def _locate(self, node: ir.Node, error: AuditError) -> SourceError:
        where = f"{describe_path(self._program.file.path)}: {self._title(node)}"
        return SourceError(describe(f"{where}: {error.args[0]}", MAX_MESSAGE), hint=error.hint)

    def _title(self, node: ir.Node) -> str:
        return node_title(self._program.names.of(node), node.op_type)


def opaque_results(call: NodeCall, why: str) -> list[Operand]:
    """Compute a node with ONNX Runtime, through a torch op named after its operator.

    ``why`` is the reason why no function of this package computes it, for an error.

    Raises:
        Unsupported: ONNX Runtime is not installed, or does not run the node either.
    """
    node = call.node
    if any(isinstance(value, list) for value in call.inputs):
        raise Unsupported(f"{why}, and sequences are not passed to ONNX Runtime")
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
    name = f"{node.domain}_{node.op_type}" if node.domain else node.op_type
    results = _op(re.sub(r"\W", "_", name))(tensors, model)
    iterator = iter(t.to(low) if low is not None and t.dtype == torch.float32 else t for t in results)
    return [next(iterator) if output.name else None for output in node.outputs]


def _model_of(call: NodeCall) -> bytes:
    """Serialize a model that consists of this node."""
    node = ir.serde.serialize_node(resolve_references(call))
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
