"""Decides which nodes of an ONNX model stay in float32."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from ampaudit.audit.config import ScanConfig
from ampaudit.audit.scan import Audited, audit_policies
from ampaudit.core.formats import low_precision_format
from ampaudit.core.sites import SiteId
from ampaudit.export.config import ConvertConfig
from ampaudit.export.onnx.decisions import nodes_before_choices
from ampaudit.export.onnx.masks import ClampedMask, clamp_masks
from ampaudit.export.onnx.opset import raise_opset
from ampaudit.export.onnx.types import MOVING
from ampaudit.export.onnx.whole_numbers import whole_number_nodes
from ampaudit.policy import RuleSet
from ampaudit.policy.load import load_policy
from ampaudit.policy.schema import Cast, Match, Reason, Rule
from ampaudit.report.finding import Severity
from ampaudit.report.model import Report
from ampaudit.source import Batch, ModelSource
from ampaudit.source.onnx.files import OnnxFile
from ampaudit.source.onnx.model import OnnxModel
from ampaudit.source.onnx.names import NodeNames, bodies_of, plain_domain
from ampaudit.trace.graph import Site
from ampaudit.tuning.tune import tuned_rules

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["OnnxPlan", "PlanWishes", "decisions_of", "plan_onnx"]

_POLICY = "strongly-typed"
_ROUNDS = 6
_MARGIN = 1.4  # the policy's margin below the format's limit
_WHOLE = "it computes with integers that 16 bits may round to others."
_OTHERS = "the run in 16 bits broke here on other inputs."
_CHOICES = "in 16 bits, the model chooses differently."
_SEQUENCES = {"SequenceConstruct", "SequenceErase", "SequenceInsert", "SequenceMap", "SplitToSequence"}


@dataclass(frozen=True, slots=True)
class OnnxPlan:
    """The decisions about a model.

    Attributes:
        file: Copy of the model with clamped masks.
        audited: Audit that the decisions are from.
        clamped: Clamped masks.
        names: Names of the nodes in the audit.
        chooses: Whether nodes choose by float32 numbers.
        opset: Operator set version that the model was raised to, if it was.
    """

    file: OnnxFile
    audited: Audited
    clamped: list[ClampedMask]
    names: NodeNames
    chooses: bool
    opset: int | None = None


@dataclass(frozen=True, slots=True)
class PlanWishes:
    """Requirements of a plan besides a run without errors on the given inputs.

    Attributes:
        clamp: Whether to clamp masks that the format cannot represent; otherwise their readers stay in
            float32.
        accuracy: Required accuracy of every output in dB, if any.
        before_choices: Number of nodes before a choice that stay in float32.
        also: Further batches that must run without errors.
    """

    clamp: bool = True
    accuracy: float | None = None
    before_choices: int = 0
    also: tuple[Batch, ...] = ()


def plan_onnx(source: ModelSource, config: ConvertConfig, wishes: PlanWishes) -> OnnxPlan:
    """Audit a model repeatedly, keeping broken ops in float32, until nothing breaks.

    Raises:
        AuditError: see ``audit_policies``.
    """
    assert isinstance(source.model, OnnxModel)
    file = source.model.file.reopened()
    _with_types(file.model)
    raised = raise_opset(file.model, config.dtype) if config.dtype == "bfloat16" else None
    clamped = clamp_masks(file.model, getattr(torch, config.dtype), file.tensor) if wishes.clamp else []
    model = OnnxModel(file)
    _with_seen_types(model, source.batches[0])
    prepared = replace(source, model=model.eval())
    is_fixed = config.names_policy
    rules = config.rules if is_fixed else load_policy(_POLICY)
    accuracy = wishes.accuracy if config.tune is None else config.tune
    if accuracy is not None and not is_fixed:
        rules = tuned_rules(prepared, config.dtype, accuracy, config)
    if not is_fixed:
        whole = whole_number_nodes(file.model, low_precision_format(config.dtype), file.tensor)
        before = nodes_before_choices(file.model, wishes.before_choices) if wishes.before_choices else set()
        for name, nodes, why in (("whole", whole, _WHOLE), ("choices", before, _CHOICES)):
            if nodes:
                rules = _keeping(rules, name, Match(layer=_escaped(map(model.names.of, nodes))), why)
    settings = ScanConfig.of(config)
    for batch in wishes.also:
        other, rules = _unbroken(replace(prepared, batches=(batch,)), rules, settings, is_fixed=is_fixed)
        wide = [site.id for site in _computing(other) if _is_wide(site)]  # also by what was measured there
        rules = _keeping(rules, "others", Match(site=_escaped(wide)), _OTHERS) if wide else rules
    audited, _ = _unbroken(prepared, rules, settings, is_fixed=is_fixed)
    chooses = bool(nodes_before_choices(file.model, 0))
    return OnnxPlan(file, audited, clamped, model.names, chooses, raised)


def _unbroken(
    source: ModelSource, rules: RuleSet, settings: ScanConfig, *, is_fixed: bool
) -> tuple[Audited, RuleSet]:
    """Audit until nothing breaks; return the audit and the policy that keeps broken ops in float32."""
    promoted: tuple[SiteId, ...] = ()
    for _ in range(_ROUNDS):
        (audited,) = audit_policies(source, [rules], settings)
        more = () if is_fixed else _broken(audited, promoted)
        if not more:
            break
        promoted = (*promoted, *more)
        rules = _keeping(rules, "broken", Match(site=_escaped(more)), "the run in 16 bits broke here.")
    return audited, rules


def _computing(audited: Audited) -> list[Site]:
    """Return the sites that compute numbers, without inserted casts."""
    sites = audited.audit.converted.traced.sites
    return [site for site in sites if site.facts is not None and not site.role.inserted]


def _broken(audited: Audited, promoted: tuple[SiteId, ...]) -> tuple[SiteId, ...]:
    """Return the 16-bit ops with errors, and those that must be promoted with them.

    These are connected ops that produce or read values beyond the format's range and, where an op in float32
    still has an error, the ops that it reads.
    """
    traced, report = audited.audit.converted.traced, audited.report
    limit = low_precision_format(report.run.dtype).max / _MARGIN
    large = {s.site for s in report.sites if s.forward is not None and s.forward.peak > limit}
    at = {f.site for f in report.findings if f.severity == Severity.ERROR and f.site}
    layers = {site.layer for site in traced.sites if site.id in at}
    low = {s.node: s.id for s in traced.sites if s.facts is not None and not _is_wide(s)}
    sites = traced.site_of_node
    pending = [n for n in traced.graph.nodes if n.name in sites and sites[n.name].layer in layers]
    changing = {sites[n.name].layer for n in pending if n.name in low}
    visited = set(pending)
    while pending:
        node = pending.pop()
        site = sites.get(node.name)
        beside: list[fx.Node] = []
        if site is not None and site.id in large:
            beside += node.users
            beside += [n for n in node.all_input_nodes if n.name in sites and sites[n.name].id in large]
        elif site is None or site.facts is None:  # a cast, or a view
            beside += node.users
        if node.name not in low and (site is None or site.layer not in changing):
            beside += node.all_input_nodes
        fresh = [n for n in beside if n not in visited and n.op == "call_function"]
        visited.update(fresh)
        pending.extend(fresh)
    ops = (low[n.name] for n in traced.graph.nodes if n in visited and n.name in low)
    return tuple(site for site in ops if site not in promoted)


def _is_wide(site: Site) -> bool:
    """Return whether an op works in float32, because a rule says so or because its inputs are."""
    if site.decision.cast in (Cast.FLOAT32, Cast.FORBID):
        return True
    follows = site.decision.cast is not Cast.LOWER and not site.role.converts
    return follows and site.dtype is torch.float32


def _escaped(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(map(glob.escape, names)))


def _keeping(rules: RuleSet, name: str, match: Match, why: str) -> RuleSet:
    """Add a rule to a policy that keeps matching ops in float32."""
    number = sum(rule.id.startswith(f"{name}/") for rule in rules.file.rules)
    rule = Rule(
        id=f"{name}/{number}",
        match=match,
        cast=Cast.FLOAT32,
        reason=Reason.RANGE,
        why=why,
        source="the audit of this model",
    )
    file = rules.file.model_copy(update={"rules": (rule, *rules.file.rules)})
    return RuleSet(file, None, rules.environment, rules.location)


def _with_types(model: ir.Model) -> None:
    """Expand functions, name every node, and infer the type of every value.

    Types that the file states for inner values may be wrong; they are used only where inference fails.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import InlinePass, ShapeInferencePass

    if model.functions:
        InlinePass()(model)
    names = NodeNames(model)
    stated = {}
    for graph in (model.graph, *model.graph.subgraphs()):
        outputs = set(graph.outputs) if graph is model.graph else set()
        for node in graph:
            node.name = names.of(node)
            for value in node.outputs:
                if value not in outputs:
                    stated[value] = value.type, value.shape
                    value.type = value.shape = None
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    for value, (kind, shape) in stated.items():
        producer = value.producer()
        if value.type is None:
            value.type, value.shape = kind, shape
        elif (
            producer is not None and producer.op_type in _SEQUENCES and isinstance(value.type, ir.TensorType)
        ):
            value.type = ir.SequenceType(value.type)  # which onnx_ir 1.1 takes for a tensor


