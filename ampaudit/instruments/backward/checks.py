"""Gradients: overflow, underflow, errors, and custom backwards that could not be compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks.interface import (
    Check,
    CheckContext,
    evidence_of,
    finding_about,
    finding_source,
    source_of,
)
from ampaudit.core.formats import BFLOAT16
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number, format_power, format_scale, listed, short_op
from ampaudit.findings.finding import Evidence, Finding, Severity
from ampaudit.instruments.backward import INSTRUMENT
from ampaudit.instruments.backward.record import (
    GradientOrigin,
    GradientRecord,
    GradientStats,
    NamedGradient,
    advice_on_scale,
    highest_exponent,
)
from ampaudit.report.gradients import ScaleAdvice
from ampaudit.trace import Role, Site

_NOTHING_LEFT_DB = 6.0  # half of the gradient is gone
_LISTED = 5
_FOLLOWABLE = "use torch.where or torch.clamp in it instead of Python's control flow and .item()"
_TEXTS = {
    "": ("no gradient is known before {}, which no trace can follow", _FOLLOWABLE),
    "left out": ("gradients are audited as if there were no {}, which no trace can follow", _FOLLOWABLE),
    "as a whole": (
        "{} runs as a whole, because no trace can follow it",
        "its result is audited; an overflow inside it is not located",
    ),
}
VANISHED = 0.5  # share of a gradient's elements that is flushed
CARRIED_DB = 20.0  # above this, the flushed elements carry less than a tenth of the gradient


def vanishes(stats: GradientStats) -> bool:
    """Return whether most of a 16-bit gradient is flushed to zero and the rest is inaccurate."""
    return stats.low_precision and _is_lost(stats)


def _is_lost(stats: GradientStats) -> bool:
    """Return whether most of a gradient is zero, here or since an earlier op, and the rest is inaccurate."""
    if stats.cancelled or stats.flushed_share < VANISHED:
        return False
    sqnr = stats.values.sqnr_db
    return sqnr is not None and sqnr < CARRIED_DB


def gradients_in(context: CheckContext) -> GradientRecord:
    """Return the gradients of an audit."""
    record: GradientRecord = context.record.parts[INSTRUMENT.name]
    return record


def named_gradients(context: CheckContext) -> tuple[NamedGradient, ...]:
    """Return the measured gradients, those of sites in graph order before those of parameters."""
    record = gradients_in(context)
    sites = (site for site in context.sites if site.id in record.sites)
    of_sites = [NamedGradient(_name(site), site.layer, record.sites[site.id]) for site in sites]
    others = [NamedGradient(n, n.rpartition(".")[0], stats) for n, stats in record.parameters.items()]
    return (*of_sites, *others)


def suitable_scales(context: CheckContext) -> ScaleAdvice | None:
    """Return the suitable loss scales; ``None`` if no gradient is stored in 16 bits."""
    return advice_on_scale(named_gradients(context), context.number_format, gradients_in(context).scale)


def name_of(context: CheckContext, value: str, is_parameter: bool) -> str:
    """Return the display name of a gradient: its parameter, also behind a cast, or its site."""
    return value if is_parameter else next((_name(site) for site in context.sites if site.id == value), value)


def _name(site: Site) -> str:
    return site.weight if site.role is Role.WEIGHT_CAST and site.weight is not None else site.id


def gradient_finding(
    context: CheckContext,
    site: Site,
    code: str,
    stats: GradientStats | None,
    cause: str,
    advice: str,
    *,
    name: str = "",
    severity: Severity | None = None,
) -> Finding:
    """Return a finding about the backward of the op at a site; ``stats`` are of the gradient of ``name``."""
    finding = finding_about(code, site.id, site.layer, cause, advice, severity=severity)
    evidence = Evidence()
    if stats is not None:
        measured = evidence_of(stats.values, context.number_format)
        # of gradients no elements are sampled
        evidence = replace(measured, flushed=stats.flushed_share, subnormal=None, about=f"gradient of {name}")
    return replace(finding, phase="backward", op=site.op, source=finding_source(site), evidence=evidence)


def find_gradient_overflow(context: CheckContext) -> Iterator[Finding]:
    """Find the op where each overflow begins; merge those that a lower scale or a smaller loss fixes."""
    record = gradients_in(context)
    if not record.origins:
        return
    suits = suitable_scales(context)
    curable: list[tuple[int, GradientOrigin]] = []
    for origin in record.origins:
        stats = record.broken_at(origin)
        highest = highest_exponent(stats.peak if stats is not None else 0.0, context.number_format)
        one_scale = highest >= 0 or (suits is not None and suits.exists)
        if one_scale and _exceeds_format(context, stats):
            curable.append((highest, origin))
        else:
            yield _overflow(context, record, suits, origin, highest)
    if curable:
        highest, worst = min(curable, key=lambda item: item[0])
        others = [origin.site for _, origin in curable if origin is not worst]
        finding = _overflow(context, record, suits, worst, highest, len(others))
        verb = "overflows" if len(others) == 1 else "overflow"
        more = f"; under this scale, {listed(others)} {verb} too" if others else ""
        yield replace(finding, cause=f"{finding.cause}{more}")


def _exceeds_format(context: CheckContext, stats: GradientStats | None) -> bool:
    """Return whether FP32's gradient exceeds the format; if not, the op itself causes NaN or infinity."""
    return stats is None or stats.values.ref_peak >= context.number_format.overflow_at


