"""The report, schema 1: everything a reader or another tool needs, in plain frozen values.

Other tools parse it, so fields are only ever added. Numbers that do not exist are null, never NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ampaudit.core.sites import SiteId
from ampaudit.report.card import Rows, Shown, counted
from ampaudit.report.extrapolation import Proofs, Stressed, Tail, VerdictChange
from ampaudit.report.finding import CRASHED, Finding, Severity, Source
from ampaudit.report.gradients import BackwardReport, Gradient

__all__ = [
    "Coverage",
    "Environment",
    "Forward",
    "ModelInfo",
    "OutputAccuracy",
    "Report",
    "RunInfo",
    "SiteReport",
    "ToolInfo",
    "WeightMemory",
    "WhatIf",
]

SCHEMA: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class ToolInfo:
    """Who made the report."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was audited."""

    source: str
    kind: str
    sha256: str | None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """How it was audited.

    Attributes:
        level: ``scan``, ``ranges`` or ``static``.
        contract: what was taken for granted about kernels, where 16 bits are emulated.
    """

    device: str
    backend: str
    dtype: str
    policy: str
    batches: int
    seed: int
    level: Literal["scan", "ranges", "static"]
    mode: Literal["eval", "train"]
    contract: str = ""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Counts of sites: ``sites`` make or hand on floats; the rest of the graph is integers and shapes.

    Attributes:
        sites: sites with a floating-point output.
        audited: those that were measured, or hand on measured values.
        measured: those that make new values.
        proved: those that are proved not to overflow by their own fault (``--prove``, ``--static``).
        integer_sites: ops without a floating-point output.
        no_rule: sites that no rule of the policy mentions; they follow type promotion.
        author_sites: sites inside the author's own autocast(enabled=False) regions.
        casts: casts that the policy inserted.
        author_casts: conversions in the author's own code.
        uncovered_ops: ops that could not be observed.
    """

    sites: int
    audited: int
    measured: int
    proved: int
    integer_sites: int
    no_rule: int
    author_sites: int
    casts: int
    author_casts: int
    uncovered_ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One number format against a site's FP32 values.

    Attributes:
        headroom_bits: log2(format's max / peak), ``None`` where all values are zero.
        overflows: whether the peak rounds to infinity (or NaN) in that format.
        vanish: share of the sampled non-zero values that round to zero.
    """

    headroom_bits: float | None
    overflows: bool
    vanish: float


@dataclass(frozen=True, slots=True)
class Forward:
    """What was measured at a site.

    Attributes:
        peak: largest magnitude: FP32's, or the 16-bit run's where that was measured and is larger.
        headroom_bits: log2(max of the run's format / peak).
        inf: elements infinite in 16 bits only.
        nan: elements NaN in 16 bits only.
        elements: elements looked at for peak, inf and nan: all of them.
        sqnr_db: accumulated signal to quantization-noise ratio against FP32; null for a weight that fits.
            On a CPU, over every eighth block of 262,144 elements of what is larger than that.
        local_sqnr_db: the same for this op alone on exact inputs, over local_elements of its output.
        local_elements: see local_sqnr_db.
        sampled: elements looked at for the fields that follow.
        min_nonzero: smallest non-zero magnitude.
        flushed: share that is zero in 16 bits and not in FP32.
        subnormal: share that is subnormal in the run's format.
        max_error: largest absolute error.
        max_relative_error: largest relative error.
        exponents: count of FP32 values per floor(log2|x|).
    """

    peak: float
    headroom_bits: float | None
    inf: int
    nan: int
    elements: int
    sqnr_db: float | None
    local_sqnr_db: float | None
    local_elements: int
    sampled: int
    min_nonzero: float | None
    flushed: float
    subnormal: float
    max_error: float
    max_relative_error: float
    exponents: dict[int, int]


@dataclass(frozen=True, slots=True)
class SiteReport:
    """One site.

    ``forward`` is null where it hands on the values of its input (role view or select). ``by_design``:
    it is near the limit because it takes in a mask, or is a value that no parameter has touched. ``bound``:
    no input of the proof's domain makes a larger magnitude here; null without a proof, or if unbounded.
    ``gradient`` is that of its output (``--backward``). ``inside`` is the largest square seen inside a norm
    that is given 16 bits, ``bound_inside`` a bound on it.
    """

    site: SiteId
    layer: str
    layer_type: str
    op: str
    role: str
    precision: str
    shape: tuple[int, ...]
    rule: str | None
    reason: str
    why: str
    source: Source | None
    verdict: Literal["proved", "observed", "overflows", "poisoned", "not observed"]
    by_design: bool
    forward: Forward | None
    gradient: Gradient | None = None
    bound: float | None = None
    bound_inside: float | None = None
    inside: float | None = None
    what_if: dict[str, WhatIf] | None = None


