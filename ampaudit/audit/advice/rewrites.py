"""Proposes rewrites of the code, which are tried by tracing the rewritten op.

A number that only serves as a limit can be replaced by the largest finite number of the format. It is a limit
if ``clamp`` takes it as its bound, or if it fills elements that every reader only compares: a softmax, a
maximum, a sort. Any other op computes with the number itself, which is then left alone.

- ``log(softmax(x, dim))`` is ``log_softmax(x, dim)`` if the natural logarithm reads the softmax itself (not
  a view, a sum with an eps or another dtype of it) and nothing writes to ``x`` in between.
- ``log(sigmoid(x))`` and ``log(1 - sigmoid(x))`` are log-sigmoids under the same conditions.
- ``(q @ k) * s`` is ``(q * s) @ k`` if each reader of the scores scales them by the same
  number right away (no mask added before), and the model does not return them.

One line of code may make several sites, so each of them must meet the condition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from ampaudit.audit.advice.interface import AdviceContext, LineChange, Proposal
from ampaudit.audit.checks.interface import CheckContext
from ampaudit.audit.checks.precision import lost_eps
from ampaudit.core.ops import having
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number, is_number
from ampaudit.findings.finding import Finding
from ampaudit.trace import Role, Site
from ampaudit.trace.caster import TOO_LARGE
from ampaudit.trace.flow import Flow
from ampaudit.trace.op_calls import (
    Edit,
    ReplaceConstant,
    ScaleOperand,
    bypass,
    fuse_log_sigmoid,
    fuse_log_softmax,
)
from ampaudit.trace.values import LOW_PRECISION_DTYPES

Edits = dict[SiteId, Edit]
Proof = Callable[[Flow, Site], Edits | None]
Likeness = Callable[[Flow, Site], bool]
_FILLS = having("constant", "fills")
_ORDERING = having("softmax", "extreme", "index_of_extreme", "orders") | {"logsumexp", "exp", "sigmoid"}
_PASSING_ON = _FILLS | {"add", "maximum", "minimum", "cat", "stack", "clone", "expand", "triu", "tril"}
_BACK = 7  # steps
Alternatives = tuple[Proposal, ...]
# the largest has most bits in float16; the smaller ones change the function less
EPS = (1e-5, 1e-6, 1e-7)


def rewrites(subject: AdviceContext, finding: Finding) -> Alternatives:
    """Propose the rewrite that the finding's page recommends, if it can be tried."""
    site = subject.context.site.get(finding.site)
    make = _BY_CODE.get(finding.code)
    return () if site is None or make is None else make(subject.context, site)


def _log_softmax(context: CheckContext, site: Site) -> Alternatives:
    edits = edits_of_line(context, site, log_softmax, reads_from("softmax"))
    if edits is None:
        return ()
    code = "torch.log_softmax(x, dim)"
    source = LineChange("log_softmax", site.source) if site.source else None
    return (Proposal("rewrite", f"write {code} for log(softmax(x))", code, edits=edits, source=source),)


def _log_sigmoid(context: CheckContext, site: Site) -> Alternatives:
    edits = edits_of_line(context, site, log_sigmoid, reads_from("sigmoid"))
    if edits is None:
        return ()
    minus = context.flow.produced_by(context.flow.node(site).all_input_nodes[0], "rsub")
    code = "F.logsigmoid(-x)" if minus else "F.logsigmoid(x)"
    what = "log(1 - sigmoid(x))" if minus else "log(sigmoid(x))"
    source = LineChange("log_sigmoid", site.source) if site.source else None
    return (Proposal("rewrite", f"write {code} for {what}", code, edits=edits, source=source),)


def _scale_first(context: CheckContext, site: Site) -> Alternatives:
    """Scale before the product, if every reader of the scores scales them by the same Python number."""
    result = score_scaling(context.flow, site)
    if result is None:
        return ()
    factor, (scaling, *others) = result
    edits = edits_of_line(context, site, scaling_edits, scaled_at(scaling))
    if edits is None:
        return ()
    lines = site.source, scaling.source
    source = LineChange("scale", lines[0], lines[1]) if lines[0] and lines[1] and not others else None
    code = f"(q * {factor:.6g}) @ k.transpose(-2, -1)"
    change = "scale q before the product, not the scores after it"
    return (Proposal("rewrite", change, code, edits=edits, source=source),)


