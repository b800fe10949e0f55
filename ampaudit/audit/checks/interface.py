"""Defines checks, the context that they read, and how they make findings."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ampaudit.audit.steps_report import steps_report
from ampaudit.bounds import BoundTable
from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.core.text import listed, plural
from ampaudit.report.finding import CRASHED, Evidence, Finding, Severity, Source
from ampaudit.report.gradients import ScaleAdvice
from ampaudit.report.pages import page_of
from ampaudit.report.steps import StepsReport
from ampaudit.run.backward.record import NamedGradient, advice_on_scale
from ampaudit.run.observation import Observation
from ampaudit.run.record import Origin, RunRecord
from ampaudit.run.weights import WeightRange
from ampaudit.trace import Role, Site
from ampaudit.trace.flow import Flow
from ampaudit.trace.stacks import ParameterUse, parameter_use

__all__ = [
    "Cause",
    "Check",
    "CheckContext",
    "evidence_of",
    "finding_about",
    "finding_at",
    "finding_source",
    "run_checks",
    "some_sites",
    "source_of",
]


_HANDS_ON = (Role.VIEW, Role.SELECT)


@dataclass(frozen=True)
class CheckContext:
    """Everything that a check may read.

    Attributes:
        sites: all sites in graph order.
        record: what the run saw.
        flow: who makes and who reads each value.
        number_format: the 16-bit format of the run.
        parameter_free: sites that no parameter reaches (masks, positions, constants).
        weights: the weights that are held in 16 bits.
        users: for each site, the names of the weights that it uses directly.
        min_headroom: bits below which a site is reported.
        min_sqnr: decibels below which a result is called inaccurate.
        ranges_only: whether only FP32 ran (``--ranges``).
        bounds: what is proved, if that was asked for.
        fused: whether norms are taken to be one kernel with FP32 inside.
        saturating: whether overflow gives the largest finite number.
        step_count: how often each batch is run; ``None`` for once.
    """

    sites: tuple[Site, ...]
    record: RunRecord
    flow: Flow
    number_format: NumberFormat
    parameter_free: frozenset[str]
    weights: tuple[WeightRange, ...]
    users: dict[SiteId, tuple[str, ...]]
    min_headroom: float = 1.0
    min_sqnr: float = 20.0
    ranges_only: bool = False
    fused: bool = True
    saturating: bool = False
    bounds: BoundTable | None = None
    step_count: int | None = None

    def step_of(self, call: int) -> int | None:
        """Return the step that a call is; ``None`` for an audit of single calls."""
        return None if self.step_count is None else call % self.step_count + 1

    @cached_property
    def steps(self) -> StepsReport | None:
        """What the steps showed, if there were several."""
        low = {
            site.id for site in self.sites if self.low_precision(site) and site.role is not Role.WEIGHT_CAST
        }
        low -= self.record.by_design | self.parameter_free
        return steps_report(self.record, self.min_sqnr, self.number_format.max, low)

    @cached_property
    def parameters(self) -> ParameterUse:
        """What the batches used of the parameters."""
        return parameter_use(self.flow.every, self.record.chosen)

    @cached_property
    def site(self) -> dict[SiteId, Site]:
        """Sites by id."""
        return {site.id: site for site in self.sites}

    @cached_property
    def gradients(self) -> tuple[NamedGradient, ...]:
        """The measured gradients, sites in graph order before parameters; none without ``--backward``."""
        seen = self.record.gradients
        if seen is None:
            return ()
        made = [NamedGradient(s.id, s.layer, seen.sites[s.id]) for s in self.sites if s.id in seen.sites]
        held = [NamedGradient(n, n.rpartition(".")[0], g) for n, g in seen.parameters.items()]
        return (*made, *held)

    @cached_property
    def scale_advice(self) -> ScaleAdvice | None:
        """The loss scales that suit; ``None`` if no gradient is stored in 16 bits."""
        seen = self.record.gradients
        return None if seen is None else advice_on_scale(self.gradients, self.number_format, seen.scale)

    @cached_property
    def broken_weights(self) -> frozenset[str]:
        """Names of weights that overflow in 16 bits."""
        return frozenset(w.name for w in self.weights if w.peak >= self.number_format.overflow_at)

    @cached_property
    def graph_sites(self) -> tuple[Site, ...]:
        """The sites of the graph that ``flow`` describes."""
        own = {site.id for traced in self.flow.every for site in traced.sites}
        return tuple(site for site in self.sites if site.id in own)

    @cached_property
    def low_precision_sites(self) -> tuple[Site, ...]:
        """Sites of the graph that compute 16-bit values, without views and selections."""
        return tuple(s for s in self.graph_sites if self.low_precision(s) and s.role not in _HANDS_ON)

    @cached_property
    def outputs(self) -> tuple[tuple[str, SiteId | None, float | None], ...]:
        """Per output of the model: its name, the site that made its values, and their accuracy in dB.

        ``None`` is exact, -inf where nothing can be right: another shape, or a value where FP32 gives 0. An
        output that is not finite in 16 bits has the accuracy that it has when its faults are repaired.
        """
        found: dict[tuple[str, SiteId | None], float | None] = {}
        for traced in self.flow.every:
            for name, node in zip(traced.outputs, traced.graph.output_node().args[0], strict=False):  # type: ignore[arg-type]
                site = self._made(node)
                seen = self.record.outputs.get(name)
                if seen is None or seen.bad:
                    found[name, site] = self.observed(site).sqnr_db if site is not None else None
                else:
                    found[name, site] = seen.accuracy_db
        return tuple((name, site, accuracy) for (name, site), accuracy in found.items())

    @cached_property
    def proved(self) -> frozenset[SiteId]:
        """Sites that provably do not overflow by their own fault."""
        return self.bounds.proved if self.bounds is not None else frozenset()

    @cached_property
    def origin_sites(self) -> frozenset[SiteId]:
        """Sites that went wrong by their own fault."""
        return frozenset(origin.site for origin in self.record.origins)

    @cached_property
    def harmed(self) -> bool:
        """Whether values stay wrong because something left the range."""
        faults = any(row.faults for row in self.record.steps)
        return faults or any(map(self.harms, self.record.origins))

    def harms(self, origin: Origin) -> bool:
        """Return whether values stay wrong because of an origin.

        Where code hides it that the FP32 model does not run, its values are right only beside that code.
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
        return self.origin_sites | {site for origin in self.record.origins for site in origin.poisons}

    def _made(self, node: object) -> SiteId | None:
        while (site := self.flow.site(node)) is None or site.role in _HANDS_ON:  # type: ignore[arg-type]
            sources = node.all_input_nodes  # type: ignore[attr-defined]
            if not sources:
                break
            node = sources[0]
        return site.id if site is not None else None

    def observed(self, site: SiteId) -> Observation:
        """Return the observation of a site; empty if it has none."""
        return self.record.observations.get(site, Observation())

    def low_precision(self, site: Site) -> bool:
        """Return whether a site's output is in the 16-bit format of the run."""
        return site.dtype is not None and str(site.dtype) == f"torch.{self.number_format.name}"

    def from_weight(self, site: Site) -> str | None:
        """Return the weight whose overflow explains an origin at this site."""
        if site.role is Role.WEIGHT_CAST and site.weight in self.broken_weights:
            return site.weight
        return next((name for name in self.users.get(site.id, ()) if name in self.broken_weights), None)

    def is_overflow(self, origin: Origin) -> bool:
        """Return whether the broken elements exceed the format in FP32; otherwise it is a domain error."""
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
    """A named reason for an origin.

    Attributes:
        code: of its page.
        applies: explains why this is the cause, as a clause before "in FP32 ..."; ``None`` if it is not.
        advice: what to write instead.
    """

    code: str
    applies: Callable[[CheckContext, Site, Origin], str | None]
    advice: str


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
    made = finding_about(code, site.id, site.layer, cause, advice, severity=severity, confidence=confidence)
    seen = context.observed(site.id)
    evidence = replace(evidence_of(seen, context.number_format), step=context.step_of(seen.peak_batch))
    source, batch = finding_source(site), context.record.names.get(seen.peak_batch)
    return replace(made, phase="forward", op=site.op, source=source, evidence=evidence, batch=batch)


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


