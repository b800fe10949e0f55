"""Defines gaps: the parts of a model that an audit did not cover, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ampaudit.core.sites import SiteId
from ampaudit.core.text import listed, plural, short_op
from ampaudit.report.finding import FailOnGaps, Finding, Gate, Severity, Verdict, gate_at

__all__ = ["Gap", "GapKind", "gaps_in_words", "gate_on", "verdict_on"]


class GapKind(StrEnum):
    """Why something was not looked at."""

    OPAQUE = "opaque op"
    UNCHECKED_TWIN = "unchecked twin"
    CONTROL_FLOW = "control flow"
    SHAPE = "varying shape"
    PRODUCT = "product rounded once"
    BACKWARD = "backward"
    OUTSIDE = "outside torch"
    OTHER_CODE = "other code"
    NOT_RUN = "not run"

    @property
    def code(self) -> str:
        """The code of its findings."""
        return _CODES.get(self, "AMP901")

    @property
    def in_words(self) -> str:
        """The phrase in front of the names of its ops."""
        return _WORDS.get(self, "not audited")


_CODES = {
    GapKind.OPAQUE: "AMP904",
    GapKind.UNCHECKED_TWIN: "AMP905",
    GapKind.BACKWARD: "AMP706",
    GapKind.OUTSIDE: "AMP215",
    GapKind.OTHER_CODE: "AMP214",
    GapKind.NOT_RUN: "AMP903",
}
_WORDS = {
    GapKind.OPAQUE: "not audited inside",
    GapKind.UNCHECKED_TWIN: "audited by an unchecked twin",
    GapKind.OUTSIDE: "values leave torch",
    GapKind.OTHER_CODE: "decides differently",
    GapKind.NOT_RUN: "never run",
}


@dataclass(frozen=True, slots=True)
class Gap:
    """An op or a part of the model that was not looked at, or not as a device computes it.

    Attributes:
        site: the first site of the op.
        kind: why.
        op: the op's name, or that of a custom backward, or of modules that never ran.
        reason: one clause that says what is not known.
        sites: the number of sites that it is about.
    """

    site: SiteId
    kind: GapKind
    op: str
    reason: str
    sites: int = 1

    @property
    def in_words(self) -> str:
        """The op and the reason why it was not audited."""
        return f"{short_op(self.op)} is {self.kind.in_words}: {self.reason}"


def verdict_on(findings: Iterable[Finding], *, ranges: bool = False) -> Verdict:
    """Return the verdict on active findings: errors fail; with ``ranges``, warnings warn."""
    severities = {finding.severity for finding in findings if finding.suppressed is None}
    if Severity.ERROR in severities:
        return "fail"
    return "warn" if ranges and Severity.WARNING in severities else "pass"


def gate_on(findings: Iterable[Finding], gaps: Sequence[Gap], fail_on: FailOnGaps) -> Gate:
    """Return whether findings that are not suppressed, or gaps, make the exit code 1."""
    if fail_on == "gap" and gaps:
        return "fail"
    return gate_at((finding.severity for finding in findings if finding.suppressed is None), fail_on)


def gaps_in_words(gaps: Sequence[Gap]) -> str:
    """Return ``2 gaps (not audited inside: mylib.softmax; not audited: cond)``; empty without gaps."""
    groups: dict[str, list[str]] = {}
    for gap in gaps:
        groups.setdefault(gap.kind.in_words, []).append(short_op(gap.op))
    kinds = "; ".join(f"{words}: {listed(ops)}" for words, ops in groups.items())
    return f"{plural(len(gaps), 'gap')} ({kinds})" if gaps else ""
