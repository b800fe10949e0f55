"""Proposals to write the code differently; the change is tried by tracing that op in its other form."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ampaudit.advice.interface import Proposal, Subject
from ampaudit.checks.epsilon import lost_eps
from ampaudit.checks.interface import CheckContext
from ampaudit.report.finding import Finding
from ampaudit.sites import SiteId
from ampaudit.trace import Site
from ampaudit.trace.edits import AsLogSigmoid, AsLogSoftmax, Constant, Edit, HandedOn, Scaled
from ampaudit.words import number

__all__ = ["rewrites"]

SAFE_EPS = 1e-5


def rewrites(subject: Subject, finding: Finding) -> Iterator[Proposal]:
    """The rewrite that the finding's page asks for, where it can be tried."""
    site = subject.context.site.get(finding.site)
    make = _BY_CODE.get(finding.code)
    if site is not None and make is not None:
        yield from make(subject.context, site)


def _log_softmax(context: CheckContext, site: Site) -> Iterator[Proposal]:
    code = "torch.log_softmax(x, dim)"
    yield Proposal("rewrite", f"write {code} for log(softmax(x))", code, edits={site.id: AsLogSoftmax()})


def _log_sigmoid(context: CheckContext, site: Site) -> Iterator[Proposal]:
    minus = context.flow.made_by(context.flow.node(site).all_input_nodes[0], "sub", "rsub")
    code = "F.logsigmoid(-x)" if minus else "F.logsigmoid(x)"
    what = "log(1 - sigmoid(x))" if minus else "log(sigmoid(x))"
    yield Proposal("rewrite", f"write {code} for {what}", code, edits={site.id: AsLogSigmoid()})


def _scale_first(context: CheckContext, site: Site) -> Iterator[Proposal]:
    """Where the scores are divided by, or multiplied with, a Python number right after the product."""
    flow = context.flow
    scaling = next((r for r in flow.readers(site) if flow.base(r) in ("div", "mul")), None)
    by = flow.arguments(scaling).get("other") if scaling is not None else None
    if scaling is None or not isinstance(by, int | float) or not by:
        return
    factor = 1.0 / by if flow.base(scaling) == "div" else float(by)
    code = f"(q * {factor:.6g}) @ k.transpose(-2, -1)"
    edits: dict[SiteId, Edit] = {site.id: Scaled(factor), scaling.id: HandedOn()}
    yield Proposal("rewrite", "scale q before the product, not the scores after it", code, edits=edits)


def _eps(context: CheckContext, site: Site) -> Iterator[Proposal]:
    found = lost_eps(context, site)
    if found is not None:
        maker, eps = found
        change = f"eps = {SAFE_EPS:g} for {number(eps)} at {maker.id}"
        yield Proposal("rewrite", change, f"eps = {SAFE_EPS:g}", edits={maker.id: Constant(eps, SAFE_EPS)})


def _constant(context: CheckContext, site: Site) -> Iterator[Proposal]:
    """The Python number beyond the format, in this op or among the constants that it is made of."""
    limit = context.number_format.max
    frontier, seen = [site], {site.id}
    for _ in range(8):
        for step in frontier:
            given = (*context.flow.arguments(step).values(), *step.exact.values())
            large = [v for v in given if isinstance(v, float | int) and limit < abs(v) < float("inf")]
            if large:
                code = "torch.finfo(x.dtype).min" if large[0] < 0 else "torch.finfo(x.dtype).max"
                change = f"{code} for {number(large[0])} at {step.id}"
                yield Proposal("rewrite", change, code, edits={step.id: Constant(large[0], limit)})
                return
        frontier = [m for step in frontier for m in context.flow.makers(step) if m.id not in seen]
        seen |= {m.id for m in frontier}


_BY_CODE: dict[str, Callable[[CheckContext, Site], Iterator[Proposal]]] = {
    "AMP108": _scale_first,
    "AMP113": _constant,
    "AMP202": _eps,
    "AMP203": _log_softmax,
    "AMP204": _log_sigmoid,
    "AMP301": _constant,
}
