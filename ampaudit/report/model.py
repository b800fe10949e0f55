"""The document of ``scan``, schema 1, as plain frozen values.

Other tools parse it, so fields are only ever added. Numbers that do not exist are null, never NaN.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from ampaudit.core.formats import FORMATS
from ampaudit.core.instruments import ByInstrument, Instrument, instruments
from ampaudit.core.sites import SiteId
from ampaudit.core.text import escape_control, format_number, plural
from ampaudit.findings.finding import (
    CRASHED,
    CombinedPolicy,
    FailOnGaps,
    Finding,
    Gap,
    Gate,
    Severity,
    Source,
    Verdict,
    gaps_in_words,
)
from ampaudit.policy.schema import AS_IS
from ampaudit.report.card import CardRows, Displayable, counted
from ampaudit.report.extrapolation import Proofs, StressResult, Sweep, Tail, VerdictChange
from ampaudit.report.gradients import BackwardReport, Gradient
from ampaudit.report.steps import StepsReport

LOST_DB = 10.0  # below this accuracy, the error is a third or more of an output's variation
SCHEMA: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A site's FP32 values compared with one number format.

    Attributes:
        headroom_bits: log2(format's max / peak); ``None`` if all values are zero.
        overflows: Whether the peak rounds to infinity (or NaN) in that format.
        vanish: Share of the sampled non-zero values that round to zero.
    """

    headroom_bits: float | None
    overflows: bool
    vanish: float


@dataclass(frozen=True, slots=True)
class Forward:
    """Measurements of a site.

    Attributes:
        peak: Largest magnitude in FP32, or in the 16-bit run if that was measured and is larger.
        headroom_bits: log2(max of the run's format / peak); null if all values are zero.
        inf: Number of elements that are infinite in 16 bits only.
        nan: Number of elements that are NaN in 16 bits only.
        elements: Number of elements measured for peak, inf and nan, which are all elements.
        sqnr_db: Signal to quantization-noise ratio against FP32 in dB, with the errors of all earlier ops;
            null if exact, or for a weight that fits. On a CPU, tensors of more than 262,144 elements are
            measured in every eighth block of that size.
        local_sqnr_db: The same ratio for this op alone on exact inputs, over local_elements of its output.
        local_elements: Number of elements measured for local_sqnr_db.
        sampled: Number of elements sampled for the fields that follow.
        min_nonzero: Smallest non-zero magnitude.
        flushed: Share that is zero in 16 bits and not in FP32.
        subnormal: Share that is subnormal in the run's format.
        max_error: Largest absolute error.
        max_relative_error: Largest relative error.
        exponents: Number of FP32 values by floor(log2|x|).
        batch: Name of the batch with the largest magnitude in FP32; null if it has none.
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
    exponents: dict[int, int] = field(repr=False)
    batch: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class SiteReport:
    """The results of one site.

    ``forward`` is null if the site passes on values of its input (role view or select). ``by_design`` is true
    if it is near the limit because it reads a mask, or if it does not depend on a parameter. ``bound`` is a
    magnitude that its values do not exceed before they are rounded to its dtype, for any input that the
    proofs assume; null without a proof, or if unbounded. ``gradient`` is that of its output (``--backward``).
    ``inside`` is the largest square computed inside a norm of 16-bit values, and ``bound_inside`` a bound on
    it.
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

    def __repr__(self) -> str:
        peak = f", peak {format_number(self.forward.peak)}" if self.forward is not None else ""
        name = escape_control(self.site)
        return f"<{type(self).__name__} {name}: {self.precision}, {self.verdict}{peak}>"

    @property
    def headroom_bits(self) -> float | None:
        """Headroom of its values in bits; ``None`` if it was not measured, or all values are zero."""
        return self.forward.headroom_bits if self.forward is not None else None

    @property
    def healthy(self) -> bool:
        """Whether it was measured, and neither overflows nor is poisoned."""
        return self.verdict in ("observed", "proved")


