"""Proves that a rewrite computes the same function in exact arithmetic; unproved rewrites are not proposed.

- ``log(softmax(x, dim))`` is ``log_softmax(x, dim)`` if the natural logarithm reads the softmax itself (not
  a view, a sum with an eps or another dtype of it) and nothing writes to ``x`` in between.
- ``log(sigmoid(x))`` and ``log(1 - sigmoid(x))`` are log-sigmoids under the same conditions.
- ``(q @ k) * s`` is ``(q * s) @ k`` if each reader of the scores scales them by the same
  number right away (no mask added before), and the model does not return them.

A line of code is one text for all the sites that it makes, so each of them must meet the condition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from ampaudit.audit.checks.interface import CheckContext
from ampaudit.core.sites import SiteId
from ampaudit.trace import Role, Site
from ampaudit.trace.edits import Bypass, Edit, FuseLogSigmoid, FuseLogSoftmax, ScaleOperand
from ampaudit.trace.flow import Flow

__all__ = [
    "Edits",
    "flows_with",
    "is_returned",
    "log_sigmoid",
    "log_softmax",
    "of_the_line",
    "reads_from",
    "scaled_at",
    "scaling_edits",
    "score_scaling",
    "siblings",
]

Edits = dict[SiteId, Edit]
Proof = Callable[[Flow, Site], Edits | None]
Likeness = Callable[[Flow, Site], bool]
_PRODUCTS = ("matmul", "bmm", "mm", "einsum")


def of_the_line(context: CheckContext, site: Site, proof: Proof, alike: Likeness) -> Edits | None:
    """Return the edits of all sites on a line of code; ``None`` if the proof fails for one of them.

    Args:
        context: Results of the audit.
        site: Site of the finding.
        proof: Returns the edits for one site of one graph, or ``None``.
        alike: Returns whether another op of the line may come from the same expression.
    """
    edits: Edits = {}
    for sibling in siblings(context, site):
        for flow in flows_with(context, sibling):
            if sibling.id != site.id and not alike(flow, sibling):
                continue
            site_edits = proof(flow, sibling)
            if site_edits is None:
                return None
            edits |= site_edits
    return edits or None


def siblings(context: CheckContext, site: Site) -> list[Site]:
    """Return the sites with the same op on the same line of code."""
    flow = context.flow
    if site.source is None:
        return [site]
    return [
        other
        for other in context.graph_sites
        if other.source == site.source and flow.base(other) == flow.base(site) and not other.role.inserted
    ]


def reads_from(op: str) -> Likeness:
    """Match ops that read the result of ``op``, at most two steps away."""
    return lambda flow, site: flow.comes_from(flow.node(site).all_input_nodes[0], op, within=2) is not None


def scaled_at(scaling: Site) -> Likeness:
    """Match ops that are scaled on the line of a given scaling."""
    return lambda flow, site: any(
        reader.source == scaling.source and flow.base(reader) == flow.base(scaling)
        for reader in flow.readers(site)
    )


def flows_with(context: CheckContext, site: Site) -> Iterator[Flow]:
    """Yield each graph that contains a site; a proof for one need not hold in another."""
    every = context.flow.every
    if len(every) == 1:
        yield context.flow
        return
    for traced in every:
        if any(other.id == site.id for other in traced.sites):
            yield Flow(traced)


def log_softmax(flow: Flow, site: Site) -> Edits | None:
    """Return the edit of a ``log`` that reads a softmax."""
    softmax = _logarithm_of(flow, site, "softmax")
    return None if softmax is None else {site.id: FuseLogSoftmax()}


def log_sigmoid(flow: Flow, site: Site) -> Edits | None:
    """Return the edit of a ``log`` that reads a sigmoid, or one minus a sigmoid."""
    operand = _logarithm_of(flow, site, "sigmoid") or _logarithm_of(flow, site, "rsub")
    if operand is None:
        return None
    if flow.base(operand) == "rsub":
        arguments = flow.arguments(operand)
        one_minus = arguments.get("other") == 1 and arguments.get("alpha", 1) == 1
        inner = _maker(flow, arguments.get("self")) if one_minus else None
        if inner is None or not _is_untouched(flow, inner, "sigmoid"):
            return None
    return {site.id: FuseLogSigmoid()}


def score_scaling(flow: Flow, site: Site) -> tuple[float, list[Site]] | None:
    """Return the scale factor of a product's scores and the ops that apply it; ``None`` without proof."""
    if flow.base(site) not in _PRODUCTS or flow.writes(site) or _is_written(flow, flow.node(site)):
        return None
    if is_returned(flow, flow.node(site)):
        return None
    readers = flow.readers(site)
    factors = {_factor(flow, reader, site) for reader in readers}
    if len(factors) != 1 or None in factors:
        return None
    (factor,) = factors
    assert factor is not None
    return factor, readers


