"""Values near the end of the format's range, or clamped to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about, finding_at, finding_source
from ampaudit.core.formats import FLOAT16
from ampaudit.core.ops import having
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number
from ampaudit.findings.finding import Evidence, Finding, Severity
from ampaudit.policy.schema import Cast
from ampaudit.run.weights import WeightRange
from ampaudit.trace import Site

VANISH_SHARE = 0.01
SUBNORMAL_SHARE = 0.25
_HIDING = having("clamps", "extremum_of_two", "saturates") | {"where"}
_CLAMPS = having("clamps", "extremum_of_two")
_NEAR = 0.9  # of float16's largest number: clamps to 64504 and 6e4 stand for its limit as well


def find_headroom(context: CheckContext) -> Iterator[Finding]:
    """Find healthy 16-bit sites with too little headroom; masks are large by design."""
    if context.config.ranges:
        return
    form = context.number_format
    for site in context.sites:
        stats = context.observed(site.id)
        exempt = site.id in context.broken_sites or site.id in context.by_design
        if exempt or not stats.elements or not context.low_precision(site):
            continue
        if "saturate" in context.contract.words and stats.ref_peak >= form.overflow_at:
            continue  # AMP116 is about it
        bits = form.headroom_bits(stats.finite_peak)
        if bits < context.config.min_headroom and stats.bad == 0:
            cause = (
                f"a peak of {format_number(stats.finite_peak)} leaves "
                f"{bits:.2f} bits of headroom below {format_number(form.max)}"
            )
            advice = (
                f"values {2 ** max(bits, 0):.3g} times as large overflow here; check more data with --batches"
            )
            yield finding_at(context, site, "AMP102", cause, advice)


def find_what_if(context: CheckContext) -> Iterator[Finding]:
    """Find sites whose FP32 peak would round to infinity, except masks and constants."""
    if not context.config.ranges:
        return
    form = context.number_format
    for site in context.sites:
        stats = context.observed(site.id)
        if not stats.elements or stats.ref_peak < form.overflow_at or site.id in context.by_design:
            continue
        peak = format_number(stats.ref_peak)
        cause = f"FP32 values reach {peak}; {form.name} ends at {format_number(form.max)}"
        advice = "run a full scan: it says whether the policy computes this in 16 bits, and what that breaks"
        yield finding_at(context, site, "AMP110", cause, advice)


def find_saturated(context: CheckContext) -> Iterator[Finding]:
    """Under ``--contract saturate``: find values beyond the format in FP32, except masks and constants."""
    if "saturate" not in context.contract.words:
        return
    form = context.number_format
    for site in context.low_precision_sites:
        stats = context.observed(site.id)
        producers = context.flow.producers(site)
        inherited = any(context.observed(producer.id).ref_peak >= form.overflow_at for producer in producers)
        if stats.ref_peak >= form.overflow_at and site.id not in context.by_design and not inherited:
            cause = (
                f"in FP32 the values reach {format_number(stats.ref_peak)}; "
                f"they become {format_number(form.max)} here"
            )
            yield finding_at(context, site, "AMP116", cause, "treat it as an overflow: no later op shows it")


def find_mask(context: CheckContext) -> Iterator[Finding]:
    """Find saturated masks, which are harmless unless a row is fully masked."""
    for site in context.sites:
        if site.id in context.record.masks:
            cause = "a mask value rounds to -inf; every value that depends on it came out finite"
            advice = "nothing to do unless a whole row can be masked; then use torch.finfo(x.dtype).min"
            yield replace(finding_at(context, site, "AMP104", cause, advice), fate="intended")


def find_hidden_clamp(context: CheckContext) -> Iterator[Finding]:
    """Find bounded ops that hide an overflow, and limits for float16 that also act in FP32."""
    reported: set[SiteId] = set()
    for origin in context.record.origins:
        for hidden in origin.hidden_at:
            site = context.site[hidden]
            if context.flow.base(site) not in _HIDING:
                continue
            reported.add(site.id)
            db = origin.hidden_sqnr_db
            right = db is None or db >= context.config.min_sqnr
            how = "with the right values" if right else f"and wrong ({db:.0f} dB against FP32)"
            if site.id in context.only_in_low_precision:
                how = "which the FP32 model does not run"
            peak = limited_peak(context, site)
            if peak is not None:
                how = f"{how}; in FP32 it limits {format_number(peak)} as well"
            yield finding_at(
                context,
                site,
                "AMP111",
                f"{origin.site} overflows, and this op makes it finite again, {how}",
                "cure the overflow where it happens; a limit in 16 bits only hides it",
                severity=Severity.NOTE if right and peak is None else Severity.WARNING,
            )
    for site in context.graph_sites:
        peak = limited_peak(context, site) if site.id not in reported else None
        if peak is not None:
            limit = format_number(context.observed(site.id).ref_peak)
            yield finding_at(
                context,
                site,
                "AMP111",
                f"in FP32 the values reach {format_number(peak)}, and this op limits them to {limit}",
                "a limit for float16 changes what the model computes; scale the values instead (--advise)",
            )


def limited_peak(context: CheckContext, site: Site) -> float | None:
    """Return the FP32 peak before a limit at float16's range; ``None`` if the op is no such limit."""
    if context.flow.base(site) not in _CLAMPS:
        return None
    node, producers, near = context.flow.node(site), context.flow.producers(site), _NEAR * FLOAT16.max
    bounds = [b for b in (*node.args[1:], *node.kwargs.values()) if isinstance(b, int | float)]
    if bounds and all(abs(bound) < near for bound in bounds):
        return None  # it cuts something else, such as what is negative
    peak = context.observed(producers[0].id).ref_peak if producers else 0.0
    at_the_end = near <= context.observed(site.id).ref_peak < FLOAT16.overflow_at
    return peak if at_the_end and peak >= FLOAT16.overflow_at else None


