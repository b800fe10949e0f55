"""Runs a model under a proposed change, and judges the result by the user's own FP32 model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ampaudit.audit.advice.interface import AdviceContext, Proposal
from ampaudit.audit.checks import CheckContext, Finding, Severity, run_checks
from ampaudit.audit.checks.interface import context_of
from ampaudit.audit.checks.model_code import mixed_after
from ampaudit.audit.checks.suppress import Suppression, suppressed
from ampaudit.audit.config import ScanConfig
from ampaudit.audit.instruments import checks_for
from ampaudit.core.errors import AuditError
from ampaudit.core.formats import low_precision_format
from ampaudit.core.session import Progress, silent
from ampaudit.core.text import plural
from ampaudit.run.audit import run_audits
from ampaudit.run.config import RunConfig
from ampaudit.run.lockstep import Pair
from ampaudit.run.outputs import OutputComparison
from ampaudit.source import ModelSource
from ampaudit.trace.isolation import call_unchanged


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of a run under a change."""

    context: CheckContext  # results of the run
    errors: tuple[Finding, ...]  # remaining errors, without suppressed ones
    keeps: bool  # whether the change preserves the model's function, as far as the run shows

    @property
    def cures(self) -> bool:
        """Whether no error remains and every output is accurate."""
        return self.keeps and not self.errors


@dataclass(frozen=True, slots=True)
class Attempts:
    """Runs one model under changes."""

    subject: AdviceContext
    source: ModelSource
    run_config: RunConfig
    config: ScanConfig
    hiding: tuple[Suppression, ...]  # suppressions of the scan; suppressed errors do not count
    on_progress: Progress = silent

    def run(self, proposal: Proposal) -> Attempt | None:
        """Audit a change; ``None`` if it cannot run, or changes what the model computes in FP32."""
        model = proposal.model
        if model is not None and not same_function(self.source, model):
            return None
        after = self.audit(proposal)
        if after is None or (proposal.confirmed is not None and not proposal.confirmed(after.flow)):
            return None
        return self.judge(after, by_dtype=proposal.by_dtype)

    def judge(self, after: CheckContext, *, by_dtype: bool = False) -> Attempt:
        """Judge a run by its errors and outputs."""
        findings = run_checks(after, checks_for(self.config))
        failing = {f.site for f in findings if f.severity is Severity.ERROR}
        mixed = (f for f in mixed_after(self.subject.context, after) if f.site not in failing)
        errors = errors_of(suppressed((*findings, *mixed), self.hiding))
        required, record = self.config.min_sqnr, after.record
        # if errors remain, the 16-bit outputs cannot show whether the function is preserved: FP32 can
        keeps = bool(errors) or worst_db(record.outputs) >= required
        if errors or not by_dtype:
            keeps = keeps and worst_db(record.edited) >= required
        return Attempt(after, errors, keeps)

    def audit(self, proposal: Proposal, outputs: list[dict[str, Pair]] | None = None) -> CheckContext | None:
        """Run a model under a change and append its outputs to a list; ``None`` if torch would reject it."""
        run_config = self.run_config
        form = low_precision_format(proposal.dtype) if proposal.dtype else run_config.number_format
        changed = replace(
            run_config,
            number_format=form,
            rules=proposal.rules or run_config.rules,
            edits=proposal.edits,
            recorders=(),
            min_sqnr=None,
            keep_outputs=None if outputs is None else lambda _, batch_outputs: outputs.append(batch_outputs),
        )
        model = proposal.model or self.source.model
        try:
            (audit,) = run_audits(model, self.source.batches, [changed], silent)
        except AuditError:
            return None
        return context_of(audit, form, self.config.changed(prove=False, static=False))


def errors_of(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the errors that are not suppressed."""
    return tuple(f for f in findings if f.severity is Severity.ERROR and f.suppressed is None)


def same_function(source: ModelSource, model: nn.Module) -> bool:
    """Return whether a model's FP32 results are bitwise equal to those of the user's on every batch."""
    for number, batch in enumerate(source.batches):
        both = (source.model, model)
        results = [call_unchanged(each, batch.args, batch.kwargs, seed=number) for each in both]
        first, second = map(torch.utils._pytree.tree_leaves, results)
        pairs = zip(first, second, strict=True)
        if not all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor)):
            return False
    return True


def worst_db(outputs: Mapping[str, OutputComparison]) -> float:
    """Return the lowest output accuracy in dB; infinite if all are exact, -infinite if one is broken."""
    accuracies = (comparison.accuracy_db for comparison in outputs.values())
    return min((math.inf if accuracy is None else accuracy for accuracy in accuracies), default=math.inf)


def decibels(context: CheckContext) -> float | None:
    """Return the lowest output accuracy; ``None`` if all are exact, or one is broken."""
    worst = worst_db(context.record.outputs)
    return round(worst, 2) if math.isfinite(worst) else None


def outputs_text(context: CheckContext, errors: int) -> str:
    """Summarize a run in a few words: the worst output and the number of errors."""
    worst = worst_db(context.record.outputs)
    words = {math.inf: "exact", -math.inf: "broken"}
    return f"outputs {words.get(worst, f'{worst:.0f} dB')}; {plural(errors, 'error')}"
