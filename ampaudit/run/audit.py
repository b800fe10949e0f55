"""Audits a model over all batches, under one policy or several side by side."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampaudit.core.errors import AuditError, InputError, ReferenceBroken, first_line
from ampaudit.core.session import Progress
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.policy import Measurement, RuleSet
from ampaudit.run.config import NextInputs, Recorder, RunConfig, Steps
from ampaudit.run.device import guarded
from ampaudit.run.fp32_check import EagerModel, reporting_model_failures
from ampaudit.run.lockstep import CarriedState, Interleaved, Observer, Pair
from ampaudit.run.outputs import compare_outputs
from ampaudit.run.record import RunRecord, StateFault, StepObservation
from ampaudit.run.runner import BatchRun, Runner
from ampaudit.run.segmented import run_segmented
from ampaudit.run.share import ALONE, Failure, PartRecords, Share
from ampaudit.source.interface import Batch
from ampaudit.source.next_inputs import NEXT_INPUTS, NothingFedBack, call_next_inputs, check_next_inputs
from ampaudit.trace import Role, Site
from ampaudit.trace.caster import FIXED_REASONS
from ampaudit.trace.converted import ConvertedModel
from ampaudit.trace.entry import named_inputs, tensor_leaves, with_objects_open
from ampaudit.trace.flow import Flow
from ampaudit.trace.graph import Slot
from ampaudit.trace.stack import calling_line
from ampaudit.trace.values import LOW_PRECISION_DTYPES, inexact, tensors_in, widened_tensor

OpOutcome = tuple[str, bool, SourceLine | None]  # op, whether its result is finite, its line if it is not
_SEED_OFFSET = 2_000_003  # so that next inputs draw other random numbers than the model


@dataclass(frozen=True, slots=True)
class Audit:
    """The record of a run and its sites in graph order.

    ``promoted`` holds the sites that the policy's measured rules promoted after a first pass, ``others`` the
    graphs of later batches that add sites, or of all later batches, and ``recorders`` those of the last pass.
    """

    record: RunRecord
    sites: tuple[Site, ...]
    converted: ConvertedModel
    constants: frozenset[SiteId]
    promoted: tuple[SiteId, ...] = ()
    others: tuple[ConvertedModel, ...] = ()
    recorders: tuple[Recorder, ...] = ()

    @property
    def graphs(self) -> tuple[ConvertedModel, ...]:
        """All graphs, starting with that of the first batch."""
        return (self.converted, *self.others)

    @property
    def flow(self) -> Flow:
        """The flow of values through all graphs."""
        return Flow(*(converted.traced for converted in self.graphs))


def run_audits(
    model: nn.Module,
    batches: Sequence[Batch],
    configs: Sequence[RunConfig],
    progress: Progress,
    share: Share = ALONE,
) -> list[Audit]:
    """Audit a model under several policies, with one run of the reference for all of them.

    The configurations share device, seed, steps, memory limit and ``release``. Policies whose measured rules
    promote something are run again, together, with the promoted ops. Several machines may share the batches.

    Raises:
        PartDone: Another machine continues with the records of this one.
        TraceFailed: The model cannot be exported.
        RunFailed: The model cannot be run, for lack of memory or of a kernel.
        ReferenceBroken: FP32 gives NaN or infinity as well.
        InputError: An input holds NaN or infinity, or there is no batch.
    """
    if not batches:
        raise InputError("there is no batch to run", hint="make batches() yield at least one batch")
    runners = _run_all(model, batches, configs, progress, "auditing", share)
    again: dict[int, tuple[RunConfig, tuple[SiteId, ...]]] = {}  # with the promoted sites
    for index, (config, runner) in enumerate(zip(configs, runners, strict=True)):
        if config.rules is not None and config.rules.measured:
            measurements = runner.measurements()
            promoted = promoted_sites(config.rules, runner.executors.sites.values(), measurements)
            if promoted:
                again[index] = (replace(config, measured=measurements), promoted)
    if again:
        spent = {index: sum(runners[index].record.seconds.values()) for index in again}
        changed = [config for config, _ in again.values()]
        repeated = _run_all(model, batches, changed, progress, "re-auditing", share)
        for index, runner in zip(again, repeated, strict=True):
            runner.record.seconds = {"first pass": spent[index], **runner.record.seconds}
            runners[index] = runner
    share.finish()
    for runner in runners:
        runner.attribute()
    return [_audit(runner, again[i][1] if i in again else ()) for i, runner in enumerate(runners)]


def _audit(runner: Runner, promoted: tuple[SiteId, ...]) -> Audit:
    sites, (first, *others) = tuple(runner.executors.sites.values()), runner.executors.converted
    # an op that writes in place keeps the dtype of what it writes to
    promoted = tuple(
        site.id for site in sites if site.id in promoted and site.dtype not in LOW_PRECISION_DTYPES
    )
    return Audit(
        runner.record,
        sites,
        first,
        runner.executors.constants,
        promoted,
        others=tuple(others),
        recorders=runner.recorders,
    )


def _run_all(
    model: nn.Module,
    batches: Sequence[Batch],
    configs: Sequence[RunConfig],
    progress: Progress,
    phase: str,
    share: Share = ALONE,
) -> list[Runner]:
    eager = EagerModel(configs[0].device, configs[0].seed, configs[0].release)
    runners = [Runner(model, config, eager) for config in configs]
    totals = [runner.end_batch() for runner in runners]  # empty records
    if configs[0].memory is None:
        totals = _run_in_order(model, batches, runners, totals, progress, phase, share)
    else:
        totals = share.joined(phase, run_segmented(model, runners, batches, share, phase, progress), progress)
    for runner, total in zip(runners, totals, strict=True):
        runner.record.join(total)
    progress(phase, len(batches), len(batches))
    return runners


def _run_in_order(
    model: nn.Module,
    batches: Sequence[Batch],
    runners: Sequence[Runner],
    totals: list[RunRecord],
    progress: Progress,
    phase: str,
    share: Share,
) -> list[RunRecord]:
    local_records: dict[int, list[RunRecord]] = {}
    failure: Failure | None = None
    for number, batch in enumerate(batches):
        progress(share.progress_of(phase), number, len(batches))
        mine, earlier = share.mine(phase, number), share.recorded(phase, number)
        try:
            with reporting_model_failures(model, batch):
                _run_batch(runners, batch, number, progress, mine=mine and earlier is None)
        except AuditError as error:
            if len(batches) > 1:
                error.add_place(batch.title(number))
            if share.alone:
                raise
            failure = Failure.of(number, error)
            break
        ended = [runner.end_batch() for runner in runners]
        if share.alone:  # join as in ``join_parts``, but without keeping the records
            for total, record in zip(totals, ended, strict=True):
                total.join(record)
        elif mine:
            local_records[number] = earlier or ended
            if earlier is None:
                share.record(phase, number, ended)
    return totals if share.alone else share.joined(phase, PartRecords(local_records, failure), progress)


def _run_batch(
    runners: Sequence[Runner], batch: Batch, number: int, progress: Progress, *, mine: bool
) -> None:
    """Run a batch under every policy, or only trace it if another machine runs it.

    Policies share the reference, unless there are recorders or random numbers.
    """
    if not mine:
        for runner in runners:
            runner.skip(batch, number)
        return
    config = runners[0].config
    if config.steps is not None:
        for runner in runners:
            runner.record.fed_back = config.steps.fed_back
            loop = _Loop(runner, config.steps, batch)
            for step in range(1, config.steps.count + 1):
                progress("running steps", step - 1, config.steps.count)
                runner.record.steps.append(loop.advance(StepObservation(number, step)))
        return
    if len(runners) == 1:
        runners[0].run(batch, number)
        return
    calls = [runner.prepare(batch, number) for runner in runners]
    draws = any(call.executor.program.draws for call in calls)
    if draws or any(runner.recorders for runner in runners):
        for runner, call in zip(runners, calls, strict=True):
            with runner.record.timing("run"):
                outputs = runner.execute(call, call.meter)
            runner.finish(call, outputs)
        return
    started = time.perf_counter()
    with guarded(config.device, batch), torch.no_grad():
        runs = [(call.executor, call.executor.start(call.tensors), call.meter) for call in calls]
        results = Interleaved(runs).advance()
    assert results is not None, "no run stops early"
    seconds = (time.perf_counter() - started) / len(runners)
    for runner, call, pairs in zip(runners, calls, results, strict=True):
        runner.record.add_seconds("run", seconds)
        runner.finish(call, pairs)


def measure(
    model: nn.Module, batches: Sequence[Batch], config: RunConfig, progress: Progress
) -> tuple[dict[SiteId, Measurement], tuple[Site, ...]]:
    """Measure the batches for the policy's measured rules; return the measurements and their sites.

    Raises:
        AuditError: See ``run_audits``.
    """
    runner = _run_all(model, batches, [config], progress, "measuring")[0]
    return runner.measurements(), tuple(runner.executors.sites.values())


def promoted_sites(
    rules: RuleSet, sites: Iterable[Site], measurements: Mapping[SiteId, Measurement]
) -> tuple[SiteId, ...]:
    """Return the 16-bit sites whose decision the measurements change.

    Ops that the author or their inputs keep in float32 are not counted as promoted.
    """
    return tuple(
        site.id
        for site in sites
        if site.dtype in LOW_PRECISION_DTYPES
        and site.decision.reason not in FIXED_REASONS
        and site.facts
        and site.id in measurements
        and rules.promotes(replace(site.facts, measurement=measurements[site.id]))
    )


@dataclass(slots=True)
class _Side:
    """One of the runs, with its inputs, buffers, and copy of the function that computes the next inputs."""

    inputs: Batch
    function: NextInputs
    buffers: dict[str, Pair] = field(default_factory=dict)

    def call(self, outputs: Any, lent: Loans, call: str) -> tuple[Batch, OpWatch]:
        """Return the next inputs, and the ops that computed them."""
        inputs = self.inputs.mapped(lent.lend)
        with OpWatch() as watch:
            next_batch = call_next_inputs(self.function, outputs, inputs, call)
        return next_batch.mapped(lent.take_back), watch


class _Loop:
    """Advances the FP32 run, the 16-bit run with repairs and, once it differs, the one without them.

    The 16-bit run carries its own floating-point state; integers and booleans, such as a chosen token, are
    FP32's in both, so that the runs stay comparable. If a step breaks, its repaired state is carried on, so
    that later steps are audited as if the fault had not happened. The unrepaired state is carried on as well,
    to determine which later steps it poisons.
    """

    def __init__(self, runner: Runner, steps: Steps, batch: Batch) -> None:
        self._runner = runner
        self._config = runner.config
        self._count = steps.count
        opened = Batch(*with_objects_open((batch.args, batch.kwargs)))
        inputs = opened.mapped(lambda tensor: tensor.to(self._config.device, copy=True))
        self._fp32 = _Side(inputs, private_copy(steps.next_inputs))
        self._low = _Side(inputs, private_copy(steps.next_inputs))
        self._unrepaired: _Side | None = None
        self._lost = False  # whether the unrepaired run cannot continue, since its values are too broken

    def advance(self, record: StepObservation) -> StepObservation:
        """Run one step and, unless it is the last, compute the inputs of the next.

        Raises:
            InputError: The function does not return valid next inputs.
            SourceError: The function fails.
            ReferenceBroken: The function returns NaN or infinity in FP32.
        """
        number, first = record.batch * self._count + record.step - 1, record.step == 1
        low_inputs = None if first else self._low.inputs
        inputs = replace(self._fp32.inputs, name=self._config.call_name(number))
        call = self._runner.prepare(inputs, number, low_inputs, self._low.buffers)
        with self._runner.record.timing("run"):
            outputs = self._runner.execute(call, call.meter)
        buffers = call.executor.named_buffers()
        repaired = self._runner.finish(call, outputs)
        if first:
            self._low.inputs = _as_placed(self._low.inputs, call)
            self._fp32.inputs = self._fp32.inputs.mapped(widened_tensor)
        self._measure(record, call, repaired)
        self._low.buffers |= call.executor.named_buffers()
        unrepaired: list[Pair] | None = None
        if self._unrepaired is not None:
            unrepaired = self._run_unrepaired(call, self._unrepaired)
            record.poisoned = self._lost or _breaks_in_16_bits(unrepaired)
        elif call.origins and not self._lost:
            unrepaired = outputs
        record.poisoned |= self._lost
        if record.step < self._count:
            spare = _Side(self._low.inputs, private_copy(self._low.function), self._low.buffers | buffers)
            self._compute_next_inputs(record, call, repaired, unrepaired, self._unrepaired or spare)
        return record

    def _measure(self, record: StepObservation, call: BatchRun, outputs: list[Pair]) -> None:
        """Record the errors and the least headroom of a step."""
        traced, form = call.executor.program.traced, self._config.number_format
        pairs = dict(zip(traced.outputs, outputs, strict=True))
        for name, comparison in compare_outputs(pairs, call.number).items():
            if comparison.kind != "integer" and comparison.elements:
                record.errors[name] = comparison.err_sq, comparison.ref_sq
        record.origins = call.origins
        sites = {site.id: site for site in traced.sites}
        exempt = self._runner.record.by_design | self._runner.executors.constants
        peaks = [
            (max(row.fields["ref_peak"], row.fields["peak"]), str(row.site))
            for row in call.measured
            if (site := sites.get(row.site)) is not None
            and site.dtype in LOW_PRECISION_DTYPES
            and site.role is not Role.WEIGHT_CAST
            and row.site not in exempt
        ]
        peak, record.headroom_at = max(peaks, default=(0.0, ""))
        record.headroom_bits = form.headroom_bits(peak) if peak > 0.0 else None

    def _run_unrepaired(self, call: BatchRun, side: _Side) -> list[Pair]:
        """Return the outputs of the unrepaired run; an empty list if it cannot continue."""
        carried = CarriedState(tensor_leaves(side.inputs.args, side.inputs.kwargs), side.buffers)
        call = replace(call, carried=carried)
        try:
            outputs = self._runner.execute(call, Observer())
        except (AuditError, ValueError):
            self._unrepaired, self._lost = None, True
            return []
        side.buffers |= call.executor.named_buffers()
        return outputs

    def _compute_next_inputs(
        self,
        record: StepObservation,
        call: BatchRun,
        outputs: list[Pair],
        unrepaired: list[Pair] | None,
        side: _Side,
    ) -> None:
        """Compute the inputs of the next step in each run; ``side`` is the run without repairs."""
        again = _Side(self._fp32.inputs, private_copy(self._fp32.function))
        fp32, watch = self._call(self._fp32, call, outputs, 0)
        low, low_watch = self._call(self._low, call, outputs, 1)
        title = self._config.call_name(call.number)
        if record.step == 1:
            check_next_inputs(call.model, fp32, title)
            refuse_hidden_state(fp32, self._call(again, call, outputs, 0)[0])
        self._fp32.inputs, self._low.inputs = fp32, carried_inputs(fp32, low, title, record)
        if record.faults:
            op, line = first_fault(watch.ops, low_watch.ops)
            record.faults = [replace(fault, op=op, line=line) for fault in record.faults]
        if self._lost or (unrepaired is None and not record.faults):
            return
        try:
            if unrepaired is not None:
                low, _ = self._call(side, call, unrepaired, 1)
            side.inputs = carried_inputs(fp32, low, title, None)
            self._unrepaired = side
        except AuditError:
            self._unrepaired, self._lost = None, True

    def _call(self, side: _Side, call: BatchRun, outputs: list[Pair], index: int) -> tuple[Batch, OpWatch]:
        """Call the function for one run, with the same random numbers for all."""
        program, title = call.executor.program, self._config.call_name(call.number)
        if program.traced.structure is None:
            raise InputError(
                f"the outputs of {title} are in an object that cannot be copied for {NEXT_INPUTS}",
                hint="return tensors, tuples, dicts, or a class registered with torch.utils._pytree",
            )
        tensors = []
        for node, pair in zip(program.outputs, outputs, strict=True):
            value = pair[index] if index == 0 else pair[1].to(node.meta["val"].dtype)
            tensors.append(value.clone() if index and value is pair[0] else value)
        pairs = zip(
            *(tensor_leaves(s.inputs.args, s.inputs.kwargs) for s in (self._fp32, side)), strict=False
        )
        shared = {id(first) for first, second in pairs if first is second}
        with guarded(self._config.device, self._fp32.inputs), torch.no_grad():
            torch.manual_seed(self._config.seed + call.number + _SEED_OFFSET)
            try:
                return side.call(program.traced.structure.filled(tensors), Loans(shared), title)
            except NothingFedBack:
                if not self._low.buffers:
                    raise
                return side.inputs, OpWatch()  # the state is in the buffers


def _as_placed(batch: Batch, call: BatchRun) -> Batch:
    """Cast the inputs of the first step as the policy does."""
    places = call.executor.program.traced.placeholders
    dtypes = [place.dtype for place in places if place.slot is Slot.INPUT]
    placed = dict(zip(map(id, tensor_leaves(batch.args, batch.kwargs)), dtypes, strict=True))
    return batch.mapped(
        lambda tensor: tensor.to(placed[id(tensor)]) if tensor.is_floating_point() else tensor
    )


def _breaks_in_16_bits(outputs: list[Pair]) -> bool:
    """Return whether an output is finite in FP32, but not in 16 bits."""
    return any(
        value.is_floating_point() and bool((~value.isfinite() & reference.isfinite()).any())
        for reference, value in outputs
    )


def private_copy(function: NextInputs) -> NextInputs:
    """Copy a function with its state, except for the models that it holds."""
    holder = getattr(function, "__self__", function)
    modules = (value for value in getattr(holder, "__dict__", {}).values() if isinstance(value, nn.Module))
    try:
        return copy.deepcopy(function, {id(module): module for module in modules})
    except Exception as error:
        raise InputError(
            f"next_inputs cannot be copied for each run: {first_line(error)}",
            hint="pass a function, or an object whose state can be copied",
        ) from error


class Loans:
    """Passes copies of tensors that both runs share to a function, which may write to them."""

    def __init__(self, shared: set[int]) -> None:
        self._shared = shared
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a shared tensor, or the tensor itself."""
        if id(tensor) not in self._shared:
            return tensor
        copied = tensor.clone()
        self._lent[id(copied)] = tensor, copied, copied._version
        return copied

    def take_back(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the original of a copy, unless the copy was written to."""
        original, copied, version = self._lent.get(id(tensor), (tensor, tensor, tensor._version))
        return original if copied._version == version else tensor


def carried_inputs(fp32: Batch, low: Batch, call: str, record: StepObservation | None) -> Batch:
    """Return the next inputs of the 16-bit run: its own floats, and FP32's integers and other values.

    With a record, broken elements are recorded and replaced by FP32's, clamped to the format.

    Raises:
        InputError: The inputs differ in structure or shape.
        ReferenceBroken: The inputs in FP32 contain NaN or infinity.
    """
    wide_leaves, low_leaves = (named_inputs(side.args, side.kwargs) for side in (fp32, low))
    if [name for name, _ in wide_leaves] != [name for name, _ in low_leaves]:
        raise InputError(f"{NEXT_INPUTS} returned different structures in 16 bits and in FP32 after {call}")
    leaves = [
        _carried_leaf(name, first, second, call, record)
        for (name, first), (_, second) in zip(wide_leaves, low_leaves, strict=True)
    ]
    return Batch(*pytree.tree_unflatten(leaves, pytree.tree_structure((low.args, low.kwargs))))


def _carried_leaf(name: str, first: Any, second: Any, call: str, record: StepObservation | None) -> Any:
    if first is second:
        return first
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        if record is not None and (type(first) is not type(second) or first != second):
            record.flipped.append(name)
        return first
    if first.shape != second.shape:
        here, there = (tuple(tensor.shape) for tensor in (second, first))
        raise InputError(
            f"{NEXT_INPUTS} made {name} of shape {here} in 16 bits and {there} in FP32 after {call}",
            hint="a shape that depends on values cannot be followed in both runs",
        )
    if not (inexact(first) and inexact(second)):
        if record is not None and not torch.equal(first, second):
            record.flipped.append(name)
        return first
    if bool((first.isnan() | (first == torch.inf)).any()):
        raise ReferenceBroken(f"{NEXT_INPUTS} gives NaN or infinity in FP32 after {call}: {name}")
    if first.dtype == second.dtype and torch.equal(first, second):
        return first
    wrong = first.isfinite() & ~second.isfinite()
    if record is None or not bool(wrong.any()):
        return second
    peak = float(first[wrong].abs().amax())
    counts = int(wrong.sum()), int((wrong & second.isnan()).sum())
    record.faults.append(StateFault(name, "", None, peak, *counts, second.numel()))
    limit = torch.finfo(second.dtype).max
    repaired = first if first.is_complex() else first.clamp(-limit, limit)
    return torch.where(wrong, repaired.to(second.dtype), second)


def refuse_hidden_state(first: Batch, second: Batch) -> None:
    """Raise if a function returned different results when called again with the same arguments."""
    for one, two in zip(
        *(tensor_leaves(batch.args, batch.kwargs) for batch in (first, second)), strict=False
    ):
        wide = one.to(torch.complex128), two.to(torch.complex128)
        if one.shape != two.shape or not torch.allclose(*wide, 1e-3, equal_nan=True):
            raise InputError(
                f"{NEXT_INPUTS} returns different results when it is called again with the same arguments",
                hint="it is called for each run: keep its state in an object with __call__, of which each "
                "run has a copy, or pass the scheduler itself as next_inputs",
            )


class OpWatch(TorchDispatchMode):
    """Records whether the result of each op is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpOutcome] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        finite = all(bool(t.isfinite().all()) for t in tensors_in(result) if inexact(t))
        self.ops.append((str(func).removesuffix(".default"), finite, None if finite else calling_line()))
        return result


def first_fault(reference: Sequence[OpOutcome], low: Sequence[OpOutcome]) -> tuple[str, SourceLine | None]:
    """Return name and line of the first op that is finite in FP32 only; empty if the ops differ earlier."""
    for (name, finite, _), (low_name, low_finite, line) in zip(reference, low, strict=False):
        if name != low_name:
            break
        if finite and not low_finite:
            return name, line
    return "", None