def _holder(context: CheckContext, origin: GradientOrigin) -> Site:
    """Return the site whose layer holds the gradient that breaks."""
    site = None if origin.is_parameter else context.site.get(SiteId(origin.value))
    return site or context.site[origin.site]


def _overflow(
    context: CheckContext,
    record: GradientRecord,
    suits: ScaleAdvice | None,
    origin: GradientOrigin,
    highest: int,
    others: int = 0,
) -> Finding:
    form, site = context.number_format, context.site[origin.site]
    stats = record.broken_at(origin)
    name = name_of(context, origin.value, origin.is_parameter)
    what = "the gradient of its own output"
    if origin.custom or origin.value != origin.site:
        by = f"{short_op(origin.op)} in {origin.custom}" if origin.op else origin.custom or "its backward"
        what = f"{by} makes a gradient of {name} that"
    reaches = format_number(stats.values.ref_peak) if stats is not None else "an unknown size"
    scaled = f" under the loss scale {format_scale(record.scale)}" if record.scale != 1 else ""
    severity = Severity.ERROR
    if _exceeds_format(context, stats):
        cause = f"{what} reaches {reaches} in FP32{scaled}; {form.name} ends at {format_number(form.max)}"
        advice = f"a loss scale of at most {format_power(highest)} fits"
        use = suits.suggested if suits is not None else None
        whole = min(highest, suits.high) if suits is not None else highest
        if use is not None and use < highest:
            advice += f" here, and {format_power(use)} suits the whole model"
        elif 0 <= whole < highest:
            advice += f" here, and one of at most {format_power(whole)} the whole model"
        if highest < 0:
            cures = [f"divide the loss by {format_power(-whole)}"] if suits and suits.exists else []
            if not others:
                cures.append(f"keep {_layer(_holder(context, origin))} in float32")
            advice = f"a loss scale of at most {format_power(whole)} fits, which is below 1: "
            advice += f"{', or '.join(cures)}{_or_bfloat16(context)}"
        elif whole < 0 and suits is not None:
            exempt = f"layer {suits.high_at!r}" if suits.high_at else "what sets that limit"
            advice += f" this op, but the whole model needs {format_power(whole)} or less, which is below 1: "
            advice += f"keep {exempt} in float32{_or_bfloat16(context)}"
        elif record.dynamic and 2.0**highest >= record.least:
            advice += "; until then the scaler skips steps and lowers the scale"
            severity = Severity.WARNING
    else:
        cause = f"{what} becomes NaN or infinite, although in FP32 it only reaches {reaches}{scaled}"
        advice = "keep this op in float32: no loss scale cures it"
    finding = gradient_finding(context, site, "AMP701", stats, cause, advice, name=name, severity=severity)
    source = source_of(origin.source) or finding.source
    return replace(finding, origin=True, source=source, batch=context.record.names.get(origin.batch))


