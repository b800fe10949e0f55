"""Adds the backward pass to a run, and the gradients to its report."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ampaudit.audit.checks.interface import CheckContext
from ampaudit.audit.instruments import Measuring
from ampaudit.audit.scan_report import headroom_bits, round_db
from ampaudit.core.errors import InputError, UsageError
from ampaudit.core.formats import BFLOAT16
from ampaudit.core.instruments import Instrument
from ampaudit.core.text import finite_or_none
from ampaudit.instruments.backward.audit import GradientAudit
from ampaudit.instruments.backward.checks import CHECKS, gradients_in, suitable_scales
from ampaudit.instruments.backward.record import GradientRecord, GradientStats
from ampaudit.policy.load import StartingScale, starting_scale
from ampaudit.report.gradients import BackwardReport, Gradient, LossValues, ParameterGradient
from ampaudit.report.model import Report
from ampaudit.run.audit import Audit
from ampaudit.run.config import RunConfig
from ampaudit.source import Batch, ModelSource
from ampaudit.trace.loss import LOSS_BATCH, WithLoss, with_input_references


class _Measuring(Measuring):
    part = GradientRecord
    checks = CHECKS

    def prepared(self, source: ModelSource, options: Any) -> ModelSource:
        """Make the loss a part of the model.

        Raises:
            UsageError: The model has no loss, or its weights are streamed.
            InputError: No parameter requires a gradient.
        """
        if source.release is not None:
            raise UsageError("--backward cannot be combined with --stream", hint="leave out --stream")
        if source.kind in ("pt2", "converted"):
            raise UsageError(
                f"--backward: {source.location} is an exported program, which has no loss",
                hint="scan the Python model",
            )
        if not any(parameter.requires_grad for parameter in source.model.parameters()):
            raise InputError(
                "no parameter of the model requires a gradient",
                hint="call requires_grad_() on the parameters to train",
            )
        batches = tuple(
            Batch(
                b.args,
                {**b.kwargs, LOSS_BATCH: with_input_references(b.args, b.kwargs, b.whole)},
                name=b.name,
            )
            for b in source.batches
        )
        return replace(source, model=WithLoss(source.model, options.loss or source.loss), batches=batches)

    def configured(self, run_config: RunConfig, source: ModelSource, options: Any) -> RunConfig:
        """Differentiate the loss, times its scale."""
        assert run_config.rules is not None, "--ranges has no backward pass"
        scale = starting_scale(run_config.rules.file.loss_scale, run_config.number_format)
        if options.loss_scale is not None:
            scale = StartingScale(options.loss_scale, False, "as given")
        recorders = (*run_config.recorders, GradientAudit)
        return replace(run_config, recorders=recorders, functionalize=True, loss_scale=scale)

    def reported(
        self, instrument: Instrument, report: Report, source: ModelSource, audit: Audit, context: CheckContext
    ) -> Report:
        """Add the gradients of sites and parameters, the losses and the suitable scales."""
        record = gradients_in(context)
        advice = suitable_scales(context)
        # bfloat16 has the range of float32: where the gradients fit as they are, no scale is needed
        unscaled = context.number_format is BFLOAT16 and advice is not None and advice.low <= 0 <= advice.high
        gradients = {site: _gradient(context, stats) for site, stats in record.sites.items()}
        backward = BackwardReport(
            loss_scale=record.scale,
            dynamic=record.dynamic,
            scale_from=record.scale_from,
            losses=tuple(
                LossValues(
                    finite_or_none(wide),
                    finite_or_none(low),
                    finite_or_none(None if _same(low, repaired) else repaired),
                )
                for wide, low, repaired in record.losses
            ),
            advice=advice,
            suggested=advice.suggested if advice is not None and not unscaled else None,
            parameters=tuple(
                ParameterGradient(name, _gradient(context, stats))
                for name, stats in record.parameters.items()
            ),
            frozen=record.frozen,
            unused=record.unused,
            notes=tuple(record.notes),
        )
        sites = tuple(replace(site, gradient=gradients.get(site.site)) for site in report.sites)
        return replace(report, backward=backward, sites=sites)


def _gradient(context: CheckContext, stats: GradientStats) -> Gradient:
    values = stats.values
    return Gradient(
        precision="16 bits" if stats.low_precision else "float32",
        peak=values.finite_peak,
        headroom_bits=headroom_bits(context.number_format, values.finite_peak),
        inf=int(values.pos_inf + values.neg_inf),
        nan=int(values.nan),
        elements=values.elements,
        flushed=round(stats.flushed_share, 6),
        sqnr_db=round_db(values.sqnr_db),
        exponents=dict(sorted(stats.exponents.items())),
        cancelled=stats.cancelled,
    )


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


MEASURING = _Measuring()
