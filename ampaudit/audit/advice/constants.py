"""Distinguishes Python numbers used as limits (masks, fillers, clamp bounds) from operands.

The largest finite number of the format serves as a limit as well. A number is a limit where ``clamp`` takes
it as its bound, and where it fills elements that every reader only orders: a softmax, a maximum, a sort. Any
other op computes with the number itself, which is then left alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from ampaudit.audit.checks.interface import CheckContext
from ampaudit.trace import Role, Site
from ampaudit.trace.flow import Flow

__all__ = ["is_limit", "large_constants"]

_CLAMPS = ("clamp", "clamp_min", "clamp_max", "clip", "hardtanh")
_FILLS = ("masked_fill", "where", "full", "full_like", "new_full", "fill", "scalar_tensor", "index_fill")
_ORDERING = (
    *("softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp", "exp", "sigmoid"),
    *("max", "amax", "min", "amin", "argmax", "argmin", "topk", "sort", "argsort", "cummax", "cummin"),
)
_HANDING_ON = (*_FILLS, "add", "maximum", "minimum", "cat", "stack", "clone", "expand", "triu", "tril")
_BACK = 8  # steps


def large_constants(context: CheckContext, site: Site) -> Iterator[tuple[Site, float]]:
    """Find Python numbers outside the format's range, in an op or in the constants nearest to it."""
    limit = context.number_format.max
    frontier, seen = [site], {site.id}
    for _ in range(_BACK):
        for step in frontier:
            given = (*context.flow.arguments(step).values(), *step.original_args.values())
            numbers = (v for v in given if isinstance(v, float | int) and not isinstance(v, bool))
            large = next((v for v in numbers if limit < abs(v) < math.inf), None)
            if large is not None:
                yield step, large
                return
        frontier = [m for step in frontier for m in context.flow.makers(step) if m.id not in seen]
        seen |= {m.id for m in frontier}


def is_limit(context: CheckContext, flow: Flow, step: Site, value: float) -> bool:
    """Return whether an op uses a number as a limit; see above."""
    base, given = flow.base(step), flow.arguments(step)
    if base in _CLAMPS:
        return True
    if base == "mul" and value < 0:
        # (1 - mask) * -1e9: no weight and no activation in the other factor
        return step.id in context.parameter_free and _only_orders(flow, flow.node(step))
    return base in _FILLS and value in given.values() and _only_orders(flow, flow.node(step))


def _only_orders(flow: Flow, node: fx.Node) -> bool:
    """Return whether all final readers of a value only compare its elements with each other."""
    seen: set[fx.Node] = set()
    frontier = [node]
    while frontier:
        current = frontier.pop()
        if not current.users:
            continue
        for user in current.users:
            if user in seen:
                continue
            seen.add(user)
            verdict = _reads(flow, user, current)
            if verdict == "computes":
                return False
            if verdict == "hands on":
                frontier.append(user)
    return True


def _reads(flow: Flow, user: fx.Node, value: fx.Node) -> str:
    """Return what a reader does with a value: ``orders``, ``hands on`` or ``computes``."""
    site = flow.site(user)
    if user.op == "output":
        return "computes"
    if site is None or site.role is Role.VIEW or site.role.converts:
        return "hands on"
    base, given = flow.base(site), flow.arguments(site)
    if base == "scaled_dot_product_attention":
        return "orders" if _is(given.get("attn_mask"), value) else "computes"
    if base in _ORDERING:
        return "orders"
    if base in _HANDING_ON or (base == "baddbmm" and _is(given.get("self"), value)):
        return "hands on"
    keeps_order = base in ("mul", "div", "sub") and _is(given.get("self"), value) and _is_positive(given)
    masks = base == "mul" and _other_is_constant(flow, site, value)
    return "hands on" if keeps_order or masks else "computes"


def _is_positive(given: Mapping[str, Any]) -> bool:
    """Return whether the other operand is a positive Python number, which preserves the order."""
    other = given.get("other")
    return isinstance(other, int | float) and other > 0


def _is(argument: Any, value: fx.Node) -> bool:
    return argument is value


def _other_is_constant(flow: Flow, site: Site, value: fx.Node) -> bool:
    """Return whether the other factor is a constant tensor, such as a mask of zeros and ones."""
    others = [n for n in flow.node(site).all_input_nodes if n is not value]
    makers = [flow.maker(other) for other in others]
    return bool(makers) and all(maker is not None and maker.id in flow.constants for maker in makers)
