"""The document of ``check``: the result of each target."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from ampaudit.core.errors import UsageError
from ampaudit.findings.finding import FailOnGaps, Gate, Severity, Source, pass_or_fail
from ampaudit.report.card import CardRows, Displayable, counted


@dataclass(frozen=True, slots=True)
class KnownFinding:
    """A finding or a gap. Several with the same code and site are merged, with the worst numbers.

    Attributes:
        site: Name of the site; for a gap, of the op.
        severity: Gravest severity.
        headroom_bits: log2(limit / peak), if the finding has it.
        sqnr_db: Accuracy of the site's values against FP32 in dB, if the finding has it.
    """

    code: str
    site: str
    severity: Severity
    headroom_bits: float | None = None
    sqnr_db: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        """The key of a finding in a baseline."""
        return self.code, self.site

    @classmethod
    def of_each_site(cls, findings: Iterable[KnownFinding]) -> tuple[KnownFinding, ...]:
        """Merge findings with the same code and site, keeping the worst numbers; sorted."""
        merged: dict[tuple[str, str], KnownFinding] = {}
        for new in findings:
            old = merged.get(new.key, new)
            merged[new.key] = cls(
                new.code,
                new.site,
                max(old.severity, new.severity, key=lambda severity: severity.rank),
                _least(old.headroom_bits, new.headroom_bits),
                _least(old.sqnr_db, new.sqnr_db),
            )
        return tuple(merged[key] for key in sorted(merged))


@dataclass(frozen=True, slots=True)
class KnownTarget:
    """The accepted findings and numbers of one target under one policy in one format.

    Attributes:
        target: Path relative to the directory of the baseline, or an import path.
        findings: Findings that count, sorted by code and site.
        headroom: Headroom in bits of each healthy 16-bit site, sorted by name.
    """

    target: str
    policy: str
    dtype: str
    findings: tuple[KnownFinding, ...]
    headroom: Mapping[str, float]
    measured: Measurements

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of its entry in a baseline."""
        return self.target, self.policy, self.dtype


@dataclass(frozen=True, slots=True)
class Baseline:
    """The accepted findings and numbers, sorted by target, policy and format."""

    kind: Literal["baseline"] = "baseline"
    schema: Literal[1] = 1
    targets: tuple[KnownTarget, ...] = ()

    def updated(self, targets: Iterable[KnownTarget]) -> Baseline:
        """Return a copy in which these targets replace entries with the same key, or are added."""
        entries = {target.key: target for target in (*self.targets, *targets)}
        return Baseline(targets=tuple(entries[key] for key in sorted(entries)))


