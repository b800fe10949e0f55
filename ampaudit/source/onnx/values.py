"""Values of an ONNX graph while it runs, and the call of one node."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ampaudit.core.errors import SourceError, first_line
from ampaudit.core.untrusted import describe
from ampaudit.source.onnx.files import torch_dtype_of
from ampaudit.trace.internals import without_modes

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "FLOATS",
    "MISFITS",
    "Known",
    "NodeCall",
    "Operand",
    "RefusedNode",
    "Unsupported",
    "as_list",
    "check_size",
    "copied",
    "onnx_type_of",
    "operand_tensors",
    "refers",
    "standard_body",
    "unfit",
    "with_values",
]


MAX_ELEMENTS = 1 << 33  # of a result; 32 GiB in float32
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# what functions of torch raise for inputs that do not fit
MISFITS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError)


class Unsupported(SourceError):
    """A node that no function here computes."""

    default_hint = (
        "docs/onnx-operators.md lists what runs: export other operators, or scan a part of the model"
    )


class RefusedNode(SourceError):
    """A node that is not computed by any other means either."""

    default_hint = "correct the node, or cut it out of the model"


@dataclass(slots=True, eq=False)
class Known:
    """A tensor whose values do not depend on the inputs: a constant, or what follows from shapes.

    Attributes:
        real: its values.
        make: returns it as an operand of ops that may be traced.
        constant: whether it is stored in the file, and not computed.
    """

    real: torch.Tensor
    make: Callable[[], torch.Tensor]
    constant: bool = False
    _operand: torch.Tensor | None = None

    def items(self) -> list[Any]:
        """Return its values as Python numbers, in order, also while a trace is made."""
        with without_modes():
            values: list[Any] = self.real.reshape(-1).tolist()
            return values

    def tensor(self) -> torch.Tensor:
        """Return it as an operand."""
        if self._operand is None:
            self._operand = self.make()
        return self._operand


Operand = torch.Tensor | Known | list[Any] | None
RunBody = Callable[["ir.Graph", Sequence[Operand]], list[Operand]]


@dataclass(slots=True)
class NodeCall:
    """One call of a node: its attributes, and ways to read its inputs.

    Attributes:
        node: of the graph.
        version: of the operator set that it belongs to.
        inputs: its inputs; ``None`` for one that is left out.
        run_body: runs a graph in an attribute on inputs.
        real: whether all inputs are known, and it is computed on their real values.
        attributes: those of the function that it is in, for references to them.
        float32: what float32 is under the policy: 16 bits, if the model's weights are stored so.
    """

    node: ir.Node
    version: int
    inputs: list[Operand]
    run_body: RunBody
    real: bool = False
    attributes: Mapping[str, ir.Attr] = field(default_factory=dict)
    float32: torch.dtype = torch.float32

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute, or its default."""
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return default
        if attribute.ref_attr_name is not None:
            attribute = self.attributes.get(attribute.ref_attr_name)
        return default if attribute is None else attribute.value

    def tensor(self, value: Operand) -> torch.Tensor:
        """Return an input as a tensor."""
        if isinstance(value, Known):
            return value.real if self.real else value.tensor()
        if not isinstance(value, torch.Tensor):
            raise self.fault("an input is missing" if value is None else "an input is a sequence")
        return value

    def operand(self, value: Operand, beside: Operand) -> Any:
        """Return an input of an elementwise op: a stored single number as a Python number.

        Ops on numbers are what a model's own code would call; a number that has more axes than the tensor
        beside it stays a tensor, since the result has them, too.
        """
        if self.real or not isinstance(value, Known) or not value.constant or isinstance(beside, Known):
            return self.tensor(value)
        real, other = value.real, self.tensor(beside)
        if real.numel() != 1 or real.ndim > other.ndim or not _alike(real.dtype, other.dtype):
            return self.tensor(value)
        return value.items()[0]

    def ints(self, value: Operand) -> list[int]:
        """Return the integers of an input; of one that depends on inputs, those of the given inputs."""
        if isinstance(value, Known):
            return [int(item) for item in value.items()]
        return [int(item) for item in self.tensor(value).reshape(-1).tolist()]

    def floats(self, value: Operand) -> list[float]:
        """Return the numbers of an input."""
        items = value.items() if isinstance(value, Known) else self.tensor(value).reshape(-1).tolist()
        return [float(item) for item in items]

    def torch_dtype(self, kind: ir.DataType) -> torch.dtype:
        """Return the dtype of torch for a type of the node; others do not have those of few bits either."""
        dtype = torch_dtype_of(kind)
        if dtype is torch.float32 and not self.real:
            return self.float32
        if dtype is None:
            raise RefusedNode(f"torch has no type {kind.name}", hint="use a type of eight bits or more")
        return dtype

    def refuse_few_bits(self, index: int) -> None:
        """Refuse an input of a type of fewer than eight bits where a result would have that type."""
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        producer = None if value is None else value.producer()
        stored = None if value is None else value.const_value
        if producer is not None and "value" in producer.attributes:
            stored = producer.attributes["value"].value
        if stored is not None:
            self.torch_dtype(stored.dtype)

    def number(self, value: Operand) -> Any:
        """Return the one number of an input."""
        if isinstance(value, Known):
            (item,) = value.items()
            return item
        return self.tensor(value).reshape(()).item()

    def optional(self, index: int) -> Operand:
        """Return an input; ``None`` if it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def is_read(self, index: int) -> bool:
        """Return whether anything reads an output."""
        outputs = self.node.outputs
        return index < len(outputs) and bool(
            outputs[index].name and (outputs[index].uses() or outputs[index].is_graph_output())
        )

    def fault(self, what: str) -> Unsupported:
        """Return the error for a node that cannot be computed here."""
        return Unsupported(what)


def check_size(*shapes: Sequence[int]) -> None:
    """Refuse tensors that no memory holds."""
    elements = max((math.prod(max(size, 0) for size in shape) for shape in shapes), default=0)
    if elements > MAX_ELEMENTS:
        raise RefusedNode(f"its result has {elements:,} elements; {MAX_ELEMENTS:,} may be")


def as_list(value: Any) -> list[Any]:
    """Return the results of a function, which may be one."""
    return list(value) if isinstance(value, tuple) else [value]


def operand_tensors(value: Any) -> Any:
    """Return a value of a graph with tensors in place of known ones."""
    if isinstance(value, list):
        return [operand_tensors(item) for item in value]
    return value.tensor() if isinstance(value, Known) else value


def _alike(one: torch.dtype, other: torch.dtype) -> bool:
    """Return whether two types are one in the file; under a policy, floats differ."""
    return one == other or (one in FLOATS and other in FLOATS)


def unfit(error: Exception, inputs: Sequence[Operand]) -> SourceError:
    """Return the error for a node whose function fails on its inputs."""
    operands = ", ".join(map(_in_words, inputs)) or "none"
    what = f"{describe(first_line(error), 120)} (its inputs: {describe(operands)})"
    return SourceError(what, hint="correct the model, or pass --inputs that fit it")


def _in_words(value: Operand) -> str:
    if value is None or isinstance(value, list):
        return "none" if value is None else "a sequence"
    tensor = value.real if isinstance(value, Known) else value
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def copied(value: torch.Tensor) -> torch.Tensor:
    """Return a known tensor as a constant of the trace."""
    with without_modes():
        items = value.tolist()
    return torch.tensor(items, dtype=value.dtype).reshape(value.shape)


def refers(node: ir.Node) -> bool:
    """Return whether a constant's value is an attribute of the function that it is in."""
    return any(attribute.is_ref() for attribute in node.attributes.values())


