"""Runs a model with some values in float32 and all others in 16 bits, on the batches of all machines."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ampaudit.audit.advice.residual import ResidualRescale
from ampaudit.audit.config import MIN_SQNR, ScanConfig
from ampaudit.audit.metric import mean_metric, metric_of, metrics_of, within_drop
from ampaudit.audit.rescale import rescaled_model
from ampaudit.audit.scan import Audited, audit_policies
from ampaudit.core.errors import InputError, RunFailed, UsageError
from ampaudit.core.formats import low_precision_format
from ampaudit.core.ops import having
from ampaudit.core.session import Session
from ampaudit.core.sites import SiteId
from ampaudit.core.text import plural
from ampaudit.devices.catalogue import Device, all_devices
from ampaudit.devices.estimate import OpCost, OpCounter, cost_of, roofline_seconds
from ampaudit.devices.host import this_machine
from ampaudit.instruments.sensitivity.measuring import sensitivities_in
from ampaudit.instruments.sensitivity.outputs import SensitivityProbe
from ampaudit.instruments.sensitivity.probe import PrecisionGraph
from ampaudit.policy import RuleSet, load_policy
from ampaudit.report.tuning import TuningReport
from ampaudit.run.audit import Audit, run_audits
from ampaudit.run.config import RunConfig
from ampaudit.run.device import environment_of, pick_device
from ampaudit.run.outputs import compare_outputs
from ampaudit.run.share import BatchNumbers, PartDone, Share
from ampaudit.source import ModelSource
from ampaudit.trace.graph import Role, Slot, TracedModel, results_of
from ampaudit.trace.opnames import base_name, composite_kernel, example_size, is_foreign
from ampaudit.trace.values import CASTABLE_DTYPES, WIDE, tensors_in, torch_dtype
from ampaudit.tuning.config import CostKind, TuneConfig
from ampaudit.tuning.search import Accuracy, Choice, Prices, TuningProblem

_DEFAULT = "a100"  # fast in float16 and bfloat16 alike, and common
_EXTRA_BYTES = 2  # bytes by which a float32 element exceeds a 16-bit one
_CAST_BYTES = 6  # bytes moved to read an element in one format and write it in the other
MARGIN = 1.4  # factor by which 16-bit values must stay below the format's limit
_POLICY = "ampaudit"  # keeps norms in float32, as a tuned policy does
BASE = "16-bit"


class Trials:
    """Run one model in one 16-bit format: with probes, and with chosen values in float32.

    If machines share the batches, the first decides what to run, and the others follow it. On the others,
    each method raises ``PartDone`` once the machine's own batches are done.

    Attributes:
        changes: Rescalings of the model.
        base: Policy that puts everything in 16 bits.
    """

    def __init__(
        self,
        source: ModelSource,
        dtype: str,
        config: TuneConfig,
        session: Session,
        changes: tuple[ResidualRescale, ...] = (),
    ) -> None:
        self.source, self.config, self.session, self.changes = source, config, session, changes
        self.number_format = low_precision_format(dtype)
        self.dtype = torch_dtype(self.number_format)
        self.device = pick_device(config.device, audits=True)
        self.base = _base(source).for_environment(environment_of(self.device))
        self._share: Share = session.share
        self._probe: SensitivityProbe  # of the last run

    @property
    def graph(self) -> PrecisionGraph:
        """The values of the programs of all batches."""
        return self._probe.graph

    def probe(self) -> Audit:
        """Run with everything in 16 bits, and probe the outputs.

        Raises:
            AuditError: See ``run_audits``; an output has no gradient.
        """
        config = self.config
        self._share.tell("probe", *(change.change for change in self.changes))
        run_config = RunConfig(
            self.base, load_policy("torch-cuda"), self.number_format, self.device, config.seed
        )
        run_config = replace(run_config, recorders=(self._probe_outputs,), functionalize=True)
        (audit,) = run_audits(
            self.source.model, self.source.batches, [run_config], self.session.on_progress, self._share
        )
        return audit

    def _probe_outputs(self, config: RunConfig) -> SensitivityProbe:
        decisions = self.config.metric_drop is not None
        self._probe = SensitivityProbe(config, self.source.batches, decisions=decisions)
        return self._probe

    def accuracy(self, choice: Choice) -> Accuracy:
        """Run a choice on all batches; return the accuracy of the worst output in the worst batch."""
        self._share.tell("accuracy", *sorted(choice))
        config, outputs, results = self.config, dict[int, Any](), BatchNumbers()
        for batch in self._probe.batches:
            self._share.mine("trial", batch.number)
            pairs = batch.run(choice, self.dtype)
            accuracies = (output.accuracy_db for output in compare_outputs(pairs, batch.number).values())
            results[batch.number] = [min((db for db in accuracies if db is not None), default=math.inf)]
            if config.metric_drop is not None:
                outputs[batch.number] = pairs
        for number, pair in (metrics_of(self.source, outputs) if outputs else {}).items():
            results[number] += pair
        every = self._share.gathered(results).values()
        least = min(db for db, *_ in every)
        worst = None if least == math.inf else least
        if config.metric_drop is None:
            assert config.target_db is not None
            return Accuracy(worst, worst is None or worst >= config.target_db)
        exact, lower = mean_metric([metric for _, *metric in every])
        if math.isinf(exact):
            raise InputError("metric(output, batch) is NaN or infinite in FP32", hint="return a number")
        return Accuracy(worst, within_drop(exact, lower, config.metric_drop), (exact, lower))

    def keep_low(self, casts: Collection[str]) -> None:
        """Treat these casts in the model's code as casts to 16 bits, whatever their inputs."""
        self._share.tell("keep_low", *sorted(casts))
        self._probe.keep_low(casts)

    def audit(self, text: str) -> tuple[Audited, tuple[float, float] | None]:
        """Audit a rule file; return the audit with the metric in FP32 and in 16 bits, if one is asked for."""
        self._share.tell("audit", text)
        config, outputs = self.config, dict[int, Any]()
        target = config.target_db
        scan_config = ScanConfig(
            dtype=self.number_format.name,
            device=config.device,
            seed=config.seed,
            min_sqnr=MIN_SQNR if target is None else target,
        )
        session = Session(share=self._share, keep_outputs=outputs.__setitem__)
        audited: Audited | None = None
        with suppress(PartDone):  # the outputs that this machine has are still to be judged
            (audited,) = audit_policies(self.source, [rules_from_text(text)], scan_config, session)
        metric = None if config.metric_drop is None else metric_of(self.source, outputs, self._share)
        if audited is None:
            raise PartDone
        return audited, metric

    def rescaled(self) -> Trials | None:
        """Return trials of a model whose residual streams are rescaled; ``None`` if none overflows."""
        self._share.tell("rescale")
        if self.source.kind == "onnx":
            return None
        dtype, config = self.number_format.name, self.config
        scan_config = ScanConfig(dtype=dtype, device=config.device, seed=config.seed)
        rescaled = rescaled_model(self.source, load_policy(_POLICY), scan_config)
        if not rescaled.changes:
            return None
        config = config.changed(exhaustive=False)
        return Trials(rescaled.source, dtype, config, self.session, rescaled.changes)


