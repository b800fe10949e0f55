"""Defines proposals and the context that they are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from ampaudit.audit.checks import CheckContext
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.policy import RuleSet
from ampaudit.report.finding import TrialKind
from ampaudit.trace.edits import Edit
from ampaudit.trace.flow import Flow

__all__ = ["AdviceContext", "Kept", "LineChange", "Proposal", "RewriteKind"]

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
        pattern: what stands there and is to be written differently.
        line: where.
        second: the line that scales a product, for ``scale``; that of the value which is beyond the format,
            for a limit.
        old: the number that is replaced, for ``number``.
        new: the code that takes its place; empty for ``torch.finfo(x.dtype).min`` or ``.max``.
        held: whether the tensor that the number is used with has the 16-bit dtype.
    """

    pattern: RewriteKind
    line: SourceLine
    second: SourceLine | None = None
    old: float = 0.0
    new: str = ""
    held: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept in float32 because of a finding.

    Attributes:
        sites: ops.
        why: the reason that the rule gives.
        weight: a parameter that is kept with all ops that use it; empty if none is.
    """

    sites: tuple[SiteId, ...]
    why: str
    weight: str = ""


@dataclass(frozen=True, slots=True)
class Proposal:
    """One change to try.

    Attributes:
        kind: ``rewrite`` of the code, ``rescale`` of weights, ``rule`` of the policy, or another ``dtype``.
        change: what to do, in one line.
        paste: what to copy: a rule, a line of code, an option.
        rules: the policy with the change, if it changes.
        edits: ops to trace in another form.
        model: a model with other weights, if they change.
        confirmed: whether the graph of that model is what the change meant to make.
        dtype: another 16-bit format.
        source: the same as ``edits`` in the source code, where its line is known.
        by_dtype: whether the code gives FP32 a number of its own, and not the one that is tried.
        kept: what the rules keep in float32.
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
    kept: tuple[Kept, ...] = ()
