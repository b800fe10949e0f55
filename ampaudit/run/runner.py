"""Runs the batches of one configuration: executes, repairs, merges."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

import torch
from torch import nn

from ampaudit.core.errors import ReferenceBroken
from ampaudit.core.sites import SiteId
from ampaudit.policy import Measurement
from ampaudit.run.attribution import Attribution, find_culprits
from ampaudit.run.buffers import buffer_updates
from ampaudit.run.config import Against, RunConfig
from ampaudit.run.eager import EagerModel
from ampaudit.run.executors import ExecutorCache
from ampaudit.run.fp32_check import Fp32Check, is_broken
from ampaudit.run.guards import guarded, refuse_broken_inputs
from ampaudit.run.lockstep import Carried, LockStep
from ampaudit.run.measurements import measurements, weight_peaks
from ampaudit.run.merging import merge_measured, note_origins
from ampaudit.run.meter import MeasuredValue, Meter
from ampaudit.run.observer import Observer, Pair
from ampaudit.run.outputs import OutputComparison, compare_outputs, merge_outputs, paired_with_fp32
from ampaudit.run.prepared import CallResult, Judged, PreparedBatch
from ampaudit.run.program import Program
from ampaudit.run.propagation import FaultPropagation
from ampaudit.run.record import RunRecord
from ampaudit.run.repair import RepairingMeter
from ampaudit.source.interface import Batch
from ampaudit.trace.entry import tensor_leaves

__all__ = ["Runner"]


class Runner:
    """Runs a model batch by batch and merges the results into one record.

    Args:
        model: the user's.
        config: what to run.
        eager: runs the FP32 model; shared by the policies of an audit.

    Attributes:
        executors: of the model's graphs, with their sites.
        record: of the current batch; in the end, of all.
    """

    def __init__(self, model: nn.Module, config: RunConfig, eager: EagerModel | None = None) -> None:
        self.config = config
        self.record = record = RunRecord(device=config.device.type, backend="")
        self.executors = ExecutorCache(model, config, record)
        self._outputs: dict[str, OutputComparison] = {}  # the worst so far
        self._worst: dict[str, Attribution] = {}  # by output, of that batch
        self._elsewhere: dict[int, tuple[LockStep, Batch]] = {}
        record.backend = self.executors.backend.name
        self._gradients = config.differentiator(config) if config.differentiator is not None else None
        self._eager = eager or EagerModel(config.device, config.seed, config.release)
        self._fp32 = Fp32Check(config, self._eager, record)

    def run(self, batch: Batch, number: int) -> None:
        """Trace if necessary, run, and run again with repairs if something broke."""
        self.execute(self.prepare(batch, number))

    def skip(self, batch: Batch, number: int) -> None:
        """Trace a batch that another machine runs, so that sites and graphs are the same on all."""
        executor = self.executors.get(batch, number)
        self._elsewhere[number] = executor, batch
        if self._gradients is not None:
            self._gradients.pass_over(executor)

    def end_batch(self) -> RunRecord:
        """Return what was recorded since the last batch, and begin a new record."""
        if self._gradients is not None:
            self._gradients.take(self.record)
        return self.record.taken()

    def execute(self, ready: PreparedBatch) -> tuple[list[Pair], dict[str, Pair], CallResult]:
        """Run a prepared batch, and again with repairs if something broke.

        Returns:
            The outputs of the first run, the buffers that it wrote, and the results of the last.
        """
        started = time.perf_counter()
        outputs = self.outputs(ready, ready.meter)
        self._add_seconds("run", started)
        return outputs, ready.executor.named_buffers(), self.finish(ready, outputs)

    def prepare(
        self, batch: Batch, number: int, own: Batch | None = None, buffers: Mapping[str, Pair] | None = None
    ) -> PreparedBatch:
        """Trace if necessary, and check the inputs.

        Args:
            batch: the inputs.
            number: of the call.
            own: the inputs of the 16-bit run in a later step, in the dtypes in which it has them.
            buffers: what earlier steps left in the buffers.
        """
        model = self.executors.model
        executor = self.executors.get(batch, number, own, buffers)
        tensors = tensor_leaves(batch.args, batch.kwargs)
        refuse_broken_inputs(tensors, batch.title(number))
        self._check_twins(executor.program, model, batch, number)
        carried = None if own is None else Carried(tensor_leaves(own.args, own.kwargs), buffers or {})
        beyond = carried is not None and self._beyond(tensors, carried)
        return PreparedBatch(executor, tensors, self._meter(local=not beyond), batch, number, model, carried)

    def _check_twins(self, program: Program, model: nn.Module, batch: Batch, number: int) -> None:
        ops = {site.twin.op for site in program.traced.sites if site.twin is not None}
        if ops:  # on each batch, so that it does not matter which of them this machine runs
            found = self._eager.check_twins(ops, model, batch, number)
            self.record.twins |= {op: self.record.twins.get(op) or why for op, why in found.items()}

    def _beyond(self, tensors: list[torch.Tensor], own: Carried) -> bool:
        """Return whether FP32's inputs cannot be held in 16 bits: on those, no op shows its own error."""
        pairs = zip(tensors, own.inputs, strict=True)
        floats = (first for first, second in pairs if first is not second and first.numel())
        return any(float(tensor.abs().amax()) > self.config.number_format.max for tensor in floats)

    def finish(self, ready: PreparedBatch, outputs: list[Pair]) -> CallResult:
        """Read the measurements of a run, run again with repairs if something broke, and merge."""
        started = time.perf_counter()
        judged, repairing, unrepaired = self.judge(ready, outputs), None, outputs
        if judged.needs_repair:
            repairing = self.repairing(ready, judged.faults.masks)
            outputs = self.outputs(ready, repairing)
        result = self.conclude(judged, repairing, outputs)
        self._add_seconds("run", started)
        if self._gradients is not None:
            started = time.perf_counter()
            with guarded(self.config.device):
                title = ready.batch.title(ready.number)
                self._gradients.run(ready.executor, outputs, unrepaired, ready.number, title)
            self._add_seconds("backward", started)
        return result

    def judge(self, ready: PreparedBatch, outputs: list[Pair]) -> Judged:
        """Read the measurements of a run without repairs, compare its outputs, and follow its faults."""
        executor, tensors, number = ready.executor, ready.tensors, ready.number
        measured = list(ready.meter.results())
        self._note_inputs(executor, tensors)
        fp32 = self.fp32_outputs(ready, outputs)
        if fp32 is None:
            self._refuse_broken_reference(outputs, measured, ready.batch.title(number))
        named = dict(zip(executor.program.traced.outputs, outputs, strict=True))
        if self.config.keep_outputs is not None:
            self.config.keep_outputs(number, named)
        if not self.config.fp32_only:
            self._compare(ready, named, fp32)
        faults = FaultPropagation(
            executor.program,
            measured,
            self.config.number_format.max,
            lambda node: executor.given_peak(node, tensors),
        )
        self.record.masks |= faults.masks
        self.record.by_design |= faults.by_design
        return Judged(ready, measured, faults)

    def repairing(self, ready: PreparedBatch, masks: Collection[str]) -> RepairingMeter:
        """Return the observer of the second run of a batch in which something broke."""
        return RepairingMeter(self._meter(local=ready.meter.local), set(map(SiteId, masks)))

    def conclude(self, judged: Judged, repairing: RepairingMeter | None, outputs: list[Pair]) -> CallResult:
        """Merge the measurements of a batch; those with repairs, if it had to run again."""
        ready, measured = judged.ready, judged.measured
        meter, number = ready.meter, ready.number
        origins: tuple[SiteId, ...] = ()
        if repairing is not None:
            meter, measured = repairing.meter, list(repairing.meter.results())
            origins = tuple(repairing.origins)
            note_origins(self.record, origins, judged.faults, number)
        repaired = None if meter is ready.meter else meter.path
        self.record.path.add(ready.meter.path, ready.executor.program.traced, number, repaired)
        merge_measured(self.record, meter, measured, number)
        if ready.batch.name and self.config.steps is None:
            self.record.names[number] = ready.batch.name
        return CallResult(outputs, measured, origins)

    def _compare(
        self, ready: PreparedBatch, named: dict[str, Pair], fp32: dict[str, torch.Tensor] | None
    ) -> None:
        """Compare outputs with the FP32 model's, and keep the worst batch of each.

        Edited code is judged by the user's own model, and so is what it gives in FP32.
        """
        found = compare_outputs(paired_with_fp32(named, fp32), ready.number)
        if self.config.edits and fp32 is not None:
            edited = {name: (fp32.get(name), reference) for name, (reference, _) in named.items()}
            merge_outputs(self.record.edited, compare_outputs(edited, ready.number))
        buffers = {} if ready.own is None else ready.own.buffers
        own = Carried(ready.tensors, {name: (pair[0], pair[0]) for name, pair in buffers.items()})
        attribution = Attribution(ready.executor, ready.tensors, self.config.seed + ready.number, own)
        merge_outputs(self.record.outputs, found)
        for name in merge_outputs(self._outputs, found):
            self._worst[name] = attribution
        self.record.buffers |= {update.name: update for update in buffer_updates(ready.executor)}

    def attribute(self) -> None:
        """Find where the errors of inaccurate outputs enter."""
        least = self.config.min_sqnr
        comparison = self.record.comparison
        if least is None or any(origin.harms for origin in self.record.origins):
            return
        if comparison is not None and comparison.wrong:
            return  # no rounding is to blame
        started = time.perf_counter()
        worst = self._worst | {
            name: self._attribution(seen.batch)
            for name, seen in self.record.outputs.items()
            if seen.batch in self._elsewhere
        }
        self.record.culprits = find_culprits(self.record.outputs, worst, least)
        if self.record.culprits:
            self._add_seconds("attribution", started)

    def _attribution(self, number: int) -> Attribution:
        """Prepare to trace errors of a batch that another machine has run."""
        executor, batch = self._elsewhere[number]
        tensors = tensor_leaves(batch.args, batch.kwargs)
        return Attribution(executor, tensors, self.config.seed + number, Carried(tensors))

    def fp32_outputs(self, ready: PreparedBatch, outputs: list[Pair]) -> dict[str, torch.Tensor] | None:
        """Return the FP32 model's own outputs by name; ``None`` if the reference is that model.

        Outputs that have no counterpart in FP32 are left out. With a reference model, those are its outputs.
        """
        if self.config.against is not None:
            return self._reference_outputs(self.config.against, ready)
        reads, edited = ready.executor.program.traced.reads, bool(self.config.edits)
        stateful = ready.own is not None and bool(ready.own.buffers)  # which a copy of the model has not
        if ready.executor.program.traced.path is not None and not (reads or edited or stateful):
            self._fp32.refuse_other_path(
                ready.model, ready.executor.program, ready.batch, ready.number, outputs
            )
        if self.config.fp32_only or stateful or not (reads or edited):
            return None
        started = time.perf_counter()
        model, program, call = ready.model, ready.executor.program, (ready.batch, ready.number)
        # the reference has the edits in it, and the user's model has not
        check = self._fp32
        found = check.unedited(model, *call) if edited else check.outputs(model, program, *call, outputs)
        self._add_seconds("fp32", started)
        return found

    def _reference_outputs(self, against: Against, ready: PreparedBatch) -> dict[str, torch.Tensor]:
        started = time.perf_counter()
        found, known = against.compare(ready.executor, ready.tensors, ready.number), self.record.comparison
        if known is None or (found.wrong and not known.wrong):
            self.record.comparison = found
        self._add_seconds("comparison", started)
        return dict(found.outputs)

    def _meter(self, *, local: bool = True) -> Meter:
        local = local and not self.config.fp32_only
        return Meter(self.config.number_format, self.executors.backend, local=local)

    def outputs(self, ready: PreparedBatch, observer: Observer) -> list[Pair]:
        """Run a prepared batch under an observer."""
        program = ready.executor.program
        followed = observer if self._gradients is None else self._gradients.following(observer, program)
        with guarded(self.config.device, ready.batch):
            torch.manual_seed(self.config.seed + ready.number)
            return ready.executor.run(ready.tensors, followed, ready.own)

    def _note_inputs(self, executor: LockStep, tensors: list[torch.Tensor]) -> None:
        if self.config.rules is None or not self.config.rules.measured:
            return
        seen = self.record.given.setdefault(self.executors.number_of(executor.program), {})
        floats = [node for node in executor.program.inputs if executor.is_given_float(node)]
        for node in floats:
            seen[node.name] = max(seen.get(node.name, 0.0), executor.given_peak(node, tensors))

    def measurements(self) -> dict[SiteId, Measurement]:
        """Return the measurements so far, for the policy's second phase."""
        found: dict[SiteId, Measurement] = {}
        for number, program in enumerate(self.executors.programs):
            weights = weight_peaks(program, self.config.release)
            given = self.record.given.get(number, {})
            for site, seen in measurements(program, self.record, given, weights).items():
                found[site] = seen.joined(found[site]) if site in found else seen
        return found

    def _refuse_broken_reference(
        self, outputs: list[Pair], measured: list[MeasuredValue], title: str
    ) -> None:
        if not any(is_broken(reference) for reference, _ in outputs):
            return
        first = next((row.site for row in measured if row.fields["ref_bad"] > 0), None)
        site = self.executors.sites[first] if first else None
        where = f" at {site.id}" if site else ""
        line = f" ({site.source.file}:{site.source.line})" if site and site.source else ""
        raise ReferenceBroken(
            f"the FP32 model itself gives NaN or infinity in {title}; the first is{where}{line}"
        )

    def _add_seconds(self, phase: str, started: float) -> None:
        self.record.add_seconds(phase, time.perf_counter() - started)