def evidence_of(seen: Observation, form: NumberFormat) -> Evidence:
    """Return the measurements of a site as evidence."""
    peak = seen.finite_peak if seen.elements else None
    samples = seen.samples
    share = max(samples.sampled, 1)
    return Evidence(
        peak=peak,
        limit=form.max,
        inf=int(seen.pos_inf + seen.neg_inf),
        nan=int(seen.nan),
        elements=seen.elements,
        headroom_bits=form.headroom_bits(peak) if peak else None,
        sqnr_db=seen.sqnr_db,
        local_sqnr_db=seen.local_sqnr_db,
        max_error=samples.max_error if samples.sampled else None,
        flushed=samples.flushed / share,
        subnormal=samples.subnormal / share,
    )


def finding_source(site: Site) -> Source | None:
    """Return the site's source line in the form used by findings."""
    return source_of(site.source, site.caller)


def source_of(line: SourceLine | None, caller: SourceLine | None = None) -> Source | None:
    """Return a line in the form used by findings."""
    return None if line is None else Source(line.file, line.line, line.code, caller)


def some_sites(sites: Sequence[Site | SiteId | str], shown: int = 3) -> str:
    """List the first few ids and count the rest."""
    return listed([site.id if isinstance(site, Site) else str(site) for site in sites], shown)


