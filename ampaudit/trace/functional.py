"""Functionalizes a traced graph: each in-place write makes a new value with its own gradient.

Torch's own functionalization runs below autograd, where composite ops and our casts are gone. This one works
on the traced graph: its fake tensors tell which values share memory.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.trace.flatten import FUNCTION_OUTPUTS, marked_values
from ampaudit.trace.graph import Slot, TracedModel
from ampaudit.trace.opnames import argument_kinds, base_name, is_view, mutated_arguments
from ampaudit.trace.replay import META_KEY
from ampaudit.trace.values import SharedMemory

aten = torch.ops.aten
# views that autograd takes for values of their own, so that a write to one would not reach the whole
_UNTRACKED = (aten.unsafe_chunk.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
# on the output of a functionalized graph: the last value of each node that the model writes to
LAST_VALUES = "ampaudit_last_values"
# ops that gradients do not pass
DETACH_OPS = ("aten.detach.default", "aten.detach_.default", "aten.detach_copy.default")
_BY_SIZES = {
    aten.view_as.default: aten.view.default,
    aten.reshape_as.default: aten.reshape.default,
    aten.expand_as.default: aten.expand.default,
}
_IDENTITIES = (aten.type_as.default, aten.to.other)  # where they share memory at all


class OnCopy:
    """Calls an op that writes to its first argument on a copy of it."""

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self.__name__ = f"on_copy_{op._schema.name.split('::')[-1]}"

    def __call__(self, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the changed copy."""
        return self.op(target.clone(), *args, **kwargs)


def for_any_strides(target: Any) -> Any:
    """Return a reshape in place of a view, and any other op as it is.

    Attention's output has other strides on another device, where the copy that ``contiguous()`` makes was not
    traced.
    """
    return aten.reshape.default if target is aten.view.default else target


def overload_of(target: Any) -> OpOverload | None:
    """Return the ATen op that a node calls, directly or on a copy; ``None`` for anything else."""
    if isinstance(target, OnCopy):
        return target.op
    return target if isinstance(target, OpOverload) else None


def functionalized(traced: TracedModel, *, write_back: bool = False) -> TracedModel:
    """Replace every in-place op of a traced model, keeping node names and therefore sites.

    An op whose schema hides its writes (``batch_norm``'s running statistics) stays as it is. ``write_back``
    writes new values of buffers back at the end.
    """
    if not any(writes_in_place(node) for node in traced.graph.nodes):
        return traced
    buffers = {p.node for p in traced.placeholders if p.slot is Slot.BUFFER} if write_back else set[str]()
    return replace(traced, graph=_Rewriter(traced.graph, buffers).graph)


