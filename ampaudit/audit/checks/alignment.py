"""AMP501: a matrix product or convolution whose sizes are not aligned for tensor cores."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.report.finding import Finding
from ampaudit.trace import Site

__all__ = ["CHECK"]

MULTIPLE = 8  # elements: 16 bytes of a 16-bit format, NVIDIA's "Matrix Multiplication Background" guide
SMALL = 16  # of smaller products, padding is no news
_PRODUCTS = ("linear", "addmm", "mm", "conv1d", "conv2d", "conv3d")


def find(context: CheckContext) -> Iterator[Finding]:
    """Find 16-bit products with a weight whose inner or outer size is no multiple of eight."""
    for site in context.low_precision_sites:
        sizes = _sizes(context, site)
        odd = [f"{name} = {size}" for name, size in sizes.items() if size % MULTIPLE and size > SMALL]
        if odd:
            cause = (
                f"{', '.join(odd)}: not a multiple of {MULTIPLE}, so tensor cores run padded or not at all"
            )
            yield finding_at(
                context, site, "AMP501", cause, f"pad to a multiple of {MULTIPLE}", confidence="rule"
            )


def _sizes(context: CheckContext, site: Site) -> dict[str, int]:
    if context.flow.base(site) not in _PRODUCTS:
        return {}
    given = context.flow.arguments(site)
    weight = given.get("weight", given.get("mat2"))
    value = getattr(weight, "meta", {}).get("val")
    if value is None or value.ndim < 2 or given.get("groups", 1) != 1:
        return {}
    return {"out": int(value.shape[0]), "in": int(value.shape[1])}


CHECK = Check("AMP501", find)
