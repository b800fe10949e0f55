"""Findings: location, severity, confidence, evidence and advice."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.core.text import escape_control, format_number, listed, plural, short_op
from ampaudit.findings.pages.page import Kind

CRASHED = "AMP990"  # the finding that a check itself failed
OTHER_CODE = "AMP212"  # a line of the model computes something else in 16 bits
OTHER_FUNCTION = "AMP611"  # the audited model computes something else than its reference
INSTALLED = "site-packages/"
KNOWN = "baseline"  # what suppresses a finding that is in the baseline


class Severity(StrEnum):
    """The severity of a finding."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"

    @property
    def rank(self) -> int:
        """The rank of a severity; larger is graver."""
        return {"error": 3, "warning": 2, "note": 1}[self.value]


Verdict = Literal["pass", "warn", "fail"]  # what was found
Gate = Literal["pass", "fail"]  # what the exit code says, which depends on --fail-on
FailOn = Literal["error", "warning", "note", "never"]
FailOnGaps = Literal["error", "gap", "warning", "note", "never"]


def threshold(fail_on: FailOnGaps) -> float:
    """Return the lowest rank of a severity that fails a report; ``gap`` fails the same ones as ``error``."""
    if fail_on == "never":
        return math.inf
    return Severity("error" if fail_on == "gap" else fail_on).rank


def pass_or_fail(passed: bool) -> Gate:
    """Return the word for a verdict or a gate."""
    return "pass" if passed else "fail"


def gate_at(severities: Iterable[Severity], fail_on: FailOnGaps) -> Gate:
    """Return ``fail`` if any of the severities makes the exit code 1."""
    least = threshold(fail_on)
    return pass_or_fail(all(severity.rank < least for severity in severities))


def counts_in_words(severities: Iterable[Severity]) -> str:
    """Format counts, gravest first: ``2 errors, 1 warning``; empty without any."""
    counts = Counter(severities)
    return ", ".join(plural(counts[level], level.value) for level in Severity if counts[level])


@dataclass(frozen=True, slots=True)
class Source:
    """The line that computes the value, and the user's line that led to it, if different."""

    file: str
    line: int
    code: str = ""
    caller: SourceLine | None = None

    @property
    def user_line(self) -> SourceLine:
        """The line to show in the user's project: the caller, if a library computes the value."""
        if self.caller is not None and INSTALLED in self.file:
            return self.caller
        return SourceLine(self.file, self.line, self.code)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The numbers behind a finding; ``None`` if a number does not apply.

    Attributes:
        peak: Largest magnitude in FP32.
        limit: Largest finite value of the format.
        inf: Number of elements that became infinite.
        nan: Number of elements that became NaN.
        elements: Number of elements measured.
        headroom_bits: log2(limit / peak); negative beyond the limit.
        sqnr_db: Accuracy of the site's values against FP32 in dB, with the errors of all earlier ops.
        local_sqnr_db: Accuracy of this op alone in dB, on exact inputs.
        max_error: Largest absolute error among the sampled elements.
        flushed: Share of the sampled elements that is zero in 16 bits only.
        subnormal: Number or share of elements that are subnormal in 16 bits.
        about: What was measured, such as ``gradient of head.weight``; empty for the values of the site.
        step: Number of the first step that breaks, or else of the one with the peak (``--steps``).
    """

    peak: float | None = None
    limit: float | None = None
    inf: int | None = None
    nan: int | None = None
    elements: int | None = None
    headroom_bits: float | None = None
    sqnr_db: float | None = None
    local_sqnr_db: float | None = None
    max_error: float | None = None
    flushed: float | None = None
    subnormal: float | None = None
    about: str = ""
    step: int | None = None

    @property
    def in_words(self) -> str:
        """Peak against limit, headroom, and how many elements broke; empty where there are no numbers."""
        parts: list[str] = []
        if self.peak is not None and self.limit is not None:
            parts.append(f"peak {format_number(self.peak)}, limit {format_number(self.limit)}")
        if self.headroom_bits is not None:
            parts.append(f"headroom {self.headroom_bits:+.2f} bits")
        for count, name in ((self.inf, "inf"), (self.nan, "NaN")):
            if count:
                parts.append(f"{count} of {self.elements} elements became {name}")
        if self.step is not None and parts:
            parts.insert(0, f"{'first ' if self.inf or self.nan else ''}at step {self.step}")
        about = f"{self.about}: " if self.about and parts else ""
        return f"{about}{'; '.join(parts)}"


TrialKind = Literal["rewrite", "rescale", "rule", "dtype"]
Outcome = Literal["cure", "fix", "failed"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A change that was tried for a finding (``--advise``).

    Attributes:
        kind: A rewrite of the code, rescaled weights, a rule of the policy, or another format.
        change: Description of the change.
        paste: Text to copy.
        before: Result of the run without it.
        after: Result of the run with it.
        outcome: ``cure`` if no error is left and every output has the required accuracy against the user's
            FP32 model; ``fix`` if this finding is gone and errors are left elsewhere; ``failed`` otherwise.
        left: Number of remaining errors.
        before_db: Accuracy of the worst output without it; ``None`` if it is exact, or not finite.
        after_db: Accuracy of the worst output with it.
        diff: Change of the source as a unified diff (``--diff``); empty if it has to be pasted.
        code: A rule or another format as PyTorch code for a variable ``model``; empty without any.
    """

    kind: TrialKind
    change: str
    paste: str
    before: str
    after: str
    outcome: Outcome = "cure"
    left: int = 0
    before_db: float | None = None
    after_db: float | None = None
    diff: str = ""
    code: str = ""

    @property
    def in_words(self) -> str:
        """The change; for a fix, also the number of remaining errors."""
        if self.outcome != "fix":
            return self.change
        are = "1 error is" if self.left == 1 else f"{self.left} errors are"
        return f"{self.change}; fixes this finding, {are} left elsewhere"


