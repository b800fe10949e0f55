"""AMP106: squares, higher powers and sums of them that overflow: from 256 on in float16."""

from __future__ import annotations

from typing import Any

from torch import fx

from ampaudit.audit.checks.interface import Cause, CheckContext
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE"]

_SQUARING = frozenset(
    """
    linalg_vector_norm norm var std var_mean std_mean mse_loss
    frobenius_norm cdist _euclidean_dist dist cosine_similarity
    """.split()
)
_SUMS = ("sum", "mean", "cumsum", "nansum")
_PRODUCTS = ("matmul", "bmm", "mm", "dot", "einsum")
_DEPTH = 8  # factors that are looked through
# what an op does, what the limit is, and what a sum adds up
_WORDS = {
    2.0: ("squares its input", "squared", "squares"),
    3.0: ("cubes its input", "cubed", "cubes"),
}


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Return whether the op raises its input to a power, or adds up powers."""
    del origin
    power = _power(context, site)
    if power is not None:
        limit = f"{context.number_format.max ** (1 / power):.4g}"
        other = (f"raises its input to the power {power:g}", f"to the power {power:g}", "")
        does, raised, _ = _WORDS.get(power, other)
        return f"the op {does}, and {limit} {raised} is the limit"
    if context.flow.base(site) not in _SUMS:
        return None
    powers = [_power(context, maker) for maker in context.flow.makers(site)]
    summed = next((power for power in powers if power is not None), None)
    if summed is None:
        return None
    return f"the op adds up {_WORDS[summed][2] if summed in _WORDS else f'values to the power {summed:g}'}"


def _power(context: CheckContext, site: Site) -> float | None:
    """Return the power that a site computes, if above 1; ``None`` otherwise."""
    flow = context.flow
    if flow.base(site) in _SQUARING:
        return 2.0
    if flow.base(site) in _PRODUCTS:
        operands = _operands(flow.arguments(site))
        same = len(operands) == 2 and flow.root(operands[0]) is flow.root(operands[1]) is not None
        return 2.0 if same else None
    power = _raised(context, flow.node(site), _DEPTH)[1]
    return power if power > 1 else None


def _raised(context: CheckContext, node: Any, depth: int) -> tuple[fx.Node | None, float]:
    """Return a value as base and exponent: ``x * x * x`` is x to the third."""
    flow = context.flow
    root, site = flow.root(node), flow.maker(node)
    if site is None or depth == 0:
        return root, 1.0
    given = flow.arguments(site)
    if flow.base(site) == "square":
        base, power = _raised(context, given["self"], depth - 1)
        return base, 2 * power
    exponent = given.get("exponent")
    if flow.base(site) == "pow" and isinstance(exponent, int | float) and exponent >= 1:
        base, power = _raised(context, given["self"], depth - 1)
        return base, exponent * power
    if flow.base(site) == "mul":
        (base, power), (other, times) = (_raised(context, o, depth - 1) for o in _operands(given))
        if base is other is not None:
            return base, power + times
    return root, 1.0


def _operands(given: dict[str, Any]) -> list[Any]:
    tensors = given.get("tensors")
    return list(tensors) if isinstance(tensors, list | tuple) else list(given.values())[:2]


CAUSE = Cause(
    "AMP106", applies, "square in float32 (x.float().square()), or divide x by its peak before squaring"
)
