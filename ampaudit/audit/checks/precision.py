"""Ops that lose precision in 16 bits, or would on other inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from torch import fx

from ampaudit.audit.checks.interface import Cause, Check, CheckContext, finding_at
from ampaudit.core.ops import having
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding, Severity
from ampaudit.run.meter import spacing
from ampaudit.run.record import Origin
from ampaudit.trace import Role, Site
from ampaudit.trace.functional import overload_of
from ampaudit.trace.values import computing_dtype, converted_numbers, dtype_name, fake_arguments

__all__ = [
    "CANCELLATION_CAUSE",
    "CHECKS",
    "EPSILON_CAUSE",
    "LOG_SIGMOID_CAUSE",
    "LOG_SOFTMAX_CAUSE",
    "POSITIONS_CAUSE",
    "latent_check",
    "lost_eps",
    "rounded_number",
    "subtracts",
]

_WITHIN = 2  # ops before the one that is reported: a comparison, and what combines masks
_PROTECTED = having("infinite_at_zero") | {"sqrt"}
_PROTECTING = ("add", "clamp", "clamp_min", "clip", "maximum", "max", "sub")
_EPSILON_ADVICE = (
    "use an eps that the format holds (1e-5 or more in float16), "
    "or compute this step and what reads it in float32"
)
_LOG_SOFTMAX_ADVICE = "write torch.log_softmax(x, dim)"
LARGEST_EPS = 0.01
_LOG_SIGMOID_ADVICE = "write F.logsigmoid(-x) for log(1 - sigmoid(x)), F.logsigmoid(x) for log(sigmoid(x))"
_CANCELLATION_ADVICE = (
    "subtract in float32, or rewrite: ((x - x.mean())**2).mean() for E[x^2] - E[x]^2, log1p, expm1"
)
_POSITIONS_ADVICE = "compute positions and angles in float32 and cast what comes after sin and cos"
POSITION_ERROR = 0.5  # half of the distance between two neighbors
ANGLE_ERROR = 0.1  # radians
MIN_COUNT = 16.0  # a mask is also made of integers: 0 and 1
NOTICEABLE_DB = 10.0  # errors of one op this far above the threshold still show in an output
PatternMatch = Callable[[CheckContext, Site, Origin | None], str | None]


def latent_check(code: str, applies: PatternMatch, advice: str) -> Check:
    """Return the check for sites that match a pattern in 16 bits but did not break."""
    return Check(code, partial(_find, code, applies, advice))


def _find(code: str, applies: PatternMatch, advice: str, context: CheckContext) -> Iterator[Finding]:
    for site in context.graph_sites:
        reason = applies(context, site, None) if site.id not in context.origin_sites else None
        if reason:
            yield finding_at(
                context, site, code, reason, advice, severity=Severity.WARNING, confidence="rule"
            )


def find_epsilon(context: CheckContext) -> Iterator[Finding]:
    """Find every lost eps before a division, root or logarithm; a subnormal one is a note."""
    form = context.number_format
    for site in context.low_precision_sites:
        eps = _eps(context, site)
        guarded = context.flow.leads_to(site, *_PROTECTED) if eps is not None else None
        if eps is None or guarded is None or guarded.id in context.origin_sites:
            continue
        flushed = eps <= form.flush_below
        became = "0" if flushed else f"subnormal, good to {math.log2(eps / form.min_subnormal):.0f} bits"
        cause = f"eps = {format_number(eps)} is {became} in {form.name}, and {guarded.id} relies on it"
        severity = Severity.WARNING if flushed else Severity.NOTE
        yield finding_at(
            context, site, "AMP202", cause, _EPSILON_ADVICE, severity=severity, confidence="rule"
        )


def _eps(context: CheckContext, site: Site) -> float | None:
    """Return the Python number below the smallest normal number that an op adds or clamps to."""
    if context.flow.base(site) not in _PROTECTING:
        return None
    arguments = context.flow.arguments(site)
    numbers = [arguments.get(name) for name in ("other", "min", "alpha")]
    numbers += [site.original_args.get(1), site.original_args.get("min")]
    form = context.number_format
    small = [v for v in numbers if isinstance(v, float) and 0.0 < abs(v) < form.min_normal]
    return abs(small[0]) if small else None


def lost_eps(context: CheckContext, site: Site) -> tuple[Site, float] | None:
    """Return the lost eps shortly before a division, root or logarithm, and the op that adds it."""
    flow = context.flow
    if flow.base(site) not in _PROTECTED:
        return None
    frontier = [site]
    for _ in range(3):
        frontier = [maker for step in frontier for maker in flow.makers(step)]
        for maker in frontier:
            eps = _eps(context, maker) if context.low_precision(maker) else None
            if eps is not None:
                return maker, eps
    return None


def epsilon_reason(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Explain a division, root or logarithm shortly after a lost eps."""
    match = lost_eps(context, site)
    if match is None:
        return None
    maker, eps = match
    flushed = eps <= context.number_format.flush_below
    if not flushed and context.is_overflow(origin):  # the value would overflow with the exact eps as well
        return None
    became = "0" if flushed else "subnormal"
    return f"eps = {format_number(eps)} at {maker.id} is {became} in {context.number_format.name}"


