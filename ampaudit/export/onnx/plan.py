"""Decides which nodes of an ONNX model stay in float32.

A mask of -1e9, or of float32's lowest number, gives a weight of 0 after the softmax. Any large negative
number does, so a mask, unlike data, may be clamped to the format. A constant is a mask if it reaches only
softmaxes, after it has been moved, selected, scaled or added to scores.
"""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass, ShapeInferencePass
from torch import fx

from ampaudit.audit.config import ScanConfig
from ampaudit.audit.scan import Audited, audit_policies
from ampaudit.core.formats import low_precision_format
from ampaudit.core.session import Session
from ampaudit.core.sites import SiteId
from ampaudit.export.config import ConvertConfig
from ampaudit.export.onnx.outputs import nodes_before_choices
from ampaudit.export.onnx.types import (
    MOVING,
    TensorOf,
    constant_of,
    is_float32,
    node_types,
    on_last_axis,
)
from ampaudit.export.onnx.whole_numbers import whole_number_nodes
from ampaudit.findings.finding import Severity
from ampaudit.policy import RuleSet
from ampaudit.policy.load import load_policy
from ampaudit.policy.schema import Cast, Match, Reason, Rule
from ampaudit.report.model import Report
from ampaudit.source import Batch, ModelSource
from ampaudit.source.onnx.checks import schema_of
from ampaudit.source.onnx.files import OnnxFile
from ampaudit.source.onnx.model import OnnxModel
from ampaudit.source.onnx.names import NodeNames, bodies_of, is_constant
from ampaudit.trace.graph import Site
from ampaudit.tuning.tune import tuned_rules

_SOFTMAXES = {"Softmax", "LogSoftmax"}
_PASSED = MOVING | {"Add", "Sub", "Mul", "Div", "Max", "Min", "Cast", "CastLike", "Clip"}
_MAX_STEPS = 2000
_Setter = Callable[[ir.TensorProtocol], None]
_NEWEST_OPSET = 23
# version in which the semantics of an operator changed, besides its attributes and inputs
_CHANGED_IN = {
    **{"Softmax": 13, "LogSoftmax": 13, "Hardmax": 13},
    **{"RoiAlign": 16, "Resize": 11, "GridSample": 20, "GroupNormalization": 21},
}
_POLICY = "strongly-typed"
_MAX_AUDITS = 6
_MARGIN = 1.4  # margin of the policy below the limit of the format
# reasons of the rules that keep nodes in float32
_WHY_WHOLE = "it computes with integers that 16 bits may round to others."
_WHY_OTHERS = "the run in 16 bits broke here on other inputs."
_WHY_CHOICES = "in 16 bits, the model chooses differently."
_SEQUENCES = {"SequenceConstruct", "SequenceErase", "SequenceInsert", "SequenceMap", "SplitToSequence"}


@dataclass(frozen=True, slots=True)
class ClampedMask:
    """A mask that was clamped to the format."""

    value: ir.Value
    lowest: float  # minimum of the original mask
    restore: Callable[[], None]  # puts the original mask back


def clamp_masks(model: ir.Model, dtype: torch.dtype, tensor_of: TensorOf) -> list[ClampedMask]:
    """Clamp the masks of a model, in place.

    The new minimum is half of the format's lowest number, which leaves room for the scores, divided by the
    number of masks that are added to the same scores. Its magnitude must be large, because in a fully masked
    row the mask absorbs the scores, as the original does.
    """
    masks: list[tuple[ir.Value, ir.TensorProtocol, set[ir.Node], _Setter]] = []
    for value, constant, setter in _constants(model):
        ends = _softmaxes(value)  # first, since reading the constant takes longer
        if ends is None:
            continue
        values = tensor_of(constant)
        lowered = values.to(dtype)
        if (lowered.isneginf() & values.isfinite()).any() and not lowered.isposinf().any():
            masks.append((value, constant, ends, setter))
    masks_per_softmax = Counter(end for _, _, ends, _ in masks for end in ends)
    clamped_masks = []
    for value, constant, ends, setter in masks:
        lowest = torch.finfo(dtype).min / 2 / max(masks_per_softmax[end] for end in ends)
        values = tensor_of(constant)
        beyond = values.to(dtype).isneginf() & values.isfinite()
        clamped = torch.where(beyond, torch.tensor(lowest, dtype=values.dtype), values)
        setter(ir.tensor(clamped.numpy(), name=str(value.name)))
        clamped_masks.append(ClampedMask(value, float(values[beyond].amin()), partial(setter, constant)))
    return clamped_masks


