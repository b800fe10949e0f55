"""Defines proposals, and the context that they are derived from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from ampaudit.audit.checks import CheckContext
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.findings.finding import TrialKind
from ampaudit.policy import RuleSet
from ampaudit.trace.flow import Flow
from ampaudit.trace.op_calls import Edit

__all__ = ["AdviceContext", "Exemption", "LineChange", "Proposal", "RewriteKind"]

RewriteKind = Literal["log_softmax", "log_sigmoid", "scale", "number"]


@dataclass(frozen=True, slots=True)
class AdviceContext:
    """The model, its policy, and the results of the audit."""

    model: nn.Module
    rules: RuleSet
    context: CheckContext


@dataclass(frozen=True, slots=True)
class LineChange:
    """A rewrite of source code on one line.

    Attributes:
        pattern: Kind of code to rewrite.
        line: Line to change.
        second: For ``scale``, the line that scales the product; for a limit, the line of the value beyond
            the format.
        old: For ``number``, the number to replace.
        new: Replacement code; empty for ``torch.finfo(x.dtype).min`` or ``.max``.
        held: Whether the tensor that the number is used with has the 16-bit dtype.
    """

    pattern: RewriteKind
    line: SourceLine
    second: SourceLine | None = None
    old: float = 0.0
    new: str = ""
    held: bool = False


@dataclass(frozen=True, slots=True)
class Exemption:
    """Ops to keep in float32 because of a finding.

    Attributes:
        sites: Sites of the ops.
        why: Reason to state in the rule.
        weight: Name of a parameter to keep together with all ops that use it; empty for none.
    """

    sites: tuple[SiteId, ...]
    why: str
    weight: str = ""


@dataclass(frozen=True, slots=True)
class Proposal:
    """One change to try.

    Attributes:
        kind: ``rewrite`` of the code, ``rescale`` of weights, ``rule`` of the policy, or another ``dtype``.
        change: Description in one line.
        paste: Text to copy: a rule, a line of code, or an option.
        rules: Changed policy, if any.
        edits: Ops to trace in another form.
        model: Model with changed weights, if any.
        confirmed: Returns whether the graph of ``model`` is as intended.
        dtype: Another 16-bit format.
        source: Equivalent of ``edits`` in the source code, if its line is known.
        by_dtype: Whether the suggested code depends on the dtype, so that FP32 gets another number.
        exemptions: Ops and weights that the rules keep in float32.
    """

    kind: TrialKind
    change: str
    paste: str
    rules: RuleSet | None = None
    edits: Mapping[SiteId, Edit] = field(default_factory=dict)
    model: nn.Module | None = None
    confirmed: Callable[[Flow], bool] | None = None
    dtype: str | None = None
    source: LineChange | None = None
    by_dtype: bool = False
    exemptions: tuple[Exemption, ...] = ()