def _set_buffer(buffer: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        buffer.copy_(value)


@dataclass(slots=True)
class _View:
    """A value as a view of its base: the node that makes the view, and the version of the base."""

    base: fx.Node
    step: fx.Node | None
    source: fx.Node | None
    version: int


class _Rewriter:
    """Copies a graph node by node; ``_now`` maps each old node to the new one that holds its value."""

    def __init__(self, graph: fx.Graph, buffers: set[str]) -> None:
        self.graph = fx.Graph()
        self._now: dict[fx.Node, fx.Node] = {}
        self._views: dict[fx.Node, _View] = {}
        self._versions: dict[fx.Node, int] = {}
        self._inputs: dict[fx.Node, fx.Node] = {}
        self._memory = SharedMemory(graph)
        self._added = 0
        for node in graph.nodes:
            if node.op == "output":
                for base, version in self._versions.items():
                    if version and base.name in buffers:
                        self.graph.call_function(_set_buffer, (self._inputs[base], self._now[base]))
                output = self.graph.output(fx.node.map_arg(node.args[0], self._value))
                output.meta[LAST_VALUES] = {
                    self._inputs[base]: self._now[base] for base, version in self._versions.items() if version
                }
            elif writes_in_place(node) and _as_view(node.target) is None:
                self._write(node)
            elif node.target is FUNCTION_OUTPUTS:
                self._copy(node)
                self._restart(node)
            else:
                self._copy(node)
        self.graph.lint()

    def _copy(self, node: fx.Node) -> None:
        self._now[node] = self.graph.node_copy(node, self._value)
        self._now[node].target = _as_view(node.target) or node.target
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        # an item of several results, which no other value shows, is where its memory begins
        begins = node.target is operator.getitem and source is not None and self._views[source].step is None
        memory = self._memory.of(node.meta.get("val"))
        if (
            source is not None
            and not begins
            and not memory.isdisjoint(self._memory.of(source.meta.get("val")))
        ):
            base = self._views[source].base
            self._views[node] = _View(base, node, source, self._versions[base])
        else:
            self._begin(node)

    def _begin(self, node: fx.Node) -> None:
        self._inputs[node] = self._now[node]
        self._views[node] = _View(node, None, None, 0)
        self._versions[node] = 0

    def _value(self, node: fx.Node) -> fx.Node:
        """Return the new node for an old one, recomputed if its memory was written since."""
        view = self._views[node]
        if view.step is None or view.source is None:  # the result of an in-place op shows later writes
            return self._now[view.base]
        if view.version == self._versions[view.base]:
            return self._now[node]
        target, args, kwargs = _shaped_by_sizes(view.step)
        self._now[node] = self._add(target, (self._value(view.source), *args), kwargs, view.step)
        view.version = self._versions[view.base]
        return self._now[node]

    def _add(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node) -> fx.Node:
        """Add a node that is not a site, under a new name, with a value like that of another node."""
        self._added += 1
        new = self.graph.create_node("call_function", target, args, kwargs, name=f"_added_{self._added}")
        new.meta = {"val": like.meta["val"]} if "val" in like.meta else {}
        return new

    def _write(self, node: fx.Node) -> None:
        target: Any = node.args[0]
        op: Any = node.target
        args = fx.node.map_arg(node.args, self._value)
        kwargs = fx.node.map_arg(dict(node.kwargs), self._value)
        result = self.graph.create_node("call_function", OnCopy(op), args, kwargs, name=node.name)
        result.meta = dict(node.meta)
        view = self._views[target]
        record = node.meta.get(META_KEY)
        self._now[view.base] = self._through(target, result, unseen=record is not None and record.no_grad)
        self._versions[view.base] += 1
        for name in (target, node):
            self._now[name] = result
            self._views[name] = replace(view, version=self._versions[view.base])

    def _restart(self, applied: fx.Node) -> None:
        """Treat values written by a custom function as new, so that views of them follow the mark."""
        for out in marked_values(applied):
            view = self._views[out]
            if not self._versions[view.base]:
                continue
            value = self._now[out]
            self._now[view.base] = self._through(out, value)
            self._versions[view.base] += 1
            for node, now in self._now.items():
                if now is value:
                    self._views[node] = replace(self._views[node], version=self._versions[view.base])

    def _through(self, target: fx.Node, value: fx.Node, *, unseen: bool = False) -> fx.Node:
        """Return the base after a write to a view of it."""
        view = self._views[target]
        if view.step is None:
            return value
        chain: list[fx.Node] = []
        ancestor: _View = view
        while ancestor.step is not None and ancestor.source is not None:
            chain.insert(0, ancestor.step)
            ancestor = self._views[ancestor.source]
        base = self._now[view.base]
        writer = WriteThrough(tuple(map(_shaped_by_sizes, chain)), unseen)
        return self._add(writer, (base, value), {}, view.base)


class WriteThrough:
    """Copies a base, and writes a new value to the part that a chain of views shows.

    ``unseen`` says that gradients were off, so that autograd does not see the write.
    """

    __name__ = "write_through"

    def __init__(
        self, chain: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...], unseen: bool = False
    ) -> None:
        self._chain = chain
        self.unseen = unseen

    def __call__(self, base: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the changed copy."""
        if any(target in _UNTRACKED for target, _, _ in self._chain):
            places = self._part(torch.arange(base.numel(), device=base.device).view(base.shape))
            values = value.to(base.dtype).expand(places.shape).reshape(-1)
            return base.reshape(-1).scatter(0, places.reshape(-1), values).view(base.shape)
        whole = base.clone()
        self._part(whole).copy_(value)
        return whole

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        part: Any = whole
        for target, args, kwargs in self._chain:
            part = target(part, *args, **kwargs)
        result: torch.Tensor = part
        return result


def writes_in_place(node: fx.Node) -> bool:
    """Return whether a node writes to its first argument."""
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and mutated_arguments(node.target) == (0,)
        and isinstance(node.args[0], fx.Node)
    )


@cache
def _as_view(op: Any) -> OpOverload | None:
    """Return the op that returns the view into which one such as ``squeeze_`` turns its argument."""
    if not isinstance(op, OpOverload) or torch.Tag.inplace_view not in op.tags:
        return None
    views = getattr(aten, base_name(op).removesuffix("_"))
    overloads: list[OpOverload] = [getattr(views, name) for name in views.overloads()]
    return next((o for o in overloads if is_view(o) and argument_kinds(o) == argument_kinds(op)), None)


def _shaped_by_sizes(step: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a view as an op with its further arguments and keywords; sizes replace other tensors."""
    if step.target in _BY_SIZES:
        return _BY_SIZES[step.target], (list(step.meta["val"].shape),), {}
    if step.target in _IDENTITIES:
        return aten.alias.default, (), {}
    return _as_view(step.target) or step.target, step.args[1:], dict(step.kwargs)