def _constants(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol, _Setter]]:
    """Yield the stored float32 values, each with a function that replaces it."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if is_float32(value) and value.const_value is not None:
                yield value, value.const_value, lambda tensor, v=value: setattr(v, "const_value", tensor)  # type: ignore[misc]
        for node in graph:
            if not is_constant(node) or not is_float32(node.outputs[0]):
                continue
            tensor = constant_of(node)
            assert tensor is not None

            def put(tensor: ir.TensorProtocol, node: ir.Node = node) -> None:
                node.attributes.clear()
                node.attributes["value"] = ir.AttrTensor("value", tensor)

            yield node.outputs[0], tensor, put


def _softmaxes(value: ir.Value) -> set[ir.Node] | None:
    """Return the softmax nodes that consume a value; ``None`` if some path from it ends elsewhere."""
    pending, visited = [value], {value}
    ends: set[ir.Node] = set()
    while pending:
        current = pending.pop()
        uses = list(current.uses())
        if not uses or current.is_graph_output() or len(visited) > _MAX_STEPS:
            return None
        for use in uses:
            node = use.node
            if node is None or node.domain:
                return None
            if node.op_type in _SOFTMAXES:
                ends.add(node)
                continue
            if node.op_type not in _PASSED or (node.op_type in ("Sub", "Div") and use.idx == 1):
                return None
            if not is_float32(node.outputs[0]):
                return None
            fresh = set(node.outputs) - visited
            visited |= fresh
            pending.extend(fresh)
    return ends


@dataclass(frozen=True, slots=True)
class OnnxPlan:
    """A model with an audit that decides the type of each node."""

    file: OnnxFile  # copy of the model with clamped masks
    audited: Audited
    clamped: list[ClampedMask]
    names: NodeNames  # of the nodes in the audit
    requirements: PlanRequirements
    chooses: bool  # whether nodes choose by float32 numbers
    opset: int | None = None  # version to which the operator set was raised


@dataclass(frozen=True, slots=True)
class PlanRequirements:
    """Requirements on a plan, besides a run without errors on the source's batches."""

    clamp: bool = True  # masks that the format cannot represent; otherwise their readers stay in float32
    accuracy: float | None = None  # of every output in dB
    before_choices: int = 0  # number of nodes before a choice to keep in float32
    other_batches: tuple[Batch, ...] = ()  # on which the model must run without errors as well


def plan_onnx(
    source: ModelSource, config: ConvertConfig, session: Session, requirements: PlanRequirements
) -> OnnxPlan:
    """Audit a model repeatedly, keeping broken ops in float32, until nothing breaks.

    Raises:
        AuditError: See ``audit_policies``.
    """
    assert isinstance(source.model, OnnxModel)
    file = source.model.file.reopened()
    _infer_types(file.model)
    raised = raise_opset(file.model, config.dtype) if config.dtype == "bfloat16" else None
    clamped = clamp_masks(file.model, getattr(torch, config.dtype), file.tensor) if requirements.clamp else []
    model = OnnxModel(file)
    _observe_types(model, source.batches[0])
    prepared = replace(source, model=model.eval())
    is_fixed = config.names_policy
    rules = config.rules if is_fixed else load_policy(_POLICY)
    accuracy = requirements.accuracy if config.tune is None else config.tune
    if accuracy is not None and not is_fixed:
        rules = tuned_rules(prepared, config.dtype, accuracy, config, session)
    if not is_fixed:
        whole = whole_number_nodes(file.model, low_precision_format(config.dtype), file.tensor)
        before = (
            nodes_before_choices(file.model, requirements.before_choices)
            if requirements.before_choices
            else set()
        )
        for name, nodes, why in (("whole", whole, _WHY_WHOLE), ("choices", before, _WHY_CHOICES)):
            if nodes:
                rules = _with_rule(rules, name, Match(layer=_escaped(map(model.names.of, nodes))), why)
    scan_config = ScanConfig.of(config)
    for batch in requirements.other_batches:
        other, rules = _audit_until_unbroken(
            replace(prepared, batches=(batch,)), rules, scan_config, session, is_fixed=is_fixed
        )
        # includes the sites that measured rules promote on that batch
        wide = {site.id for site in _computing(other) if _is_wide(site)}
        if wide:
            patterns = tuple(sorted(pattern for site in wide for pattern in _each_iteration(site)))
            rules = _with_rule(rules, "others", Match(site=patterns), _WHY_OTHERS)
    audited, _ = _audit_until_unbroken(prepared, rules, scan_config, session, is_fixed=is_fixed)
    chooses = bool(nodes_before_choices(file.model, 0))
    return OnnxPlan(file, audited, clamped, model.names, requirements, chooses, raised)


