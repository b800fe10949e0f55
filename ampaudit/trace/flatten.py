"""Makes one flat graph of an exported program, without regions and dead ops; defines the graph's marks.

A mark is an op without a result, which every pass of ``torch.export`` keeps. Its ``number`` identifies the
function call, the hook or the read that it belongs to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ampaudit.trace.internals import region_calls

_LIBRARY = torch.library.Library("ampaudit", "DEF")
_MARKS: set[OpOverload] = set()


def _mark(schema: str, kernel: Callable[..., Any] = lambda *_: None) -> OpOverload:
    """Define a mark."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    op: OpOverload = getattr(torch.ops.ampaudit, name).default
    _MARKS.add(op)
    if not op._schema.returns:
        fx.node.has_side_effect(op)  # or it would be dropped as unused
    return op


FUNCTION_INPUTS = _mark("function_inputs(Tensor[] inputs, int number) -> ()")
FUNCTION_OUTPUTS = _mark("function_outputs(Tensor[] outputs, int number) -> ()")
TENSOR_HOOK = _mark("tensor_hook(Tensor[] value, int number) -> ()")  # hooks take this value's gradient
BACKWARD_START = _mark("backward_start(Tensor[] near, int number) -> ()")  # the ops of the backward follow
OUTPUT_GRADIENT = _mark(  # stands for the gradient of an output
    "output_gradient(Tensor like, int number, int index) -> Tensor", lambda like, *_: torch.empty_like(like)
)
# what the backward returns
BACKWARD_END = _mark("backward_end(Tensor?[] gradients, int number, Tensor[] leaves) -> ()")
VALUE_READ = _mark("value_read(Tensor[] value, int number) -> ()")  # Python code reads this value
VALUE_SIZED = _mark("value_sized(Tensor[] value, int number) -> ()")  # values decide the size of this result


def flat_graph(program: ExportedProgram) -> fx.Graph:
    """Build a flat graph that computes the same outputs, with explicit casts.

    What enters and leaves autocast and no-grad regions is dropped: the dtypes say what the regions meant. Ops
    without users are dropped unless they write to one of their inputs. An object that is not a tensor
    comes from a node of its own.
    """
    graph = fx.Graph()
    source = program.graph_module
    objects = {
        spec.arg.name: program.constants[str(spec.target)]
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.CUSTOM_OBJ
    }
    # placeholders come first in every graph: what stands for an object comes after them
    nodes = sorted(source.graph.nodes, key=lambda node: node.name in objects or node.op != "placeholder")
    env: dict[fx.Node, Any] = {}
    for node in nodes:
        if node.name in objects:
            held = ObjectSource(objects[node.name])
            env[node] = graph.create_node("call_function", held, (), {}, name=node.name)
        elif node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], env.__getitem__))
        elif node.op == "get_attr":
            env[node] = getattr(source, str(node.target), None)
        elif node.target not in region_calls:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.eliminate_dead_code(has_effect)
    graph.lint()
    return graph


def as_module(graph: fx.Graph) -> fx.GraphModule:
    """Return a flat graph as a module, in which the bodies of ops such as ``torch.cond`` are submodules."""
    bodies: dict[str, torch.nn.Module] = {}
    graph = copy.deepcopy(graph)

    def as_attribute(argument: Any) -> Any:
        if not isinstance(argument, torch.nn.Module):
            return argument
        name = f"body_{len(bodies)}"
        bodies[name] = argument
        return graph.create_node("get_attr", name)

    for node in list(graph.nodes):
        with graph.inserting_before(node):
            node.args = fx.node.map_aggregate(node.args, as_attribute)
    return fx.GraphModule(bodies, graph)


def has_effect(node: fx.Node) -> bool:
    """Return whether a node has an effect besides its value."""
    if node.op in ("placeholder", "output") or is_mark(node.target):
        return True
    schema = getattr(node.target, "_schema", None)
    return bool(schema and schema.is_mutable)


class ObjectSource:
    """Supplies the graph with a non-tensor object: a random generator, or a TorchScript class.

    A generator is copied for each run in the state that the trace found. So the FP32 run and the 16-bit run
    draw the same numbers, and the model's own generator keeps its state.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._state = value.get_state() if isinstance(value, torch.Generator) else None
        self.__name__ = f"{type(value).__name__.lower()}_of_the_model"

    def __call__(self) -> Any:
        """Return the object, or a copy of the generator."""
        if self._state is None:
            return self._value
        return torch.Generator(self._value.device).set_state(self._state)


def saved_values(values: list[Any], number: int) -> None:
    """Mark where a run saves values for a custom backward; some are numbers."""


def is_mark(target: Any) -> bool:
    """Return whether a node's target is a mark, which computes nothing."""
    return target is saved_values or (isinstance(target, OpOverload) and target in _MARKS)


def marked_values(node: fx.Node) -> list[fx.Node]:
    """Return the values that a mark refers to."""
    return list(node.args[0])  # type: ignore[arg-type]


def mark_number(node: fx.Node) -> int:
    """Return the number of the function call, hook or read that a mark belongs to."""
    number = node.args[1]
    assert isinstance(number, int)
    return number
