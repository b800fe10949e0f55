"""Adds the reference model to a run, and the comparison to its report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ampaudit.audit.checks.interface import CheckContext, finding_source
from ampaudit.audit.instruments import Measuring
from ampaudit.core.instruments import Instrument
from ampaudit.instruments.against.checks import CHECKS, comparison_in
from ampaudit.instruments.against.reference import ReferenceModel
from ampaudit.report.model import AgainstReport, Correspondence, ReferenceDifference, Report
from ampaudit.run.audit import Audit
from ampaudit.run.config import RunConfig
from ampaudit.source import ModelSource


class _Measuring(Measuring):
    part = None
    checks = CHECKS

    def configured(self, run_config: RunConfig, source: ModelSource, options: Any) -> RunConfig:
        """Compare with the reference, whose outputs take the place of the model's own in FP32."""
        other = source.reference
        assert other is not None, "the source was opened beside its reference"
        reference = ReferenceModel(other.model, other.batches, run_config, source.places)
        return replace(run_config, against=reference)

    def reported(
        self, instrument: Instrument, report: Report, source: ModelSource, audit: Audit, context: CheckContext
    ) -> Report:
        """Add the comparison."""
        comparison = comparison_in(context)
        assert source.reference is not None
        against = AgainstReport(
            source.reference.location,
            tuple(Correspondence(here.id, there.id) for here, there in comparison.matched),
            tuple(site.id for site in comparison.only_audited),
            tuple(site.id for site in comparison.only_reference),
            tuple(
                ReferenceDifference(
                    each.kind,
                    each.site.id,
                    each.site.layer,
                    each.counterpart.id if each.counterpart else None,
                    finding_source(each.counterpart) if each.counterpart else None,
                    each.what,
                    each.outputs,
                )
                for each in comparison.differences
            ),
        )
        return replace(report, against=against)


MEASURING = _Measuring()