EPSILON_CAUSE = Cause("AMP202", epsilon_reason, _EPSILON_ADVICE)


def log_softmax_reason(context: CheckContext, site: Site, origin: Origin | None) -> str | None:
    """Explain the log of a 16-bit softmax."""
    del origin
    flow = context.flow
    if flow.base(site) not in having("logarithm"):
        return None
    softmax = flow.comes_from(flow.node(site).all_input_nodes[0], "softmax", within=2)
    if softmax is None or not any(context.low_precision(step) for step in (softmax, *flow.makers(site))):
        return None
    form = context.number_format
    return f"probabilities below {format_number(form.flush_below)} are 0 in {form.name}, and log(0) is -inf"


LOG_SOFTMAX_CAUSE = Cause("AMP203", log_softmax_reason, _LOG_SOFTMAX_ADVICE)


def log_sigmoid_reason(context: CheckContext, site: Site, origin: Origin | None) -> str | None:
    """Explain the log of a sigmoid, or of one minus it, partly in 16 bits."""
    del origin
    flow = context.flow
    if flow.base(site) not in having("logarithm"):
        return None
    steps = _steps(context, flow.node(site).all_input_nodes[0])
    if steps is None or not any(context.low_precision(step) for step in steps):
        return None
    bits = context.number_format.fraction_bits
    edge = (bits + 1 + 1) * 0.6931
    return f"1 - sigmoid(x) rounds to 0 in {context.number_format.name} from x = {format_number(edge)} on"


def _steps(context: CheckContext, node: fx.Node) -> list[Site] | None:
    """Return a sigmoid and what follows (``1 - p``, ``-p``, a lower limit, a small eps), or ``None``."""
    flow, steps = context.flow, list[Site]()
    for _ in range(4):
        site = flow.maker(node)
        if site is None:
            return None
        steps.append(site)
        if flow.base(site) == "sigmoid":
            return steps
        if flow.base(site) not in ("sub", "rsub", "neg", "add", "clamp", "clamp_min"):
            return None
        numbers = [v for v in flow.arguments(site).values() if isinstance(v, int | float)]
        if any(abs(v) > LARGEST_EPS and v not in (1, -1) for v in numbers):
            return None
        tensors = [n for n in flow.node(site).all_input_nodes if flow.comes_from(n, "sigmoid", within=3)]
        if len(tensors) != 1:
            return None
        node = tensors[0]
    return None


LOG_SIGMOID_CAUSE = Cause("AMP204", log_sigmoid_reason, _LOG_SIGMOID_ADVICE)