def _eps(context: CheckContext, site: Site) -> Alternatives:
    """Try larger values of eps that the format can represent; runs decide which preserve the function."""
    match = lost_eps(context, site)
    if match is None:
        return ()
    producer, eps = match
    tries: list[Proposal] = []
    for larger in (e for e in EPS if eps < e and e > context.number_format.flush_below):
        code = f"{larger:g}"
        edits: Edits = {
            other.id: ReplaceConstant(eps, larger)
            for other in siblings(context, producer)
            if eps in context.numbers(other)
        }
        source = LineChange("number", producer.source, old=eps, new=code) if producer.source else None
        change = f"eps = {code} for {format_number(eps)} at {producer.id}"
        tries.append(Proposal("rewrite", change, f"eps = {code}", edits=edits, source=source))
    return tuple(tries)


def _constant(context: CheckContext, site: Site) -> Alternatives:
    """Replace the out-of-range number at or before this value, if it is a mask or another limit."""
    steps = (site, *context.flow.upstream(site, _BACK))
    numbers = ((step, number) for step in steps for number in context.numbers(step))
    largest = context.number_format.max
    match = next(((step, number) for step, number in numbers if largest < abs(number) < math.inf), None)
    if match is None:
        return ()
    step, value = match

    def as_limit(flow: Flow, other: Site) -> Edits | None:
        if value not in context.numbers(other):
            return {}
        limit = math.copysign(largest, value)
        return {other.id: ReplaceConstant(value, limit)} if is_limit(context, flow, other, value) else None

    edits = edits_of_line(context, step, as_limit, lambda flow, other: True)
    if edits is None:
        return ()
    code = "torch.finfo(x.dtype).min" if value < 0 else "torch.finfo(x.dtype).max"
    low_precision = all(_is_held(flow, step) for flow in flows_with(context, step))
    lines = step.source, site.source
    source = LineChange("number", lines[0], lines[1], value, held=low_precision) if lines[0] else None
    change = f"{code} for {format_number(value)} at {step.id}"
    return (Proposal("rewrite", change, code, edits=edits, source=source, by_dtype=True),)


def _is_held(flow: Flow, step: Site) -> bool:
    """Return whether the tensors that an op is called on are stored in 16 bits, without a cast."""
    nodes = flow.node(step).all_input_nodes
    if step.decision.reason == TOO_LARGE:  # torch would refuse the op: the casts are those of the audit
        casts = {n for n in nodes if (site := flow.site(n)) is not None and site.role.inserted}
        nodes = [n.all_input_nodes[0] if n in casts else n for n in nodes]
    operands = [(flow.site(node), node.meta.get("val")) for node in nodes]
    floats = [(s, v) for s, v in operands if isinstance(v, torch.Tensor) and v.is_floating_point()]
    low = (v.dtype in LOW_PRECISION_DTYPES and (s is None or not s.role.inserted) for s, v in floats)
    return bool(floats) and all(low)


_BY_CODE: dict[str, Callable[[CheckContext, Site], Alternatives]] = {
    "AMP108": _scale_first,
    "AMP113": _constant,
    "AMP202": _eps,
    "AMP203": _log_softmax,
    "AMP204": _log_sigmoid,
    "AMP301": _constant,
    "AMP308": _constant,
}


def is_limit(context: CheckContext, flow: Flow, step: Site, value: float) -> bool:
    """Return whether an op uses a number as a limit, as the module's docstring defines it."""
    base, arguments = flow.base(step), flow.arguments(step)
    if base in having("clamps"):
        return True
    if base == "mul" and value < 0:
        # (1 - mask) * -1e9: no weight and no activation in the other factor
        return step.id in context.by_design and _only_orders(context, flow, flow.node(step))
    return base in _FILLS and value in arguments.values() and _only_orders(context, flow, flow.node(step))


def _only_orders(context: CheckContext, flow: Flow, node: fx.Node) -> bool:
    """Return whether all final readers of a value only compare its elements with each other."""
    visited: set[fx.Node] = set()
    frontier = [node]
    while frontier:
        current = frontier.pop()
        for user in current.users:
            if user in visited:
                continue
            visited.add(user)
            verdict = _reads(context, flow, user, current)
            if verdict == "computes":
                return False
            if verdict == "passes on":
                frontier.append(user)
    return True


def _reads(context: CheckContext, flow: Flow, user: fx.Node, value: fx.Node) -> str:
    """Return what a reader does with a value: ``orders``, ``passes on`` or ``computes``."""
    site = flow.site(user)
    if user.op == "output":
        return "computes"
    if site is None or site.role is Role.VIEW or site.role.converts:
        return "passes on"
    base, args = flow.base(site), flow.arguments(site)
    if base == "scaled_dot_product_attention":
        return "orders" if args.get("attn_mask") is value else "computes"
    if base in _ORDERING:
        return "orders"
    first, other = args.get("self") is value, args.get("other")
    if base in _PASSING_ON or (base == "baddbmm" and first):
        return "passes on"
    positive = isinstance(other, int | float) and other > 0
    keeps_order = base in ("mul", "div", "sub") and first and positive
    masks = base == "mul" and _other_is_constant(context, flow, site, value)
    return "passes on" if keeps_order or masks else "computes"


