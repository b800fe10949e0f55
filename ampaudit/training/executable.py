"""A traced graph made ready to train: autograd goes through it, natively or with 16 bits emulated."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from ampaudit.run.backends import rounded
from ampaudit.run.program import widened
from ampaudit.run.step import differentiable
from ampaudit.trace.functional import OnCopy, functionalized
from ampaudit.trace.graph import Slot, TracedModel
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["Executable", "emulated", "native"]

Executable = Callable[[Sequence[torch.Tensor]], tuple[Any, ...]]


class _Round(torch.autograd.Function):
    """Through the format and back, on both ways: a 16-bit value has a 16-bit gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The value, rounded."""
        ctx.dtype = dtype
        return rounded(value, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient, rounded."""
        return _Round.apply(gradients[0], ctx.dtype), None


def round_through(value: torch.Tensor, dtype: torch.dtype) -> Any:
    """A float32 tensor as the 16-bit format would hold it."""
    return _Round.apply(value, dtype)


def native(traced: TracedModel) -> Executable:
    """The graph in its own dtypes. It takes a value for each placeholder and gives the outputs in order."""
    return _copied(traced, lambda graph, node, made: made)


def emulated(traced: TracedModel) -> Executable:
    """The graph in float32, each 16-bit value and gradient rounded; placeholders take float32 tensors.

    Where several ops use a value, their gradients are added up before they are rounded.
    """
    # buffers are rounded by whoever holds them: a copy could not be written to
    stored = {place.node: place.dtype for place in traced.placeholders if place.slot is not Slot.BUFFER}

    def held(graph: fx.Graph, node: fx.Node, made: fx.Node) -> fx.Node:
        made.args, made.kwargs = widened(made.args), widened(dict(made.kwargs))
        dtype = stored.get(node.name) if node.op == "placeholder" else _dtype(node)
        return graph.call_function(round_through, (made, dtype)) if dtype in LOW_PRECISION_DTYPES else made

    return _copied(functionalized(traced, write_back=True), held)


def _copied(traced: TracedModel, hold: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]) -> Executable:
    """The graph with each copied node held in some way, and gradients stopped where the model's code says."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], lambda n: known[n]))
            continue
        known[node] = hold(graph, node, graph.node_copy(node, lambda n: known[n]))
        if node.op == "call_function" and not differentiable(node):
            known[node] = _detached(graph, node, known[node])
    return _callable(graph)


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _detached(graph: fx.Graph, node: fx.Node, made: fx.Node) -> fx.Node:
    """What the model's code computes with gradients switched off carries none."""
    value = node.meta.get("val")
    plain = node.target is not operator.getitem and not isinstance(node.target, OnCopy)
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return graph.call_function(torch.ops.aten.detach.default, (made,)) if plain and is_float else made


def _callable(graph: fx.Graph) -> Executable:
    graph.lint()
    for node in graph.nodes:
        node.meta = {}  # fake tensors and stack traces are not needed any more
    module = fx.GraphModule(nn.Module(), graph)
    run: Callable[..., Any] = module.forward
    return lambda values: tuple(run(*values))
