"""Budgets of a check, and the measurements compared with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ampaudit.core.errors import UsageError
from ampaudit.report.finding import FailOnGaps, Severity, Source

__all__ = ["Breach", "Budgets", "Measurements"]


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits; ``None`` means unlimited.

    Attributes:
        fail_on: severity of a finding from which it counts: ``error``, ``warning``, ``note`` or ``never``;
            ``gap`` for errors and gaps.
        allow: codes of findings that do not count.
        min_headroom: bits between the largest value of a 16-bit site and the format's end.
        min_sqnr: dB of every output, against FP32.
        max_metric_drop: how much ``metric(output, batch)`` of the model file may fall from FP32 to 16 bits.
        max_fp32_share: share, from 0 to 1, of computing sites that may stay in float32.
    """

    fail_on: FailOnGaps = "error"
    allow: tuple[str, ...] = ()
    min_headroom: float | None = None
    min_sqnr: float | None = None
    max_metric_drop: float | None = None
    max_fp32_share: float | None = None

    def __post_init__(self) -> None:
        """Reject limits that nothing can exceed.

        Raises:
            UsageError: one is NaN.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and math.isnan(value):
                raise UsageError(f"--{field.name.replace('_', '-')} nan: no limit", hint="give a number")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Budgets:
        """Build from values by field name, ignoring other names."""
        own = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in own})


@dataclass(frozen=True, slots=True)
class Measurements:
    """The quantities that budgets limit; ``None`` if not measured.

    Attributes:
        headroom_bits: the least of a 16-bit site that is not large by design.
        headroom_site: where.
        sqnr_db: the lowest of an output that is finite; null if all are exact.
        broken: outputs that an overflow or NaN reaches.
        metric_fp32: the mean of the model file's metric in FP32.
        metric_lower: the same in 16 bits.
        fp32_share: share of computing sites in float32.
    """

    headroom_bits: float | None = None
    headroom_site: str | None = None
    sqnr_db: float | None = None
    broken: tuple[str, ...] = ()
    metric_fp32: float | None = None
    metric_lower: float | None = None
    fp32_share: float = 0.0

    @property
    def accuracy(self) -> str:
        """The accuracy of the least accurate output: ``63 dB``, ``exact`` or ``broken``."""
        if self.broken:
            return "broken"
        return f"{self.sqnr_db:.0f} dB" if self.sqnr_db is not None else "exact"

    @property
    def metric_drop(self) -> float | None:
        """FP32's metric minus that in 16 bits."""
        if self.metric_fp32 is None or self.metric_lower is None:
            return None
        return self.metric_fp32 - self.metric_lower


@dataclass(frozen=True, slots=True)
class Breach:
    """An exceeded budget.

    Attributes:
        budget: its name, or a finding's code.
        where: the site, output or file.
        what: the value and the limit, in words.
        severity: of the finding; a budget's own is an error.
        source: the line, where it is known.
    """

    budget: str
    where: str
    what: str
    severity: Severity = Severity.ERROR
    source: Source | None = None
