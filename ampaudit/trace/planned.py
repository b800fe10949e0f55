"""Traces a model under a policy, whatever the policy needs to see first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId
from ampaudit.policy import Measurement, RuleSet, plain_fp32
from ampaudit.policy.planning import PlanSite, plan_graph
from ampaudit.trace.capture import TraceConfig, capture
from ampaudit.trace.caster import META_KEY, OpRecord
from ampaudit.trace.custom_backward import separate_backwards
from ampaudit.trace.edits import Edit
from ampaudit.trace.entry import layer_path, tensor_leaves
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.graph import Slot, TracedModel
from ampaudit.trace.opnames import CASTABLE_DTYPES
from ampaudit.trace.replay import INSERTED, OPAQUE, REPLAYED, replaying
from ampaudit.trace.site_table import float_value

__all__ = ["plan_sites", "trace"]


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rules: RuleSet,
    author_rules: RuleSet,
    number_format: NumberFormat,
    measured: Mapping[SiteId, Measurement] | None = None,
    edits: Mapping[SiteId, Edit] | None = None,
    differentiated: bool = False,
    seed: int | None = None,
    trace_backward: bool = False,
) -> TracedModel:
    """The model's graph for inputs like these, with the policy's casts in it.

    A policy of level *calls* acts while the model's code runs. One of level *graph* acts as converters do:
    the model is traced in FP32, so that its code never sees a 16-bit tensor, decisions are made on that graph
    as a whole, and the graph is replayed under them.

    Args:
        model: in the mode (train or eval) that is to be audited; not changed.
        args: positional inputs; only shapes and dtypes of tensors matter.
        kwargs: keyword inputs.
        rules: the policy.
        author_rules: what an autocast region of the author's own means (CUDA autocast's rules).
        number_format: the 16-bit format of the run.
        measured: what a run saw, by site, for the policy's second phase.
        edits: ops to rewrite, by site.
        differentiated: whether the graph's gradients will be asked for.
        seed: of the random numbers that the model's code draws while it is traced; without one it draws
            those that come next.
        trace_backward: also trace custom backwards; the model must return its loss.

    Raises:
        TraceFailed: torch.export refuses the model; the message names the line.
    """
    setting = TraceConfig(
        *(rules, author_rules, number_format, measured or {}),
        edits=edits or {},
        differentiated=differentiated,
        seed=seed,
        follows=True if trace_backward else None,
    )
    if rules.file.level == "calls":
        return separate_backwards(capture(model, args, kwargs, setting))
    uncast = plain_fp32(whole=rules.op_names)
    survey = capture(model, args, kwargs, replace(setting, rules=uncast, author_rules=uncast))
    sites = plan_sites(survey)
    decisions = plan_graph(rules, sites)
    planned = {SiteId(site.facts.site): made for site, made in zip(sites, decisions, strict=True)}
    replay = GraphReplay(model, survey)
    replay.training = model.training
    leaves = tuple(tensor_leaves(args, kwargs))
    traced = capture(
        replay, leaves, {}, replace(setting, author_rules=uncast, planned=planned, edits={}, follows=None)
    )
    made = replace(
        traced,
        outputs=survey.outputs,
        structure=survey.structure,
        custom_functions=survey.custom_functions,
        notes=(*traced.notes, *survey.notes),
        changes=survey.changes,
        random_constants=survey.random_constants,
        custom_backwards=survey.custom_backwards,
        backward_notes=survey.backward_notes,
    )
    return separate_backwards(made)


def plan_sites(traced: TracedModel) -> list[PlanSite]:
    """The ops of a graph as the policy sees them, with the flow of floating-point values between them."""
    index: dict[fx.Node, int] = {}
    found: list[PlanSite] = []
    by_node = traced.site_of_node
    for node in traced.graph.nodes:
        sources = {index[n] for n in node.all_input_nodes if n in index and _is_float(n)}
        site = by_node.get(node.name)
        if site is not None and site.facts is not None:
            index[node] = len(found)
            found.append(PlanSite(site.facts, tuple(sorted(sources))))
        elif len(sources) == 1:
            index[node] = sources.pop()  # a cast, or one item of a result
    return found


def _is_float(node: fx.Node) -> bool:
    return float_value(node.meta.get("val")) is not None


class GraphReplay(nn.Module):
    """Runs a flat FP32 graph node by node, so that a new trace keeps each op's layer and source line.

    Casts that did nothing in FP32 are left out: a converter never sees them.
    """

    def __init__(self, model: nn.Module, survey: TracedModel) -> None:
        super().__init__()
        setattr(self, REPLAYED, model)
        self._survey = _Survey(survey)
        for place in survey.placeholders:
            if place.slot is Slot.CONSTANT:
                self.register_buffer(place.node, survey.tensors[place.node], persistent=False)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tensors in the order of the survey's inputs; its outputs in their order."""
        tensors = {layer_path(name): tensor for name, tensor in named_tensors(self).items()}
        given = iter(inputs)
        values = [
            next(given)
            if place.slot is Slot.INPUT
            else tensors[place.node if place.slot is Slot.CONSTANT else place.name]
            for place in self._survey.placeholders
        ]
        replayer = _Replayer(self, garbage_collect_values=True, graph=self._survey.graph)
        outputs = replayer.run(*values, enable_io_processing=False)
        return tuple(outputs)


class _Survey:
    """The FP32 graph: a copy of its replay reads the same one."""

    def __init__(self, traced: TracedModel) -> None:
        self.graph = traced.graph
        self.placeholders = traced.placeholders

    def __deepcopy__(self, memo: dict[int, Any]) -> _Survey:
        return self


class _Replayer(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and _does_nothing(n):
            return self.env[n.all_input_nodes[0]]
        if isinstance(n.target, HigherOrderOperator):
            return self._opaque(n)
        with replaying(_origin(n)):
            return super().run_node(n)

    def _opaque(self, n: fx.Node) -> Any:
        """An op with a graph of its own, such as ``torch.cond``: it is left in the FP32 of the survey."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        with replaying(INSERTED):
            args, kwargs = pytree.tree_map_only(torch.Tensor, _in_float32, (args, kwargs))
        with replaying(_origin(n) | {OPAQUE: True}):
            return self.call_function(n.target, args, kwargs)


def _origin(node: fx.Node) -> dict[str, Any]:
    """Layer and line of a survey's node, which may itself be one that was replayed, and its record."""
    record = node.meta.get(META_KEY)
    if isinstance(record, OpRecord) and record.replayed is not None:
        return {**record.replayed, META_KEY: record}
    return dict(node.meta)


def _in_float32(value: torch.Tensor) -> torch.Tensor:
    return (
        value.to(torch.float32) if value.dtype in CASTABLE_DTYPES and value.dtype != torch.float32 else value
    )


def _does_nothing(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or node.target._schema.name != "aten::to":
        return False
    before, after = float_value(node.args[0].meta.get("val")), float_value(node.meta.get("val"))  # type: ignore[union-attr]
    return (
        before is not None
        and after is not None
        and before.dtype == after.dtype
        and after.dtype in CASTABLE_DTYPES
    )
