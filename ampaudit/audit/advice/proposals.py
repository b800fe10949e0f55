"""Lists all proposals for a finding, the least invasive first."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.advice.interface import AdviceContext, Proposal
from ampaudit.audit.advice.rescale import rescaled
from ampaudit.audit.advice.residual import stream_rescaled
from ampaudit.audit.advice.rewrites import rewrites
from ampaudit.audit.advice.rules import keep_in_float32
from ampaudit.report.finding import Finding

__all__ = ["proposals"]


def proposals(subject: AdviceContext, finding: Finding) -> Iterator[tuple[Proposal, ...]]:
    """Propose a rewrite of the line, then rescaled weights, then float32 for a few ops, then another format.

    Each item holds alternatives, of which the most accurate counts.
    """
    yield from rewrites(subject, finding)
    for proposal in (*rescaled(subject, finding), *stream_rescaled(subject, finding)):
        yield (proposal,)
    for proposal in keep_in_float32(subject, finding):
        yield (proposal,)
    if subject.context.number_format.name == "float16":
        change = "use bfloat16, which has the range of float32"
        yield (Proposal("dtype", change, "--dtype bfloat16", dtype="bfloat16"),)