@dataclass(frozen=True, slots=True)
class CombinedPolicy:
    """One policy for the errors of a report, run as a whole (``--advise``).

    Attributes:
        change: Description of what it keeps in float32.
        name: Name of the policy.
        extends: Name or path of the policy of the scan.
        text: Rule file (YAML).
        code: The policy as PyTorch code for a variable ``model``; empty without any.
        before: Result of the run without it.
        after: Result of the run with it.
        outcome: ``cure`` if no error is left and every output has the required accuracy against the user's
            FP32 model; ``fix`` if errors are left.
        left: Remaining errors, each with its site.
        before_db: Accuracy of the worst output without it; ``None`` if it is exact, or not finite.
        after_db: Accuracy of the worst output with it.
    """

    change: str
    name: str
    extends: str
    text: str
    code: str
    before: str
    after: str
    outcome: Outcome
    left: tuple[str, ...] = ()
    before_db: float | None = None
    after_db: float | None = None

    @property
    def title(self) -> str:
        """A heading that says whether it addresses all errors."""
        return f"One policy for {'all' if self.outcome == 'cure' else 'some of the'} errors"

    @property
    def in_words(self) -> str:
        """The change and the remaining errors."""
        if self.outcome == "cure":
            return f"{self.change}: no error is left"
        return f"{self.change}: these errors are left: {', '.join(self.left)}"

    def saved_in(self, directory: Path) -> str:
        """Return the rule file with the path that it extends, if any, as seen from a directory."""
        if not Path(self.extends).is_file():  # the name of a shipped policy
            return self.text
        base = Path(self.extends).resolve()
        with contextlib.suppress(ValueError):  # on another drive
            base = Path(os.path.relpath(base, directory.resolve()))
        return self.text.replace(self.frame(self.extends), self.frame(base.as_posix()), 1)

    @staticmethod
    def frame(extends: str) -> str:
        """Return the line that names the policy to extend."""
        return f"extends: [{json.dumps(extends, ensure_ascii=False)}]"


@dataclass(frozen=True, slots=True, repr=False)
class Finding:
    """One finding of one check.

    Attributes:
        fate: Fate of a value that is not finite: intended, masked inside the model, or in its output.
        hidden_at: Sites that mask it by turning inf or NaN into finite values.
        suppressed: Option or comment that suppresses it; null if it counts.
        tried: Changes that cure or fix it, smallest first; if none does, all that were tried.
        batch: Name of the batch in which an origin appears first, or another finding is worst, such as
            ``call 14`` of a recording; null if that batch has no name.
    """

    code: str
    kind: Kind
    severity: Severity
    confidence: Literal["observed", "proved", "rule"]
    phase: Literal["forward", "backward", "weights", "static"]
    layer: str
    op: str
    site: SiteId
    source: Source | None
    evidence: Evidence
    origin: bool
    poisons: tuple[SiteId, ...]
    cause: str
    advice: str
    fate: Literal["intended", "recovered", "reaches the output"] | None = None
    hidden_at: tuple[SiteId, ...] = ()
    suppressed: str | None = None
    tried: tuple[Trial, ...] = ()
    batch: str | None = None

    def __repr__(self) -> str:
        number = f": {self.key_number}" if self.key_number else ""
        hidden = ", ignored" if self.suppressed is not None else ""
        return (
            f"<{type(self).__name__} {self.severity} {self.code} {escape_control(self.site)}{number}{hidden}>"
        )

    @property
    def helpful(self) -> tuple[Trial, ...]:
        """Changes that cure or fix it."""
        return tuple(trial for trial in self.tried if trial.outcome != "failed")

    @property
    def all_trials_failed(self) -> bool:
        """Whether changes were tried and all failed."""
        return bool(self.tried) and not self.helpful

    @property
    def numbers(self) -> str:
        """Its evidence in words, and the batch that shows it if that has a name."""
        where = f"{'first' if self.origin else 'worst'} in {self.batch}" if self.batch else ""
        return "; ".join(part for part in (self.evidence.in_words, where) if part)

    @property
    def finite_error(self) -> bool:
        """Whether the values are finite but inaccurate."""
        return self.kind == "precision" and not self.origin

    @property
    def key_number(self) -> str:
        """The number that says how bad it is: headroom, elements lost, or accuracy; empty without one."""
        evidence, backward = self.evidence, self.phase == "backward"
        bits = evidence.headroom_bits
        if bits is None or bits >= 0:
            if evidence.nan or evidence.inf:
                return f"{evidence.nan:,} NaN" if evidence.nan else f"{evidence.inf:,} inf"
            if backward and evidence.flushed is not None and evidence.flushed >= 0.5:
                return f"{evidence.flushed:.0%} flushed"
            if (backward or self.kind == "precision") and evidence.sqnr_db is not None:
                return f"{evidence.sqnr_db:.0f} dB"
        return f"{bits:+.1f} bits" if bits is not None else ""


class GapKind(StrEnum):
    """Why something was not audited."""

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
    """An op or a part of the model that was not audited, or not as a device computes it.

    Attributes:
        site: First site of the op.
        kind: Kind of gap.
        op: Name of the op, of a custom backward, or of modules that never ran.
        reason: Clause that says what is not known.
        sites: Number of sites that it concerns.
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
    """Return ``fail`` if findings that are not suppressed, or gaps, make the exit code 1."""
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