def scaling_edits(flow: Flow, site: Site) -> Edits | None:
    """Return the edits that scale the first operand of a product instead of its result."""
    scaling = score_scaling(flow, site)
    if scaling is None:
        return None
    factor, readers = scaling
    return {site.id: ScaleOperand(factor), **{reader.id: Bypass() for reader in readers}}


def _logarithm_of(flow: Flow, site: Site, op: str) -> Site | None:
    """Return the input of a natural logarithm, if neither it nor the result is overwritten."""
    if flow.base(site) != "log" or flow.writes(site):
        return None
    maker = _maker(flow, flow.arguments(site).get("self"))
    return maker if maker is not None and _is_untouched(flow, maker, op) else None


def _is_untouched(flow: Flow, site: Site, op: str) -> bool:
    """Return whether a site has this op and neither its value nor its input is written in place."""
    if flow.base(site) != op or flow.writes(site):
        return False
    node, source = flow.node(site), flow.arguments(site).get("self")
    return not _is_written(flow, node) and not (isinstance(source, fx.Node) and _is_written(flow, source))


def _maker(flow: Flow, node: Any) -> Site | None:
    """Return the site that made a value, looking only through casts of the policy."""
    while isinstance(node, fx.Node):
        site = flow.site(node)
        if site is None or not site.role.inserted:
            return site
        node = node.all_input_nodes[0]
    return None


def _is_written(flow: Flow, node: fx.Node) -> bool:
    """Return whether an op writes in place to a value, one of its views, or its base."""
    while (site := flow.site(node)) is not None and site.role is Role.VIEW and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return _writes_below(flow, node)


def _writes_below(flow: Flow, node: fx.Node) -> bool:
    for user in node.users:
        site = flow.site(user)
        if site is None:
            continue
        if flow.writes(site) and user.args and user.args[0] is node:
            return True
        if site.role is Role.VIEW and _writes_below(flow, user):
            return True
    return False


def is_returned(flow: Flow, node: fx.Node) -> bool:
    """Return whether a value, or a view or cast of it, is an output of the model."""
    for user in node.users:
        if user.op == "output":
            return True
        site = flow.site(user)
        handed_on = site is None or site.role is Role.VIEW or site.role.converts
        if handed_on and is_returned(flow, user):
            return True
    return False


def _factor(flow: Flow, reader: Site, product: Site) -> float | None:
    """Return the factor that an op multiplies a product by, if that is all it does."""
    arguments = flow.arguments(reader)
    by, first = arguments.get("other"), arguments.get("self")
    if not isinstance(by, int | float) or isinstance(by, bool) or by == 0:
        return None
    if flow.writes(reader) or arguments.get("rounding_mode") is not None:
        return None
    maker = flow.maker(first)
    if maker is None or maker.id != product.id or flow.base(reader) not in ("div", "mul"):
        return None
    if any(isinstance(value, torch.dtype) for value in arguments.values()):
        return None
    return 1.0 / by if flow.base(reader) == "div" else float(by)
