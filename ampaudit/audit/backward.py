"""Adds the loss to a source's model and the backward pass to its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampaudit.audit.config import ScanConfig
from ampaudit.core.errors import InputError, UsageError
from ampaudit.policy.scaling import StartingScale, starting_scale
from ampaudit.run.audit import RunConfig
from ampaudit.run.backward.gradients import GradientAudit
from ampaudit.run.sensitivity.gradients import GradientProbe
from ampaudit.source import Batch, ModelSource
from ampaudit.trace.loss import WithLoss, item_apart

__all__ = ["differentiated"]


def differentiated(
    source: ModelSource, plans: Sequence[RunConfig], settings: ScanConfig
) -> tuple[ModelSource, list[RunConfig]]:
    """Return the source with its loss, and the configurations with a backward pass.

    Raises:
        UsageError: an option that goes forward only.
        InputError: no parameter asks for a gradient.
    """
    _refuse_forward_only(settings, source)
    if not any(parameter.requires_grad for parameter in source.model.parameters()):
        raise InputError(
            "no parameter of the model requires a gradient",
            hint="call requires_grad_() on the parameters to train",
        )
    model = WithLoss(source.model, settings.loss or source.loss)
    batches = tuple(
        Batch((batch.args, batch.kwargs, item_apart(batch.args, batch.kwargs, batch.whole)), name=batch.name)
        for batch in source.batches
    )
    return replace(source, model=model, batches=batches), [_with_backward(plan, settings) for plan in plans]


def _with_backward(plan: RunConfig, settings: ScanConfig) -> RunConfig:
    assert plan.rules is not None, "--ranges has no backward pass"
    scale = starting_scale(plan.rules.file.loss_scale, plan.number_format)
    if settings.loss_scale is not None:
        scale = StartingScale(settings.loss_scale, False, "as given")
    kind = GradientProbe if settings.sensitivity else GradientAudit
    return replace(plan, differentiator=lambda p: kind(p, scale))


def _refuse_forward_only(settings: ScanConfig, source: ModelSource) -> None:
    if source.release is not None:
        raise UsageError("--backward cannot be combined with --stream", hint="leave out --stream")
    if source.kind in ("pt2", "converted"):
        raise UsageError(
            f"--backward: {source.location} is an exported program, which has no loss",
            hint="scan the Python model",
        )