def _least(*numbers: float | None) -> float | None:
    return min((round(number, 2) for number in numbers if number is not None), default=None)


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits; ``None`` means unlimited.

    Attributes:
        fail_on: Least severity of a finding that counts: ``error``, ``warning``, ``note`` or ``never``;
            ``gap`` for errors and gaps.
        allow: Codes of findings that do not count.
        min_headroom: Least headroom in bits of the 16-bit sites.
        min_sqnr: Least accuracy of every output against FP32 in dB.
        max_metric_drop: Largest decrease of ``metric(output, batch)`` of the model file from FP32 to 16 bits.
        max_fp32_share: Largest share, from 0 to 1, of computing sites that stay in float32.
    """

    fail_on: FailOnGaps = "error"
    allow: tuple[str, ...] = ()
    min_headroom: float | None = None
    min_sqnr: float | None = None
    max_metric_drop: float | None = None
    max_fp32_share: float | None = None

    def __post_init__(self) -> None:
        """Reject NaN, which nothing exceeds.

        Raises:
            UsageError: A limit is NaN.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and math.isnan(value):
                raise UsageError(f"--{field.name.replace('_', '-')} nan: no limit", hint="give a number")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Budgets:
        """Create budgets from a mapping; keys that are not fields are ignored."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


@dataclass(frozen=True, slots=True)
class Measurements:
    """The quantities that budgets limit; ``None`` if not measured.

    Attributes:
        headroom_bits: Least headroom in bits of the 16-bit sites that are not large by design.
        headroom_site: The site with the least headroom.
        sqnr_db: Lowest accuracy of a finite output in dB; null if all are exact.
        broken: Outputs that an overflow or NaN reaches.
        metric_fp32: Mean of the metric of the model file in FP32.
        metric_lower: The same mean in 16 bits.
        fp32_share: Share of computing sites in float32.
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
        budget: Name of the budget, or code of the finding.
        where: Site, output or file.
        what: Value and limit in words.
        severity: Severity of the finding; ``ERROR`` for a budget.
    """

    budget: str
    where: str
    what: str
    severity: Severity = Severity.ERROR
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One target and how to check it; a worker process receives it as JSON.

    Attributes:
        target: A model file, a converted directory, or a ``.pt2`` or ``.onnx`` file.
        options: Options of the audit and of the source by name.
        budgets: Fields of ``Budgets``.
        baseline: The entry of the target in the baseline; ``None`` without a baseline.
        update_baseline: Whether the baseline will accept the findings.
        number: Number of the target, by which processes of several ranks find each other.
    """

    target: str
    options: dict[str, object]
    budgets: dict[str, object]
    baseline: tuple[KnownTarget, ...] | None = None
    update_baseline: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class TargetResult:
    """The result of one target.

    Attributes:
        target: Path or import path of the target.
        verdict: ``pass``, ``fail`` (its report has an error, or a budget is exceeded), or ``error`` (it could
            not be audited).
        exit_code: 0, 1, or that of the error: 2 for bad input, 3 for an audit that could not be carried out.
        breaches: Exceeded budgets and findings that count.
        ignored: Errors that do not count, because of ``--fail-on never``.
        known: Breaches that the baseline accepts.
        gone: Findings of the baseline that no longer occur.
        accepted: New entry of the baseline, with ``--update-baseline``.
        measured: Measurements; ``None`` if it could not be audited.
        error: Error message with the next step; empty without an error.
        seconds: Wall time.
        peak_bytes: Largest sampled resident memory of the process and its children.
    """

    target: str
    verdict: Literal["pass", "fail", "error"]
    exit_code: int
    breaches: tuple[Breach, ...] = ()
    ignored: tuple[Breach, ...] = ()
    known: tuple[Breach, ...] = ()
    gone: tuple[KnownFinding, ...] = ()
    accepted: KnownTarget | None = None
    measured: Measurements | None = None
    policy: str = ""
    dtype: str = ""
    error: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class CheckResults(Displayable):
    """The results of all targets."""

    schema: Literal[1]
    verdict: Gate
    gate: Gate
    targets: tuple[TargetResult, ...]
    kind: Literal["check"] = "check"

    @property
    def exit_code(self) -> int:
        """The gravest of all targets: 3 (not audited), 2 (bad input), 1 (budget exceeded) or 0."""
        return max((target.exit_code for target in self.targets), default=0)

    @classmethod
    def of(cls, targets: Sequence[TargetResult]) -> CheckResults:
        """Collect results: the verdict follows those of the targets, the gate their exit codes."""
        passed = all(target.verdict == "pass" for target in targets)
        gate = pass_or_fail(all(target.exit_code == 0 for target in targets))
        return cls(1, pass_or_fail(passed), gate, tuple(targets))

    @property
    def headline(self) -> str:
        """The verdict, and what it is about."""
        return f"{self.verdict.upper()} {counted(len(self.targets), 'target')}"

    def card_rows(self) -> CardRows:
        """Return the targets."""
        return [
            (
                target.verdict,
                target.target,
                target.error.split("\n")[0] or ", ".join(b.budget for b in target.breaches),
            )
            for target in self.targets
        ]
