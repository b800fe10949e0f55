"""The JSON schema of an exported program (torch/_export/serde/schema.py, version 8).

Expressions, guards and ranges are checked but never evaluated: a replayed graph computes its sizes from its
inputs.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

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


class Strict(TypedDict):
    """A strictly typed object."""

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]


class Union(TypedDict):
    """An object with exactly one member."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]


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


class Named(Strict):
    name: Name


class Device(Strict):
    type: Literal["cpu", "cuda", "mps", "xpu", "hpu", "meta"]
    index: NotRequired[Annotated[int, Field(ge=0, le=1_000)] | None]


class SymInt(Union, total=False):
    as_name: Name
    as_int: Integer


class SymFloat(Union, total=False):
    as_name: Name
    as_float: Number


class SymBool(Union, total=False):
    as_name: Name
    as_bool: bool


class OptionalTensor(Union, total=False):
    as_tensor: Named
    as_none: Nothing


class Complex(Strict):
    real: Number
    imag: Number


class SubGraph(Strict):
    name: Name
    graph: Graph


class Argument(Union, total=False):
    """An argument of a call, or a value of the graph."""

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


class NodeInput(Strict):
    """A named argument."""

    name: Name
    arg: Argument
    kind: NotRequired[Literal[0, 1, 2] | None]


class Node(Strict):
    """A call of an operator."""

    target: Name
    inputs: list[NodeInput]
    outputs: list[Argument]
    metadata: dict[Name, Text]
    is_hop_single_tensor_return: NotRequired[bool | None]


class SymbolicExpression(Strict):
    expr_str: Expression


class SymbolicValue(Strict, total=False):
    as_expr: SymbolicExpression


class ValueMeta(Strict):
    sizes: list[SymbolicValue]
    strides: list[SymbolicValue]
    storage_offset: SymbolicValue


class Graph(Strict):
    """Inputs, calls and outputs."""

    inputs: list[Argument]
    outputs: list[Argument]
    nodes: list[Node]
    is_single_tensor_return: NotRequired[bool]
    tensor_values: NotRequired[dict[Name, ValueMeta]]
    sym_int_values: NotRequired[dict[Name, SymbolicValue]]
    sym_float_values: NotRequired[dict[Name, SymbolicValue]]
    sym_bool_values: NotRequired[dict[Name, SymbolicValue]]


class ParameterSpec(Strict):
    arg: Named
    parameter_name: Name


class BufferSpec(Strict):
    arg: Named
    buffer_name: Name
    persistent: NotRequired[bool]


class ConstantSpec(Strict):
    arg: Named
    tensor_constant_name: Name


class InputMutation(Strict):
    arg: Named
    user_input_name: Name


class InputSpec(Union, total=False):
    """The kind of a graph input: the user's, or a stored tensor."""

    user_input: Any
    constant_input: Any
    parameter: ParameterSpec
    buffer: BufferSpec
    tensor_constant: ConstantSpec
    custom_obj: Any
    token: Any


class OutputSpec(Union, total=False):
    """The kind of a graph output: the user's, or the new value of a mutated tensor."""

    user_output: Any
    buffer_mutation: BufferSpec
    parameter_mutation: ParameterSpec
    user_input_mutation: InputMutation
    loss_output: Any
    gradient_to_parameter: Any
    gradient_to_user_input: Any
    token: Any


class Signature(Strict):
    """The kinds of the graph's inputs and outputs."""

    input_specs: list[InputSpec]
    output_specs: list[OutputSpec]


class CallSignature(Strict):
    in_spec: Text
    out_spec: Text


class CallEntry(Strict):
    fqn: Name
    signature: NotRequired[CallSignature | None]


class FieldNames(Strict):
    field_names: list[Name]


class GraphModule(Strict):
    graph: Graph
    signature: Signature
    module_call_graph: list[CallEntry]
    treespec_namedtuple_fields: NotRequired[dict[Name, FieldNames]]


class Version(Strict):
    major: Integer
    minor: Integer


class ProgramFile(Strict):
    """The JSON file of a program; its weights are in other files."""

    graph_module: GraphModule
    schema_version: Version
    range_constraints: NotRequired[dict[Expression, Any]]
    guards_code: NotRequired[list[Expression]]


PROGRAM_SCHEMA = TypeAdapter(ProgramFile)
