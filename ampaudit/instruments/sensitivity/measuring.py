"""Ranks the values whose rounding causes the error of the outputs."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ampaudit.audit.checks.interface import finding_source
from ampaudit.audit.instruments import Measuring
from ampaudit.core.formats import NumberFormat
from ampaudit.core.text import finite_or_none, ratio_db
from ampaudit.instruments.backward.audit import GradientAudit
from ampaudit.instruments.sensitivity import INSTRUMENT, Sensitivity
from ampaudit.instruments.sensitivity.gradients import GradientProbe
from ampaudit.instruments.sensitivity.outputs import SensitivityProbe
from ampaudit.instruments.sensitivity.probe import (
    PrecisionGraph,
    Sensitivities,
    SensitivityPart,
    ValueKind,
)
from ampaudit.report.tuning import Noise, NoiseKind
from ampaudit.run.audit import Audit
from ampaudit.run.config import RunConfig
from ampaudit.source import ModelSource

_MIN_SHARE = 1e-6


def noise_rows(
    sensitivities: Sensitivities, graph: PrecisionGraph, wide: frozenset[str]
) -> tuple[Noise, ...]:
    """Return what rounding each value adds to the error, the largest first; ``wide`` are in float32."""
    rows: dict[tuple[str, NoiseKind], Any] = defaultdict(float)
    for name, row in sensitivities.own.items():
        if name not in wide:
            rows[name, "weight" if graph.values[name].kind is ValueKind.WEIGHT else "op"] += row
    for (producer, reader), row in sensitivities.reads.items():
        if producer in wide and reader not in wide:
            rows[(producer, "weight") if graph.values[producer].is_weight else (reader, "cast")] += row
    for key, row in sensitivities.backward.items():
        rows[key] += row
    total = sum(rows.values(), np.zeros(len(sensitivities.columns)))
    worst = int(total.argmax()) if total.any() else 0
    noises: list[Noise] = []
    for (name, kind), row in rows.items():
        if row.max() > 0 and (share := float(row[worst] / total[worst])) > _MIN_SHARE:
            noise, site = Noise(name, kind, -10.0 * math.log10(row.max()), share), graph.values[name].site
            if site is not None:
                noise = replace(noise, layer=site.layer, op=site.op, source=finding_source(site))
            noises.append(noise)
    return tuple(sorted(noises, key=lambda noise: -noise.share))


def sensitivities_in(audit: Audit) -> Sensitivities:
    """Return the sensitivities that an audit measured."""
    return Sensitivities.of(audit.record.parts[INSTRUMENT.name].columns)


class _Measuring(Measuring):
    part = SensitivityPart

    def configured(self, run_config: RunConfig, source: ModelSource, options: Any) -> RunConfig:
        """Probe the gradients, if they are audited, or else the outputs."""
        if not run_config.trains:
            recorder = partial(SensitivityProbe, batches=source.batches)
            return replace(run_config, recorders=(*run_config.recorders, recorder), functionalize=True)
        recorders = (GradientProbe if make is GradientAudit else make for make in run_config.recorders)
        return replace(run_config, recorders=tuple(recorders))

    def section(self, audit: Audit, number_format: NumberFormat) -> Sensitivity:
        """Return the ranking of a policy's roundings, with the predicted and the measured total error."""
        part: SensitivityPart = audit.record.parts[INSTRUMENT.name]
        probe = next(each for each in audit.recorders if isinstance(each, SensitivityProbe | GradientProbe))
        graph, sensitivities = probe.graph, sensitivities_in(audit)
        wide = frozenset(name for name, value in graph.values.items() if not value.low)
        predicted = float(sensitivities.predicted(wide).max(initial=0.0))
        of_gradients = isinstance(probe, GradientProbe)
        accuracies = [ratio_db(1.0, error) for error in part.measured]
        if not of_gradients:
            outputs = audit.record.outputs.values()
            accuracies = [output.accuracy_db for output in outputs if output.accuracy_db is not None]
        measured = min(accuracies, default=math.inf)
        return Sensitivity(
            number_format.name,
            noise_rows(sensitivities, graph, wide),
            ratio_db(1.0, predicted) if predicted else None,
            finite_or_none(measured),
            part.probes,
            measured == -math.inf,
            "gradients" if of_gradients else "outputs",
        )


MEASURING = _Measuring()