def _audit_until_unbroken(
    source: ModelSource, rules: RuleSet, scan_config: ScanConfig, session: Session, *, is_fixed: bool
) -> tuple[Audited, RuleSet]:
    """Audit until nothing breaks; return the audit and the policy that keeps broken ops in float32."""
    promoted: tuple[SiteId, ...] = ()
    for _ in range(_MAX_AUDITS):
        (audited,) = audit_policies(source, [rules], scan_config, session)
        more = () if is_fixed else _sites_to_promote(audited, promoted)
        if not more:
            break
        promoted = (*promoted, *more)
        rules = _with_rule(rules, "broken", Match(site=_escaped(more)), "the run in 16 bits broke here.")
    return audited, rules


def _computing(audited: Audited) -> list[Site]:
    """Return the sites that compute numbers, without inserted casts."""
    sites = audited.audit.converted.traced.sites
    return [site for site in sites if site.facts is not None and not site.role.inserted]


def _sites_to_promote(audited: Audited, promoted: tuple[SiteId, ...]) -> tuple[SiteId, ...]:
    """Return the 16-bit ops with errors, and those that must be promoted with them.

    The latter are connected ops that produce or read values beyond the format's range. If an op in float32
    still has an error, they include the ops that produce its inputs.
    """
    traced, report = audited.audit.converted.traced, audited.report
    limit = low_precision_format(report.run.dtype).max / _MARGIN
    large = {s.site for s in report.sites if s.forward is not None and s.forward.peak > limit}
    failing = {f.site for f in report.findings if f.severity == Severity.ERROR and f.site}
    layers = {site.layer for site in traced.sites if site.id in failing}
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
    """Return whether an op computes in float32, because of a rule or of its inputs."""
    if site.decision.cast in (Cast.FLOAT32, Cast.FORBID):
        return True
    follows = site.decision.cast is not Cast.LOWER and not site.role.converts
    return follows and site.dtype is torch.float32


def _each_iteration(site: SiteId) -> tuple[str, ...]:
    """Return globs for a site and its repetitions: a node in a loop has one site per iteration."""
    first = re.sub(r"#\d+$", "", site)
    return (glob.escape(first), f"{glob.escape(first)}#*") if first != site else (glob.escape(site),)


def _escaped(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(map(glob.escape, names)))


def _with_rule(rules: RuleSet, name: str, match: Match, why: str) -> RuleSet:
    """Return the policy with a first rule that keeps matching ops in float32."""
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


def _infer_types(model: ir.Model) -> None:
    """Expand functions, name every node, and infer the type of every value.

    Types that the file states for inner values may be wrong; they are used only where inference fails.
    """
    if model.functions:
        InlinePass()(model)
    names = NodeNames(model)
    stated = {}
    for graph in model.graphs():
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
        elif producer is not None and isinstance(value.type, ir.TensorType):
            if producer.op_type in _SEQUENCES:  # of which onnx_ir 1.1 infers the type of the elements
                value.type = ir.SequenceType(value.type)
            elif producer.op_type == "Optional":
                value.type = ir.OptionalType(value.type)


def _observe_types(model: OnnxModel, batch: Batch) -> None:
    """Set types that cannot be inferred, such as those of a runtime's operators, from a run."""
    unknown = {value for node in model.file.nodes() for value in node.outputs if value.type is None}
    if not unknown:
        return
    for value, dtype in model.dtypes_of(batch).items():
        if value in unknown and dtype is torch.float32:
            value.type = ir.TensorType(ir.DataType.FLOAT)


