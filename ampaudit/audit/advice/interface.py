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

RewriteKind = Literal["log_softmax", "log_sigmoid", "scale", "number"]


@dataclass(frozen=True, slots=True)
class AdviceContext:
    """The model, its policy, and the results of the audit."""

    model: nn.Module
    rules: RuleSet
    context: CheckContext


@dataclass(frozen=True, slots=True)
class LineChange:
    """A rewrite of source code on one line."""

    pattern: RewriteKind  # kind of code to rewrite
    line: SourceLine  # line to change
    # for ``scale``, the line that scales the product; for a limit, the line of the value beyond the format
    second: SourceLine | None = None
    old: float = 0.0  # for ``number``, the number to replace
    new: str = ""  # replacement code; empty for ``torch.finfo(x.dtype).min`` or ``.max``
    held: bool = False  # whether the tensor that the number is used with has the 16-bit dtype


@dataclass(frozen=True, slots=True)
class Exemption:
    """Ops to keep in float32 because of a finding."""

    sites: tuple[SiteId, ...]  # sites of the ops
    why: str  # reason to state in the rule
    weight: str = ""  # name of a parameter to keep together with all ops that use it; empty for none


@dataclass(frozen=True, slots=True)
class Proposal:
    """One change to try."""

    # ``rewrite`` of the code, ``rescale`` of weights, ``rule`` of the policy, or another ``dtype``
    kind: TrialKind
    change: str  # description in one line
    paste: str  # text to copy: a rule, a line of code, or an option
    rules: RuleSet | None = None  # changed policy, if any
    edits: Mapping[SiteId, Edit] = field(default_factory=dict)  # ops to trace in another form
    model: nn.Module | None = None  # model with changed weights, if any
    confirmed: Callable[[Flow], bool] | None = None  # returns whether the graph of ``model`` is as intended
    dtype: str | None = None  # another 16-bit format
    source: LineChange | None = None  # equivalent of ``edits`` in the source code, if its line is known
    # whether the suggested code depends on the dtype, so that FP32 gets another number
    by_dtype: bool = False
    exemptions: tuple[Exemption, ...] = ()  # ops and weights that the rules keep in float32
