"""Runs a model with everything in 16 bits, and states from what it shows what is to be chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ampaudit.audit.sensitivity import sensitivities_in
from ampaudit.core.sites import SiteId
from ampaudit.run.audit import Audit
from ampaudit.run.sensitivity.precision_graph import PrecisionGraph
from ampaudit.tuning.costs import Costs, costs_of
from ampaudit.tuning.problem import Prices, TuningProblem
from ampaudit.tuning.trials import Trials

__all__ = ["LowPrecisionRun", "run_low_precision"]

MARGIN = 1.4  # that values must keep to the format's limit to be in 16 bits


@dataclass(frozen=True, slots=True)
class LowPrecisionRun:
    """A run with everything in 16 bits, and the means to run any other choice.

    Attributes:
        trials: of the model in the 16-bit format.
        audit: of the run.
        problem: what is to be chosen.
        ranges: ops and weights that must be in float32 because of their values, with the reason in words.
        appeared: ops that are in a trace only once their inputs are in float32; they are to stay there.
    """

    trials: Trials
    audit: Audit
    problem: TuningProblem
    ranges: Mapping[str, str]
    appeared: set[str] = field(default_factory=set)


def run_low_precision(trials: Trials) -> LowPrecisionRun:
    """Run a model under a policy that puts everything in 16 bits, and probe its outputs.

    Raises:
        AuditError: see ``run_audits``; an output has no gradient.
    """
    audit, config = trials.probe(), trials.config
    ranges, wide = _out_of_range(audit, trials.graph, trials.number_format.max)
    costs = costs_of(audit.converted.traced, config.cost, config.target)
    problem = TuningProblem(
        trials.graph,
        sensitivities_in(audit),
        _prices(audit, trials.graph, costs),
        frozenset(ranges),
        frozenset(wide),
    )
    return LowPrecisionRun(trials, audit, problem, ranges)


def _out_of_range(audit: Audit, graph: PrecisionGraph, limit: float) -> tuple[dict[str, str], set[str]]:
    """Return what must be in float32 because of its values, and the values that no cast may take."""
    record = audit.record
    masks = record.masks | record.by_design
    peaks = {site: seen.ref_peak for site, seen in record.observations.items()}
    ranges: dict[str, str] = {}
    wide: set[str] = set()
    for origin in record.origins:
        if origin.harms and origin.site in graph.values:
            ranges[origin.site] = "it gives infinity or NaN in 16 bits"
    for name, value in graph.values.items():
        # constants of the code, such as a mask's or finfo.max, need no margin
        single = value.site is not None and math.prod(value.site.shape) == 1
        most = limit if single or name in audit.parameter_free else limit / MARGIN
        peak = peaks.get(SiteId(name), 0.0)
        # a mask on values that are out of range hides that they are
        masked = name in masks and wide.isdisjoint(graph.reads.get(name, ()))
        if not value.is_weight and not masked and peak > most:
            wide.add(name)
            near = "" if peak > limit else "come near the limit: they "
            ranges[name] = f"its values {near}reach {peak:.4g}; 16 bits end at {limit:.6g}"
    masters = audit.converted.masters
    for place in audit.converted.traced.placeholders:
        tensor = masters.get(place.node)
        known = graph.values.get(place.name)
        if tensor is None or known is None or not tensor.is_floating_point() or not tensor.numel():
            continue
        peak = float(tensor.detach().abs().nan_to_num(0.0, math.inf, math.inf).amax())
        if limit < peak < math.inf and place.name not in masks:
            wide.add(place.name)
            ranges[place.name] = f"it holds {peak:.4g}; 16 bits end at {limit:.6g}"
    return ranges, wide


def _prices(audit: Audit, graph: PrecisionGraph, costs: Costs) -> Prices:
    """Return the costs under the names of values."""
    nodes = {value.name: value.site.node for value in graph.values.values() if value.site is not None}
    nodes |= {place.name: place.node for place in audit.converted.traced.placeholders}
    values = {name: costs.ops[SiteId(name)] for name in graph.values if SiteId(name) in costs.ops}
    for name, node in nodes.items():
        if name not in values and name in graph.values:
            values[name] = costs.weights.get(node, 0.0)
    casts = {name: costs.casts.get(nodes[name], 0.0) for name in graph.values if name in nodes}
    return Prices(values, casts)