@dataclass(frozen=True, slots=True)
class OutputAccuracy:
    """The accuracy of one output tensor, in its worst batch.

    Attributes:
        name: Path in the model's output.
        site: Site that computes it.
        sqnr_db: Signal-to-noise ratio against FP32 in dB; for integers, 20 log10(1 / share that differs).
            Null if both agree exactly, or if ``problem`` says why there is no number.
        kind: ``float`` (also integers of 8 and 16 bits), ``complex`` (two floats per element) or ``integer``
            (also booleans).
        differing: Number of integers that differ.
        problem: Reason why a wrong output has no accuracy; empty for other outputs.
        variation_db: Signal-to-noise ratio in dB without the mean, of the output or of its rows, whichever is
            lowest; null for integers, for fewer than 16 elements, and if nothing varies or both agree.
        constant: The value of all floats in FP32, if they are equal; the accuracy then says nothing about
            other inputs.
        empty: Whether it has no elements.
        repaired: Whether it is inf or NaN in 16 bits, so that its accuracy is that of the repaired run.
        batch: Name of its worst batch, such as ``call 14`` of a recording; null if it has none.
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
    repaired: bool = False
    batch: str | None = None

    @property
    def accuracy_db(self) -> float | None:
        """``sqnr_db``; -inf if the output is broken."""
        return -math.inf if self.problem else self.sqnr_db

    @property
    def where(self) -> str:
        """The batch in which it is worst; empty if the batch has no name, or the output is exact."""
        return f" in {self.batch}" if self.batch and (self.problem or self.sqnr_db is not None) else ""

    @property
    def fault(self) -> str:
        """What is wrong with a broken output, as the rest of a sentence that begins with its name."""
        return self.problem or "holds infinity or NaN"

    @property
    def in_words(self) -> str:
        """The accuracy as tables show it."""
        if self.problem:
            return "wrong"
        if self.kind == "integer" and self.differing:
            return f"{self.differing:,} differ"
        if self.empty:
            return "empty"
        if self.constant is not None:
            return f"{format_number(self.constant)} everywhere in FP32, which says nothing about its accuracy"
        if self.sqnr_db is None:
            return "exact"
        varies = self.variation_db
        lost = varies is not None and varies < min(LOST_DB, self.sqnr_db - LOST_DB)
        aside = f" ({varies:.0f} dB without its mean)" if lost else ""
        return f"{self.sqnr_db:.0f} dB{aside}"


@dataclass(frozen=True, slots=True)
class Correspondence:
    """A site of the audited model and the reference's site that computes the same."""

    site: SiteId
    counterpart: SiteId


@dataclass(frozen=True, slots=True)
class ReferenceDifference:
    """A difference between the functions that the audited model and its reference compute.

    Attributes:
        kind: ``value`` (another function), ``constant``, ``weight``, ``missing`` (an op of the reference), or
            ``clamped`` (a number that the format lacks is its largest, as in masks).
        site: Site of the audited model.
        layer: Module path of that site; in an ONNX graph, the name of the node.
        counterpart: Site of the reference; ``None`` if it has none.
        source: Line of the reference, if known.
        what: Description of the difference.
        outputs: Outputs that it makes wrong; empty if it has no effect on these inputs.
    """

    kind: Literal["value", "constant", "weight", "missing", "clamped"]
    site: SiteId
    layer: str
    counterpart: SiteId | None
    source: Source | None
    what: str
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AgainstReport:
    """How the audited model corresponds to its reference.

    Attributes:
        reference: Location of the reference.
        matched: Computing sites with their counterparts.
        only_here: Sites without a counterpart: additions, or parts of an op of the reference.
        only_reference: Sites of the reference without a counterpart.
        differences: Differences, those that make outputs wrong first.
    """

    reference: str
    matched: tuple[Correspondence, ...]
    only_here: tuple[SiteId, ...]
    only_reference: tuple[SiteId, ...]
    differences: tuple[ReferenceDifference, ...]

    @property
    def extent(self) -> str:
        """The number of matched ops, and of those on one side only."""
        here, there = len(self.only_here), len(self.only_reference)
        return f"{plural(len(self.matched), 'op')} matched, {here} only here, {there} only in the reference"


