"""Lets instruments take part in an audit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

from ampaudit.audit.checks.interface import Check
from ampaudit.audit.config import ScanConfig
from ampaudit.core.formats import NumberFormat
from ampaudit.core.instruments import Instrument, instruments, measuring
from ampaudit.run.audit import Audit
from ampaudit.run.config import RunConfig
from ampaudit.source import ModelSource

__all__ = ["Measuring", "checks_of", "requested"]


class Measuring(Protocol):
    """The measuring half of an instrument.

    Attributes:
        part: Type of the part that a ``Recorder`` adds to ``RunRecord.parts`` for each batch. Parts are sent
            between processes as JSON; their method ``joined`` adds the part of later batches.
        checks: Checks of the measurements.
    """

    part: ClassVar[type]
    checks: ClassVar[Sequence[Check]] = ()

    def configured(self, run_config: RunConfig, source: ModelSource, options: Any) -> RunConfig:
        """Add a recorder to the configuration of a run; ``options`` has the fields of the instrument."""

    def section(self, audit: Audit, number_format: NumberFormat) -> Any:
        """Return the section of the report."""


def requested(config: ScanConfig) -> tuple[Instrument, ...]:
    """Return the instruments whose options are set."""
    return tuple(instrument for instrument in instruments() if getattr(config, instrument.name))


def checks_of(chosen: Iterable[Instrument]) -> Iterator[Check]:
    """Yield the checks of instruments."""
    for instrument in chosen:
        yield from measuring(instrument).checks