def _other_is_constant(context: CheckContext, flow: Flow, site: Site, value: fx.Node) -> bool:
    """Return whether the other factor is a constant tensor, such as a mask of zeros and ones."""
    others = [n for n in flow.node(site).all_input_nodes if n is not value]
    producers = [flow.producer(other) for other in others]
    return bool(producers) and all(
        producer is not None and producer.id in context.constants for producer in producers
    )


def edits_of_line(context: CheckContext, site: Site, proof: Proof, alike: Likeness) -> Edits | None:
    """Return the edits of all sites on a line of code; ``None`` if the proof fails for one of them.

    The proof is asked for each site in each graph, if ``alike`` says that it may be of the same expression.
    """
    edits: Edits = {}
    for sibling in siblings(context, site):
        for flow in flows_with(context, sibling):
            if sibling.id == site.id or alike(flow, sibling):
                site_edits = proof(flow, sibling)
                if site_edits is None:
                    return None
                edits |= site_edits
    return edits or None


def siblings(context: CheckContext, site: Site) -> list[Site]:
    """Return the sites with the same op on the same line of code."""
    if site.source is None:
        return [site]
    base, same = context.flow.base, (s for s in context.graph_sites if s.source == site.source)
    return [other for other in same if base(other) == base(site) and not other.role.inserted]


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
    for traced in context.flow.traces:
        if len(context.flow.traces) == 1:
            yield context.flow
        elif any(other.id == site.id for other in traced.sites):
            yield Flow(traced)


def log_softmax(flow: Flow, site: Site) -> Edits | None:
    """Return the edit of a ``log`` that reads a softmax."""
    return {site.id: fuse_log_softmax} if _logarithm_of(flow, site, "softmax") is not None else None


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
    return {site.id: fuse_log_sigmoid}


def score_scaling(flow: Flow, site: Site) -> tuple[float, list[Site]] | None:
    """Return the scale factor of a product's scores and the ops that apply it; ``None`` without proof."""
    node = flow.node(site)
    written = flow.writes(site) or _is_written(flow, node)
    if flow.base(site) not in having("product") or written or is_returned(flow, node):
        return None
    readers = flow.readers(site)
    factors = {_factor(flow, reader, site) for reader in readers}
    factor = factors.pop() if len(factors) == 1 else None
    return None if factor is None else (factor, readers)


def scaling_edits(flow: Flow, site: Site) -> Edits | None:
    """Return the edits that scale the first operand of a product instead of its result."""
    scaling = score_scaling(flow, site)
    if scaling is None:
        return None
    factor, readers = scaling
    return {site.id: ScaleOperand(factor), **{reader.id: bypass for reader in readers}}


def _logarithm_of(flow: Flow, site: Site, op: str) -> Site | None:
    """Return the input of a natural logarithm, if neither it nor the result is overwritten."""
    if flow.base(site) != "log" or flow.writes(site):
        return None
    producer = _maker(flow, flow.arguments(site).get("self"))
    return producer if producer is not None and _is_untouched(flow, producer, op) else None


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
    sites = ((user, site) for user in node.users if (site := flow.site(user)) is not None)
    return any(
        (flow.writes(site) and user.args and user.args[0] is node)
        or (site.role is Role.VIEW and _writes_below(flow, user))
        for user, site in sites
    )


def is_returned(flow: Flow, node: fx.Node) -> bool:
    """Return whether a value, or a view or cast of it, is an output of the model."""
    for user in node.users:
        if user.op == "output":
            return True
        site = flow.site(user)
        passed_on = site is None or site.role is Role.VIEW or site.role.converts
        if passed_on and is_returned(flow, user):
            return True
    return False


def _factor(flow: Flow, reader: Site, product: Site) -> float | None:
    """Return the factor that an op multiplies a product by, if that is all it does."""
    arguments = flow.arguments(reader)
    by, first = arguments.get("other"), arguments.get("self")
    if not is_number(by) or by == 0:
        return None
    dtypes = any(isinstance(value, torch.dtype) for value in arguments.values())
    if flow.writes(reader) or arguments.get("rounding_mode") is not None or dtypes:
        return None
    producer = flow.producer(first)
    if producer is None or producer.id != product.id or flow.base(reader) not in ("div", "mul"):
        return None
    return 1.0 / by if flow.base(reader) == "div" else float(by)
