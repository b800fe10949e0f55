"""AMP705: a parameter that requires a gradient but does not affect the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about
from ampaudit.core.sites import SiteId
from ampaudit.report.finding import Finding

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield one finding per layer."""
    record = context.record.gradients
    layers: dict[str, list[str]] = {}
    for name in record.unused if record is not None else ():
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    for layer, names in layers.items():
        cause = f"no batch's loss depends on {', '.join(names)}"
        advice = "freeze it, or find out why it is not used; DDP needs find_unused_parameters=True for it"
        made = finding_about(
            "AMP705", SiteId(f"{names[0]}/gradient"), layer, cause, advice, confidence="observed"
        )
        yield replace(made, phase="backward")


CHECK = Check("AMP705", find)