def subtracts(context: CheckContext, site: Site) -> bool:
    """Return whether a site is a sum or difference much smaller than its operands."""
    if context.flow.base(site) not in having("sum_of_two"):
        return False
    stats = context.observed(site.id)
    peaks = [context.observed(maker.id).ref_peak for maker in context.flow.makers(site)]
    numbers = [v for v in context.flow.arguments(site).values() if isinstance(v, int | float)]
    largest = max((*peaks, *(abs(float(v)) for v in numbers)), default=0.0)
    return largest > 8 * _typical(stats.ref_sq, stats.elements, stats.ref_peak)


def _typical(squares: float, elements: int, peak: float) -> float:
    """Return the root mean square, or the peak if it was not measured."""
    return float((squares / elements) ** 0.5) if squares and elements else peak


def find_cancellation(context: CheckContext) -> Iterator[Finding]:
    """Find differences that are mostly rounding error."""
    for site in context.low_precision_sites:
        if site.id in context.origin_sites or not subtracts(context, site):
            continue
        severity = local_error_matters(context, site)
        if severity is not None:
            db = context.observed(site.id).local_sqnr_db
            cause = f"both operands are large and nearly equal; {db:.0f} dB of their difference are right"
            yield finding_at(context, site, "AMP205", cause, _CANCELLATION_ADVICE, severity=severity)


