"""Baselines: the findings and the numbers of targets that ``ampaudit check`` accepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ampaudit.report.budgets import Measurements
from ampaudit.report.finding import Severity

__all__ = ["Baseline", "KnownFinding", "KnownTarget"]


@dataclass(frozen=True, slots=True)
class KnownFinding:
    """A finding or a gap; of several with one code at one site, the worst numbers.

    Attributes:
        code: of the check.
        site: where; of a gap, its op.
        severity: the gravest.
        headroom_bits: log2(limit / peak), if the finding has it.
        sqnr_db: accuracy of the site's values against FP32, if the finding has it.
    """

    code: str
    site: str
    severity: Severity
    headroom_bits: float | None = None
    sqnr_db: float | None = None

    @classmethod
    def of_each_site(cls, findings: Iterable[KnownFinding]) -> tuple[KnownFinding, ...]:
        """Return one for each code and site, sorted."""
        found: dict[tuple[str, str], KnownFinding] = {}
        for new in findings:
            old = found.get((new.code, new.site), new)
            found[new.code, new.site] = cls(
                new.code,
                new.site,
                max(old.severity, new.severity, key=lambda severity: severity.rank),
                _least(old.headroom_bits, new.headroom_bits),
                _least(old.sqnr_db, new.sqnr_db),
            )
        return tuple(found[key] for key in sorted(found))


@dataclass(frozen=True, slots=True)
class KnownTarget:
    """What is accepted of one target under one policy in one format.

    Attributes:
        target: its path from the directory of the baseline, or an import path.
        policy: name of the policy.
        dtype: the format.
        findings: those that count, sorted by code and site.
        headroom: bits of each healthy 16-bit site, sorted by its name.
        measured: the numbers that budgets limit.
    """

    target: str
    policy: str
    dtype: str
    findings: tuple[KnownFinding, ...]
    headroom: Mapping[str, float]
    measured: Measurements

    @property
    def key(self) -> tuple[str, str, str]:
        """What a result is found by."""
        return self.target, self.policy, self.dtype


@dataclass(frozen=True, slots=True)
class Baseline:
    """What is accepted, sorted by target, policy and format."""

    kind: Literal["baseline"] = "baseline"
    schema: Literal[1] = 1
    targets: tuple[KnownTarget, ...] = ()

    def updated(self, targets: Iterable[KnownTarget]) -> Baseline:
        """Return this with the entries of what was checked, and the others as they are."""
        entries = {target.key: target for target in (*self.targets, *targets)}
        return Baseline(targets=tuple(entries[key] for key in sorted(entries)))


def _least(*numbers: float | None) -> float | None:
    return min((round(number, 2) for number in numbers if number is not None), default=None)
