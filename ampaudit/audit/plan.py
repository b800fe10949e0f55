"""``ampaudit plan``: what a policy would do to a model, and the same for two policies side by side."""

from __future__ import annotations

import torch
from torch import nn

from ampaudit.audit.inputs import Inputs, source_of
from ampaudit.audit.plan_report import build_plan
from ampaudit.core.formats import NumberFormat, low_precision_format
from ampaudit.core.sites import SiteId
from ampaudit.policy import Measurement, RuleSet, load_policy
from ampaudit.report.plan import PlanReport
from ampaudit.run.audit import Progress, RunConfig, measure, promoted_sites, silent
from ampaudit.run.device import environment_of, pick_device
from ampaudit.source import ModelSource
from ampaudit.trace import TracedModel, trace
from ampaudit.trace.converted import convert
from ampaudit.trace.isolation import preserved

__all__ = ["plan", "plan_source", "trace_under"]


def plan(
    model: nn.Module,
    inputs: Inputs,
    *,
    policy: str | RuleSet = "ampaudit",
    dtype: str = "float16",
    device: str = "auto",
    seed: int = 0,
) -> PlanReport:
    """What a policy does to each op of a model in memory; nothing is run in 16 bits.

    Args:
        model: in the mode (``train()`` or ``eval()``) that is meant; it is not changed.
        inputs: one batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        policy: name of a shipped policy, path of a rule file, or a loaded rule set.
        dtype: ``float16`` or ``bfloat16``.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: of the random numbers that the model draws.

    Raises:
        AuditError: see ``ampaudit.core.errors``.
    """
    return plan_source(source_of(model, [inputs]), policy, dtype, device=device, seed=seed)


@preserved()
def plan_source(
    source: ModelSource,
    policy: str | RuleSet,
    dtype: str,
    *,
    device: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> PlanReport:
    """What a policy does to each op of a model, for the shapes of its first batch.

    A policy with measured rules needs numbers: the batches are run once in FP32 to get them.

    Args:
        source: the model and its batches.
        policy: name, path or rule set.
        dtype: ``float16`` or ``bfloat16``.
        device: ``auto``, ``cpu`` or ``cuda``: what rules about devices see, and where numbers are measured.
        seed: of the random numbers that the model draws.
        progress: told about each batch.

    Raises:
        AuditError: see ``ampaudit.core.errors``.
    """
    form = low_precision_format(dtype)
    where = pick_device(device)
    rules = policy if isinstance(policy, RuleSet) else load_policy(policy)
    rules = rules.for_environment(environment_of(where))
    traced, notes = trace_under(source, rules, form, where, seed, progress)
    masters = rules.file.weights.master
    return build_plan(convert(traced), source.location, masters=masters, notes=notes)


def trace_under(
    source: ModelSource,
    rules: RuleSet,
    form: NumberFormat,
    where: torch.device,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[TracedModel, tuple[str, ...]]:
    """The graph of the first batch under a policy, after an FP32 run if its rules ask for one; and notes.

    Raises:
        AuditError: see ``ampaudit.core.errors``.
    """
    author = load_policy("torch-cuda")
    seen: dict[SiteId, Measurement] = {}
    notes: tuple[str, ...] = ()
    if rules.measured:
        setting = RunConfig(rules, author, form, where, seed, reference_only=True)
        seen, sites = measure(source.model, source.batches, setting, progress or silent)
        promoted = promoted_sites(rules, sites, seen)
        count = len(source.batches)
        batches = "1 batch" if count == 1 else f"{count} batches"
        notes = (f"{len(promoted)} sites promoted by measured rules, after {batches} in FP32",)
    batch = source.batches[0]
    return trace(source.model, batch.args, batch.kwargs, rules, author, form, seen, seed=seed), notes
