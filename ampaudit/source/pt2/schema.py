"""The JSON schema of an exported program (torch/_export/serde/schema.py, version 8).

Expressions, guards and ranges are only checked: a replayed graph computes its sizes from its inputs, so
nothing needs to evaluate them.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

__all__ = [
    "PROGRAM_SCHEMA",
    "STRICT",
    "UNION",
    "Argument",
    "Graph",
    "InputSpec",
    "Integer",
    "Name",
    "Node",
    "OutputSpec",
    "ProgramFile",
    "Signature",
    "check_expression",
]

_MAX_LENGTH = 20_000
_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.Attribute, ast.Subscript, ast.keyword),
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.boolop, ast.operator, ast.unaryop, ast.cmpop),
)
# functions of sympy and of torch.utils._sympy.functions; of Python and math in guards
_FUNCTION = re.compile(
    r"[A-Z][A-Za-z0-9]*|abs|bool|ceil(?:ing)?|float|floor|int|log|max|min|round|sqrt|trunc"
)
_METHODS = frozenset({"dim", "ndim", "numel", "shape", "size", "storage_offset", "stride"})
_NAME = re.compile(r"(?!.*__)[A-Za-z_]\w*", re.ASCII)
STRICT = ConfigDict(strict=True)
# a union is an object with exactly one member
UNION = ConfigDict(strict=True, extra="forbid")

Name = Annotated[str, Field(max_length=4_000)]
Text = Annotated[str, Field(max_length=1_000_000)]
Integer = Annotated[int, Field(ge=-(2**64), le=2**64)]
Number = float | Literal["Infinity", "-Infinity", "NaN"]
Nothing = bool | list[Any]  # ``true``; older versions of torch wrote an empty list


@lru_cache(4096)
def check_expression(text: str) -> str:
    """Check that an expression or guard consists of numbers, sizes, and functions of them.

    Raises:
        ValueError: The expression holds anything else.
    """
    try:
        if len(text) > _MAX_LENGTH:
            raise ValueError
        for node in ast.walk(ast.parse(text, mode="eval")):
            if not isinstance(node, _NODES) or not _is_plain(node):
                raise ValueError
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ValueError("an expression over sizes holds something else") from None
    return text


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return _NAME.fullmatch(node.id) is not None
    if isinstance(node, ast.Attribute):
        return node.attr in _METHODS or _is_function(node)
    if isinstance(node, ast.Call):
        return _is_function(node.func) or (
            isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
        )
    return not isinstance(node, ast.keyword) or isinstance(node.value, ast.Constant)


def _is_function(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        of_math = isinstance(node.value, ast.Name) and node.value.id in ("math", "torch")
        return of_math and _FUNCTION.fullmatch(node.attr.removeprefix("sym_")) is not None
    return isinstance(node, ast.Name) and _FUNCTION.fullmatch(node.id) is not None


Expression = Annotated[str, AfterValidator(check_expression)]


class Named(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    name: Name


class Device(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["cpu", "cuda", "mps", "xpu", "hpu", "meta"]
    index: NotRequired[Annotated[int, Field(ge=0, le=1_000)] | None]


class SymInt(TypedDict, total=False):
    __pydantic_config__ = UNION  # type: ignore[misc]
    as_name: Name
    as_int: Integer


class SymFloat(TypedDict, total=False):
    __pydantic_config__ = UNION  # type: ignore[misc]
    as_name: Name
    as_float: Number


class SymBool(TypedDict, total=False):
    __pydantic_config__ = UNION  # type: ignore[misc]
    as_name: Name
    as_bool: bool


class OptionalTensor(TypedDict, total=False):
    __pydantic_config__ = UNION  # type: ignore[misc]
    as_tensor: Named
    as_none: Nothing


class Complex(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    real: Number
    imag: Number


class SubGraph(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    name: Name
    graph: Graph


class Argument(TypedDict, total=False):
    """An argument of a call, or a value of the graph."""

    __pydantic_config__ = UNION  # type: ignore[misc]
    as_none: Nothing
    as_tensor: Named
    as_tensors: list[Named]
    as_int: Integer
    as_ints: list[Integer]
    as_float: Number
    as_floats: list[Number]
    as_string: Text
    as_strings: list[Text]
    as_sym_int: SymInt
    as_sym_ints: list[SymInt]
    as_scalar_type: Integer
    as_memory_format: Integer
    as_layout: Integer
    as_device: Device
    as_bool: bool
    as_bools: list[bool]
    as_sym_bool: SymBool
    as_sym_bools: list[SymBool]
    as_graph: SubGraph
    as_optional_tensors: list[OptionalTensor]
    as_custom_obj: Any
    as_operator: Name
    as_sym_float: SymFloat
    as_sym_floats: list[SymFloat]
    as_optional_tensor: OptionalTensor
    as_complex: Complex
    as_nested_tensors: list[list[Named]]
    as_int_lists: list[list[Integer]]
    as_float_lists: list[list[Number]]
    as_string_to_argument: dict[Name, Argument]


class NodeInput(TypedDict):
    """A named argument."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    name: Name
    arg: Argument
    kind: NotRequired[Literal[0, 1, 2] | None]


