"""What a proposal is, and what it is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ampaudit.checks import CheckContext
from ampaudit.policy import RuleSet
from ampaudit.report.finding import TrialKind
from ampaudit.sites import SiteId
from ampaudit.trace.edits import Edit

__all__ = ["Proposal", "Subject"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What advice is about: the model, its policy, and what the audit saw."""

    model: nn.Module
    rules: RuleSet
    context: CheckContext


@dataclass(frozen=True, slots=True)
class Proposal:
    """One change, to be tried.

    Attributes:
        kind: ``rewrite`` of the code, ``rescale`` of weights, ``rule`` of the policy, or another ``dtype``.
        change: what to do, in one line.
        paste: what to copy: a rule, a line of code, an option.
        rules: the policy with the change, if it changes.
        edits: ops to trace in another form.
        model: a model with other weights, if they change.
        dtype: another 16-bit format.
    """

    kind: TrialKind
    change: str
    paste: str
    rules: RuleSet | None = None
    edits: Mapping[SiteId, Edit] = field(default_factory=dict)
    model: nn.Module | None = None
    dtype: str | None = None
