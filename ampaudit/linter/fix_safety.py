"""Decides which fixes are safe: of a known mistake, with bound names, for every torch that is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ampaudit.linter.bound_names import is_bound, names_in
from ampaudit.linter.declared_torch import DeclaredTorch
from ampaudit.linter.diagnostic import LINES_PER_FILE, Applicability, Certainty, Diagnostic, Fix
from ampaudit.linter.flow.script import Script

__all__ = ["applicability", "needed_torch", "with_safety"]

# the first versions of torch that have a name of torch.amp, with its argument for the device
_OLD: Final = "1.10"  # which a project that declares nothing is taken to have
_SINCE: Final = {"autocast": _OLD, "GradScaler": "2.3", "custom_fwd": "2.4", "custom_bwd": "2.4"}


def with_safety(script: Script, diagnostic: Diagnostic) -> Diagnostic:
    """Return a diagnostic whose fix says whether the script allows it."""
    fix = diagnostic.fix
    if fix is None or fix.line >= LINES_PER_FILE:  # that would change an imported file
        return replace(diagnostic, fix=None)
    is_known = diagnostic.certainty == Certainty.KNOWN
    safe = is_known and all(is_bound(script, fix.line, name) for name in _written_names(fix))
    return replace(diagnostic, fix=replace(fix, is_safe=safe))


def applicability(fix: Fix | None, torch: DeclaredTorch) -> Applicability:
    """Return how a fix may be applied in a project with these versions of torch."""
    if fix is None:
        return Applicability.NONE
    needed = needed_torch(fix)
    allowed = torch.is_at_least(needed) if needed else True
    if allowed is False:
        return Applicability.NONE
    is_likely = allowed or needed == _OLD
    return Applicability.SAFE if fix.is_safe and is_likely else Applicability.UNSAFE


def needed_torch(fix: Fix) -> str:
    """Return the first version of torch that has the names that a fix writes; empty if it writes none."""
    names: list[str] = []
    if fix.kind == "rename import":
        names = [detail.partition("=")[0].rpartition(".")[2] for detail in fix.details[1:]]
    elif fix.kind == "rename use":
        names = [fix.details[1]]
    elif fix.kind == "decorate":
        names = ["custom_fwd"]
    return max((_SINCE[name] for name in names), key=lambda v: tuple(map(int, v.split("."))), default="")


def _written_names(fix: Fix) -> set[str]:
    """Return the names that a fix writes and the statement does not have."""
    if fix.kind in ("scale loss", "step by scaler"):
        return {fix.details[0]}
    if fix.kind in ("insert before", "insert after", "add entry"):
        return names_in(fix.details[-1])
    if fix.kind in ("decorate", "rename use") or (fix.kind == "replace" and "torch." in fix.details[0]):
        return {"torch"}
    return set()