def run_checks(context: CheckContext, checks: Iterable[Check]) -> tuple[Finding, ...]:
    """Return all findings, the gravest first, in graph order.

    Errors about finite values come after others, which may be their cause; of warnings about precision the
    worst comes first.
    """
    order = {site.id: position for position, site in enumerate(context.sites)}
    found = [finding for check in checks for finding in _found(check, context)]

    def rank(finding: Finding) -> tuple[float, bool, float, int, str, str]:
        own = finding.evidence.local_sqnr_db if finding.kind == "precision" else None
        accuracy = own if own is not None else 1e3
        wrong = finding.severity is Severity.ERROR and finding.finite
        return (
            -finding.severity.rank,
            wrong,
            accuracy,
            order.get(finding.site, -1),
            finding.code,
            finding.layer,
        )

    ordered = sorted(found, key=rank)
    return tuple(_one_per_line(ordered) if context.record.path.paths else ordered)


def _one_per_line(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Merge findings about one line of one layer: along a path, each turn of a loop has sites of its own."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for number, finding in enumerate(findings):
        line = None if finding.source is None else (finding.source.file, finding.source.line)
        key = (finding.code, finding.layer, finding.op, finding.severity, line)
        groups.setdefault(key if line is not None else (number,), []).append(finding)
    for group in groups.values():
        worst = max(group, key=lambda finding: finding.evidence.peak or 0.0)
        sites = dict.fromkeys(site for finding in group for site in finding.poisons)
        more = f"; the same at {plural(len(group) - 1, 'more op')} of this line" if len(group) > 1 else ""
        own = {finding.site for finding in group}
        poisons = tuple(site for site in sites if site not in own)
        yield replace(worst, cause=f"{worst.cause}{more}", poisons=poisons) if more else worst


def _found(check: Check, context: CheckContext) -> list[Finding]:
    try:
        return list(check.find(context))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).splitlines()[0] if str(error) else "no message"
        place = f"{last.name}, line {last.lineno}"
        cause = f"check {check.code} itself failed: {type(error).__name__}: {text} ({place})"
        advice = "the other findings stand; please report this one, with the model if you can"
        return [finding_about(CRASHED, SiteId(f"{check.code}/crashed"), "", cause, advice)]
