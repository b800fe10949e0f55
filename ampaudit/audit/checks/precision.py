"""Ops that lose precision in 16 bits, or would on other inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from ampaudit.audit.checks.interface import Cause, Check, CheckContext, cause, finding_at
from ampaudit.core.ops import having
from ampaudit.core.text import format_number
from ampaudit.findings.finding import Finding, Severity
from ampaudit.run.meter import spacing
from ampaudit.trace import Role, Site
from ampaudit.trace.functional import overload_of
from ampaudit.trace.values import computing_dtype, converted_numbers, dtype_name, fake_arguments, node_dtype

_WITHIN = 2  # ops to look back from the reported one: a comparison, and an op that combines masks
_PROTECTED = having("infinite_at_zero") | {"sqrt"}
_PROTECTING = ("add", "clamp", "clamp_min", "clip", "maximum", "max", "sub")
LARGEST_EPS = 0.01
POSITION_ERROR = 0.5  # half of the distance between two neighbors
ANGLE_ERROR = 0.1  # radians
MIN_COUNT = 16.0  # a mask is also made of integers: 0 and 1
NOTICEABLE_DB = 10.0  # errors of one op this far above the threshold still show in an output


def _latent(match: Cause) -> Check:
    """Return the check for sites that a cause applies to in 16 bits but that did not break."""

    def find(context: CheckContext) -> Iterator[Finding]:
        for site in context.graph_sites:
            text = match.applies(context, site) if site.id not in context.origins else None
            if text:
                severity = Severity.WARNING
                yield finding_at(
                    context, site, match.code, text, match.advice, severity=severity, confidence="rule"
                )

    return Check(match.code, find)


def find_epsilon(context: CheckContext) -> Iterator[Finding]:
    """Find every lost eps before a division, root or logarithm; a subnormal one is a note."""
    form = context.number_format
    for site in context.low_precision_sites:
        eps = _eps(context, site)
        guarded = context.flow.leads_to(site, *_PROTECTED) if eps is not None else None
        if eps is None or guarded is None or guarded.id in context.origins:
            continue
        flushed = eps <= form.flush_below
        became = "0" if flushed else f"subnormal, good to {math.log2(eps / form.min_subnormal):.0f} bits"
        text = f"eps = {format_number(eps)} is {became} in {form.name}, and {guarded.id} relies on it"
        severity = Severity.WARNING if flushed else Severity.NOTE
        yield finding_at(context, site, "AMP202", text, epsilon.advice, severity=severity, confidence="rule")


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
    for producer in context.flow.upstream(site, 3) if context.flow.base(site) in _PROTECTED else ():
        eps = _eps(context, producer) if context.low_precision(producer) else None
        if eps is not None:
            return producer, eps
    return None


@cause(
    "AMP202",
    "use an eps that the format holds (1e-5 or more in float16), "
    "or compute this step and what reads it in float32",
)
def epsilon(context: CheckContext, site: Site) -> str | None:
    """Explain a division, root or logarithm shortly after a lost eps."""
    match = lost_eps(context, site)
    if match is None:
        return None
    producer, eps = match
    flushed = eps <= context.number_format.flush_below
    if not flushed and context.is_overflow(context.origins[site.id]):
        return None  # the value would overflow with the exact eps as well
    became = "0" if flushed else "subnormal"
    return f"eps = {format_number(eps)} at {producer.id} is {became} in {context.number_format.name}"


@cause("AMP203", "write torch.log_softmax(x, dim)")
def log_softmax(context: CheckContext, site: Site) -> str | None:
    """Explain the log of a 16-bit softmax."""
    flow = context.flow
    if flow.base(site) not in having("logarithm"):
        return None
    softmax = flow.comes_from(flow.node(site).all_input_nodes[0], "softmax", within=2)
    if softmax is None or not any(context.low_precision(step) for step in (softmax, *flow.producers(site))):
        return None
    form = context.number_format
    return f"probabilities below {format_number(form.flush_below)} are 0 in {form.name}, and log(0) is -inf"


@cause("AMP204", "write F.logsigmoid(-x) for log(1 - sigmoid(x)), F.logsigmoid(x) for log(sigmoid(x))")
def log_sigmoid(context: CheckContext, site: Site) -> str | None:
    """Explain the log of a sigmoid, or of one minus it, partly in 16 bits."""
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
        site = flow.producer(node)
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


def subtracts(context: CheckContext, site: Site) -> bool:
    """Return whether a site is a sum or difference much smaller than its operands."""
    if context.flow.base(site) not in having("sum_of_two"):
        return False
    stats = context.observed(site.id)
    peaks = [context.observed(producer.id).ref_peak for producer in context.flow.producers(site)]
    numbers = [v for v in context.flow.arguments(site).values() if isinstance(v, int | float)]
    largest = max((*peaks, *(abs(float(v)) for v in numbers)), default=0.0)
    measured = bool(stats.ref_sq and stats.elements)
    typical = math.sqrt(stats.ref_sq / stats.elements) if measured else stats.ref_peak
    return largest > 8 * typical


def find_cancellation(context: CheckContext) -> Iterator[Finding]:
    """Find differences that are mostly rounding error."""
    for site in context.low_precision_sites:
        if site.id in context.origins or not subtracts(context, site):
            continue
        severity = local_error_matters(context, site)
        if severity is not None:
            db = context.observed(site.id).local_sqnr_db
            text = f"both operands are large and nearly equal; {db:.0f} dB of their difference are right"
            yield finding_at(context, site, "AMP205", text, cancellation.advice, severity=severity)


@cause(
    "AMP205", "subtract in float32, or rewrite: ((x - x.mean())**2).mean() for E[x^2] - E[x]^2, log1p, expm1"
)
def cancellation(context: CheckContext, site: Site) -> str | None:
    """Explain a root, logarithm or division of the difference of two nearly equal values."""
    for producer in context.flow.upstream(site, 3):
        peaks = [context.observed(m.id).ref_peak for m in context.flow.producers(producer)]
        if len(peaks) == 2 and context.flow.base(producer) in ("sub", "rsub"):
            peak = format_number(max(peaks))
            return f"{producer.id} is a difference of values up to {peak} that nearly cancel"
    return None


def find_positions(context: CheckContext) -> Iterator[Finding]:
    """Find the first 16-bit site of each chain of positions or angles with a visible error."""
    reported: set[str] = set()
    for site in context.low_precision_sites:
        stats = context.observed(site.id)
        error = stats.samples.max_error
        limit = _limit(context, site)
        if limit is None or error < limit or site.id in context.origins:
            continue
        producers = context.flow.producers(site)
        inherited = any(
            context.low_precision(producer)
            and _counts(context, producer)
            and context.observed(producer.id).samples.max_error >= POSITION_ERROR
            for producer in producers
        )
        reported.add(site.id)
        if not inherited and not any(producer.id in reported for producer in producers):
            what = "angle" if limit == ANGLE_ERROR else "position"
            form, peak = context.number_format, format_number(stats.ref_peak)
            step = spacing(stats.ref_peak, form.fraction_bits)
            text = (
                f"{what}s up to {peak} are off by {format_number(error)} or more; "
                f"{form.name} values next to {peak} are {format_number(step)} apart"
            )
            yield finding_at(context, site, "AMP206", text, positions.advice)


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
    if context.observed(site.id).ref_peak < MIN_COUNT or site.id not in context.constants:
        return False
    dtypes = [dtype_name(node_dtype(node)) for node in context.flow.node(site).all_input_nodes]
    return base == "arange" or any(dtype.startswith(("int", "uint")) for dtype in dtypes)


@cause("AMP206", "compute positions and angles in float32 and cast what comes after sin and cos")
def positions(context: CheckContext, site: Site) -> str | None:
    """Explain a conversion of integers that exceed the format's limit."""
    return "these are counts, such as positions or timestamps" if _counts(context, site) else None


