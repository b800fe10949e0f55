"""Values of a running ONNX graph, and the call of a node."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import onnx
import onnx_ir as ir
import torch

from ampaudit.core.errors import SourceError, first_line
from ampaudit.core.untrusted import describe
from ampaudit.source.onnx.checks import schema_of
from ampaudit.source.onnx.files import torch_dtype_of
from ampaudit.trace.internals import without_modes
from ampaudit.trace.values import dtype_name

Operator = Callable[..., Any]
OPERATORS: dict[tuple[str, str], Operator] = {}
MAX_ELEMENTS = 1 << 33  # elements of a result; 32 GiB in float32
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# exceptions that torch raises for inputs that do not fit
MISFITS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError)


class Unsupported(SourceError):
    """Raised for a node that no function of this package computes; another way may."""

    default_hint = (
        "docs/onnx-operators.md lists what runs: export other operators, or scan a part of the model"
    )


class RefusedNode(SourceError):
    """Raised for a node that cannot be computed by any means."""

    default_hint = "correct the node, or cut it out of the model"


@dataclass(slots=True, eq=False)
class Known:
    """A tensor whose values do not depend on the inputs: a constant, or computed from shapes."""

    real: torch.Tensor
    make: Callable[[], torch.Tensor]  # returns it as an operand of traced ops
    constant: bool = False  # stored in the file rather than computed
    _operand: torch.Tensor | None = None

    def items(self) -> list[Any]:
        """Return the values as Python numbers, without tracing the access."""
        with without_modes():
            values: list[Any] = self.real.reshape(-1).tolist()
            return values

    def tensor(self) -> torch.Tensor:
        """Return the tensor as an operand of traced ops."""
        if self._operand is None:
            self._operand = self.make()
        return self._operand


Operand = torch.Tensor | Known | list[Any] | None
RunBody = Callable[[ir.Graph, Sequence[Operand]], list[Operand]]


@dataclass(slots=True)
class NodeCall:
    """A call of a node, with access to its attributes and inputs."""

    node: ir.Node
    version: int  # of the node's operator set
    inputs: list[Operand]  # None for an omitted one
    run_body: RunBody  # runs a graph attribute on inputs
    real: bool = False  # all inputs are known, and the node is computed on their values
    attributes: Mapping[str, ir.Attr] = field(default_factory=dict)  # of the enclosing function
    # stands for float32: a 16-bit dtype if the model's weights are stored in it
    float32: torch.dtype = torch.float32

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute, with a list for several values, or the default."""
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return default
        if attribute.ref_attr_name is not None:
            attribute = self.attributes.get(attribute.ref_attr_name)
        value = default if attribute is None else attribute.value
        if isinstance(value, bytes):  # not UTF-8
            return value.decode()
        return list(value) if isinstance(value, tuple) else value

    def tensor(self, value: Operand) -> torch.Tensor:
        """Return an input as a tensor."""
        if isinstance(value, Known):
            return value.real if self.real else value.tensor()
        if not isinstance(value, torch.Tensor):
            raise Unsupported("an input is missing" if value is None else "an input is a sequence")
        return value

    def operand(self, value: Operand, beside: Operand) -> Any:
        """Return an input of an elementwise op; a stored single number becomes a Python number.

        The code of the model that was exported had such numbers. A number stays a tensor if it has more axes
        than the other operand, since the result has these axes, or if a policy stores it in 16 bits, since it
        has to be rounded.
        """
        if self.real or not isinstance(value, Known) or not value.constant or isinstance(beside, Known):
            return self.tensor(value)
        real, other = value.real, self.tensor(beside)
        if real.numel() != 1 or real.ndim > other.ndim or not _alike(real.dtype, other.dtype):
            return self.tensor(value)
        if real.dtype is torch.float32 is not self.float32:
            return self.tensor(value)
        return value.items()[0]

    def ints(self, value: Operand) -> list[int]:
        """Return the integers of an input; a traced input is read, which fixes its values in the trace."""
        return [int(item) for item in self._items(value)]

    def floats(self, value: Operand) -> list[float]:
        """Return the numbers of an input."""
        return [float(item) for item in self._items(value)]

    def _items(self, value: Operand) -> list[Any]:
        return value.items() if isinstance(value, Known) else self.tensor(value).reshape(-1).tolist()

    def torch_dtype(self, kind: ir.DataType) -> torch.dtype:
        """Return the torch dtype for an ONNX type.

        Raises:
            RefusedNode: Torch has no such type.
        """
        dtype = torch_dtype_of(kind)
        if dtype is torch.float32 and not self.real:
            return self.float32
        if dtype is None:
            raise RefusedNode(f"torch has no type {kind.name}", hint="use a type of eight bits or more")
        return dtype

    def reject_sub_byte_type(self, index: int) -> None:
        """Reject an input that is a constant of less than eight bits, whose type the result would have."""
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        producer = None if value is None else value.producer()
        stored = None if value is None else value.const_value
        if producer is not None and "value" in producer.attributes:
            stored = producer.attributes["value"].value
        if stored is not None:
            self.torch_dtype(stored.dtype)

    def number(self, value: Operand) -> Any:
        """Return the single number of an input."""
        if isinstance(value, Known):
            (item,) = value.items()
            return item
        return self.tensor(value).reshape(()).item()

    def is_read(self, index: int) -> bool:
        """Return whether an output is used."""
        outputs = self.node.outputs
        return index < len(outputs) and bool(
            outputs[index].name and (outputs[index].uses() or outputs[index].is_graph_output())
        )