def find_gradient_vanishes(context: CheckContext) -> Iterator[Finding]:
    """Find where gradients begin to vanish, and list those that follow; merge what one scale cures."""
    record = gradients_in(context)
    suits = suitable_scales(context)
    if suits is None or not any(map(vanishes, (*record.sites.values(), *record.parameters.values()))):
        return
    curable: list[Finding] = []
    for site, stats, name, poisons in _vanishing(context, record):
        cured = _cured(context, record, suits, stats)
        finding = _vanished(context, record, suits, site, stats, name, poisons, cured)
        if cured:
            curable.append(finding)
        else:
            yield finding
    if curable:
        worst = max(curable, key=lambda finding: finding.severity.rank)  # the first of the gravest
        others = listed([finding.site for finding in curable if finding is not worst])
        also = f"; the same begins at {others}" if others else ""
        sites = dict.fromkeys(site for finding in curable for site in (finding.site, *finding.poisons))
        rest = tuple(site for site in sites if site != worst.site)
        yield replace(worst, cause=f"{worst.cause}{also}", poisons=rest)


_Vanishing = tuple[Site, GradientStats, str, tuple[SiteId, ...]]


def _vanishing(context: CheckContext, record: GradientRecord) -> Iterator[_Vanishing]:
    """Yield where gradients begin to vanish, in the order of the backward pass.

    Each has a site, a gradient and its name, and the sites whose gradients vanish because of it.
    """
    behind: dict[SiteId, list[SiteId]] = {}
    starts: dict[SiteId, SiteId] = {}
    for site in reversed(context.graph_sites):
        stats = record.sites.get(site.id)
        before = next((starts[r.id] for r in context.flow.readers(site) if r.id in starts), None)
        if stats is not None and vanishes(stats):
            starts[site.id] = before or site.id
            behind.setdefault(starts[site.id], []).append(site.id)
        elif before is not None and (stats is None or _is_lost(stats)):
            starts[site.id] = before  # it only passes values on, or computes in float32
    for start, sites in behind.items():
        name = name_of(context, start, False)
        yield context.site[start], record.sites[start], name, tuple(site for site in sites if site != start)
    for name, stats in record.parameters.items():  # those stored in 16 bits
        user = _user(context, name) if vanishes(stats) else None
        if user is not None and user.id not in starts:
            yield user, stats, name, ()


def _cured(context: CheckContext, record: GradientRecord, suits: ScaleAdvice, stats: GradientStats) -> bool:
    """Return whether a higher scale without overflow keeps most of a gradient."""
    lowest = suits.low if suits.exists else suits.high
    at_best = stats.flushed_at(2.0**suits.high, context.number_format)
    return 2.0**lowest > record.scale and at_best < VANISHED


def _user(context: CheckContext, parameter: str) -> Site | None:
    """Return the first op that reads a parameter: a cast, or what computes with it as it is stored."""
    for site in context.graph_sites:
        places = map(context.flow.placeholder, context.flow.node(site).all_input_nodes)
        if any(place is not None and place.name == parameter for place in places):
            return site
    return None


def _vanished(
    context: CheckContext,
    record: GradientRecord,
    suits: ScaleAdvice,
    site: Site,
    stats: GradientStats,
    name: str,
    poisons: tuple[SiteId, ...],
    cured: bool,
) -> Finding:
    form = context.number_format
    at = " without loss scaling"
    if record.scale != 1:
        at = f" under the loss scale {format_scale(record.scale)}"
    cause = f"{stats.flushed_share:.0%} of the gradient of {name} becomes zero in {form.name}{at}"
    too_small = stats.flushed_at(record.scale, form) >= VANISHED
    reaches = format_number(stats.values.ref_peak)
    if too_small:
        least = format_number(form.flush_below)
        cause += f": it reaches {reaches} in FP32, and {form.name} rounds {least} and less to zero"
    else:
        cause += f", although it reaches {reaches} in FP32: smaller values on the way to it become zero"
    sqnr = stats.values.sqnr_db
    severity = Severity.ERROR if sqnr is not None and sqnr < _NOTHING_LEFT_DB else Severity.WARNING
    highest = format_power(suits.high)
    if cured and suits.exists:
        advice = f"use a loss scale of at least {format_power(suits.low)}; nothing overflows up to {highest}"
    elif cured:
        advice = f"use the loss scale {highest}, the highest without overflow; none suits every layer"
    else:
        ops = " and the ops that it poisons" if poisons else ""
        advice = f"keep {_layer(site)}{ops} in float32{_or_bfloat16(context)}"
        if too_small or 2.0**suits.high <= record.scale:
            advice += ": no loss scale without overflow cures it"
        else:
            advice = f"try a larger loss scale (nothing overflows up to {highest}), or {advice}"
    finding = gradient_finding(context, site, "AMP702", stats, cause, advice, name=name, severity=severity)
    return replace(finding, poisons=poisons)


