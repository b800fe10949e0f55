"""Lets instruments take part in an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from ampaudit.audit.checks import ALL_CHECKS, Check, CheckContext
from ampaudit.audit.config import ScanConfig
from ampaudit.core.formats import NumberFormat
from ampaudit.core.instruments import Instrument, measuring
from ampaudit.report.model import Report
from ampaudit.run.audit import Audit
from ampaudit.run.config import RunConfig
from ampaudit.source import ModelSource


class Measuring(Protocol):
    """The measuring half of an instrument."""

    # type of the part that a ``Recorder`` adds to ``RunRecord.parts`` for each batch, or ``None``. Parts are
    # sent between processes as JSON; their method ``joined`` adds the part of later batches
    part: ClassVar[type | None]
    checks: ClassVar[Sequence[Check]] = ()  # checks of the measurements

    def prepared(self, source: ModelSource, options: Any) -> ModelSource:
        """Return the model and batches to run; ``options`` has the fields of the instrument."""
        return source

    def configured(self, run_config: RunConfig, source: ModelSource, options: Any) -> RunConfig:
        """Add a recorder to the configuration of a run."""

    def section(self, audit: Audit, number_format: NumberFormat) -> Any:
        """Return the section of the report, if it has one."""
        return None

    def reported(
        self, instrument: Instrument, report: Report, source: ModelSource, audit: Audit, context: CheckContext
    ) -> Report:
        """Return the report with the measurements, by default as a section."""
        section = self.section(audit, context.number_format)
        return replace(report, sections=report.sections | {instrument.name: section})


def checks_for(config: ScanConfig) -> tuple[Check, ...]:
    """Return all checks of an audit, those of the requested instruments last."""
    return (*ALL_CHECKS, *(check for each in config.requested for check in measuring(each).checks))