@dataclass(frozen=True, slots=True)
class InputsInfo:
    """The origin of an audit's batches.

    Attributes:
        origin: ``given`` as tensors by the user, ``stored`` in the program, made by the model's processor of
            the user's ``file`` or of a built-in ``sample``, or ``random``.
        detail: Details in words; empty if there are none.
    """

    origin: Literal["given", "stored", "file", "sample", "random"]
    detail: str = ""

    @property
    def made_up(self) -> str:
        """Description of random or built-in inputs; empty for inputs of the user or the program."""
        return {"sample": "built-in samples", "random": "random inputs"}.get(self.origin, "")


GIVEN = InputsInfo("given")


def of_made_up(inputs: InputsInfo | None) -> str:
    """Return `` of random inputs`` or `` of built-in samples``; empty for other inputs."""
    return f" of {inputs.made_up}" if inputs is not None and inputs.made_up else ""


@dataclass(frozen=True, slots=True)
class ReadLine:
    """A line of the model's code that reads values of tensors.

    Attributes:
        name: Method that reads them (``bool``, ``item``, ``tolist``, ``numpy``), or op whose output size
            depends on values.
        kind: Use in Python: as a ``choice`` (boolean or integer), a ``number`` or an ``array``.
        layer: Path of the module whose forward reads them.
        source: Source line.
        reads: Number of reads over all batches.
        differing: Number of reads that decide differently on the values of the 16-bit run.
        batch: Number of the first batch with such a read.
        fp32: Value in FP32 of the first differing read, or else of the first read.
        low: The same value in 16 bits.
    """

    name: str
    kind: Literal["choice", "number", "array"]
    layer: str
    source: Source | None
    reads: int
    differing: int
    batch: int | None
    fp32: str
    low: str


@dataclass(frozen=True, slots=True)
class InputPath:
    """The path through the model's code that the inputs take.

    Attributes:
        count: Number of different paths over all batches.
        lines: Lines that decide the path, in execution order.
    """

    count: int
    lines: tuple[ReadLine, ...]

    @property
    def reads(self) -> int:
        """The number of reads."""
        return sum(line.reads for line in self.lines)


def _known_format(name: str) -> str:
    if name not in FORMATS:
        raise PydanticCustomError("dtype", "unknown dtype")
    return name


