"""Builds the gradient part of a report."""

from __future__ import annotations

import math

from ampaudit.audit.checks.interface import CheckContext
from ampaudit.core.formats import BFLOAT16
from ampaudit.report.gradients import BackwardReport, Gradient, LossValues, ParameterGradient
from ampaudit.run.backward.record import GradientStats
from ampaudit.trace import Site

__all__ = ["backward_report", "gradient_of"]


def gradient_of(context: CheckContext, site: Site) -> Gradient | None:
    """Return the gradient of a site's output, if it was measured."""
    record = context.record.gradients
    stats = record.sites.get(site.id) if record is not None else None
    return None if stats is None else _gradient(context, stats)


def backward_report(context: CheckContext) -> BackwardReport | None:
    """Return everything about the backward pass that is not specific to one site."""
    record = context.record.gradients
    if record is None:
        return None
    advice = context.scale_advice
    # the range of bfloat16 is that of float32: where the gradients fit as they are, no scale is needed
    unscaled = context.number_format is BFLOAT16 and advice is not None and advice.low <= 0 <= advice.high
    return BackwardReport(
        loss_scale=record.scale,
        dynamic=record.dynamic,
        scale_from=record.scale_from,
        losses=tuple(_loss(*values) for values in record.losses),
        advice=advice,
        suggested=advice.suggested if advice is not None and not unscaled else None,
        parameters=tuple(
            ParameterGradient(name, _gradient(context, stats)) for name, stats in record.parameters.items()
        ),
        frozen=record.frozen,
        unused=record.unused,
        notes=tuple(record.notes),
    )


def _gradient(context: CheckContext, stats: GradientStats) -> Gradient:
    values, form = stats.values, context.number_format
    peak = values.finite_peak
    sqnr = values.sqnr_db
    return Gradient(
        precision="16 bits" if stats.low_precision else "float32",
        peak=peak,
        headroom_bits=round(form.headroom_bits(peak), 4) if peak > 0 else None,
        inf=int(values.pos_inf + values.neg_inf),
        nan=int(values.nan),
        elements=values.elements,
        flushed=round(stats.flushed_share, 6),
        sqnr_db=None if sqnr is None else round(sqnr, 3),
        exponents=dict(sorted(stats.exponents.items())),
        cancelled=stats.cancelled,
    )


def _loss(float32: float, lower: float, repaired: float) -> LossValues:
    same = lower == repaired or (math.isnan(lower) and math.isnan(repaired))
    return LossValues(_finite(float32), _finite(lower), None if same else _finite(repaired))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
