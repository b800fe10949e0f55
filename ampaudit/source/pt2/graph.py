"""Builds the graph of an exported program from its JSON, as torch's deserializer does, without code."""

from __future__ import annotations

import functools
import keyword
import math
import operator
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from torch import fx, nn
from torch._functorch import predispatch
from torch._ops import HigherOrderOperator, OpOverload

from ampaudit.checkpoint.archive import Archive
from ampaudit.checkpoint.pickled import flat_tensor, misfit
from ampaudit.checkpoint.safetensors import MAX_DIMENSIONS
from ampaudit.core.errors import SourceError
from ampaudit.core.untrusted import MAX_TABLE, describe, parse_json, validate
from ampaudit.source.pt2.schema import (
    Argument,
    Graph,
    InputSpec,
    Integer,
    Name,
    Node,
    NodeInput,
    OutputSpec,
    Strict,
    Union,
)

# numbered as in torch/_export/serde/schema.py
_FROM_1 = "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16"
_FROM_28 = "uint16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint32 uint64"
SERIALIZED_DTYPES: Mapping[int, torch.dtype] = {
    number: getattr(torch, name)
    for first, names in ((1, _FROM_1), (28, _FROM_28))
    for number, name in enumerate(names.split(), first)
}
Size = Annotated[int, Field(ge=0, le=2**62)]
_OVERLOAD = re.compile(r"torch\.ops\.(aten|prims)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)", re.ASCII)
_REGISTERED = re.compile(r"torch\.ops(\.[A-Za-z_]\w*){3}", re.ASCII)
_HIGHER_ORDER = re.compile(r"torch\.ops\.higher_order\.([a-z_]+)", re.ASCII)
_FUNCTION = re.compile(r"(_operator|math|torch|torch\._functorch\.predispatch)\.(\w+)", re.ASCII)
# operators that write files, print, change the process, or trust their sizes, indices and pointers
_FORBIDDEN = re.compile(
    r"from_file|_foreach_copy|save|print|manual_seed|backward|set_data|make_dual|pin_memory|\w*_unsafe|to_padded_tensor"
    r"|(sparse|to_sparse|fbgemm|quantized|cudnn|miopen|mps)(_\w+)?|\w+_mps|sspaddmm|hspmm|\w*_?jvp"
)
# private and backward operators, and those of them that exported programs contain
_INTERNAL = re.compile(r"_(?!_\w+__$)\w+|\w+_backward\w*")
_KNOWN_INTERNAL = re.compile(
    r"(?!.*backward)(_adaptive_avg_pool[23]d|_add_relu|_addmm_activation|_aminmax|_assert_\w+|_autocast_\w+|_cast_\w+"
    r"|_cdist_forward|_conj(_copy|_physical)?|_convolution(_mode)?|_ctc_loss|_dim_arange|_efficientzerotensor"
    r"|_efficient_attention_forward|_embedding_bag(_forward_only)?|_euclidean_dist|_fake_quantize_\w+"
    r"|_fft_(c2c|c2r|r2c)|_flash_attention_forward|_foreach_\w+|_functional_\w+|_fused_moving_avg_obs_\w+"
    r"|_fused_rms_norm|_grouped_mm|_int_mm|_is_a(ll|ny)_true|_linalg_\w+|_local_scalar_dense|_log_softmax"
    r"|_logcumsumexp|_lu_with_info|_native_batch_norm_legit\w*|_native_multi_head_attention|_neg_view(_copy)?"
    r"|_pack_padded_sequence|_pad_(circular|enum|packed_sequence)|_pdist_forward|_prelu_kernel|_reshape_copy"
    r"|_safe_softmax|_sample_dirichlet|_scaled_dot_product_\w+|_scaled_(grouped_)?mm(_v2)?|_shape_as_tensor"
    r"|_softmax|_standard_gamma|_thnn_fused_(gru|lstm)_cell|_to_copy|_to_cpu|_transformer_encoder_layer_fwd"
    r"|_trilinear|_unique2?|_unsafe_\w+|_upsample_\w+|_weight_int[48]pack_mm\w*|_weight_norm(_interface)?)"
    r"|(convolution|diagonal|elu|gelu|glu|hardsigmoid|hardswish|hardtanh|leaky_relu|log_sigmoid|logit|mish"
    r"|native_dropout|select|sigmoid|silu|slice|softplus|tanh|threshold|native_layer_norm)_backward"
    r"|_(log_)?softmax_backward_data"
)
# argument types that operators must not have
_RAW = re.compile(r"Storage|Stream|__torch__|Any|Dict|Future")
# without while_loop, which may not end
_HIGHER_ORDER_NAMES = frozenset(
    "associative_scan autograd_function_apply cond flex_attention invoke_subgraph map_impl out_dtype scan "
    "strict_mode tag_activation_checkpoint wrap_with_autocast wrap_with_set_grad_enabled".split()
)
_OPERATOR = frozenset(
    "add and_ eq floordiv ge getitem gt le lshift lt mod mul ne neg not_ or_ pos pow rshift "
    "sub truediv".split()
)
_MATH = frozenset("acos asin atan ceil cos cosh exp floor log log2 sin sinh sqrt tan tanh trunc".split())
_TORCH = frozenset(
    "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt _sym_sqrt _sym_log2 _sym_cos _sym_sin "
    "sym_sum _sym_exp".split()
)
_VMAP = frozenset(
    "lazy_load_decompositions _add_batch_dim _remove_batch_dim _vmap_increment_nesting "
    "_vmap_decrement_nesting".split()
)
_GROWING = frozenset({"add", "lshift", "mod", "mul", "pow", "sub"})  # their integers may have any size
_BITS = 64
_MEMORY_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}
_STRIDED = 7
_SETTINGS: Mapping[str, Mapping[int, Any]] = {
    "as_scalar_type": SERIALIZED_DTYPES,
    "as_memory_format": _MEMORY_FORMATS,
    "as_layout": {_STRIDED: torch.strided},
}
_ATTRIBUTE = re.compile(r"""(?!__)[^"\\]{1,500}""")
# attributes that weights must not replace
_MODULE_NAMES = frozenset(dir(nn.Module()))
_GRAPH_NAMES = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))
POSITIONAL, _KEYWORD = 1, 2
SYMBOLS = ("as_sym_int", "as_sym_float", "as_sym_bool")
LISTS = {
    "as_tensors": "as_tensor",
    "as_sym_ints": "as_sym_int",
    "as_sym_floats": "as_sym_float",
    "as_sym_bools": "as_sym_bool",
    "as_optional_tensors": "",
}
_PLAIN = ("as_int", "as_ints", "as_bool", "as_bools", "as_string", "as_strings")
_NUMBERS = ("as_float", "as_floats", "as_float_lists")
_MAX_NODES = 100_000  # of all graphs
_CONSTANT_INPUTS = ("as_none", "as_int", "as_float", "as_bool", "as_string")


