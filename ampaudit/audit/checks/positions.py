"""AMP206: positions, timestamps, angles or coordinates that coincide in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Cause, Check, CheckContext, finding_at
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding
from ampaudit.run.decisions import spacing
from ampaudit.run.record import Origin
from ampaudit.trace import Site
from ampaudit.trace.values import dtype_name

__all__ = ["CAUSE", "CHECK"]

_WAVES = ("sin", "cos", "polar", "tan")
_ADVICE = "compute positions and angles in float32 and cast what comes after sin and cos"
POSITION_ERROR = 0.5  # half of the distance between two neighbors
ANGLE_ERROR = 0.1  # radians
MIN_COUNT = 16.0  # a mask is also made of integers: 0 and 1


def find(context: CheckContext) -> Iterator[Finding]:
    """Find the first 16-bit site of each chain of positions or angles with a visible error."""
    reported: set[str] = set()
    for site in context.low_precision_sites:
        seen = context.observed(site.id)
        error = seen.samples.max_error
        limit = _limit(context, site)
        if limit is None or error < limit or site.id in context.origin_sites:
            continue
        behind = any(maker.id in reported for maker in context.flow.makers(site))
        inherited = behind or _follows(context, site)
        reported.add(site.id)
        if not inherited:
            what = "angle" if limit == ANGLE_ERROR else "position"
            form, peak = context.number_format, format_number(seen.ref_peak)
            step = spacing(seen.ref_peak, form.fraction_bits)
            cause = (
                f"{what}s up to {peak} are off by {format_number(error)} or more; "
                f"{form.name} values next to {peak} are {format_number(step)} apart"
            )
            yield finding_at(context, site, "AMP206", cause, _ADVICE)


def _limit(context: CheckContext, site: Site) -> float | None:
    """Return the error that matters; ``None`` for values that are neither positions nor angles."""
    if site.id in context.record.by_design or site.id in context.record.masks:
        return None
    if any(context.flow.base(reader) in _WAVES for reader in context.flow.readers(site)):
        return ANGLE_ERROR
    return POSITION_ERROR if _counts(context, site) else None


def _counts(context: CheckContext, site: Site) -> bool:
    """Return whether a site converts integers that are no mask to floats."""
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


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Return whether the op converts integers that exceed the format's limit."""
    del origin
    return "these are counts, such as positions or timestamps" if _counts(context, site) else None


CAUSE = Cause("AMP206", applies, _ADVICE)
CHECK = Check("AMP206", find)