def cancellation_reason(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Explain a root, logarithm or division of the difference of two nearly equal values."""
    del origin
    frontier = [site]
    for _ in range(3):
        frontier = [maker for step in frontier for maker in context.flow.makers(step)]
        for maker in frontier:
            peaks = [context.observed(m.id).ref_peak for m in context.flow.makers(maker)]
            if len(peaks) == 2 and context.flow.base(maker) in ("sub", "rsub"):
                return (
                    f"{maker.id} is a difference of values up to "
                    f"{format_number(max(peaks))} that nearly cancel"
                )
    return None


CANCELLATION_CAUSE = Cause("AMP205", cancellation_reason, _CANCELLATION_ADVICE)


def find_positions(context: CheckContext) -> Iterator[Finding]:
    """Find the first 16-bit site of each chain of positions or angles with a visible error."""
    reported: set[str] = set()
    for site in context.low_precision_sites:
        stats = context.observed(site.id)
        error = stats.samples.max_error
        limit = _limit(context, site)
        if limit is None or error < limit or site.id in context.origin_sites:
            continue
        behind = any(maker.id in reported for maker in context.flow.makers(site))
        inherited = behind or _follows(context, site)
        reported.add(site.id)
        if not inherited:
            what = "angle" if limit == ANGLE_ERROR else "position"
            form, peak = context.number_format, format_number(stats.ref_peak)
            step = spacing(stats.ref_peak, form.fraction_bits)
            cause = (
                f"{what}s up to {peak} are off by {format_number(error)} or more; "
                f"{form.name} values next to {peak} are {format_number(step)} apart"
            )
            yield finding_at(context, site, "AMP206", cause, _POSITIONS_ADVICE)


def _limit(context: CheckContext, site: Site) -> float | None:
    """Return the smallest error to report; ``None`` for values that are neither positions nor angles."""
    if site.id in context.record.by_design or site.id in context.record.masks:
        return None
    if any(context.flow.base(reader) in having("wave") for reader in context.flow.readers(site)):
        return ANGLE_ERROR
    return POSITION_ERROR if _counts(context, site) else None


def _counts(context: CheckContext, site: Site) -> bool:
    """Return whether a site converts integers, other than a mask, to floats."""
    base = context.flow.base(site)
    if base not in ("to", "_to_copy", "type_as", "arange", "mul", "add", "div"):
        return False
    if context.observed(site.id).ref_peak < MIN_COUNT or site.id not in context.parameter_free:
        return False
    return base == "arange" or any(map(_is_integer, context.flow.node(site).all_input_nodes))


def _is_integer(node: object) -> bool:
    value = getattr(node, "meta", {}).get("val")
    return dtype_name(getattr(value, "dtype", None)).startswith(("int", "uint"))


def _follows(context: CheckContext, site: Site) -> bool:
    """Return whether the values were positions in 16 bits already."""
    return any(
        context.low_precision(maker)
        and _counts(context, maker)
        and context.observed(maker.id).samples.max_error >= POSITION_ERROR
        for maker in context.flow.makers(site)
    )


def positions_reason(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Explain a conversion of integers that exceed the format's limit."""
    del origin
    return "these are counts, such as positions or timestamps" if _counts(context, site) else None


POSITIONS_CAUSE = Cause("AMP206", positions_reason, _POSITIONS_ADVICE)


def find_local_error(context: CheckContext) -> Iterator[Finding]:
    """Find ops whose own error is above the threshold, except the differences of AMP205."""
    for site in context.low_precision_sites:
        if site.id in context.origin_sites or subtracts(context, site) or _overflows_before(context, site):
            continue
        severity = local_error_matters(context, site)
        if severity is not None:
            db = context.observed(site.id).local_sqnr_db
            cause = f"on exact inputs this op alone gives {db:.0f} dB; {context.min_sqnr:.0f} dB are required"
            advice = "keep this op in float32: the error is its own, not inherited"
            yield finding_at(context, site, "AMP208", cause, advice, severity=severity)


def _overflows_before(context: CheckContext, site: Site) -> bool:
    """Return whether an input is too large for the format: its overflow is another finding."""
    limit = context.number_format.max
    return any(context.observed(maker.id).ref_peak > limit for maker in context.flow.makers(site))


def local_error_matters(context: CheckContext, site: Site) -> Severity | None:
    """Return the severity of an op's own error; ``None`` if the op is accurate enough.

    An error that no output of the model shows is a note.
    """
    db = context.observed(site.id).local_sqnr_db
    by_design = site.id in context.record.by_design or site.id in context.record.masks
    excluded = by_design or context.from_weight(site) is not None
    if db is None or db >= context.min_sqnr or excluded or site.role is not Role.COMPUTE:
        return None
    accuracies = [accuracy for _, _, accuracy in context.outputs if accuracy is not None]
    shows = min(accuracies, default=0.0) < context.min_sqnr + NOTICEABLE_DB
    return Severity.WARNING if shows else Severity.NOTE


CHECKS = (
    Check("AMP202", find_epsilon),
    latent_check("AMP203", log_softmax_reason, _LOG_SOFTMAX_ADVICE),
    latent_check("AMP204", log_sigmoid_reason, _LOG_SIGMOID_ADVICE),
    Check("AMP205", find_cancellation),
    Check("AMP206", find_positions),
    Check("AMP208", find_local_error),
)


class RoundedNumber(NamedTuple):
    """A number that 16 bits round to another one, in words, and the op that takes it."""

    site: Site
    text: str

    @property
    def decides(self) -> bool:
        """Whether the op compares, that is, its result is not a float."""
        return self.site.dtype is None


def rounded_number(context: CheckContext, site: Site) -> RoundedNumber | None:
    """Return a number that rounding changes at or shortly before a site: ``0.9999 is 1 in float16``."""
    frontier = [site]
    for _ in range(_WITHIN + 1):
        for step in frontier:
            if (text := _rounded_number(context, step)) is not None:
                return RoundedNumber(step, text)
        frontier = [maker for step in frontier for maker in context.flow.makers(step)]
    return None


def _rounded_number(context: CheckContext, site: Site) -> str | None:
    node = context.flow.node(site)
    op = overload_of(node.target)
    if op is None:
        return None
    args, kwargs = fake_arguments(node)
    dtype = computing_dtype(op, args, kwargs)
    if dtype is None:
        return None
    read = converted_numbers(op, args, kwargs, dtype)
    for number, rounded in zip((*args, *kwargs.values()), (*read[0], *read[1].values()), strict=True):
        if rounded is not number:
            before, after = format_number(number), format_number(rounded)
            return f"{before} at {site.id} is {after} in {context.number_format.name}"
    return None
