"""AMP106: squares, and sums of squares, that leave the range: from 256 on in float16."""

from __future__ import annotations

from typing import Any

from ampaudit.checks.interface import Cause, CheckContext
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE"]

_SQUARING = frozenset(
    """
    square linalg_vector_norm norm var std var_mean std_mean mse_loss
    frobenius_norm cdist _euclidean_dist dist cosine_similarity
    """.split()
)
_SUMS = ("sum", "mean", "cumsum", "nansum")
_PRODUCTS = ("mul", "matmul", "bmm", "mm", "dot", "einsum")


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """The op squares its input, or adds up what was squared just before."""
    del origin
    if squares(context, site):
        return f"the op squares its input, and {context.number_format.max**0.5:.4g} squared is the limit"
    summed = context.flow.base(site) in _SUMS and any(squares(context, m) for m in context.flow.makers(site))
    return "the op adds up squares" if summed else None


def squares(context: CheckContext, site: Site) -> bool:
    """Whether a site multiplies a value with itself."""
    flow = context.flow
    base, given = flow.base(site), flow.arguments(site)
    if base == "pow":
        return given.get("exponent") in (2, 2.0, 3, 3.0, 4, 4.0)
    if base in _PRODUCTS:
        operands = _operands(given)
        return len(operands) == 2 and flow.root(operands[0]) is flow.root(operands[1]) is not None
    return base in _SQUARING


def _operands(given: dict[str, Any]) -> list[Any]:
    tensors = given.get("tensors")
    return list(tensors) if isinstance(tensors, list | tuple) else list(given.values())[:2]


CAUSE = Cause(
    "AMP106", applies, "square in float32 (x.float().square()), or divide x by its peak before squaring"
)