@dataclass(frozen=True, slots=True)
class OutputAccuracy:
    """One output tensor of the model, in its worst batch.

    Attributes:
        name: where it was found.
        site: the site that makes it.
        sqnr_db: signal to error ratio against FP32; of integers, 20 log10(1 / share that differs). Null
            where both agree exactly, or where ``problem`` says why there is no number.
        kind: ``float``, ``complex`` (two floats per element) or ``integer`` (booleans, too).
        differing: integers that differ.
        problem: why no accuracy can be given although the output is wrong; empty otherwise.
        variation_db: signal to error ratio of what varies in it, its mean taken out; null for integers, for
            fewer than 16 elements, and where nothing varies or both agree.
        constant: the value that FP32 gives everywhere, of floats; its accuracy says nothing of other inputs.
        empty: whether it has no elements.
    """

    name: str
    site: SiteId | None
    sqnr_db: float | None
    kind: Literal["float", "complex", "integer"] = "float"
    differing: int = 0
    problem: str = ""
    variation_db: float | None = None
    constant: float | None = None
    empty: bool = False

    @property
    def accuracy_db(self) -> float | None:
        """``sqnr_db``; -inf where there is none because of a problem."""
        return -math.inf if self.problem else self.sqnr_db


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Bytes of the FP32 masters and of the 16-bit working copies beside them."""

    master_bytes: int
    working_bytes: int


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions that can change a result."""

    python: str
    torch: str


@dataclass(frozen=True, slots=True, repr=False)
class Report(Shown):
    """A whole audit.

    ``raised`` is schema 1's name for ``promoted``.
    """

    schema: Literal[1]
    tool: ToolInfo
    model: ModelInfo
    run: RunInfo
    verdict: Literal["pass", "fail"]
    fail_on: Literal["error", "warning", "note", "never"]
    coverage: Coverage
    findings: tuple[Finding, ...]
    sites: tuple[SiteReport, ...]
    outputs: tuple[OutputAccuracy, ...]
    weights: WeightMemory
    notes: tuple[str, ...]
    environment: Environment
    timings: dict[str, float] = field(default_factory=dict)
    raised: tuple[SiteId, ...] = ()
    proofs: Proofs | None = None
    changed: tuple[VerdictChange, ...] = ()
    stressed: tuple[Stressed, ...] = ()
    tails: tuple[Tail, ...] = ()
    backward: BackwardReport | None = None

    @property
    def exit_code(self) -> int:
        """0 for a pass, 1 for findings at or above ``fail_on``, 3 if a check itself failed."""
        if any(finding.code == CRASHED for finding in self.findings):
            return 3
        return 0 if self.verdict == "pass" else 1

    @property
    def promoted(self) -> tuple[SiteId, ...]:
        """Sites kept in float32 because of what a first pass measured."""
        return self.raised

    @property
    def broken_outputs(self) -> tuple[OutputAccuracy, ...]:
        """Outputs that an overflow or NaN reaches, or that are nothing like FP32's.

        The accuracy of the former is that of the repaired run.
        """
        wrong = {site.site for site in self.sites if site.verdict in ("overflows", "poisoned")}
        return tuple(output for output in self.outputs if output.site in wrong or output.problem)

    def count(self, severity: Severity) -> int:
        """Findings of one severity, without those that are suppressed."""
        return sum(f.severity is severity and f.suppressed is None for f in self.findings)

    @property
    def headline(self) -> str:
        """The verdict, and what it is about."""
        errors, warnings = (self.count(severity) for severity in (Severity.ERROR, Severity.WARNING))
        found = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
        how = f"in {self.run.dtype} under {self.run.policy}"
        return f"{self.verdict.upper()} {self.model.source} {how}: {found}"

    def card_rows(self) -> Rows:
        """Return the findings."""
        return [(f.severity, f.code, f.layer, f.cause) for f in self.findings if f.suppressed is None]
