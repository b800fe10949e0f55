"""Defines checks, the context that they read, and how they make findings."""

from __future__ import annotations

import math
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

from ampaudit.audit.config import ScanConfig
from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.core.text import is_number, plural, ratio_db
from ampaudit.findings.finding import CRASHED, Evidence, Finding, Severity, Source
from ampaudit.findings.pages import page_of
from ampaudit.report.steps import StepGrowth, StepReport, StepsReport, doubling_time
from ampaudit.run.audit import Audit
from ampaudit.run.backends import Contract, parse_contract
from ampaudit.run.measure import Observation
from ampaudit.run.record import Origin, RunRecord, StepObservation
from ampaudit.run.weights import WeightRange, weight_ranges
from ampaudit.trace import Role, Site
from ampaudit.trace.flow import Flow, ParameterUse, parameter_use

if TYPE_CHECKING:
    from ampaudit.bounds import BoundTable

_SATURATES = 0.3  # relative error from which growth saturates
PASSES_ON = (Role.VIEW, Role.SELECT)
SCALE_INPUT = "scale the input down before the model reads it"


@dataclass(frozen=True)
class CheckContext:
    """Everything that a check may read."""

    sites: tuple[Site, ...]  # all sites in graph order
    record: RunRecord  # record of the run
    flow: Flow  # producers and readers of each value
    number_format: NumberFormat  # the 16-bit format of the run
    # sites that no parameter and no floating-point input reaches: masks, positions, tables
    constants: frozenset[SiteId]
    weights: tuple[WeightRange, ...]  # ranges of the weights that are stored in 16 bits
    weights_read: dict[SiteId, tuple[str, ...]]  # names of the weights that each site reads directly
    config: ScanConfig  # options of the scan
    contract: Contract  # assumptions about kernels
    bounds: BoundTable | None = None  # proved bounds, if requested

    def step_of(self, call: int) -> int | None:
        """Return the step number of a call; ``None`` for an audit of single calls."""
        return None if self.config.steps is None else call % self.config.steps + 1

    @cached_property
    def steps(self) -> StepsReport | None:
        """The report of the steps; ``None`` for an audit of single calls."""
        if not self.record.steps:
            return None
        by_step: defaultdict[int, list[StepObservation]] = defaultdict(list)
        for row in self.record.steps:
            by_step[row.step].append(row)
        growth = (*_error_growth(self, by_step), *_value_growth(self, len(by_step)))
        rows = tuple(_step_report(step, observations) for step, observations in by_step.items())
        return StepsReport(self.record.traces, rows, growth, self.record.fed_back)

    @cached_property
    def parameters(self) -> ParameterUse:
        """The parameters that the batches used."""
        empty = {place for place, stats in self.record.observations.items() if not stats.elements}
        return parameter_use(self.flow.traces, self.record.chosen, empty)

    @cached_property
    def site(self) -> dict[SiteId, Site]:
        """Sites by id."""
        return {site.id: site for site in self.sites}

    @cached_property
    def broken_weights(self) -> frozenset[str]:
        """Names of weights that overflow in 16 bits."""
        return frozenset(w.name for w in self.weights if w.peak >= self.number_format.overflow_at)

    @cached_property
    def graph_sites(self) -> tuple[Site, ...]:
        """The sites of the graph that ``flow`` describes."""
        ids = {site.id for traced in self.flow.traces for site in traced.sites}
        return tuple(site for site in self.sites if site.id in ids)

    @cached_property
    def low_precision_sites(self) -> tuple[Site, ...]:
        """Sites of the graph that compute 16-bit values, without views and selections."""
        return tuple(s for s in self.graph_sites if self.low_precision(s) and s.role not in PASSES_ON)

    @cached_property
    def outputs(self) -> tuple[tuple[str, SiteId | None, float | None], ...]:
        """The outputs of the model: their names, the sites that produce them, and their accuracies in dB.

        The accuracy is ``None`` if exact, and -inf if the shapes differ or FP32 is 0 everywhere. For an
        output that is not finite in 16 bits, it is that of the repaired run.
        """
        accuracies: dict[tuple[str, SiteId | None], float | None] = {}
        for traced in self.flow.traces:
            for name, node in zip(traced.outputs, traced.graph.output_node().args[0], strict=False):  # type: ignore[arg-type]
                site = self._producer(node)
                comparison = self.record.outputs.get(name)
                if comparison is None or comparison.bad:
                    accuracies[name, site] = self.observed(site).sqnr_db if site is not None else None
                else:
                    accuracies[name, site] = comparison.accuracy_db
        return tuple((name, site, accuracy) for (name, site), accuracy in accuracies.items())

    @cached_property
    def proved(self) -> frozenset[SiteId]:
        """Sites that provably do not cause an overflow."""
        return self.bounds.proved if self.bounds is not None else frozenset()

    @cached_property
    def origins(self) -> dict[SiteId, Origin]:
        """What causes inf or NaN, by its site."""
        return {origin.site: origin for origin in self.record.origins}

    @cached_property
    def by_design(self) -> frozenset[SiteId]:
        """Sites whose values may be large: masks and constants."""
        return self.constants | self.record.by_design

    @cached_property
    def harmed(self) -> bool:
        """Whether values stay wrong because something left the range."""
        faults = any(row.faults for row in self.record.steps)
        return faults or any(map(self.harms, self.record.origins))

    def harms(self, origin: Origin) -> bool:
        """Return whether values stay wrong because of an origin.

        An origin that is hidden by code which only the 16-bit model runs counts as harmful.
        """
        return origin.harms or not self.only_in_low_precision.isdisjoint(origin.hidden_at)

    @cached_property
    def only_in_low_precision(self) -> frozenset[SiteId]:
        """Sites of code that the FP32 model does not run, or runs with other constants."""
        place = self.record.code.place
        return frozenset(place.low_sites if place is not None else ())

    @cached_property
    def broken_sites(self) -> frozenset[SiteId]:
        """Origins and the sites that they poison."""
        return frozenset(self.origins).union(*(origin.poisons for origin in self.record.origins))

    def _producer(self, node: object) -> SiteId | None:
        while (site := self.flow.site(node)) is None or site.role in PASSES_ON:  # type: ignore[arg-type]
            sources = node.all_input_nodes  # type: ignore[attr-defined]
            if not sources:
                break
            node = sources[0]
        return site.id if site is not None else None

    def output_site(self, output: str) -> Site | None:
        """Return the site that makes an output."""
        sites = (site for name, site, _ in self.outputs if name == output and site is not None)
        return self.site.get(next(sites, SiteId("")))

    def observed(self, site: SiteId) -> Observation:
        """Return the observation of a site; an empty one if it was not measured."""
        return self.record.observations.get(site, Observation())

    def numbers(self, site: Site) -> list[float]:
        """Return the Python numbers that an op takes, in the graph and in the model's code."""
        values = (*self.flow.arguments(site).values(), *site.original_args.values())
        return list(filter(is_number, values))

    def low_precision(self, site: Site) -> bool:
        """Return whether a site's output is in the 16-bit format of the run."""
        return site.dtype is not None and str(site.dtype) == f"torch.{self.number_format.name}"

    def from_weight(self, site: Site) -> str | None:
        """Return the weight whose overflow explains an origin at this site."""
        if site.role is Role.WEIGHT_CAST and site.weight in self.broken_weights:
            return site.weight
        return next(
            (name for name in self.weights_read.get(site.id, ()) if name in self.broken_weights), None
        )

    def is_overflow(self, origin: Origin) -> bool:
        """Return whether the broken elements exceed the format in FP32; otherwise, it is a domain error."""
        observation = self.observed(origin.site)
        infinite = observation.pos_inf + observation.neg_inf > 0
        return infinite and observation.bad_ref_peak >= self.number_format.max / 2