def follow(source: ModelSource, config: TuneConfig, session: Session) -> NoReturn:
    """Run the tasks of the first machine until it ends.

    Raises:
        PartDone: The first machine has ended.
        AuditError: This machine cannot run a task.
    """
    trials: Trials | None = None
    for name, *words in session.share.tasks():
        with suppress(PartDone):
            if name == "start":
                trials = Trials(source, words[0], config, session)
                continue
            assert trials is not None, "a start comes first"
            if name == "rescale":
                trials = trials.rescaled() or trials
            elif name == "probe":
                if words != [change.change for change in trials.changes]:
                    raise RunFailed(
                        "this machine and the first one rescale the model differently",
                        hint="use machines of one kind",
                    )
                trials.probe()
            elif name == "accuracy":
                trials.accuracy(frozenset(words))
            elif name == "keep_low":
                trials.keep_low(words)
            else:
                trials.audit(*words)
    raise PartDone


def _base(source: ModelSource) -> RuleSet:
    """Return the initial policy, which puts everything in 16 bits."""
    if source.kind != "onnx":
        return load_policy(BASE)
    rules = load_policy("strongly-typed")
    static = tuple(rule for rule in rules.file.rules if not rule.measured)
    return RuleSet(rules.file.model_copy(update={"rules": static}), None, rules.environment, rules.location)