def _layer(site: Site) -> str:
    return f"layer {site.layer!r}" if site.layer else "this op"


def _or_bfloat16(context: CheckContext) -> str:
    return "" if context.number_format is BFLOAT16 else ", or use bfloat16"


def find_no_loss_scale(context: CheckContext) -> Iterator[Finding]:
    """Report if some layer loses most of its gradient at every scale without overflow."""
    record, form = gradients_in(context), context.number_format
    counted = [gradient for gradient in named_gradients(context) if not gradient.stats.cancelled]
    scale_advice = advice_on_scale(counted, form, record.scale, share=VANISHED)
    if scale_advice is None or scale_advice.exists:
        return
    low, high = scale_advice.low_at or "(top module)", scale_advice.high_at or "(top module)"
    cause = (
        f"the gradients of {high} overflow from 2^{scale_advice.high + 1} on; those of {low} need "
        f"{format_power(scale_advice.low)} for half of them to be nonzero in {form.name}"
    )
    advice = f"keep {high} or {low} in float32, use bfloat16, or bring their gradients closer together"
    finding = finding_about(
        "AMP703", SiteId(f"{low}/gradient"), scale_advice.low_at, cause, advice, confidence="observed"
    )
    yield replace(finding, phase="backward")


def find_gradient_error(context: CheckContext) -> Iterator[Finding]:
    """Find the least accurate parameter gradients, unless a graver finding explains them."""
    record = gradients_in(context)
    if record.origins or context.record.origins:
        return
    if any(vanishes(gradient.stats) for gradient in named_gradients(context)):
        return
    required = context.config.min_sqnr
    inaccurate = [
        (sqnr, name, stats)
        for name, stats in record.parameters.items()
        if not stats.cancelled and stats.values.ref_peak
        if (sqnr := stats.values.sqnr_db) is not None and sqnr < required
    ]
    for sqnr, name, stats in sorted(inaccurate, key=lambda item: item[0])[:_LISTED]:
        site = _user(context, name)
        if site is None:
            continue
        cause = f"the gradient of {name} has {sqnr:.0f} dB against FP32; {required:.0f} dB are required"
        advice = "look for a sum in the backward pass that cancels, or keep the layers after it in float32"
        yield gradient_finding(context, site, "AMP704", stats, cause, advice, name=name)


def find_no_gradient(context: CheckContext) -> Iterator[Finding]:
    """Yield one finding per layer with parameters that no loss depends on."""
    layers: dict[str, list[str]] = {}
    for name in gradients_in(context).unused:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    for layer, names in layers.items():
        cause = f"no batch's loss depends on {', '.join(names)}"
        advice = "freeze it, or find out why it is not used; DDP needs find_unused_parameters=True for it"
        finding = finding_about(
            "AMP705", SiteId(f"{names[0]}/gradient"), layer, cause, advice, confidence="observed"
        )
        yield replace(finding, phase="backward")


def find_custom_backward(context: CheckContext) -> Iterator[Finding]:
    """Yield one finding per custom backward that cannot be traced; a note if it ran as a whole."""
    for custom in gradients_in(context).untraced:
        site = context.site[custom.site]
        cause, advice = _TEXTS[custom.instead]
        cause = f"{cause.format(custom.name)}: {custom.reason}"
        if "same dtype" in custom.reason:
            advice = "it fails in training as well: decorate it with torch.amp.custom_fwd and custom_bwd"
        severity = Severity.NOTE if custom.instead == "as a whole" else Severity.WARNING
        finding = gradient_finding(context, site, "AMP706", None, cause, advice, severity=severity)
        yield replace(finding, source=source_of(custom.source) or finding.source)


CHECKS = (
    Check("AMP701", find_gradient_overflow),
    Check("AMP702", find_gradient_vanishes),
    Check("AMP703", find_no_loss_scale),
    Check("AMP704", find_gradient_error),
    Check("AMP705", find_no_gradient),
    Check("AMP706", find_custom_backward),
)