def decisions_of(plan: OnnxPlan) -> dict[ir.Node, bool]:
    """Return for each audited node whether one of its ops stays in float32.

    A node with bodies, such as a Loop, computes nothing itself: it may have either type, unless a body
    returns values that the format cannot represent.
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
        more = {node for node in names.keys() - large if any(v.producer() in large for v in _passed_on(node))}
        if not more:
            return large
        large |= more


def _passed_on(node: ir.Node) -> list[ir.Value]:
    """Return the values that a node passes on: operands that it moves, and outputs of its bodies."""
    operands = node.inputs if node.op_type in MOVING and not node.domain else ()
    returned = (value for body in bodies_of(node) for value in body.outputs)
    return [value for value in (*operands, *returned) if value is not None]


def raise_opset(model: ir.Model, low: str) -> int | None:
    """Raise the operator set to the lowest version in which as many nodes as possible support a format.

    Nodes do not change, except for attributes that become inputs. Versions are tried up to the first in which
    a node would compute something else.

    Returns:
        The new version, or ``None`` if it does not change.
    """
    version_before = model.opset_imports.get("")
    if version_before is None:
        return None
    nodes = [n for n in model.graph.all_nodes() if not n.domain and n.version is None]
    floats = [n for n in nodes if any(map(is_float32, (*n.inputs, *n.outputs)))]

    def count_low(version: int) -> int:
        return sum(node_types(node, version, low).takes_low for node in floats)

    best, most = version_before, count_low(version_before)
    for version in range(version_before + 1, min(_NEWEST_OPSET, onnx.defs.onnx_opset_version()) + 1):
        if not all(_is_equivalent(node, version_before, version) for node in nodes):
            break
        if count_low(version) > most:
            best, most = version, count_low(version)
    if best == version_before:
        return None
    names = {str(v.name) for n in model.graph.all_nodes() for v in (*n.inputs, *n.outputs) if v is not None}
    for node in nodes:
        _move_attributes(node, version_before, best, names)
    model.opset_imports[""] = best
    oldest = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", best)], ignore_unknown=True)
    model.ir_version = max(model.ir_version, oldest)
    return best


def _is_equivalent(node: ir.Node, version_before: int, version: int) -> bool:
    """Return whether a node computes the same function in two versions of its operator set."""
    old, new = (schema_of("", node.op_type, number) for number in (version_before, version))
    if old is None or new is None or new.deprecated:
        return False
    if old.since_version == new.since_version:
        return True
    if old.since_version < _CHANGED_IN.get(node.op_type, 0) <= new.since_version and not _keeps_last_axis(
        node
    ):
        return False
    inputs = [[formal.name for formal in schema.inputs] for schema in (old, new)]
    outputs = [[formal.name for formal in schema.outputs] for schema in (old, new)]
    if inputs[1][: len(inputs[0])] != inputs[0] or (len(node.outputs) > 1 and outputs[0] != outputs[1]):
        return False
    added = [name for name, a in new.attributes.items() if name not in old.attributes and a.required]
    defaults = [n for n, a in old.attributes.items() if n in new.attributes and n not in node.attributes]
    removed = {name for name in node.attributes if name not in new.attributes}
    changed = any(_default(old, name) != _default(new, name) for name in defaults)
    movable = removed <= set(inputs[1][len(inputs[0]) :]) and len(removed) <= 1
    halves = node.op_type == "Split" and version >= 18 and len(node.inputs) < 2 and "split" not in removed
    return not (added or changed or halves) and movable


def _keeps_last_axis(node: ir.Node) -> bool:
    """Return whether a softmax explicitly names the last axis, for which its versions agree."""
    return node.op_type.endswith(("Softmax", "Hardmax")) and "axis" in node.attributes and on_last_axis(node)


def _default(schema: Any, name: str) -> bytes:
    default: bytes = schema.attributes[name].default_value.SerializeToString()
    return default


def _move_attributes(node: ir.Node, version_before: int, version: int, names: set[str]) -> None:
    """Move an attribute that became an input to an initializer with a new name."""
    old, new = (schema_of("", node.op_type, number) for number in (version_before, version))
    for name in [name for name in node.attributes if name not in new.attributes]:
        numbers = np.array(node.attributes[name].as_ints(), np.int64)
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        label = f"{node.outputs[0].name}_{name}"
        while label in names or label in graph.initializers:
            label += "_"
        names.add(label)
        constant = ir.Value(name=label, shape=ir.Shape(numbers.shape), type=ir.TensorType(ir.DataType.INT64))
        constant.const_value = ir.tensor(numbers, name=label)
        graph.register_initializer(constant)
        position = [formal.name for formal in new.inputs].index(name)
        node.resize_inputs(position + 1)
        node.replace_input_with(position, constant)
        del node.attributes[name]
        assert position >= len(old.inputs)