def rescale_text(changes: tuple[ResidualRescale, ...], after: TuningReport) -> str:
    """Describe the changes, what must stay in float32 after them, and their code."""
    ops = f"{len(after.kept)} of {plural(after.ops, 'op')} in float32"
    accuracy = "" if after.measured_db is None else f", {after.measured_db:.1f} dB"
    outcome = f"then: {ops}{accuracy}; written by: ampaudit convert --rescale --tune DB"
    summary = "\n".join(change.change for change in changes)
    code = "\n\n".join(change.paste for change in changes)
    return f"{summary}\n{outcome}\n\n{code}"


def rules_from_text(text: str) -> RuleSet:
    """Return the rules of a rule file's text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuned.yaml"
        path.write_text(text, "utf-8")
        rules = load_policy(path)
    return RuleSet(rules.file, rules.ops, rules.environment)


def run_low_precision(trials: Trials) -> tuple[Audit, TuningProblem, dict[str, str]]:
    """Run a model under a policy that puts everything in 16 bits, and probe its outputs.

    Returns:
        The audit, the problem to solve, and why values force ops and weights into float32, by name.

    Raises:
        AuditError: See ``run_audits``; an output has no gradient.
    """
    audit, config = trials.probe(), trials.config
    ranges, wide = _out_of_range(audit, trials.graph, trials.number_format.max)
    costs = costs_of(audit.converted.traced, config.cost, config.target)
    problem = TuningProblem(
        trials.graph,
        sensitivities_in(audit),
        _prices(audit, trials.graph, costs),
        frozenset(ranges),
        frozenset(wide),
    )
    return audit, problem, ranges


def _out_of_range(audit: Audit, graph: PrecisionGraph, limit: float) -> tuple[dict[str, str], set[str]]:
    """Return why values force ops and weights into float32, by name, and the values out of range."""
    record = audit.record
    masks = record.masks | record.by_design
    peaks = {site: stats.ref_peak for site, stats in record.observations.items()}
    ranges: dict[str, str] = {}
    wide: set[str] = set()
    for origin in record.origins:
        if origin.harms and origin.site in graph.values:
            ranges[origin.site] = "it gives infinity or NaN in 16 bits"
    for name, value in graph.values.items():
        # constants of the code, such as a mask's or finfo.max, need no margin
        single = value.site is not None and math.prod(value.site.shape) == 1
        most = limit if single or name in audit.constants else limit / MARGIN
        peak = peaks.get(SiteId(name), 0.0)
        # a mask over values that are out of range would hide them
        masked = name in masks and wide.isdisjoint(graph.reads.get(name, ()))
        if not value.is_weight and not masked and peak > most:
            wide.add(name)
            near = "" if peak > limit else "come near the limit: they "
            ranges[name] = f"its values {near}reach {peak:.4g}; 16 bits end at {limit:.6g}"
    masters = audit.converted.masters
    for place in audit.converted.traced.placeholders:
        tensor = masters.get(place.node)
        if tensor is None or place.name not in graph.values:
            continue
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        peak = float(tensor.detach().abs().nan_to_num(0.0, math.inf, math.inf).amax())
        if limit < peak < math.inf and place.name not in masks:
            wide.add(place.name)
            ranges[place.name] = f"it holds {peak:.4g}; 16 bits end at {limit:.6g}"
    return ranges, wide


def _prices(audit: Audit, graph: PrecisionGraph, costs: Costs) -> Prices:
    """Return the costs keyed by the names of values."""
    nodes = {value.name: value.site.node for value in graph.values.values() if value.site is not None}
    nodes |= {place.name: place.node for place in audit.converted.traced.placeholders}
    values = {name: costs.ops[SiteId(name)] for name in graph.values if SiteId(name) in costs.ops}
    for name, node in nodes.items():
        if name not in values and name in graph.values:
            values[name] = costs.weights.get(node, 0.0)
    casts = {name: costs.casts.get(nodes[name], 0.0) for name in graph.values if name in nodes}
    return Prices(values, casts)


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of float32, in the unit of its kind: ops, bytes moved per pass, or seconds.

    Bytes and seconds are those of eager PyTorch: each op and each cast is a kernel of its own, which reads
    its inputs from memory and writes its outputs there. A compiler that fuses a cast makes it cheaper.
    """

    # extra cost of running each site in float32 instead of 16 bits, never negative
    ops: Mapping[SiteId, float]
    # cost of casting a node's value once, in either direction, for nodes whose values can be cast
    casts: Mapping[str, float]
    # extra cost of storing a weight in float32, by placeholder. Tied weights are counted once, under the
    # first name that the graph reads
    weights: Mapping[str, float]
    device: Device | None = None  # device whose time is estimated; ``None`` for other kinds