@dataclass(frozen=True, slots=True)
class Check:
    """A check with its code."""

    code: str
    find: Callable[[CheckContext], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Cause:
    """A named reason for an origin."""

    code: str  # code of its page
    advice: str  # the code to write instead; empty for the usual advice
    # function that returns why this is the cause, as a clause before "in FP32 ..."; ``None`` if it is not
    applies: Callable[[CheckContext, Site], str | None]


def cause(code: str, advice: str) -> Callable[[Callable[[CheckContext, Site], str | None]], Cause]:
    """Return a decorator that makes a cause of the function that says why it applies."""
    return partial(Cause, code, advice)


def finding_at(
    context: CheckContext,
    site: Site,
    code: str,
    cause: str,
    advice: str,
    *,
    severity: Severity | None = None,
    confidence: Literal["observed", "proved", "rule"] = "observed",
) -> Finding:
    """Return a finding at a site, with its measurements; kind and severity come from the page."""
    base = finding_about(code, site.id, site.layer, cause, advice, severity=severity, confidence=confidence)
    stats = context.observed(site.id)
    evidence = replace(evidence_of(stats, context.number_format), step=context.step_of(stats.peak_batch))
    source, batch = finding_source(site), context.record.names.get(stats.peak_batch)
    return replace(base, phase="forward", op=site.op, source=source, evidence=evidence, batch=batch)


def finding_about(
    code: str,
    site: SiteId,
    layer: str,
    cause: str,
    advice: str,
    *,
    severity: Severity | None = None,
    confidence: Literal["observed", "proved", "rule"] = "observed",
) -> Finding:
    """Return a finding that is not about an op; kind and severity come from the page."""
    page = page_of(code)
    return Finding(
        code=code,
        kind=page.kind,
        severity=severity or Severity(page.severity),
        confidence=confidence,
        phase="static",
        layer=layer,
        op="",
        site=site,
        source=None,
        evidence=Evidence(),
        origin=False,
        poisons=(),
        cause=cause,
        advice=advice,
    )


def evidence_of(stats: Observation, form: NumberFormat) -> Evidence:
    """Return the measurements of a site as evidence."""
    peak = stats.finite_peak if stats.elements else None
    samples = stats.samples
    sampled = max(samples.sampled, 1)
    return Evidence(
        peak=peak,
        limit=form.max,
        inf=int(stats.pos_inf + stats.neg_inf),
        nan=int(stats.nan),
        elements=stats.elements,
        headroom_bits=form.headroom_bits(peak) if peak else None,
        sqnr_db=stats.sqnr_db,
        local_sqnr_db=stats.local_sqnr_db,
        max_error=samples.max_error if samples.sampled else None,
        flushed=samples.flushed / sampled,
        subnormal=samples.subnormal / sampled,
    )


def finding_source(site: Site) -> Source | None:
    """Return the site's source line in the form used by findings."""
    return source_of(site.source, site.caller)


def source_of(line: SourceLine | None, caller: SourceLine | None = None) -> Source | None:
    """Return a line in the form used by findings."""
    return None if line is None else Source(line.file, line.line, line.code, caller)


def run_checks(context: CheckContext, checks: Iterable[Check]) -> tuple[Finding, ...]:
    """Return all findings, the gravest first, in graph order.

    Errors about finite values come after other errors, which may be their cause. Warnings about precision are
    sorted by accuracy, the lowest first.
    """
    order = {site.id: position for position, site in enumerate(context.sites)}
    findings = [finding for check in checks for finding in _run(check, context)]

    def rank(finding: Finding) -> tuple[float, bool, float, int, str, str]:
        accuracy = finding.evidence.local_sqnr_db if finding.kind == "precision" else None
        wrong = finding.severity is Severity.ERROR and finding.finite_error
        return (
            -finding.severity.rank,
            wrong,
            1e3 if accuracy is None else accuracy,
            order.get(finding.site, -1),
            finding.code,
            finding.layer,
        )

    ordered = sorted(findings, key=rank)
    return tuple(_one_per_line(ordered) if context.record.path.paths else ordered)


def _one_per_line(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Merge findings about one line of one layer, since each iteration of a loop has its own sites."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for number, finding in enumerate(findings):
        line = None if finding.source is None else (finding.source.file, finding.source.line)
        key = (finding.code, finding.layer, finding.op, finding.severity, line)
        groups.setdefault(key if line is not None else (number,), []).append(finding)
    for group in groups.values():
        worst = max(group, key=lambda finding: finding.evidence.peak or 0.0)
        sites = dict.fromkeys(site for finding in group for site in finding.poisons)
        also = f"; the same at {plural(len(group) - 1, 'more op')} of this line" if len(group) > 1 else ""
        group_sites = {finding.site for finding in group}
        poisons = tuple(site for site in sites if site not in group_sites)
        yield replace(worst, cause=f"{worst.cause}{also}", poisons=poisons) if also else worst


def _run(check: Check, context: CheckContext) -> list[Finding]:
    """Run a check; if it crashes, return a finding about the crash."""
    try:
        return list(check.find(context))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).splitlines()[0] if str(error) else "no message"
        place = f"{last.name}, line {last.lineno}"
        cause = f"check {check.code} itself failed: {type(error).__name__}: {text} ({place})"
        advice = "the other findings stand; please report this one, with the model if you can"
        return [finding_about(CRASHED, SiteId(f"{check.code}/crashed"), "", cause, advice)]


def context_of(
    audit: Audit, form: NumberFormat, config: ScanConfig, bounds: BoundTable | None = None
) -> CheckContext:
    """Build the context of one audit under a number format."""
    return CheckContext(
        sites=audit.sites,
        record=audit.record,
        flow=audit.flow,
        number_format=form,
        constants=audit.constants,
        weights=() if config.ranges else _weights(audit),
        weights_read=_weights_read(audit),
        config=config,
        contract=parse_contract(config.contract),
        bounds=bounds,
    )


def _weights(audit: Audit) -> tuple[WeightRange, ...]:
    """Return the ranges of 16-bit weights; those measured in the run are not read again."""
    stats = audit.record.observations
    peaks = {s.weight: stats[s.id].ref_peak for s in audit.sites if s.weight is not None and s.id in stats}
    ranges = (each for converted in audit.graphs for each in weight_ranges(converted, peaks))
    return tuple({each.name: each for each in ranges}.values())


def _weights_read(audit: Audit) -> dict[SiteId, tuple[str, ...]]:
    """Map each site to the 16-bit weights that it reads directly."""
    weights: dict[SiteId, tuple[str, ...]] = {}
    for converted in audit.graphs:
        copies = {copy.node: copy.name for copy in converted.copies.values()}
        nodes = {node.name: node for node in converted.traced.graph.nodes}
        for site in converted.traced.sites:
            sources = nodes[site.node].all_input_nodes
            weights.setdefault(site.id, tuple(copies[n.name] for n in sources if n.name in copies))
    return weights


def _step_report(step: int, rows: Sequence[StepObservation]) -> StepReport:
    accuracies = [
        (decibels, name)
        for row in rows
        for name, (error, signal) in row.errors.items()
        if (decibels := ratio_db(signal, error)) < math.inf
    ]
    accuracy, output = min(accuracies, default=(math.inf, ""))
    headrooms = [(row.headroom_bits, row.headroom_at) for row in rows if row.headroom_bits is not None]
    bits, site = min(headrooms, default=(None, ""))
    return StepReport(
        step=step,
        accuracy_db=round(accuracy, 3) if math.isfinite(accuracy) else None,
        output=output,
        headroom_bits=None if bits is None else round(bits, 4),
        headroom_at=site,
        origins=tuple(dict.fromkeys(str(site) for row in rows for site in row.origins)),
        broken_inputs=tuple(dict.fromkeys(fault.name for row in rows for fault in row.faults)),
        flipped=tuple(dict.fromkeys(name for row in rows for name in row.flipped)),
        poisoned=any(row.poisoned for row in rows),
    )


def _error_growth(context: CheckContext, by_step: dict[int, list[StepObservation]]) -> Iterator[StepGrowth]:
    """Yield the growth of the error of one output: the one whose error is largest at its last fitted step."""
    candidates: list[tuple[float, StepGrowth]] = []
    for name in dict.fromkeys(name for rows in by_step.values() for row in rows for name in row.errors):
        points: list[tuple[int, float]] = []
        for step, rows in by_step.items():
            error = max((_relative(*row.errors[name]) for row in rows if name in row.errors), default=0.0)
            if error > _SATURATES:
                break
            if error > 0.0:
                points.append((step, error))
        fitted = doubling_time(points)
        if fitted is not None:
            every, last = fitted
            reaches = points[-1][0] + (-context.config.min_sqnr / 20 * math.log2(10) - last) * every
            soon = math.ceil(max(reaches, 1)) if reaches <= 2 * len(by_step) else None
            candidates.append((last, StepGrowth("error", name, round(every, 2), soon)))
    if candidates:
        yield max(candidates, key=lambda item: item[0])[1]


def _relative(error: float, signal: float) -> float:
    return math.sqrt(error / signal) if signal > 0.0 and math.isfinite(error) else 0.0


def _value_growth(context: CheckContext, count: int) -> Iterator[StepGrowth]:
    """Yield the growth of the 16-bit values that leave the range first, or else grow fastest."""
    low = {s.id for s in context.sites if context.low_precision(s) and s.role is not Role.WEIGHT_CAST}
    candidates: list[StepGrowth] = []
    for site, stats in context.record.observations.items():
        if site not in low or site in context.by_design:
            continue
        peaks: defaultdict[int, float] = defaultdict(float)
        for call, peak in sorted(stats.batch_peaks.items()):
            step = call % count + 1
            peaks[step] = max(peaks[step], peak)
        points = [(step, peak) for step, peak in sorted(peaks.items()) if peak > 0.0]
        fitted = doubling_time(points)
        if fitted is not None:
            every, last = fitted
            reaches = math.ceil(points[-1][0] + (math.log2(context.number_format.max) - last) * every)
            soon = reaches if 0 < reaches <= 2 * count else None
            candidates.append(StepGrowth("values", site, round(every, 2), soon))
    if candidates:
        yield min(candidates, key=lambda growth: (growth.reaches or math.inf, growth.doubles_every))