@dataclass(frozen=True, slots=True)
class ToolInfo:
    """The program that made the report."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The audited model."""

    source: str
    kind: str
    sha256: str | None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The conditions of the audit.

    Attributes:
        level: ``scan``, ``ranges`` or ``static``.
        contract: Assumptions about kernels where 16 bits are emulated.
        inputs: Origin of the batches; ``None`` if unknown.
        steps: Number of steps per batch, each on the outputs of the previous one; ``None`` for one.
    """

    device: str
    backend: str
    dtype: Annotated[str, AfterValidator(_known_format)]
    policy: str
    batches: int
    seed: int
    level: Literal["scan", "ranges", "static"]
    mode: Literal["eval", "train"]
    contract: str = ""
    inputs: InputsInfo | None = None
    steps: int | None = None

    @property
    def made_up(self) -> str:
        """Description of random or built-in inputs; empty for other inputs, or if nothing was run."""
        return "" if self.inputs is None or self.level == "static" else self.inputs.made_up

    @property
    def extent(self) -> str:
        """The number of batches and the device, or that nothing was run."""
        if self.level == "static":
            return "nothing was run"
        extent = f"{plural(self.batches, 'batch')}{of_made_up(self.inputs)}"
        extent += f", {plural(self.steps, 'step')}" if self.steps is not None else ""
        return f"{extent} on {self.device} ({self.backend})"


@dataclass(frozen=True, slots=True)
class Coverage:
    """The numbers of sites that an audit covers.

    Attributes:
        sites: Number of sites with a floating-point output.
        audited: Number of these that were measured, or pass on measured values.
        measured: Number of these that were measured, since they compute new values.
        proved: Number of these that provably do not overflow by their own fault (``--prove``, ``--static``).
        integer_sites: Number of ops without a floating-point output.
        no_rule: Number of sites that no rule of the policy mentions; they follow type promotion.
        author_sites: Number of sites inside autocast(enabled=False) regions of the model's code.
        casts: Number of casts that the policy inserted.
        author_casts: Number of conversions in the model's code.
        uncovered_ops: Ops that could not be observed.
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
class WeightMemory:
    """Bytes of the FP32 masters and of the 16-bit working copies."""

    master_bytes: int
    working_bytes: int


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions that can change a result."""

    python: str
    torch: str


@dataclass(frozen=True, slots=True, repr=False)
class Report(Displayable):
    """The report of an audit.

    ``verdict`` follows from the findings: ``fail`` if there is an error, ``warn`` if ranges would overflow.
    ``gate`` says whether findings and gaps pass ``fail_on``, and decides the exit code.

    ``promoted`` holds the sites that measurements keep in float32; ``against`` compares with a reference
    model; ``path`` is present if the model's code depends on values; ``gaps`` leaves out gaps whose finding
    is suppressed; ``advised`` is true if changes were tried (``--advise``); ``sections`` holds the results of
    instruments by name.
    """

    schema: Literal[1]
    tool: ToolInfo
    model: ModelInfo
    run: RunInfo
    verdict: Verdict
    gate: Gate
    fail_on: FailOnGaps
    coverage: Coverage
    findings: tuple[Finding, ...]
    sites: tuple[SiteReport, ...]
    outputs: tuple[OutputAccuracy, ...]
    weights: WeightMemory
    notes: tuple[str, ...]
    environment: Environment
    timings: dict[str, float] = field(default_factory=dict)
    promoted: tuple[SiteId, ...] = ()
    proofs: Proofs | None = None
    changed: tuple[VerdictChange, ...] = ()
    stressed: tuple[StressResult, ...] = ()
    tails: tuple[Tail, ...] = ()
    backward: BackwardReport | None = None
    combined: CombinedPolicy | None = None
    advised: bool = False
    path: InputPath | None = None
    gaps: tuple[Gap, ...] = ()
    steps: StepsReport | None = None
    sweep: Sweep | None = None
    against: AgainstReport | None = None
    sections: Annotated[dict[str, Any], ByInstrument("section")] = field(default_factory=dict)
    kind: Literal["scan"] = "scan"

    @property
    def exit_code(self) -> int:
        """0 if the gate passes, 1 if it fails, 3 if a check itself failed."""
        if any(finding.code == CRASHED for finding in self.findings):
            return 3
        return 0 if self.gate == "pass" else 1

    @property
    def active(self) -> tuple[Finding, ...]:
        """Findings that are not suppressed."""
        return tuple(finding for finding in self.findings if finding.suppressed is None)

    def count(self, severity: Severity) -> int:
        """Count the findings of one severity, without suppressed ones."""
        return sum(finding.severity is severity for finding in self.active)

    def ignored(self, severity: Severity) -> int:
        """Count the suppressed findings of one severity."""
        return sum(f.severity is severity and f.suppressed is not None for f in self.findings)

    @property
    def codes_by_site(self) -> Mapping[str, list[str]]:
        """The codes of active findings by site; an empty list if there are none."""
        codes: defaultdict[str, list[str]] = defaultdict(list)
        for finding in self.active:
            codes[finding.site].append(finding.code)
        return codes

    @property
    def by_instrument(self) -> Iterator[tuple[Instrument, Any]]:
        """The instruments that have a section, each with its section."""
        return ((each, self.sections[each.name]) for each in instruments() if each.name in self.sections)

    @property
    def stored_in_16_bits(self) -> bool:
        """Whether the model came with 16-bit weights, so that FP32 computes with them as well."""
        return self.run.policy == AS_IS and self.weights.working_bytes > 0

    @property
    def low_precision_sites(self) -> tuple[SiteReport, ...]:
        """Sites whose values are in the 16-bit format of the run."""
        return tuple(site for site in self.sites if site.precision == self.run.dtype)

    @property
    def by_headroom(self) -> tuple[SiteReport, ...]:
        """Measured sites in any precision without masks and constants, largest values first."""
        measured = (s for s in self.sites if s.headroom_bits is not None and not s.by_design)
        return tuple(sorted(measured, key=lambda site: site.headroom_bits or 0.0))

    @property
    def low_by_headroom(self) -> tuple[SiteReport, ...]:
        """Measured 16-bit sites without masks, constants and casts of weights, least headroom first."""
        low = (site for site in self.by_headroom if site.precision == self.run.dtype)
        return tuple(site for site in low if site.role != "weight-cast")

    @property
    def least_headroom(self) -> SiteReport | None:
        """The 16-bit site nearest the limit."""
        return next(iter(self.low_by_headroom), None)

    @property
    def nearest_sites(self) -> tuple[SiteReport, ...]:
        """Healthy 16-bit sites with the least headroom first, except those that hide earlier faults."""
        graver = [f for f in self.findings if f.severity is not Severity.NOTE]
        bad = {site for f in graver for site in (f.site, *f.hidden_at)}
        return tuple(site for site in self.low_by_headroom if site.healthy and site.site not in bad)

    @property
    def broken_outputs(self) -> tuple[OutputAccuracy, ...]:
        """Outputs that contain inf or NaN, or have no accuracy for another reason (``problem``).

        The accuracy of outputs with inf or NaN is that of the repaired run.
        """
        wrong = {site.site for site in self.sites if site.verdict in ("overflows", "poisoned")}
        return tuple(o for o in self.outputs if o.site in wrong or o.repaired or o.problem)

    @property
    def worst_outputs_first(self) -> tuple[OutputAccuracy, ...]:
        """Outputs by accuracy, broken ones first; exact, empty and constant ones come last."""
        broken = self.broken_outputs

        def rank(output: OutputAccuracy) -> tuple[bool, bool, float]:
            accuracy = output.accuracy_db
            silent = accuracy is None or output.empty or output.constant is not None
            return output not in broken, silent, math.inf if accuracy is None else accuracy

        return tuple(sorted(self.outputs, key=rank))

    @property
    def worst_output(self) -> OutputAccuracy | None:
        """The least accurate output; ``None`` if all are exact or there is none."""
        inexact = [output for output in self.outputs if output.accuracy_db is not None]
        return min(inexact, key=lambda output: output.accuracy_db or 0.0, default=None)

    @property
    def accuracy(self) -> str:
        """The accuracy of the least accurate output: ``63 dB``, ``exact`` or ``broken``."""
        if self.broken_outputs:
            return "broken"
        return self.worst_output.in_words if self.worst_output is not None else "exact"

    @property
    def headline(self) -> str:
        """The verdict, the model, the run, and the number of findings."""
        errors, warnings = (self.count(severity) for severity in (Severity.ERROR, Severity.WARNING))
        hidden = len(self.findings) - len(self.active)
        counts = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
        counts += f", {hidden} ignored" if hidden else ""
        counts += f", {gaps_in_words(self.gaps)}" if self.gaps else ""
        how = f"in {self.run.dtype} under {self.run.policy}"
        on = f" on {self.run.made_up}" if self.run.made_up else ""
        beside = f" against {self.against.reference}" if self.against is not None else ""
        return f"{self.verdict.upper()} {self.model.source} {how}{beside}{on}: {counts}"

    def card_rows(self) -> CardRows:
        """Return the findings."""
        return [(f.severity, f.code, f.layer, f.cause) for f in self.findings if f.suppressed is None]


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Displayable):
    """Reports of one model under several policies."""

    schema: Literal[1] = field(default=1, kw_only=True)
    reports: tuple[Report, ...]
    kind: Literal["comparison"] = "comparison"

    @property
    def exit_code(self) -> int:
        """The gravest of all: 3 (a check crashed), 1 (findings) or 0."""
        return max(report.exit_code for report in self.reports)

    @property
    def headline(self) -> str:
        """The number of policies, and their names."""
        return f"{len(self.reports)} policies: {', '.join(report.run.policy for report in self.reports)}"

    def card_rows(self) -> CardRows:
        """Return the verdict of each policy, its errors and the accuracy of the outputs."""
        counts = [counted(report.count(Severity.ERROR), "error") for report in self.reports]
        return [
            (report.verdict.upper(), report.run.policy, errors, f"output {report.accuracy}")
            for report, errors in zip(self.reports, counts, strict=True)
        ]