def find_local_error(context: CheckContext) -> Iterator[Finding]:
    """Find ops whose own error is above the threshold, except the differences of AMP205."""
    for site in context.low_precision_sites:
        if site.id in context.origins or subtracts(context, site):
            continue
        peaks = (context.observed(producer.id).ref_peak for producer in context.flow.producers(site))
        if any(peak > context.number_format.max for peak in peaks):
            continue  # the overflow of an input is another finding
        severity = local_error_matters(context, site)
        if severity is not None:
            db, required = context.observed(site.id).local_sqnr_db, context.config.min_sqnr
            text = f"on exact inputs this op alone gives {db:.0f} dB; {required:.0f} dB are required"
            advice = "keep this op in float32: the error is its own, not inherited"
            yield finding_at(context, site, "AMP208", text, advice, severity=severity)


def local_error_matters(context: CheckContext, site: Site) -> Severity | None:
    """Return the severity of an op's own error; ``None`` if the op is accurate enough.

    An error that no output of the model shows is a note.
    """
    db = context.observed(site.id).local_sqnr_db
    by_design = site.id in context.record.by_design or site.id in context.record.masks
    excluded = by_design or context.from_weight(site) is not None
    if db is None or db >= context.config.min_sqnr or excluded or site.role is not Role.COMPUTE:
        return None
    accuracies = [accuracy for _, _, accuracy in context.outputs if accuracy is not None]
    shows = min(accuracies, default=0.0) < context.config.min_sqnr + NOTICEABLE_DB
    return Severity.WARNING if shows else Severity.NOTE


CHECKS = (
    Check("AMP202", find_epsilon),
    _latent(log_softmax),
    _latent(log_sigmoid),
    Check("AMP205", find_cancellation),
    Check("AMP206", find_positions),
    Check("AMP208", find_local_error),
)


class RoundedNumber(NamedTuple):
    """A number that 16 bits round to another one, in words, and the op that takes it."""

    site: Site
    text: str


def rounded_number(context: CheckContext, site: Site) -> RoundedNumber | None:
    """Return a number that rounding changes at or shortly before a site: ``0.9999 is 1 in float16``."""
    for step in (site, *context.flow.upstream(site, _WITHIN)):
        node = context.flow.node(step)
        if (op := overload_of(node.target)) is None:
            continue
        args, kwargs = fake_arguments(node)
        if (dtype := computing_dtype(op, args, kwargs)) is None:
            continue
        read = converted_numbers(op, args, kwargs, dtype)
        for number, rounded in zip((*args, *kwargs.values()), (*read[0], *read[1].values()), strict=True):
            if rounded is not number:
                before, after = format_number(number), format_number(rounded)
                form = context.number_format.name
                return RoundedNumber(step, f"{before} at {step.id} is {after} in {form}")
    return None