def costs_of(traced: TracedModel, kind: CostKind, device: Device | None = None) -> Costs:
    """Return the costs of float32 in a model that was traced in 16 bits.

    ``ops`` counts ops that compute or select. All casts together cost less than one of them, and all weights
    together less than one cast, so that these only choose among equal numbers of ops.

    ``bytes`` are those that an op reads and writes. Views and casts in the model's code follow their input
    and are free. A stored weight is charged the bytes that it adds, as if read once a pass.

    ``time`` is the roofline on a device: the longer of an op's arithmetic and its bytes, in float32 without
    TF32. A data-dependent size counts as 1. The device is that of ``default_device`` unless one is named.

    Ops that are in float32 anyway cost nothing extra.

    Raises:
        UsageError: The catalogue lacks a rate of the device.
    """
    device = (device or default_device()) if kind == "time" else None
    price = _price(device)
    calls = _calls(traced)
    ops = {site: max(price(wide) - price(low), 0.0) for site, (low, wide) in calls.items()}
    casts = {node: price(_traffic(count * _CAST_BYTES)) for node, count in _castable(traced).items()}
    weights = {node: price(_traffic(count * _EXTRA_BYTES)) for node, count in _stored(traced).items()}
    if kind == "ops":
        ops = {site: float(extra > 0) for site, extra in ops.items()}
        cast = 0.5 / (len(casts) + 1)
        total = sum(weights.values()) or 1.0
        casts = dict.fromkeys(casts, cast)
        weights = {node: 0.5 * cast * extra / total for node, extra in weights.items()}
    return Costs(ops, casts, weights, device)


def default_device() -> Device:
    """Return the catalogue's entry for the GPU of this machine, or else for an A100."""
    entries = (device.entry for device in this_machine().devices if device.kind != "cpu")
    return all_devices()[next((entry for entry in entries if entry is not None), _DEFAULT)]


def _traffic(count: int) -> OpCost:
    """Return the cost of moving bytes without arithmetic."""
    return OpCost(flops=0, precision="float32", product=False, bytes_moved=count, cast=False)


def _price(device: Device | None) -> Callable[[OpCost], float]:
    """Return the seconds of an op on a device, or its bytes without one."""
    if device is None:
        return lambda op: float(op.bytes_moved)
    if roofline_seconds([_traffic(1)], device, tf32=False) is None:
        raise UsageError(
            f"the catalogue has no rates for {device.id}", hint="name a GPU, or minimise bytes or ops"
        )
    return lambda op: roofline_seconds([op], device, tf32=False) or 0.0