def _with_seen_types(model: OnnxModel, batch: Batch) -> None:
    """Take types that cannot be inferred, as after operators of a runtime, from a run."""
    import onnx_ir as ir

    unknown = {value for node in model.file.nodes() for value in node.outputs if value.type is None}
    if not unknown:
        return
    for value, dtype in model.dtypes_of(batch).items():
        if value in unknown and dtype is torch.float32:
            value.type = ir.TensorType(ir.DataType.FLOAT)


def decisions_of(plan: OnnxPlan) -> dict[ir.Node, bool]:
    """Return for each audited node whether one of its ops stays in float32.

    A node with bodies, such as a Loop, computes nothing itself: it may have either type, unless a body hands
    it values that the format cannot hold.
    """
    wide: dict[str, bool] = {}
    for site in _computing(plan.audited):
        wide[site.layer] = wide.get(site.layer, False) or _is_wide(site)
    names = {node: plan.names.of(node) for node in plan.file.nodes()}
    decisions = {node: wide[name] for node, name in names.items() if name in wide and not bodies_of(node)}
    large = _with_large_values(names, plan.audited.report)
    return decisions | {node: True for node in large if bodies_of(node)}


def _with_large_values(names: Mapping[ir.Node, str], report: Report) -> set[ir.Node]:
    """Return the nodes with values beyond the format's range, including nodes that only pass them on."""
    limit = low_precision_format(report.run.dtype).max / _MARGIN
    layers = {s.layer for s in report.sites if s.forward is not None and s.forward.peak > limit}
    large = {node for node, name in names.items() if name in layers}
    while True:
        more = {node for node in names.keys() - large if any(v.producer() in large for v in _handed_on(node))}
        if not more:
            return large
        large |= more


def _handed_on(node: ir.Node) -> list[ir.Value]:
    """Return the values that a node passes on unchanged: its operands, or the outputs of its bodies."""
    operands = node.inputs if node.op_type in MOVING and plain_domain(node.domain) == "" else ()
    returned = (value for body in bodies_of(node) for value in body.outputs)
    return [value for value in (*operands, *returned) if value is not None]
