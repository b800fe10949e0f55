"""Runs a model with everything in 16 bits, and states from what it shows what is to be chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ampaudit.audit.metric import metric_of, within_drop
from ampaudit.audit.sensitivity import probing, sensitivities_in
from ampaudit.core.errors import InputError
from ampaudit.core.formats import low_precision_format
from ampaudit.core.sites import SiteId
from ampaudit.policy import RuleSet, load_policy
from ampaudit.run.audit import Audit, run_audits
from ampaudit.run.config import RunConfig
from ampaudit.run.device import pick_device
from ampaudit.run.outputs import compare_outputs
from ampaudit.run.sensitivity.measure import SensitivityProbe
from ampaudit.run.sensitivity.precision_graph import PrecisionGraph
from ampaudit.source import ModelSource
from ampaudit.trace.values import torch_dtype
from ampaudit.tuning.config import TuneConfig
from ampaudit.tuning.costs import Costs, costs_of
from ampaudit.tuning.problem import Chosen, Prices, TuningProblem
from ampaudit.tuning.search import Accuracy

__all__ = ["LowPrecisionRun", "run_low_precision"]

MARGIN = 1.4  # that values must keep to the format's limit to be in 16 bits


@dataclass(frozen=True, slots=True)
class LowPrecisionRun:
    """A run with everything in 16 bits, and the means to run any other choice.

    Attributes:
        source: the model.
        config: what is asked for.
        base: the policy that puts everything in 16 bits.
        audit: of the run.
        probe: the probes of its outputs.
        problem: what is to be chosen.
        dtype: the 16-bit format.
        ranges: ops and weights that must be in float32 because of their values, with the reason in words.
        appeared: ops that are in a trace only once their inputs are in float32; they are to stay there.
    """

    source: ModelSource
    config: TuneConfig
    base: RuleSet
    audit: Audit
    probe: SensitivityProbe
    problem: TuningProblem
    dtype: torch.dtype
    ranges: Mapping[str, str]
    appeared: set[str] = field(default_factory=set)

    def accuracy(self, chosen: Chosen) -> Accuracy:
        """Run a choice on all batches; return the accuracy of the worst output in the worst batch."""
        config, worst = self.config, None
        kept = {}
        for number, batch in enumerate(self.probe.batches):
            pairs = batch.run(chosen, self.dtype)
            kept[number] = pairs
            found = (comparison.accuracy_db for comparison in compare_outputs(pairs, number).values())
            worst = min((db for db in (worst, *found) if db is not None), default=None)
        if config.metric_drop is not None:
            exact, lower = metric_of(self.source, kept)
            if math.isinf(exact):
                raise InputError("metric(output, batch) is NaN or infinite in FP32", hint="return a number")
            return Accuracy(worst, within_drop(exact, lower, config.metric_drop), (exact, lower))
        assert config.target_db is not None
        return Accuracy(worst, worst is None or worst >= config.target_db)


def run_low_precision(source: ModelSource, base: RuleSet, dtype: str, config: TuneConfig) -> LowPrecisionRun:
    """Run a model under a policy that puts everything in 16 bits, and probe its outputs.

    Raises:
        AuditError: see ``run_audits``; an output has no gradient.
    """
    form, probes = low_precision_format(dtype), list[SensitivityProbe]()
    plan = RunConfig(
        base,
        load_policy("torch-cuda"),
        form,
        pick_device(config.device, audits=True),
        config.seed,
    )
    plan = probing(plan, source, probes, decisions=config.metric_drop is not None)
    (audit,) = run_audits(source.model, source.batches, [plan], config.on_progress)
    probe = probes[-1]
    traced = audit.converted.traced
    ranges, wide = _out_of_range(audit, probe.graph, form.max)
    costs = costs_of(traced, config.cost, config.target)
    problem = TuningProblem(
        probe.graph,
        sensitivities_in(audit),
        _prices(audit, probe.graph, costs),
        frozenset(ranges),
        frozenset(wide),
    )
    return LowPrecisionRun(source, config, base, audit, probe, problem, torch_dtype(form), ranges)


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