def check_size(*shapes: Sequence[int]) -> None:
    """Reject absurdly large tensors."""
    elements = max((math.prod(max(size, 0) for size in shape) for shape in shapes), default=0)
    if elements > MAX_ELEMENTS:
        raise RefusedNode(f"its result has {elements:,} elements; at most {MAX_ELEMENTS:,} are allowed")


def as_list(value: Any) -> list[Any]:
    """Return the results of a function as a list."""
    return list(value) if isinstance(value, tuple) else [value]


def operand_tensors(value: Any) -> Any:
    """Replace known values by tensors, including those in sequences."""
    if isinstance(value, list):
        return [operand_tensors(item) for item in value]
    return value.tensor() if isinstance(value, Known) else value


def _alike(one: torch.dtype, other: torch.dtype) -> bool:
    """Return whether two dtypes may be the same type in the file, since a policy changes that of floats."""
    return one == other or (one in FLOATS and other in FLOATS)


def misfit_error(error: Exception, inputs: Sequence[Operand]) -> SourceError:
    """Return the error for a node whose inputs do not fit its operator."""
    operands = ", ".join(map(_in_words, inputs)) or "none"
    what = f"{describe(first_line(error), 120)} (its inputs: {describe(operands)})"
    return SourceError(what, hint="correct the model, or pass --inputs that fit it")


def _in_words(value: Operand) -> str:
    if value is None or isinstance(value, list):
        return "none" if value is None else "a sequence"
    tensor = value.real if isinstance(value, Known) else value
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def as_constant(value: torch.Tensor) -> torch.Tensor:
    """Recreate a known tensor as a constant of the trace."""
    with without_modes():
        items = value.tolist()
    return torch.tensor(items, dtype=value.dtype).reshape(value.shape)


def has_references(node: ir.Node) -> bool:
    """Return whether a node has an attribute that refers to one of the enclosing function."""
    return any(attribute.is_ref() for attribute in node.attributes.values())


def resolve_references(call: NodeCall) -> ir.Node:
    """Copy a node with references to the function's attributes resolved."""
    node = call.node
    attributes = []
    for name, attribute in node.attributes.items():
        source: Any = call.attributes.get(str(attribute.ref_attr_name)) if attribute.is_ref() else attribute
        if source is not None:
            attributes.append(ir.Attr(name, source.type, source.value))
    inputs = [None if v is None else ir.Value(name=f"i{i}") for i, v in enumerate(call.inputs)]
    outputs = [ir.Value(name=f"o{i}" if output.name else "") for i, output in enumerate(node.outputs)]
    return ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs, name=node.name)


def standard_body(call: NodeCall) -> ir.Function | None:
    """Return the function by which the ONNX standard defines a node's operator; ``None`` if it does not.

    It may depend on the node's attributes and input types.
    """
    schema = schema_of(call.node.domain, call.node.op_type, call.version)
    proto = onnx.FunctionProto()
    if schema is None:
        return None
    if schema.has_function:
        versions = [version for version in schema.function_opset_versions if version <= call.version]
        data = schema.get_function_with_opset_version(max(versions, default=schema.since_version))
    elif schema.has_context_dependent_function:
        node = ir.serde.serialize_node(resolve_references(call)).SerializeToString()
        supported = schema.context_dependent_function_opset_versions
        version = max((v for v in supported if v <= call.version), default=schema.since_version)
        types = [onnx_type_of(value).SerializeToString() for value in call.inputs]
        data = schema.get_context_dependent_function_with_opset_version(version, node, types)
    else:
        return None
    if not data:
        return None
    proto.ParseFromString(data)
    computed = {name for node in proto.node for name in node.output} | set(proto.input)
    for name in set(proto.output) - computed:  # the standard omits nodes for outputs that nothing reads
        proto.node.append(onnx.helper.make_node("Constant", [], [name], value_int=0))
    function = ir.serde.deserialize_function(proto)
    for name in schema.attributes:
        default = schema.attributes[name].default_value
        if default.name and name not in call.node.attributes:
            function.attributes[name] = ir.serde.deserialize_attribute(default)
    return function


def onnx_type_of(value: Operand) -> Any:
    """Return the ONNX type of a value."""
    if value is None:
        return onnx.TypeProto()
    if isinstance(value, list):
        return onnx.helper.make_sequence_type_proto(onnx_type_of(value[0]) if value else onnx.TypeProto())
    tensor = value.real if isinstance(value, Known) else value
    assert isinstance(tensor, torch.Tensor)
    kind = next(kind for kind in ir.DataType if torch_dtype_of(kind) == tensor.dtype)
    return onnx.helper.make_tensor_type_proto(kind.value, list(tensor.shape))


def operator(*names: str, domain: str = "") -> Callable[[Operator], Operator]:
    """Register a function of a ``NodeCall`` and its inputs for operators of these names.

    Inputs become tensors where a parameter is annotated as ``Tensor`` or ``Tensor | None``.
    """

    def register(function: Operator) -> Operator:
        kinds = [parameter.annotation for parameter in inspect.signature(function).parameters.values()]

        @functools.wraps(function)
        def with_tensors(call: NodeCall, *inputs: Operand) -> Any:
            pairs = zip_longest(inputs, kinds[1 : len(inputs) + 1], fillvalue=kinds[-1])
            return function(
                call,
                *(
                    call.tensor(value)
                    if kind == "Tensor" or (value is not None and "Tensor" in kind)
                    else value
                    for value, kind in pairs
                ),
            )

        for name in names:
            assert (domain, name) not in OPERATORS, name
            OPERATORS[domain, name] = with_tensors
        return function

    return register