def _calls(traced: TracedModel) -> dict[SiteId, tuple[OpCost, OpCost]]:
    """Return the cost of each site as traced and in float32."""
    low = {node.name: _on_meta(results_of(node)) for node in traced.graph.nodes}
    wide = {
        name: pytree.tree_map_only(torch.Tensor, lambda t: t.to(WIDE.get(t.dtype, t.dtype), copy=True), value)
        for name, value in low.items()
    }
    nodes = {node.name: node for node in traced.graph.nodes}
    calls = {}
    for site in traced.sites:
        node = nodes[site.node]
        if site.role not in (Role.COMPUTE, Role.SELECT) or not tensors_in(low[site.node]):
            calls[site.id] = (_traffic(0), _traffic(0))
            continue
        costs = [_call(node, values) for values in (low, wide)]
        flops = costs[0].flops or _composite_flops(node, low)
        before, after = (replace(cost, flops=flops, product=flops > 0) for cost in costs)
        calls[site.id] = (before, after)
    return calls


def _arguments(node: fx.Node, values: Mapping[str, Any]) -> tuple[Any, Any]:
    arguments: Any = map_arg((node.args, node.kwargs), lambda source: values[source.name])
    return arguments[0], arguments[1]


def _call(node: fx.Node, values: Mapping[str, Any]) -> OpCost:
    (args, kwargs), out = _arguments(node, values), values[node.name]
    if args and isinstance(node.target, OpOverload) and base_name(node.target) in having("gathers"):
        read = torch.empty_like(out) if out.numel() < args[0].numel() else args[0]
        args = (read, *args[1:])
    try:
        return cost_of(node.target, args, kwargs, out)
    except AssertionError:  # torch's formula: sizes that depend on the data do not fit together
        return cost_of(None, args, kwargs, out)


def _composite_flops(node: fx.Node, values: Mapping[str, Any]) -> int:
    """Count the arithmetic of the ops that a composite op calls: ``linear``, ``einsum``, attention."""
    op = node.target
    if not isinstance(op, OpOverload) or is_foreign(op) or composite_kernel(op) is None:
        return 0
    args, kwargs = _arguments(node, values)
    # an op that reads values, or has sizes that depend on them, may fail: what it did before counts
    unreadable = suppress(AssertionError, RuntimeError, TypeError, ValueError)
    with torch.no_grad(), OpCounter() as counter, unreadable:
        op(*args, **kwargs)
    return sum(cost.flops for cost in counter.ops)


def _on_meta(value: Any) -> Any:
    """Return traced values without data and symbols, of the sizes in this trace."""
    value = pytree.tree_map_only(torch.Tensor, _sized, value)
    return pytree.tree_map_only(torch.SymInt, _known, value)


def _sized(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor of the same sizes and dtype, without data."""
    return torch.empty([_known(size) for size in tensor.shape], dtype=tensor.dtype, device="meta")


def _known(symbol: Any) -> int:
    """Return the number that a symbol stands for in this trace, and 1 if it depends on the data."""
    number = example_size(symbol)
    return 1 if number is None else int(number)


def _castable(traced: TracedModel) -> dict[str, int]:
    """Count the elements that a cast of each node's value converts."""
    counts_by_node = {}
    for node in traced.graph.nodes:
        items = tensors_in(_on_meta(node.meta.get("val")))
        counts = [item.numel() for item in items if item.dtype in CASTABLE_DTYPES]
        if counts:
            counts_by_node[node.name] = sum(counts)
    return counts_by_node


def _stored(traced: TracedModel) -> dict[str, int]:
    """Count the elements of each weight; tied weights count under the first name that the graph reads."""
    weights = [p for p in traced.placeholders if p.slot is not Slot.INPUT and p.dtype in CASTABLE_DTYPES]
    unread = {node.name: not node.users for node in traced.graph.nodes}
    sizes, counted = dict[str, int](), set[int]()
    for weight in sorted(weights, key=lambda weight: unread[weight.node]):
        tensor = traced.tensors[weight.node]
        sizes[weight.node] = 0 if id(tensor) in counted else tensor.numel()
        counted.add(id(tensor))
    return sizes