def find_inside_norm(context: CheckContext) -> Iterator[Finding]:
    """Find norms with 16-bit input whose squares exceed the limit; a note if the kernel is fused."""
    form = context.number_format
    for site in context.graph_sites:
        inside = context.observed(site.id).inside_peak
        if inside < form.overflow_at or site.id in context.broken_sites:
            continue
        what = "decomposed into 16-bit ops, it overflows, and the norm returns zeros"
        if context.contract.fused:
            what = (
                "a kernel with float32 inside is assumed here; decomposed, as in many exports, it overflows"
            )
        yield finding_at(
            context,
            site,
            "AMP112",
            f"a square inside reaches {format_number(inside)}; "
            f"{form.name} ends at {format_number(form.max)}; {what}",
            "keep this norm and its input in float32, or divide the input by its peak first",
            severity=Severity.NOTE if context.contract.fused else Severity.ERROR,
        )


def find_forbidden(context: CheckContext) -> Iterator[Finding]:
    """Find forbidden sites; the run continued in float32 so that the rest is audited."""
    for site in context.sites:
        if site.decision.cast is Cast.FORBID and site.decision.explicit:
            cause = f"rule {site.decision.rule} forbids {site.op}: {site.decision.why}"
            advice = "replace the op; under real autocast this line raises an error"
            yield finding_at(context, site, "AMP601", cause, advice)


def find_weights(context: CheckContext) -> Iterator[Finding]:
    """Yield one finding per weight; the origins that it explains are listed as poisoned.

    A buffer that overflows without consequence (a mask whose -inf a softmax makes zero) is a note. So is one
    that the policy clips, if every output is accurate nevertheless.
    """
    form = context.number_format
    origins = [(origin, context.site[origin.site]) for origin in context.record.origins]
    for weight in context.weights:
        if weight.name not in context.broken_weights:
            continue
        explained = [(o, s) for o, s in origins if context.from_weight(s) == weight.name]
        poisons = dict.fromkeys(p for o, s in explained for p in (s.id, *o.poisons))
        users = (site for site, names in context.weights_read.items() if weight.name in names)
        is_clipped = not weight.overflow
        accuracies = (
            [db for _, _, db in context.outputs]
            if is_clipped
            else [context.observed(s).sqnr_db for s in users]
        )
        accurate = all(db is None or db >= context.config.min_sqnr for db in accuracies)
        harmless = not weight.parameter and not explained and accurate
        first: Site | None = explained[0][1] if explained else None
        if is_clipped:
            which = "every" if accurate else "not every"
            consequence = f"the policy clips it, and {which} output is accurate"
        else:
            consequence = f"{weight.overflow} of {weight.elements} elements became inf"
            consequence += "; every value that depends on it came out finite" if harmless else ""
        yield weight_finding(
            context,
            weight,
            "AMP403" if weight.name.endswith("running_var") else "AMP401",
            f"{weight.name} holds {format_number(weight.peak)}; {form.name} ends at "
            f"{format_number(form.max)}; {consequence}",
            f"keep {weight.name} in float32, or rescale it",
            severity=Severity.NOTE if harmless else Severity.ERROR,
            first=first,
            poisons=tuple(p for p in poisons if first is None or p != first.id),
        )