def build_graph(
    root: nn.Module, graph: Graph, inputs: Sequence[InputSpec], outputs: Sequence[OutputSpec]
) -> fx.GraphModule:
    """Build a module that takes the user's inputs and reads the weights from its attributes.

    The root holds the weights under their names. They are inputs of the graph in the file.

    Raises:
        ValueError: The graph uses a missing value or a forbidden operator, or is otherwise invalid.
    """
    builder = _Builder(root, count())
    if len(graph["inputs"]) != len(inputs) or len(graph["outputs"]) != len(outputs):
        raise ValueError("its graph and its signature differ in the number of inputs or outputs")
    targets: dict[tuple[str, str], fx.Node] = {}
    for argument, spec in zip(graph["inputs"], inputs, strict=True):
        key = weight_of(spec)
        node = builder.placeholder(argument) if key is None else builder.weight(argument, key[1])
        targets[key or ("user_input", node.name)] = node
    builder.add_nodes(graph["nodes"])
    results = [builder.output(argument) for argument in graph["outputs"]]
    builder.graph.output(_write_mutations(builder, results, outputs, targets))
    return fx.GraphModule(builder.root, builder.graph)


def weight_of(spec: InputSpec) -> tuple[str, str] | None:
    """Return the kind and name of the stored tensor of a graph input; ``None`` for an input of the user.

    Raises:
        ValueError: The input is an object that only code could create.
    """
    kind, value = only(spec, "input")
    if kind in ("user_input", "constant_input"):
        return None
    if kind not in ("parameter", "buffer", "tensor_constant"):
        raise ValueError(f"it takes a {kind}")
    return kind, attribute_path(str(value[f"{kind}_name"]))


