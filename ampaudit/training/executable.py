"""Makes a traced graph trainable with autograd, natively or with emulated 16 bits."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ampaudit.run.backends import rounded
from ampaudit.run.step import differentiable
from ampaudit.trace.functional import OnCopy, functionalized
from ampaudit.trace.graph import Slot, TracedModel
from ampaudit.trace.values import LOW_PRECISION_DTYPES, widened
from ampaudit.training.tensor_parallel import Executable, by_parts, replicated

__all__ = ["emulated", "native"]


class _RoundFunction(torch.autograd.Function):
    """Rounds a value and its gradient to the format."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Round the value."""
        ctx.dtype = dtype
        return by_parts(partial(rounded, dtype=dtype), value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Round the gradient."""
        return _RoundFunction.apply(gradients[0], ctx.dtype), None


def round_through(value: torch.Tensor, dtype: torch.dtype) -> Any:
    """Round a float32 tensor, and later its gradient, to the 16-bit format."""
    return _RoundFunction.apply(value, dtype)


def native(traced: TracedModel) -> Executable:
    """Run the graph in its own dtypes; it takes a value for each placeholder and returns the outputs."""
    return _transformed(traced, lambda graph, node, copied: copied)


def emulated(traced: TracedModel) -> Executable:
    """Run the graph in float32 with each 16-bit value and gradient rounded; placeholders take float32.

    Where several ops use a value, their gradients are added up before they are rounded.
    """
    # buffers are rounded by their owner: a copy could not be written to
    stored = {place.node: place.dtype for place in traced.placeholders if place.slot is not Slot.BUFFER}

    def round_result(graph: fx.Graph, node: fx.Node, copied: fx.Node) -> fx.Node:
        copied.args, copied.kwargs = widened(copied.args), widened(dict(copied.kwargs))
        dtype = stored.get(node.name) if node.op == "placeholder" else _dtype(node)
        if dtype not in LOW_PRECISION_DTYPES:
            return copied
        return graph.call_function(round_through, (copied, dtype))

    return _transformed(functionalized(traced, write_back=True), round_result)


def _transformed(
    traced: TracedModel, transform: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]
) -> Executable:
    """Copy the graph with each result transformed, and stop gradients where the code does."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], lambda n: known[n]))
            continue
        known[node] = transform(graph, node, graph.node_copy(node, lambda n: known[n]))
        if node.op == "call_function" and not differentiable(node):
            known[node] = _detached(graph, node, known[node])
    return _callable(graph)


def _replicate_constants(graph: fx.Graph) -> None:
    """Let a graph's own tensors stand next to shards: those that it computes from no other value."""
    like = next((node for node in graph.nodes if node.op == "placeholder"), None)
    for node in list(graph.nodes):
        if like is not None and node.op == "call_function" and not node.all_input_nodes:
            with graph.inserting_after(node):
                made = graph.call_function(replicated, (node, like))
            node.replace_all_uses_with(made, lambda user, made=made: user is not made)


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _detached(graph: fx.Graph, node: fx.Node, copied: fx.Node) -> fx.Node:
    """Detach what the model's code computes with gradients off."""
    value = node.meta.get("val")
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    if not is_float or node.target is operator.getitem or isinstance(node.target, OnCopy):
        return copied
    return graph.call_function(torch.ops.aten.detach.default, (copied,))


def _callable(graph: fx.Graph) -> Executable:
    _replicate_constants(graph)
    graph.lint()
    for node in graph.nodes:
        node.meta = {}  # fake tensors and stack traces are not needed any more
    module = fx.GraphModule(nn.Module(), graph)
    run: Callable[..., Any] = module.forward
    return lambda values: tuple(run(*values))
