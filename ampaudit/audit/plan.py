"""``ampaudit plan``: shows what a policy does to a model, or compares two policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ampaudit.audit.config import PlanConfig, rules_of
from ampaudit.audit.inputs import Inputs, ModelLike, as_source
from ampaudit.audit.plan_report import build_plan, planned_memory
from ampaudit.core.config import Progress, silent, with_options
from ampaudit.core.formats import NumberFormat, low_precision_format
from ampaudit.core.sites import SiteId
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.text import parse_size, plural
from ampaudit.policy import Measurement, RuleSet, load_policy
from ampaudit.report.inputs import of_made_up
from ampaudit.report.plan import PlanReport
from ampaudit.run.audit import RunConfig, measure, promoted_sites
from ampaudit.run.device import environment_of, pick_device
from ampaudit.source import ModelSource
from ampaudit.source.stored_weights import with_plain_weights
from ampaudit.source.twins import using_twins
from ampaudit.trace import TracedModel, trace
from ampaudit.trace.converted import attach_weights
from ampaudit.trace.isolation import preserved
from ampaudit.trace.path.recorder import PathTracing

__all__ = ["plan", "trace_under"]


@with_options(PlanConfig)
@preserved()
def plan(
    model: ModelLike,
    inputs: Inputs | None = None,
    *,
    source: SourceConfig | None = None,
    config: PlanConfig | None = None,
    **options: Any,
) -> PlanReport:
    """Show what a policy does to each op, for the shapes of the first batch; nothing is run in 16 bits.

    For a policy with measured rules, the batches are run once in FP32.

    Args:
        model: the model, in the mode to audit (``train()`` or ``eval()``), which is not changed; or its
            location: a path, or ``package.module:factory``.
        inputs: one batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        source: how to load a model from its location: weights, inputs, ``trust`` ...
        config: the options as one record.
        **options: fields of ``PlanConfig``, which override those of ``config``.

    Returns:
        The plan: each op's precision and the rule behind it, casts, bytes, and weight memory.

    Raises:
        AuditError: see ``ampaudit.core.errors``.
    """
    chosen = PlanConfig.given(config, options)
    chosen.check()
    opened = as_source(model, inputs, options=source or SourceConfig(seed=chosen.seed))
    opened = with_plain_weights(opened)
    form, where = low_precision_format(chosen.dtype), pick_device(chosen.device, audits=True)
    rules = rules_of(chosen.policy).for_environment(environment_of(where))
    with using_twins(chosen.twins):
        traced, notes = trace_under(opened, rules, form, where, chosen.seed, chosen.on_progress)
    masters = rules.file.weights.master
    made = build_plan(attach_weights(traced), opened.location, masters=masters, notes=opened.notes + notes)
    if not chosen.memory:
        return made
    limit, batches = parse_size(chosen.memory), len(opened.batches)
    return replace(made, memory=planned_memory(traced, where, limit, batches))


def trace_under(
    source: ModelSource,
    rules: RuleSet,
    form: NumberFormat,
    where: torch.device,
    seed: int = 0,
    on_progress: Progress = silent,
) -> tuple[TracedModel, tuple[str, ...]]:
    """Trace the first batch under a policy, after an FP32 run if rules need measurements; with notes.

    Raises:
        AuditError: See ``ampaudit.core.errors``.
    """
    author = load_policy("torch-cuda")
    measurements: dict[SiteId, Measurement] = {}
    notes: tuple[str, ...] = ()
    if rules.measured:
        setting = RunConfig(rules, author, form, where, seed, reference_only=True)
        measurements, sites = measure(source.model, source.batches, setting, on_progress)
        promoted = promoted_sites(rules, sites, measurements)
        sites_text = plural(len(promoted), "site")
        count = len(source.batches)
        batches = ("1 batch" if count == 1 else f"{count} batches") + of_made_up(source.inputs)
        notes = (f"{sites_text} promoted by measured rules, after {batches} in FP32",)
    batch = source.batches[0]
    more: dict[str, Any] = {"seed": seed, "path": PathTracing.FALLBACK}
    return trace(source.model, batch.args, batch.kwargs, rules, author, form, measurements, **more), notes