def with_values(call: NodeCall) -> ir.Node:
    """Return a copy of a node whose attributes have the values that the calling function gives them."""
    import onnx_ir as ir

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
    """Return the body that the standard gives for a node with its attributes and types of inputs.

    ``None`` if the standard has none.
    """
    import onnx
    import onnx_ir as ir

    try:
        schema: Any = onnx.defs.get_schema(call.node.op_type, call.version, call.node.domain)
    except onnx.defs.SchemaError:
        return None
    proto = onnx.FunctionProto()
    if schema.has_function:
        versions = [version for version in schema.function_opset_versions if version <= call.version]
        data = schema.get_function_with_opset_version(max(versions, default=schema.since_version))
    elif schema.has_context_dependent_function:
        node = ir.serde.serialize_node(with_values(call)).SerializeToString()
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
    for name in set(proto.output) - computed:  # left out of this body, since nothing reads it
        proto.node.append(onnx.helper.make_node("Constant", [], [name], value_int=0))
    function = ir.serde.deserialize_function(proto)
    for name in schema.attributes:
        default = schema.attributes[name].default_value
        if default.name and name not in call.node.attributes:
            function.attributes[name] = ir.serde.deserialize_attribute(default)
    return function


def onnx_type_of(value: Operand) -> Any:
    """Return the ONNX type of a value."""
    import onnx
    import onnx_ir as ir

    if value is None:
        return onnx.TypeProto()
    if isinstance(value, list):
        return onnx.helper.make_sequence_type_proto(onnx_type_of(value[0]) if value else onnx.TypeProto())
    tensor = value.real if isinstance(value, Known) else value
    assert isinstance(tensor, torch.Tensor)
    kind = next(kind for kind in ir.DataType if torch_dtype_of(kind) == tensor.dtype)
    return onnx.helper.make_tensor_type_proto(kind.value, list(tensor.shape))
