"""Runs a batch for several steps: each run feeds its own outputs back as its next inputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampaudit.core.config import Progress
from ampaudit.core.errors import AuditError, InputError
from ampaudit.run.carried import Lent, carried_inputs, own_copy, refuse_hidden_state
from ampaudit.run.config import NextInputs, Steps
from ampaudit.run.guards import guarded
from ampaudit.run.lockstep import Carried
from ampaudit.run.observer import Observer, Pair
from ampaudit.run.op_faults import OpWatch, first_fault
from ampaudit.run.outputs import compare_outputs
from ampaudit.run.prepared import CallResult, PreparedBatch
from ampaudit.run.record import StepObservation
from ampaudit.run.runner import Runner
from ampaudit.run.step import widened_tensor
from ampaudit.source.interface import Batch
from ampaudit.source.next_inputs import NEXT_INPUTS, NothingFedBack, call_next_inputs, refuse_misfit
from ampaudit.trace import Role
from ampaudit.trace.entry import tensor_leaves, with_objects_open
from ampaudit.trace.graph import Slot
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["run_steps"]

_SEED_OFFSET = 2_000_003  # next inputs draw other random numbers than the model


def run_steps(runner: Runner, steps: Steps, batch: Batch, number: int, progress: Progress) -> None:
    """Run a batch for a number of steps.

    The 16-bit run carries its own floating-point state; integers and booleans, such as a chosen token, are
    FP32's in both, so that the runs stay comparable. If a step breaks, its repaired state is carried on, so
    that later steps are audited as if it had not happened. The unrepaired state is carried on as well, and
    says which later steps it poisons.

    Raises:
        InputError: what the function returns cannot be the next inputs.
        SourceError: the function fails.
        ReferenceBroken: it gives NaN or infinity in FP32.
    """
    loop, runner.record.fed_back = _Loop(runner, steps, batch), steps.fed_back
    for step in range(1, steps.count + 1):
        progress("running steps", step - 1, steps.count)
        runner.record.steps.append(loop.advance(StepObservation(number, step)))


@dataclass(slots=True)
class _Side:
    """One of the runs: its inputs and buffers, and its own copy of the function that makes the inputs."""

    inputs: Batch
    function: NextInputs
    buffers: dict[str, Pair] = field(default_factory=dict)

    def call(self, outputs: Any, lent: Lent, call: str) -> tuple[Batch, OpWatch]:
        """Return the next inputs, and the ops that made them."""
        inputs = self.inputs.mapped(lent.lend)
        with OpWatch() as watch:
            made = call_next_inputs(self.function, outputs, inputs, call)
        return made.mapped(lent.take_back), watch


class _Loop:
    """The state of the FP32 run, of the 16-bit run with repairs, and of that without once they differ."""

    def __init__(self, runner: Runner, steps: Steps, batch: Batch) -> None:
        self._runner = runner
        self._config = runner.config
        self._count = steps.count
        opened = Batch(*with_objects_open((batch.args, batch.kwargs)))
        given = opened.mapped(lambda tensor: tensor.to(self._config.device, copy=True))
        self._fp32 = _Side(given, own_copy(steps.next_inputs))
        self._own = _Side(given, own_copy(steps.next_inputs))
        self._unrepaired: _Side | None = None
        self._lost = False  # the unrepaired run cannot go on: its values are too broken

    def advance(self, record: StepObservation) -> StepObservation:
        """Run one step and, but for the last, make the inputs of the next."""
        number, first = record.batch * self._count + record.step - 1, record.step == 1
        own = None if first else self._own.inputs
        inputs = replace(self._fp32.inputs, name=self._config.call_name(number))
        ready = self._runner.prepare(inputs, number, own, self._own.buffers)
        outputs, buffers, result = self._runner.execute(ready)
        if first:
            self._own.inputs = _as_placed(self._own.inputs, ready)
            self._fp32.inputs = self._fp32.inputs.mapped(widened_tensor)
        self._measure(record, ready, result)
        self._own.buffers |= ready.executor.named_buffers()
        unrepaired: list[Pair] | None = None
        if self._unrepaired is not None:
            unrepaired = self._run_unrepaired(ready, self._unrepaired)
            record.poisoned = self._lost or _broken(unrepaired)
        elif result.origins and not self._lost:
            unrepaired = outputs
        record.poisoned |= self._lost
        if record.step < self._count:
            spare = _Side(self._own.inputs, own_copy(self._own.function), self._own.buffers | buffers)
            self._step_on(record, ready, result.outputs, unrepaired, self._unrepaired or spare)
        return record

    def _measure(self, record: StepObservation, ready: PreparedBatch, result: CallResult) -> None:
        """Note errors, peaks and the least headroom of a step."""
        traced, form = ready.executor.program.traced, self._config.number_format
        named = dict(zip(traced.outputs, result.outputs, strict=True))
        for name, seen in compare_outputs(named, ready.number).items():
            if seen.kind != "integer" and seen.elements:
                record.errors[name] = seen.err_sq, seen.ref_sq
        record.origins = result.origins
        sites = {site.id: site for site in traced.sites}
        exempt = self._runner.record.by_design | self._runner.executors.parameter_free
        peaks = [
            (max(row.fields["ref_peak"], row.fields["peak"]), str(row.site))
            for row in result.measured
            if (site := sites.get(row.site)) is not None
            and site.dtype in LOW_PRECISION_DTYPES
            and site.role is not Role.WEIGHT_CAST
            and row.site not in exempt
        ]
        peak, record.headroom_at = max(peaks, default=(0.0, ""))
        record.headroom_bits = form.headroom_bits(peak) if peak > 0.0 else None

    def _run_unrepaired(self, ready: PreparedBatch, side: _Side) -> list[Pair]:
        """Return the outputs of the unrepaired run; none if it cannot go on."""
        ready = replace(ready, own=Carried(tensor_leaves(side.inputs.args, side.inputs.kwargs), side.buffers))
        try:
            found = self._runner.outputs(ready, Observer())
        except (AuditError, ValueError):
            self._unrepaired, self._lost = None, True
            return []
        side.buffers |= ready.executor.named_buffers()
        return found

    def _step_on(
        self,
        record: StepObservation,
        ready: PreparedBatch,
        outputs: list[Pair],
        unrepaired: list[Pair] | None,
        side: _Side,
    ) -> None:
        """Make the inputs of the next step in each run; ``side`` is the unrepaired one, if it differs."""
        again = _Side(self._fp32.inputs, own_copy(self._fp32.function))
        fp32, watch = self._call(self._fp32, ready, outputs, 0)
        own, own_watch = self._call(self._own, ready, outputs, 1)
        call = self._config.call_name(ready.number)
        if record.step == 1:
            refuse_misfit(ready.model, fp32, call)
            refuse_hidden_state(fp32, self._call(again, ready, outputs, 0)[0])
        self._fp32.inputs, self._own.inputs = fp32, carried_inputs(fp32, own, call, record)
        if record.faults:
            op, line = first_fault(watch.ops, own_watch.ops)
            record.faults = [replace(fault, op=op, line=line) for fault in record.faults]
        if self._lost or (unrepaired is None and not record.faults):
            return
        try:
            if unrepaired is not None:
                own, _ = self._call(side, ready, unrepaired, 1)
            side.inputs = carried_inputs(fp32, own, call, None)
            self._unrepaired = side
        except AuditError:
            self._unrepaired, self._lost = None, True

    def _call(
        self, side: _Side, ready: PreparedBatch, outputs: list[Pair], index: int
    ) -> tuple[Batch, OpWatch]:
        """Call the function for one run, with the same random numbers for all."""
        program, call = ready.executor.program, self._config.call_name(ready.number)
        if program.traced.structure is None:
            raise InputError(
                f"the outputs of {call} are in an object that cannot be copied for {NEXT_INPUTS}",
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
            torch.manual_seed(self._config.seed + ready.number + _SEED_OFFSET)
            try:
                return side.call(program.traced.structure.filled(tensors), Lent(shared), call)
            except NothingFedBack:
                if not self._own.buffers:
                    raise
                return side.inputs, OpWatch()  # the state is in buffers


def _as_placed(batch: Batch, ready: PreparedBatch) -> Batch:
    """Cast the inputs of the first step as the policy does."""
    places = ready.executor.program.traced.placeholders
    dtypes = [place.dtype for place in places if place.slot is Slot.INPUT]
    placed = dict(zip(map(id, tensor_leaves(batch.args, batch.kwargs)), dtypes, strict=True))
    return batch.mapped(
        lambda tensor: tensor.to(placed[id(tensor)]) if tensor.is_floating_point() else tensor
    )


def _broken(outputs: list[Pair]) -> bool:
    """Return whether an output is not finite in 16 bits only."""
    return any(
        value.is_floating_point() and bool((~value.isfinite() & reference.isfinite()).any())
        for reference, value in outputs
    )
