"""Runs a model with any of its ops in float32 and the others in 16 bits, without ampaudit.

The plain FP32 model, exported by torch, is interpreted op by op. An op in 16 bits casts all its float
inputs down, weights as well, computes in float32 and rounds its result. An op in float32 takes its inputs
as they are. Ops that only move values have no precision of their own. All subsets together cost about
two ops each, because those that agree on the first ops share them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

# what the graphs use of the ops that copy, select or reorder values and compute none
MOVES = frozenset(
    """
    cat chunk clone contiguous detach dropout expand flatten getitem index_select max_pool1d max_pool2d
    narrow permute relu repeat reshape select slice split split_with_sizes squeeze stack t to transpose
    unbind unflatten unsqueeze view
    """.split()
)


@dataclass(frozen=True)
class PlainGraph:
    """The ops of a plain FP32 model.

    ``real`` calls the kernels of the 16-bit dtype instead of rounding what float32's compute.
    """

    nodes: tuple[fx.Node, ...]
    given: dict[fx.Node, Any]
    weights: dict[fx.Node, str]
    outputs: tuple[fx.Node, ...]
    sites: dict[fx.Node, str]
    reference: tuple[torch.Tensor, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, model: nn.Module, *args: torch.Tensor, **kwargs: Any) -> PlainGraph:
        """Export a model in FP32 for inputs."""
        with torch.no_grad():
            program = torch.export.export(model.eval(), args, kwargs, strict=False)
        signature, graph = program.graph_signature, program.graph
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        state = {**dict(model.named_parameters(remove_duplicate=False)), **program.state_dict}
        state |= dict(model.named_buffers(remove_duplicate=False)) | dict(program.constants)
        names |= signature.inputs_to_lifted_tensor_constants
        inputs = iter(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        given, weights = {}, {}
        for node in graph.find_nodes(op="placeholder"):
            weight = names.get(node.name)
            given[node] = next(inputs) if weight is None else state[weight].detach()
            if weight is not None:
                weights[node] = weight
        calls = tuple(n for n in graph.nodes if n.op == "call_function" and not _only_checks(n))
        leaves = tuple(n for n in pytree.tree_leaves(graph.output_node().args) if isinstance(n, fx.Node))
        made = cls(calls, given, weights, leaves, dict(_named(calls)))
        every = frozenset(made.sites.values())
        return cls(calls, given, weights, leaves, made.sites, made.run(every, torch.float16))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the sites in the order of the graph."""
        return tuple(self.sites.values())

    def run(
        self,
        float32: Collection[str],
        dtype: torch.dtype,
        stored: Collection[str] = (),
        *,
        real: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs with some sites in float32; ``stored`` are weights that 16 bits store."""
        call = _Call(dtype, real)
        values = self._start(dtype, stored)
        with torch.no_grad():
            for node in self.nodes:
                site = self.sites.get(node)
                values[node] = call(node, values, low=site is not None and site not in float32)
        return tuple(values[node].float() for node in self.outputs)

    def accuracy(self, float32: Collection[str], dtype: torch.dtype, stored: Collection[str] = ()) -> float:
        """Return the dB of the least accurate output."""
        return worst(self.reference, self.run(float32, dtype, stored))

    def all_subsets(self, dtype: torch.dtype, stored: Collection[str] = ()) -> Iterator[tuple[int, float]]:
        """Yield each set of float32 sites, as a bit per site in their order, with its dB."""
        values, call = self._start(dtype, stored), _Call(dtype, False)
        numbers = {node: number for number, node in enumerate(self.sites)}

        def follow(index: int, mask: int) -> Iterator[tuple[int, float]]:
            while index < len(self.nodes) and self.nodes[index] not in numbers:
                values[self.nodes[index]] = call(self.nodes[index], values, low=False)
                index += 1
            if index == len(self.nodes):
                yield mask, worst(self.reference, [values[node] for node in self.outputs])
                return
            node = self.nodes[index]
            for low in (True, False):
                values[node] = call(node, values, low=low)
                yield from follow(index + 1, mask if low else mask | 1 << numbers[node])

        with torch.no_grad():
            yield from follow(0, 0)

    def _start(self, dtype: torch.dtype, stored: Collection[str]) -> dict[fx.Node, Any]:
        low = {node for node, name in self.weights.items() if name in stored}
        return {n: v.to(dtype).float() if n in low and _is_float(v) else v for n, v in self.given.items()}


class FewestOps:
    """The best accuracy of each number of float32 ops, from all subsets."""

    def __init__(self, graph: PlainGraph, dtype: torch.dtype, stored: Collection[str] = ()) -> None:
        self.graph = graph
        best: dict[int, tuple[float, int]] = {}
        for mask, decibels in graph.all_subsets(dtype, stored):
            size = mask.bit_count()
            best[size] = max(best.get(size, (-math.inf, mask)), (decibels, mask))
        self._best = best

    def best(self, size: int) -> float:
        """Return the highest accuracy that so many float32 ops, or fewer, reach."""
        return max(self._best[fewer][0] for fewer in range(size + 1))

    def needed(self, target: float) -> int:
        """Return the smallest number of float32 ops that reaches a target."""
        return next(size for size in range(len(self._best)) if self.best(size) >= target)

    def asking_for(self, size: int) -> float:
        """Return a target, in the middle between two sizes, that needs so many ops."""
        low, high = self.best(size - 1), min(self.best(size), 300.0)
        assert low < high, f"{size} ops are no more accurate than {size - 1}"
        return high - 1.0 if math.isinf(low) else (low + high) / 2

    def smallest(self, target: float) -> tuple[str, ...]:
        """Return a smallest set that reaches a target."""
        mask = self._best[self.needed(target)][1]
        return tuple(name for bit, name in enumerate(self.graph.names) if mask >> bit & 1)


class _Call:
    """Calls one op in 16 bits or in float32; weights are rounded once."""

    def __init__(self, dtype: torch.dtype, real: bool) -> None:
        self._dtype, self._real = dtype, real
        self._rounded: dict[fx.Node, torch.Tensor] = {}

    def __call__(self, node: fx.Node, values: dict[fx.Node, Any], *, low: bool) -> Any:
        def fetch(source: fx.Node) -> Any:
            value = values[source]
            if not _is_float(value):
                return value
            if not low:
                return value.float()
            if source.op != "placeholder":
                return self._cast(value)
            if source not in self._rounded:
                self._rounded[source] = self._cast(value)
            return self._rounded[source]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), fetch)
        result = node.target(*args, **kwargs)
        if not low or self._real:
            return result
        return pytree.tree_map(lambda r: self._cast(r) if _is_float(r) else r, result)

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        low = value.to(self._dtype)
        return low if self._real else low.float()


def sqnr(reference: torch.Tensor, value: torch.Tensor) -> float:
    """Return 10 log10(sum ref^2 / sum err^2): -inf if a number broke, inf if all are equal."""
    reference, value = reference.double(), value.double()
    if not value.isfinite().all():
        return -math.inf
    error = (value - reference).square().sum().item()
    return 10 * math.log10(reference.square().sum().item() / error) if error else math.inf


def worst(reference: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> float:
    """Return the accuracy of the least accurate output."""
    return min(sqnr(r, v) for r, v in zip(reference, values, strict=True))


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _only_checks(node: fx.Node) -> bool:
    return "_assert" in str(node.target)


def _named(calls: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
    """Name the ops that compute floats from floats: the layer, the op, and which of its kind."""
    seen: dict[str, int] = {}
    for node in calls:
        if not hasattr(node.target, "_schema"):
            continue
        op = node.target._schema.name.removeprefix("aten::")
        stack = list(node.meta["nn_module_stack"].values())
        layer = stack[-1][0].partition("@")[0] or "(top)"
        base = f"{layer}/{op}"
        seen[base] = seen.get(base, 0) + 1
        if op in MOVES or not _is_float(_first(node.meta["val"])):
            continue
        if any(_is_float(_first(source.meta["val"])) for source in node.all_input_nodes):
            yield node, base if seen[base] == 1 else f"{base}#{seen[base]}"


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value