def weight_finding(
    context: CheckContext,
    weight: WeightRange,
    code: str,
    cause: str,
    advice: str,
    *,
    severity: Severity | None = None,
    first: Site | None = None,
    poisons: tuple[SiteId, ...] = (),
) -> Finding:
    """Return a finding about a weight, at the first site where it shows or at the weight itself."""
    form = context.number_format
    site = first.id if first else SiteId(f"{weight.name}/stored")
    layer = weight.name.rpartition(".")[0]
    finding = finding_about(code, site, layer, cause, advice, severity=severity)
    evidence = Evidence(
        peak=weight.peak,
        limit=form.max,
        inf=weight.overflow,
        elements=weight.elements,
        headroom_bits=form.headroom_bits(weight.peak) if weight.peak else None,
        flushed=weight.vanish / weight.nonzero if weight.nonzero else 0.0,
        subnormal=weight.subnormal / weight.nonzero if weight.nonzero else 0.0,
    )
    return replace(
        finding,
        phase="weights",
        op="cast",
        source=finding_source(first) if first else None,
        evidence=evidence,
        origin=finding.severity is Severity.ERROR,
        poisons=poisons,
    )


def find_small_weights(context: CheckContext) -> Iterator[Finding]:
    """Find weights that lose a relevant share of their values; counts are exact."""
    form = context.number_format
    for weight in context.weights:
        if weight.name in context.broken_weights or not weight.nonzero:
            continue
        vanish, small = weight.vanish / weight.nonzero, weight.subnormal / weight.nonzero
        losses = f"{weight.vanish} become 0 and {weight.subnormal} subnormal"
        text = f"of {weight.nonzero} non-zero values of {weight.name}, {losses} in {form.name} "
        text += f"(below {format_number(form.min_normal)})"
        if weight.name.endswith("running_var") and weight.vanish + weight.subnormal:
            advice = "keep BatchNorm statistics in float32, or fold them into the convolution"
            yield weight_finding(context, weight, "AMP403", text, advice, severity=Severity.WARNING)
        elif vanish > VANISH_SHARE or small > SUBNORMAL_SHARE:
            severity = None if vanish > VANISH_SHARE else Severity.NOTE
            advice = f"keep {weight.name} in float32, or rescale it by a power of two"
            yield weight_finding(context, weight, "AMP402", text, advice, severity=severity)


def find_tied_weights(context: CheckContext) -> Iterator[Finding]:
    """Find tied weights whose names fall under different rules."""
    for names in context.flow.traced.split_ties:
        first = names[0]
        cause = f"{' and '.join(names)} are one tensor, and the policy keeps only some of these in float32"
        advice = "give all names the same rule; the tensor was left in float32 here"
        site, layer = SiteId(f"{first}/stored"), first.rpartition(".")[0]
        yield finding_about("AMP404", site, layer, cause, advice, confidence="rule")


CHECKS = (
    Check("AMP102", find_headroom),
    Check("AMP110", find_what_if),
    Check("AMP116", find_saturated),
    Check("AMP104", find_mask),
    Check("AMP111", find_hidden_clamp),
    Check("AMP112", find_inside_norm),
    Check("AMP601", find_forbidden),
    Check("AMP401", find_weights),
    Check("AMP402", find_small_weights),
    Check("AMP404", find_tied_weights),
)
