"""Builds the sites of a graph: layer, op, role, dtype and source line of each op."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.core.sites import SiteNumbering
from ampaudit.policy import Decision
from ampaudit.policy.schema import Cast
from ampaudit.trace.entry import layer_of
from ampaudit.trace.flatten import ObjectSource, is_mark
from ampaudit.trace.graph import Placeholder, Role, Site, Slot
from ampaudit.trace.opnames import CAST_OPS, base_name, is_view, selects, written_values
from ampaudit.trace.replay import META_KEY, MODULE_SCOPE, OpRecord
from ampaudit.trace.stack import source_lines
from ampaudit.trace.values import float_value, sizes_of

__all__ = ["build_sites", "is_idle_dropout", "results_of"]

_DROPOUTS = {"aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default"}
_UNSEEN = Decision(Cast.FOLLOW, None, "default", "made by the tracer")


def build_sites(graph: fx.Graph, placeholders: Sequence[Placeholder]) -> tuple[Site, ...]:
    """Return one site per ATen op in graph order, including ops on shapes and indices."""
    numbering = SiteNumbering(getattr(node.meta.get(META_KEY), "site", None) for node in graph.nodes)
    weights = {p.node: p for p in placeholders if p.slot is not Slot.INPUT}
    sites: list[Site] = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if isinstance(node.target, ObjectSource) or is_mark(node.target):
            continue
        if isinstance(node.target, OpOverload) and node.target.namespace == "prim":
            continue
        sites.append(_site(node, weights, numbering))
    return tuple(sites)


def _number(value: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor, or else the first complex one."""
    number = float_value(value)
    if number is not None:
        return number
    items = value if isinstance(value, list | tuple) else (value,)
    return next((item for item in items if isinstance(item, torch.Tensor) and item.is_complex()), None)


def _site(node: fx.Node, weights: dict[str, Placeholder], numbering: SiteNumbering) -> Site:
    record: OpRecord | None = node.meta.get(META_KEY)
    weight = _cast_weight(node, weights)
    meta = record.replayed if record is not None and record.replayed is not None else node.meta
    layer, layer_type = layer_of(meta.get("nn_module_stack") or {})
    if scope := meta.get(MODULE_SCOPE):
        layer_type = f"{layer_type} of {scope}"
    if weight is not None and record is not None and record.inserted and "." in weight.name:
        layer = weight.name.rsplit(".", 1)[0]
    name = str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "?")
    short = name.removeprefix("aten.").split(".")[0]
    role = _role(node, record, weight)
    if role is Role.WEIGHT_CAST and weight is not None:
        short = f"cast({weight.name.rsplit('.', 1)[-1]})"
    elif role is Role.INSERTED_CAST:
        short = "cast"
    site_id = record.site if record is not None and role is not Role.WEIGHT_CAST else None
    value = _number(results_of(node))
    source, caller = source_lines(meta.get("stack_trace"))
    if record is not None and record.twin is not None:
        caller = record.twin.called_at
    return Site(
        id=site_id or numbering.next_id(layer, short),
        node=node.name,
        layer=layer,
        layer_type=layer_type,
        op=name,
        role=role,
        dtype=value.dtype if value is not None else None,
        shape=sizes_of(value),
        decision=record.decision if record else _UNSEEN,
        source=source,
        caller=caller,
        weight=weight.name if role is Role.WEIGHT_CAST and weight else None,
        facts=record.facts if record else None,
        original_args=record.original_args if record else {},
        twin=record.twin if record else None,
    )


def results_of(node: fx.Node) -> Any:
    """Return the (fake) results of a node, which an op that returns nothing writes to its arguments."""
    if not isinstance(node.target, OpOverload) or node.target._schema.returns:
        return node.meta.get("val")
    values = written_values(node.target, node.args, dict(node.kwargs))
    return [value.meta.get("val") for value in values if isinstance(value, fx.Node)]


def _cast_weight(node: fx.Node, weights: dict[str, Placeholder]) -> Placeholder | None:
    first = node.args[0] if node.args else None
    return weights.get(first.name) if isinstance(first, fx.Node) else None


def _role(node: fx.Node, record: OpRecord | None, weight: Placeholder | None) -> Role:
    if not isinstance(node.target, OpOverload):
        return Role.COMPUTE
    if base_name(node.target) in CAST_OPS:
        if weight is not None:
            return Role.WEIGHT_CAST
        return Role.INSERTED_CAST if record and record.inserted else Role.CAST
    if is_view(node.target) or is_idle_dropout(node):
        return Role.VIEW
    return Role.SELECT if _only_selects(node) else Role.COMPUTE


def _only_selects(node: fx.Node) -> bool:
    """Return whether a selecting op does not cast (a ``cat`` of two dtypes does)."""
    if not isinstance(node.target, OpOverload) or not selects(node.target):
        return False
    output = float_value(node.meta.get("val"))
    values = (float_value(source.meta.get("val")) for source in node.all_input_nodes)
    return output is not None and all(v is None or v.dtype == output.dtype for v in values)


def is_idle_dropout(node: fx.Node) -> bool:
    """Return whether a node is a dropout outside training, which returns its input."""
    train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train")
    return str(node.target) in _DROPOUTS and train is False
