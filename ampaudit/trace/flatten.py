"""Flattens an exported program into one graph by inlining regions and removing dead ops."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ampaudit.trace.internals import region_calls
from ampaudit.trace.marks import is_mark

__all__ = ["ObjectSource", "flat_graph", "has_effect"]

_REGIONS = {"wrap_with_autocast", "wrap_with_set_grad_enabled"}


def flat_graph(program: ExportedProgram) -> fx.Graph:
    """Build a flat graph that computes the same outputs, with explicit casts.

    The bodies of autocast and no-grad regions become plain nodes: the dtypes say what the regions meant. Ops
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
            graph.output(_mapped(node.args[0], env))
        else:
            env[node] = _copy(node, source, graph, env)
    graph.eliminate_dead_code(has_effect)
    graph.lint()
    return graph


def _copy(node: fx.Node, owner: torch.nn.Module, graph: fx.Graph, env: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(owner, str(node.target), None)
    if node.op == "call_function":
        if node.target in region_calls:
            return None
        if getattr(node.target, "__name__", "") in _REGIONS:
            return _inlined(node, graph, env)
        if node.target is operator.getitem:
            source: Any = node.args[0]
            if isinstance(env[source], tuple):
                return env[source][node.args[1]]
    return graph.node_copy(node, lambda n: env[n])


def _inlined(node: fx.Node, graph: fx.Graph, env: dict[fx.Node, Any]) -> tuple[Any, ...]:
    """Inline the region's body; its arguments are (settings..., submodule, inputs...)."""
    args: list[Any] = list(node.args)
    position = next(
        i for i, a in enumerate(args) if isinstance(a, fx.Node) and isinstance(env[a], fx.GraphModule)
    )
    body: fx.GraphModule = env[args[position]]
    inputs = [env[a] if isinstance(a, fx.Node) else a for a in args[position + 1 :]]
    inner: dict[fx.Node, Any] = {}
    result: Any = ()
    for child in body.graph.nodes:
        if child.op == "placeholder":
            inner[child] = inputs.pop(0)
        elif child.op == "output":
            result = _mapped(child.args[0], inner)
        else:
            inner[child] = _copy(child, body, graph, inner)
    return tuple(result) if isinstance(result, list | tuple) else (result,)


def _mapped(value: Any, env: dict[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        return env[value]
    if isinstance(value, list | tuple):
        return tuple(_mapped(item, env) for item in value)
    return value


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

    def __init__(self, held: Any) -> None:
        self._held = held
        self._state = held.get_state() if isinstance(held, torch.Generator) else None
        self.__name__ = f"{type(held).__name__.lower()}_of_the_model"

    def __call__(self) -> Any:
        """Return the object, or a copy of the generator."""
        if self._state is None:
            return self._held
        return torch.Generator(self._held.device).set_state(self._state)
