"""Traces a model under a policy, op by op or, for policies that decide on whole graphs, in two passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId
from ampaudit.policy import Decision, Measurement, RuleSet, plain_fp32
from ampaudit.policy.planning import PlanSite, plan_graph
from ampaudit.trace.backward.graphs import separate_backwards
from ampaudit.trace.capture import TraceConfig, capture
from ampaudit.trace.dynamic import Dimensions
from ampaudit.trace.edits import Edit
from ampaudit.trace.entry import layer_path, tensor_leaves
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.graph import Site, Slot, TracedModel
from ampaudit.trace.path.recorder import GivenValues, PathTracing
from ampaudit.trace.replay import REPLAYED, Replayer
from ampaudit.trace.unsupported import refuse_unsupported
from ampaudit.trace.values import float_value

__all__ = ["trace"]


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
    planned: Mapping[SiteId, Decision] | None = None,
    dynamic: Dimensions | None = None,
    path: PathTracing = PathTracing.OFF,
    known: Sequence[Site] = (),
    values: GivenValues | None = None,
) -> TracedModel:
    """Trace a model on inputs like these, with the policy's casts in the graph.

    A policy of level *calls* acts while the model's code runs. One of level *graph* acts as converters do:
    the model is traced in FP32, so that its code never sees a 16-bit tensor, decisions are made on that graph
    as a whole, and the graph is replayed under them.

    Args:
        model: in the mode (train or eval) to audit; not changed.
        args: positional inputs; only shapes and dtypes of tensors matter.
        kwargs: keyword inputs.
        rules: the policy.
        author_rules: the rules inside an autocast region of the model's code (CUDA autocast's rules).
        number_format: the 16-bit format of the run.
        measured: measurements of a run, by site, for the rules that ask for evidence.
        edits: ops to rewrite, by site.
        differentiated: whether the graph's gradients will be asked for.
        seed: seeds the random numbers that the model's code draws while it is traced; without it the
            generators continue.
        trace_backward: also trace custom backwards; the model must return its loss.
        planned: decisions of another trace of the model, by site, which hold here as well.
        dynamic: axes of each input tensor that may vary.
        path: whether to follow the path that these inputs take; the values of inputs and weights matter then.
        known: sites of the paths that other inputs take.
        values: what decides the path, where that is not the inputs and the model as it is.

    Raises:
        TraceFailed: torch.export refuses the model; the message names the line.
        SourceError: the model itself fails, or is of a kind that cannot be traced.
        InputError: an input is of such a kind.
    """
    refuse_unsupported(model, args, kwargs, packed=path is PathTracing.OFF)
    config = TraceConfig(
        *(rules, author_rules, number_format, measured or {}),
        edits=edits or {},
        differentiated=differentiated,
        seed=seed,
        follow_backward=True if trace_backward else None,
        planned=planned or {},
        dynamic=dynamic,
        path=path,
        known=known,
        values=values,
    )
    if rules.file.level == "calls":
        return separate_backwards(capture(model, args, kwargs, config))
    uncast = plain_fp32(whole=rules.op_names)
    fp32_trace = capture(model, args, kwargs, replace(config, rules=uncast, author_rules=uncast, planned={}))
    sites = _plan_sites(fp32_trace)
    decisions = plan_graph(rules, sites)
    own = {SiteId(site.facts.site): made for site, made in zip(sites, decisions, strict=True)}
    replay = Fp32Replay(model, fp32_trace)
    replay.training = model.training
    inputs = tuple(tensor_leaves(args, kwargs))
    config = replace(
        config,
        author_rules=uncast,
        planned={**own, **config.planned},
        edits={},
        follow_backward=None,
        path=PathTracing.OFF if fp32_trace.path is None else PathTracing.ON,
    )
    traced = capture(replay, inputs, {}, config)
    return separate_backwards(
        replace(
            traced,
            outputs=fp32_trace.outputs,
            structure=fp32_trace.structure,
            custom_functions=fp32_trace.custom_functions,
            notes=(*traced.notes, *fp32_trace.notes),
            changes=fp32_trace.changes,
            random_constants=fp32_trace.random_constants,
            custom_backwards=fp32_trace.custom_backwards,
            backward_notes=fp32_trace.backward_notes,
            path=fp32_trace.path,
        )
    )


def _plan_sites(traced: TracedModel) -> list[PlanSite]:
    """List the ops of a graph as the policy sees them, with the flow of floats between them."""
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


class Fp32Replay(nn.Module):
    """Replays an FP32 trace as a model of flat tensors, so that it can be traced again under decisions."""

    def __init__(self, model: nn.Module, traced: TracedModel) -> None:
        super().__init__()
        setattr(self, REPLAYED, model)
        self._graph = traced.graph
        self._placeholders = traced.placeholders
        for placeholder in traced.placeholders:
            if placeholder.slot is Slot.CONSTANT:
                self.register_buffer(placeholder.node, traced.tensors[placeholder.node], persistent=False)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Take tensors in the order of the trace's inputs; return its outputs in their order."""
        tensors = {layer_path(name): tensor for name, tensor in named_tensors(self).items()}
        remaining = iter(inputs)
        values = [
            next(remaining)
            if placeholder.slot is Slot.INPUT
            else tensors[placeholder.node if placeholder.slot is Slot.CONSTANT else placeholder.name]
            for placeholder in self._placeholders
        ]
        replayer = Replayer(self, self._graph, converting=True)
        return tuple(replayer.run(*values, enable_io_processing=False))