class Node(TypedDict):
    """A call of an operator."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    target: Name
    inputs: list[NodeInput]
    outputs: list[Argument]
    metadata: dict[Name, Text]
    is_hop_single_tensor_return: NotRequired[bool | None]


class SymbolicExpression(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    expr_str: Expression


class SymbolicValue(TypedDict, total=False):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    as_expr: SymbolicExpression


class ValueMeta(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    sizes: list[SymbolicValue]
    strides: list[SymbolicValue]
    storage_offset: SymbolicValue


class Graph(TypedDict):
    """Inputs, calls and outputs."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    inputs: list[Argument]
    outputs: list[Argument]
    nodes: list[Node]
    is_single_tensor_return: NotRequired[bool]
    tensor_values: NotRequired[dict[Name, ValueMeta]]
    sym_int_values: NotRequired[dict[Name, SymbolicValue]]
    sym_float_values: NotRequired[dict[Name, SymbolicValue]]
    sym_bool_values: NotRequired[dict[Name, SymbolicValue]]


class ParameterSpec(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    arg: Named
    parameter_name: Name


class BufferSpec(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    arg: Named
    buffer_name: Name
    persistent: NotRequired[bool]


class ConstantSpec(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    arg: Named
    tensor_constant_name: Name


class InputMutation(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    arg: Named
    user_input_name: Name


class InputSpec(TypedDict, total=False):
    """The kind of an input of the graph: the user's, or a stored tensor."""

    __pydantic_config__ = UNION  # type: ignore[misc]
    user_input: Any
    constant_input: Any
    parameter: ParameterSpec
    buffer: BufferSpec
    tensor_constant: ConstantSpec
    custom_obj: Any
    token: Any


class OutputSpec(TypedDict, total=False):
    """The kind of an output of the graph: the program's, or a write to a stored tensor or input."""

    __pydantic_config__ = UNION  # type: ignore[misc]
    user_output: Any
    buffer_mutation: BufferSpec
    parameter_mutation: ParameterSpec
    user_input_mutation: InputMutation
    loss_output: Any
    gradient_to_parameter: Any
    gradient_to_user_input: Any
    token: Any


class Signature(TypedDict):
    """The kinds of the graph's inputs and outputs."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    input_specs: list[InputSpec]
    output_specs: list[OutputSpec]


class CallSignature(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    in_spec: Text
    out_spec: Text


class CallEntry(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    fqn: Name
    signature: NotRequired[CallSignature | None]


class FieldNames(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    field_names: list[Name]


class GraphModule(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    graph: Graph
    signature: Signature
    module_call_graph: list[CallEntry]
    treespec_namedtuple_fields: NotRequired[dict[Name, FieldNames]]


class Version(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    major: Integer
    minor: Integer


class ProgramFile(TypedDict):
    """A whole program without its weights."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    graph_module: GraphModule
    schema_version: Version
    range_constraints: NotRequired[dict[Expression, Any]]
    guards_code: NotRequired[list[Expression]]


PROGRAM_SCHEMA = TypeAdapter(ProgramFile)