def _write_mutations(
    builder: _Builder,
    results: Sequence[Any],
    specs: Sequence[OutputSpec],
    targets: Mapping[tuple[str, str], fx.Node],
) -> tuple[Any, ...]:
    """Write the mutated buffers, parameters and inputs back, and return the outputs of the user."""
    copies: dict[fx.Node, fx.Node] = {}
    returned = []
    for value, spec in zip(results, specs, strict=True):
        kind, item = only(spec, "output")
        if kind == "user_output":
            returned.append(value)
            continue
        mutated = kind.removesuffix("_mutation")
        if mutated not in ("buffer", "parameter", "user_input") or not isinstance(value, fx.Node):
            raise ValueError(f"it has an output of the kind {kind}")
        name = str(item[f"{mutated}_name"])
        target = builder.values.get(name) if mutated == "user_input" else None
        target = target or targets.get((mutated, name))
        if target is None:
            raise ValueError(f"it writes to {describe(name)!r}, which does not exist")
        copies[value] = builder.graph.call_function(torch.ops.aten.copy_.default, (target, value))
    return tuple(copies.get(value, value) if isinstance(value, fx.Node) else value for value in returned)


class _Builder:
    """Builds a graph; ``values`` are its nodes by their names in the file."""

    def __init__(self, root: nn.Module, nodes: Iterator[int]) -> None:
        self.root = root
        self._nodes = nodes  # counts the nodes of all graphs
        self.graph = fx.Graph()
        self.values: dict[str, fx.Node] = {}
        self._inner_graphs: dict[str, Graph] = {}

    def placeholder(self, argument: Argument) -> fx.Node:
        kind, value = only(argument, "input")
        if kind in _CONSTANT_INPUTS:
            return self._create("placeholder", f"constant_{len(self.graph.nodes)}")
        name = value.get("as_name") if kind in SYMBOLS else value["name"] if kind == "as_tensor" else None
        if name is None:
            raise ValueError(f"it takes an input of the kind {kind}")
        return self._register(self._create("placeholder", identifier(name)), name)

    def weight(self, argument: Argument, path: str) -> fx.Node:
        kind, value = only(argument, "input")
        if kind != "as_tensor":
            raise ValueError(f"the weight {describe(path)!r} is not a tensor")
        node = self._create("get_attr", path, name=identifier(path.replace(".", "_")))
        return self._register(node, value["name"])

    def add_nodes(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            target = operator_named(node["target"])
            args, kwargs = self._arguments(target, node["inputs"])
            results = [result_names(*only(item, "output")) for item in node["outputs"]]
            single = results[0] if len(results) == 1 else None
            name = identifier(single) if isinstance(single, str) else None
            call = self._create("call_function", target, args, kwargs, name)
            call.meta = layers_and_line(node["metadata"])
            for value in (*args, *kwargs.values()):
                if isinstance(value, fx.Node) and value.op == "get_attr" and not value.meta:
                    value.meta = dict(call.meta)  # inner graphs have no metadata of their own
            in_tuple = node.get("is_hop_single_tensor_return") is False
            if len(results) != 1 or (in_tuple and single is not None):
                self._unpack(call, results)
            elif isinstance(single, str):
                self._register(call, single)
            elif single is not None:
                self._unpack(call, single)

    def output(self, argument: Argument) -> Any:
        """Return the node or constant that is an output."""
        kind, value = only(argument, "output")
        if kind in (*SYMBOLS, "as_tensor", "as_none", "as_int", "as_float", "as_bool"):
            return self._value(kind, value)
        raise ValueError(f"it returns a value of the kind {kind}")

    def _arguments(self, target: Any, inputs: Sequence[NodeInput]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = [
            (item["name"], item.get("kind"), self._value(*only(item["arg"], "argument"))) for item in inputs
        ]
        if not isinstance(target, OpOverload):
            is_named = isinstance(target, HigherOrderOperator)
            args = tuple(v for name, kind, v in values if not is_named or kind == POSITIONAL or not name)
            kwargs = {n: v for n, kind, v in values if is_named and kind != POSITIONAL and n}
            for name in kwargs:
                if identifier(name) != name:
                    raise ValueError(f"a call has an argument {describe(name)!r}")
            return args, kwargs
        return call_arguments(target, values)

    def _value(self, kind: str, value: Any) -> Any:
        """Convert an argument to nodes, numbers, dtypes and containers of these."""
        if kind in _VALUES:
            return _VALUES[kind](self, value)
        if kind in SYMBOLS:
            inner, content = only(value, "argument")
            return self._node(content) if inner == "as_name" else number(content)
        if kind in LISTS:
            return [self._value(*list_item(item, LISTS[kind])) for item in value]
        return setting(kind, value)

    def _node(self, name: str) -> fx.Node:
        if name not in self.values:
            raise ValueError(f"it uses {describe(name)!r} before it is computed")
        return self.values[name]

    def _inner(self, name: str, graph: Graph) -> fx.Node:
        """Add a graph argument of an operator, such as a branch of ``torch.cond``."""
        plain = identifier(name)
        if plain not in self._inner_graphs and not hasattr(self.root, plain):
            self._inner_graphs[plain] = graph
            self.root.add_module(plain, _inner_module(graph, self._nodes))
        present = self._inner_graphs.get(plain)
        if present is None or any(present[part] != graph[part] for part in ("inputs", "nodes", "outputs")):
            raise ValueError(f"two inner graphs have the name {describe(name)!r}")
        return self._create("get_attr", plain, name=plain)

    def _unpack(self, call: fx.Node, results: Sequence[Any]) -> None:
        """Register the items of a call that returns a tuple or list."""
        for index, result in enumerate(results):
            if result is None:
                continue
            part = self._create("call_function", operator.getitem, (call, index))
            part.meta = dict(call.meta)
            if isinstance(result, str):
                self._register(part, result)
            else:
                self._unpack(part, result)

    def _create(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> fx.Node:
        if next(self._nodes) > _MAX_NODES:
            raise ValueError(f"it has more than {_MAX_NODES:,} nodes")
        return self.graph.create_node(kind, target, args, kwargs, name)

    def _register(self, node: fx.Node, name: str) -> fx.Node:
        if name in self.values:
            raise ValueError(f"it computes {describe(name)!r} twice")
        self.values[name] = node
        return node


_VALUES: dict[str, Callable[[_Builder, Any], Any]] = {
    "as_none": lambda _, value: None,
    **dict.fromkeys(_PLAIN, lambda _, value: value),
    **dict.fromkeys(_NUMBERS, lambda _, value: number(value)),
    "as_complex": lambda _, value: complex(number(value["real"]), number(value["imag"])),
    "as_int_lists": lambda _, value: [tuple(row) for row in value],
    "as_operator": lambda _, value: operator_named(value),
    "as_tensor": lambda builder, value: builder._node(value["name"]),
    "as_nested_tensors": lambda builder, value: [[builder._node(x["name"]) for x in row] for row in value],
    "as_graph": lambda builder, value: builder._inner(value["name"], value["graph"]),
    "as_optional_tensor": lambda builder, value: builder._value(*only(value, "argument")),
    "as_string_to_argument": lambda builder, value: {
        name: builder._value(*only(item, "argument")) for name, item in value.items()
    },
}


def _inner_module(graph: Graph, nodes: Iterator[int]) -> fx.GraphModule:
    inner = _Builder(nn.Module(), nodes)
    for argument in graph["inputs"]:
        inner.placeholder(argument)
    inner.add_nodes(graph["nodes"])
    results, single = tuple(map(inner.output, graph["outputs"])), graph.get("is_single_tensor_return")
    if single and len(results) != 1:
        raise ValueError("an inner graph returns one tensor and several")
    inner.graph.output(results[0] if single else results)
    return fx.GraphModule(inner.root, inner.graph)


class UnknownOperator(ValueError):
    """Raised for an operator that a file must not call."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"operator {describe(name)!r} {why}")


class ForeignOperator(UnknownOperator):
    """Raised for an operator of another package."""


def operator_named(name: str) -> Callable[..., Any]:
    """Return the operator with a name such as ``torch.ops.aten.add.Tensor``.

    Raises:
        UnknownOperator: This version of torch lacks it, or a file must not call it.
    """
    if match := _OVERLOAD.fullmatch(name):
        return _overload(name, *match.groups())
    place: Any
    if match := _HIGHER_ORDER.fullmatch(name):
        short = match[1]
        place, allowed = torch.ops.higher_order, _HIGHER_ORDER_NAMES
    elif match := _FUNCTION.fullmatch(name):
        module, short = match.groups()
        place, allowed = {
            "_operator": (operator, _OPERATOR),
            "math": (math, _MATH),
            "torch": (torch, _TORCH),
            "torch._functorch.predispatch": (predispatch, _VMAP),
        }[module]
    else:
        error = ForeignOperator if _REGISTERED.fullmatch(name) else UnknownOperator
        raise error(name, "is not one of PyTorch's own")
    function: Callable[..., Any] | None = getattr(place, short, None) if short in allowed else None
    if function is None:
        raise UnknownOperator(name, "is not one that ampaudit reads from a file")
    return _with_bounded_result(function) if short in _GROWING else function


@functools.cache
def _overload(name: str, namespace: str, packet: str, overload: str) -> OpOverload:
    op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    if not isinstance(op, OpOverload) or op.namespace != namespace:
        raise UnknownOperator(name, "is not in this version of PyTorch")
    arguments = op._schema.arguments
    raw = any(_RAW.search(str(a.type)) or a.name == "filename" for a in arguments)
    internal = _INTERNAL.fullmatch(packet) and (
        not _KNOWN_INTERNAL.fullmatch(packet) or any(a.is_out for a in arguments)
    )
    # an operator without a kernel is a TorchScript function on Python values
    if raw or internal or _FORBIDDEN.fullmatch(packet) or not torch._C._dispatch_has_kernel(op.name()):
        raise UnknownOperator(name, "may not be called from a file: it reaches beyond its tensors")
    return op


@functools.cache
def _with_bounded_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator on sizes so that its result cannot exceed 64 bits."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if any(isinstance(argument, str | list | tuple) for argument in args):
            raise SourceError("the program computes with text or lists", hint="export the model again")
        result = None if _surely_large(function, args) else function(*args)
        if result is None or (type(result) is int and result.bit_length() > _BITS):
            raise SourceError("the program computes a size beyond 64 bits", hint="export the model again")
        return result

    return call


def _surely_large(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether the result is so large that computing it would take long."""
    if len(args) != 2 or not all(type(a) is int for a in args):
        return False
    base, exponent = args
    if function is operator.pow:
        return bool(abs(base) > 1 and base.bit_length() * exponent > 2 * _BITS)
    return function is operator.lshift and exponent > _BITS


def only(union: Any, what: str) -> tuple[str, Any]:
    """Return the kind and value of the single member of a union.

    Raises:
        ValueError: The union has no member, or several.
    """
    if len(union) != 1:
        raise ValueError(f"an {what} has {len(union)} values instead of one")
    ((kind, value),) = union.items()
    return kind, value


def list_item(item: Any, kind: str) -> tuple[str, Any]:
    """Return the kind and value of a list item; without a kind, the item is a union."""
    return (kind, item) if kind else only(item, "argument")


def result_names(kind: str, value: Any) -> Any:
    """Return the name of a result: a list of names for a list, and ``None`` for a constant."""
    if kind == "as_tensor":
        return str(value["name"])
    if kind in SYMBOLS:
        return value.get("as_name")
    if kind in LISTS:
        return [result_names(*list_item(item, LISTS[kind])) for item in value]
    if kind in ("as_none", "as_int", "as_float", "as_bool", "as_ints", "as_floats", "as_bools"):
        return None
    raise ValueError(f"a call returns a value of the kind {kind}")


def call_arguments(
    target: OpOverload, arguments: Sequence[tuple[str, int | None, Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arrange arguments in the order of the operator's schema."""
    values = {name: (kind, value) for name, kind, value in arguments}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    positional = True
    for argument in target._schema.arguments:
        if argument.name not in values:
            if not argument.has_default_value():
                raise ValueError(f"a call of {target} lacks its argument {argument.name}")
            positional = False  # later arguments are no longer positional
            continue
        kind, value = values.pop(argument.name)
        by_default = _KEYWORD if argument.has_default_value() or argument.kwarg_only else POSITIONAL
        by_name = (kind or by_default) == _KEYWORD and not keyword.iskeyword(argument.name)
        positional = positional and not argument.kwarg_only and not by_name
        if positional:
            args.append(value)
        else:
            kwargs[argument.name] = value
    if values:
        raise ValueError(f"a call of {target} has an argument {describe(next(iter(values)))!r}")
    return tuple(args), kwargs


def setting(kind: str, value: Any) -> Any:
    """Convert a dtype, layout, device or memory format."""
    if kind == "as_device":
        index = value.get("index")
        return torch.device(value["type"]) if index is None else torch.device(value["type"], index)
    if value in _SETTINGS.get(kind, ()):
        return _SETTINGS[kind][value]
    raise ValueError(f"an argument of the kind {kind} cannot be read")


def number(value: Any) -> Any:
    """Convert a number or nested lists of numbers; non-finite ones are strings in JSON."""
    if isinstance(value, list):
        return [number(item) for item in value]
    return {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}.get(value, value)


def identifier(name: str) -> str:
    """Return a name that is safe in the Python code that torch generates for a graph."""
    plain = re.sub(r"\W", "_", name[:200], flags=re.ASCII)
    return f"_{plain}" if not plain.isidentifier() or keyword.iskeyword(plain) else plain


def attribute_path(path: str) -> str:
    """Check that the parts of a dotted attribute name are not reserved, and return it.

    Raises:
        ValueError: A part is reserved, or would not be one name in the Python code that torch generates.
    """
    parts = path.split(".")
    free = all(_is_quotable(part) and part not in _MODULE_NAMES for part in parts)
    if not free or parts[0] in _GRAPH_NAMES:
        raise ValueError(f"a weight has the name {describe(path)!r}")
    return path


def _is_quotable(part: str) -> bool:
    """Return whether torch's code reads just this attribute: ``x.part``, else ``getattr(x, "part")``."""
    if _ATTRIBUTE.fullmatch(part) is None or not part.isprintable():
        return False
    # Python normalizes identifiers
    bare = part.isidentifier()
    return not bare or (not keyword.iskeyword(part) and unicodedata.normalize("NFKC", part) == part)


def layers_and_line(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the layers and the source line of a node, where its metadata has them."""
    meta: dict[str, Any] = {}
    if trace := metadata.get("stack_trace"):
        meta["stack_trace"] = trace
    if stack := metadata.get("nn_module_stack"):
        layers = [list(_at_commas(item)) for item in stack.split(";")]
        if any(len(layer) != 3 for layer in layers):
            raise ValueError("a node's layers cannot be read")
        meta["nn_module_stack"] = {key: (path, kind) for key, path, kind in layers}
    return meta


def _at_commas(item: str) -> Iterator[str]:
    """Split ``key,path,type``; brackets in the last two may hold commas."""
    depth = start = 0
    for place, char in enumerate(item):
        depth += (char in "[(") - (char in ")]")
        if char == "," and depth == 0:
            yield item[start:place]
            start = place + 1
    yield item[start:]


class ConcreteSize(Union):
    as_int: Size


class TensorMeta(Strict):
    """Dtype, sizes, strides and offset (in elements) of a stored tensor."""

    dtype: Integer
    sizes: Annotated[list[ConcreteSize], Field(max_length=MAX_DIMENSIONS)]
    strides: Annotated[list[ConcreteSize], Field(max_length=MAX_DIMENSIONS)]
    storage_offset: ConcreteSize
    requires_grad: bool
    layout: Integer


class Payload(Strict):
    """The location of a tensor's bytes."""

    path_name: Name
    is_param: bool
    use_pickle: bool
    tensor_meta: TensorMeta | None


class PayloadTable(Strict):
    config: dict[Name, Payload]


_PAYLOADS = TypeAdapter(PayloadTable)


def read_tensors(archive: Archive, folder: str, table: str) -> dict[str, torch.Tensor]:
    """Map the tensors of a table into memory, by name; equal entries share one tensor.

    Raises:
        SourceError: The table or a tensor cannot be read.
        ValueError: The table does not fit the bytes.
    """
    text = archive.read(f"{folder}{table}", MAX_TABLE)
    hint = "save the program again with torch.export.save"
    payloads = validate(_PAYLOADS, parse_json(text), Path(archive.path, table), SourceError, hint)
    tensors: dict[str, torch.Tensor] = {}
    same: dict[str, torch.Tensor] = {}
    for name, payload in payloads["config"].items():
        key = repr(payload)
        if key not in same:
            same[key] = _stored_tensor(archive, folder, name, payload)
        tensors[name] = same[key]
    return tensors


def _stored_tensor(archive: Archive, folder: str, name: str, payload: Payload) -> torch.Tensor:
    path, meta = payload["path_name"], payload["tensor_meta"]
    if payload["use_pickle"] or meta is None or not path.startswith(("weight_", "tensor_")):
        raise ValueError(f"{describe(name)} is a Python object, which loading would run")
    dtype = SERIALIZED_DTYPES.get(meta["dtype"])
    if dtype is None or meta["layout"] != _STRIDED:
        raise ValueError(f"{describe(name)} has a dtype or layout that cannot be read")
    data = archive.mapped(f"{folder}{path}")
    if len(data) % dtype.itemsize:
        raise ValueError(f"{describe(name)} has {len(data):,} bytes of {dtype}")
    flat, start = flat_tensor(data, dtype), meta["storage_offset"]["as_int"]
    sizes, strides = ([size["as_int"] for size in part] for part in (meta["sizes"], meta["strides"]))
    if len(sizes) != len(strides):
        raise ValueError(f"{describe(name)} has {len(sizes)} sizes and {len(strides)} strides")
    if why := misfit(sizes, strides, start, flat.numel()):
        raise ValueError(f"{describe(name)} {why}")
    tensor = flat.as_strided(sizes, strides, start)
    return nn.Parameter(tensor, requires_grad=meta["requires_grad"]) if payload["is_param"] else tensor
