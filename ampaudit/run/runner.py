"""Runs the batches of one plan: traces, executes, repairs, merges."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ampaudit.core.errors import InputError, ReferenceBroken
from ampaudit.core.sites import SiteId
from ampaudit.policy import Measurement, plain_fp32
from ampaudit.run.attribution import Attribution, find_culprits
from ampaudit.run.backends import choose_backend
from ampaudit.run.buffers import buffer_updates
from ampaudit.run.config import RunConfig
from ampaudit.run.decisions import DecisionStats
from ampaudit.run.eager import EagerModel
from ampaudit.run.fp32_check import Fp32Check, is_broken
from ampaudit.run.guards import guarded, refuse_broken_inputs
from ampaudit.run.lockstep import LockStep, Pair
from ampaudit.run.measurements import measurements, weight_peaks
from ampaudit.run.meter import MeasuredValue, Meter
from ampaudit.run.outputs import compare_outputs, merge_outputs, paired_with_fp32
from ampaudit.run.program import Program, compile_program
from ampaudit.run.propagation import FaultPropagation
from ampaudit.run.record import RunRecord
from ampaudit.run.repair import RepairingMeter
from ampaudit.source.interface import Batch
from ampaudit.trace import Site, trace
from ampaudit.trace.converted import ConvertedModel, convert
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.functional import functionalized
from ampaudit.trace.graph import TracedModel
from ampaudit.trace.keys import TraceCache, call_key
from ampaudit.trace.state import PythonState, hand_over
from ampaudit.trace.structure import structural_copy

__all__ = ["PreparedTrace", "RunConfig", "Runner"]


@dataclass(frozen=True, slots=True)
class PreparedTrace:
    """A batch that is ready to be run, and the model as it is before."""

    executor: LockStep
    tensors: list[torch.Tensor]
    meter: Meter
    batch: Batch
    number: int
    model: nn.Module


class Runner:
    """Keeps one executor per kind of call: a batch of another shape, or with another flag, is traced anew.

    Where the model's code counts its calls, or draws random numbers in Python, each batch is traced anew, on
    a copy of the model that goes through the states that the user's would go through.
    """

    def __init__(
        self, model: nn.Module, plan: RunConfig, record: RunRecord, eager: EagerModel | None = None
    ) -> None:
        self._model = model
        self._own = False  # whether the model is a copy
        self.plan = plan
        self.record = record
        self._backend = plan.backend or choose_backend(plan.device)
        self._executors: TraceCache[LockStep] = TraceCache()
        self._worst: dict[str, Attribution] = {}  # by output, of its worst batch
        self._programs: dict[int, Program] = {}  # by identity, for the policy's second phase
        self.sites: dict[str, Site] = {}
        self.parameter_free: set[str] = set()
        self._given: dict[int, dict[str, float]] = {}
        self.converted: list[ConvertedModel] = []
        record.backend = self._backend.name
        self._gradients = plan.differentiator(plan) if plan.differentiator is not None else None
        record.gradients = None if self._gradients is None else self._gradients.record
        self._fp32 = Fp32Check(plan, eager or EagerModel(plan.device, plan.seed, plan.release), record.code)

    def run(self, batch: Batch, number: int) -> None:
        """Trace if need be, run, and run again with repairs if something went wrong."""
        self.execute(self.prepare(batch, number))

    def execute(self, ready: PreparedTrace) -> None:
        """Run a batch that is ready, and again with repairs if something went wrong."""
        started = time.perf_counter()
        outputs = self._pass(ready.executor, ready.tensors, ready.meter, ready.number)
        self._add_seconds("run", started)
        self.finish(ready, outputs)

    def prepare(self, batch: Batch, number: int) -> PreparedTrace:
        """Trace if need be, and look at the inputs."""
        model = self._model
        executor = self.executor(batch, number)
        tensors = tensor_leaves(batch.args, batch.kwargs)
        refuse_broken_inputs(tensors, number)
        return PreparedTrace(executor, tensors, self._meter(), batch, number, model)

    def finish(self, ready: PreparedTrace, outputs: list[Pair]) -> None:
        """Read what a run measured; run again with repairs if something went wrong; merge."""
        started = time.perf_counter()
        executor, tensors, meter, number = ready.executor, ready.tensors, ready.meter, ready.number
        measured = list(meter.results())
        self._note_inputs(executor, tensors)
        fp32 = self.fp32_outputs(ready, outputs)
        if fp32 is None:
            self._refuse_broken_reference(outputs, measured, number)
        named = dict(zip(executor.program.traced.outputs, outputs, strict=True))
        if self.plan.keep_outputs is not None:
            self.plan.keep_outputs(number, named)
        if not self._reference_only:
            self._compare(ready, named, fp32)
        faults = FaultPropagation(
            executor.program,
            measured,
            self.plan.number_format.max,
            lambda node: executor.given_peak(node, tensors),
        )
        self.record.masks |= faults.masks
        self.record.by_design |= faults.by_design
        if faults.need_repair:
            repairing = RepairingMeter(self._meter(), faults.masks)
            outputs = self._pass(executor, tensors, repairing, number)
            meter, measured = repairing.meter, list(repairing.meter.results())
            self._note_origins(repairing.origins, faults, number)
        self._merge(meter, measured)
        self._add_seconds("run", started)
        if self._gradients is not None:
            started = time.perf_counter()
            with guarded(self.plan.device):
                self._gradients.run(executor, outputs, number)
            self._add_seconds("backward", started)

    def _compare(
        self, ready: PreparedTrace, named: dict[str, Pair], fp32: dict[str, torch.Tensor] | None
    ) -> None:
        """Compare the outputs with the FP32 model's, and keep the worst batch of each.

        Edited code is judged by the user's own model, and so is what it gives in FP32.
        """
        found = compare_outputs(paired_with_fp32(named, fp32), ready.number)
        if self.plan.edits and fp32 is not None:
            edited = {name: (fp32.get(name), reference) for name, (reference, _) in named.items()}
            merge_outputs(self.record.edited, compare_outputs(edited, ready.number))
        attribution = Attribution(ready.executor, ready.tensors, self.plan.seed + ready.number)
        for name in merge_outputs(self.record.outputs, found):
            self._worst[name] = attribution
        self.record.buffers |= {update.name: update for update in buffer_updates(ready.executor)}

    def attribute(self) -> None:
        """Find out where the errors of outputs that are too inaccurate enter."""
        least = self.plan.min_sqnr
        if least is None or any(origin.harms for origin in self.record.origins):
            return
        started = time.perf_counter()
        self.record.culprits = find_culprits(self.record.outputs, self._worst, least)
        if self.record.culprits:
            self._add_seconds("attribution", started)

    def executor(self, batch: Batch, number: int) -> LockStep:
        """The executor for such a batch, traced on first use."""
        key = call_key(batch.args, batch.kwargs)
        executor = self._executors.find(key)
        if executor is None:
            state = PythonState(self._model)
            executor = self._traced(batch, number)
            if not executor.program.traced.drew:
                self._executors.keep(key, state, executor)
        self._follow(executor.program.traced)
        return executor

    def _traced(self, batch: Batch, number: int) -> LockStep:
        started = time.perf_counter()
        plan = self.plan
        rules = plan.rules or plain_fp32()
        author_rules = plan.author_rules if plan.rules else plain_fp32()
        differentiated, seed = self._gradients is not None, plan.seed + number
        setting = (rules, author_rules, plan.number_format, plan.measured, plan.edits, differentiated, seed)
        traced = trace(self._model, batch.args, batch.kwargs, *setting, ways_back=differentiated)
        if not traced.outputs:
            raise InputError(
                f"{type(self._model).__name__} returns no tensor: there is nothing to compare",
                hint="return the tensors that are used",
            )
        traced = functionalized(traced) if differentiated else traced
        converted = convert(traced, plan.release)
        self._add_seconds("trace", started)
        program = compile_program(traced, plan.device)
        executor = LockStep(
            program, converted, self._backend, plan.device, reference_only=self._reference_only
        )
        if rules.measured:
            self._programs[id(program)] = program
        if plan.keep_graphs or any(s.id not in self.sites for s in traced.sites) or not self.converted:
            self.converted.append(converted)
        for site in traced.sites:
            self.sites.setdefault(site.id, site)
        free = {node.name for node in program.parameter_free}
        self.parameter_free |= {site.id for site in traced.sites if site.node in free}
        return executor

    def _follow(self, traced: TracedModel) -> None:
        """Let the state of a copy of the model go on as a call of the model would; the user's stays."""
        if not any(change.plain for change in traced.changes):
            return
        if not self._own or traced.reads:  # then the model as it was is run, too
            tensors = named_tensors(self._model).values()
            self._model = structural_copy(self._model, {id(t): t for t in tensors})
            self._executors, self._own = TraceCache(), True
        hand_over(traced.changes, PythonState(self._model))

    def fp32_outputs(self, ready: PreparedTrace, outputs: list[Pair]) -> dict[str, torch.Tensor] | None:
        """The FP32 model's own outputs by name; ``None`` where the reference is that model.

        Outputs that have no counterpart in FP32 are left out.
        """
        reads, edited = ready.executor.program.traced.reads, bool(self.plan.edits)
        if self._reference_only or not (reads or edited):
            return None
        started = time.perf_counter()
        model, program, call = ready.model, ready.executor.program, (ready.batch, ready.number)
        # the reference has the edits in it, and the user's model has not
        check = self._fp32
        found = check.unedited(model, *call) if edited else check.outputs(model, program, *call, outputs)
        self._add_seconds("fp32", started)
        return found

    def _meter(self) -> Meter:
        return Meter(self.plan.number_format, self._backend, local=not self._reference_only)

    @property
    def _reference_only(self) -> bool:
        return self.plan.rules is None or self.plan.reference_only

    def _pass(
        self, executor: LockStep, tensors: list[torch.Tensor], observer: Meter | RepairingMeter, number: int
    ) -> list[Pair]:
        followed = (
            observer if self._gradients is None else self._gradients.following(observer, executor.program)
        )
        with guarded(self.plan.device):
            torch.manual_seed(self.plan.seed + number)
            return executor.run(tensors, followed)

    def _note_inputs(self, executor: LockStep, tensors: list[torch.Tensor]) -> None:
        if self.plan.rules is None or not self.plan.rules.measured:
            return
        seen = self._given.setdefault(id(executor.program), {})
        floats = [node for node in executor.program.inputs if executor.is_given_float(node)]
        for node in floats:
            seen[node.name] = max(seen.get(node.name, 0.0), executor.given_peak(node, tensors))

    def measurements(self) -> dict[SiteId, Measurement]:
        """What the batches so far have shown, for the policy's second phase."""
        found: dict[SiteId, Measurement] = {}
        for number, program in self._programs.items():
            weights = weight_peaks(program, self.plan.release)
            given = self._given.get(number, {})
            for site, seen in measurements(program, self.record, given, weights).items():
                found[site] = seen.joined(found[site]) if site in found else seen
        return found

    def _note_origins(self, origins: Sequence[SiteId], faults: FaultPropagation, number: int) -> None:
        known = {origin.site for origin in self.record.origins}
        for site in origins:
            if site not in known:
                self.record.origins.append(faults.origin(site, number))

    def _merge(self, meter: Meter, measured: Sequence[MeasuredValue]) -> None:
        for row in measured:
            self.record.observation(row.site).merge(row.fields, row.elements)
        for site, error, signal, elements in meter.local_results():
            observation = self.record.observation(site)
            observation.local_err_sq += error
            observation.local_ref_sq += signal
            observation.local_elements += elements
        for site, peak in meter.inside_results():
            observation = self.record.observation(site)
            observation.inside_peak = max(observation.inside_peak, peak)
        for site, elements, differing in meter.choices():
            self.record.decisions.setdefault(site, DecisionStats()).add(elements, differing)
        for name, statistics in meter.samples.results.items():
            self.record.observation(self.sites[name].id).samples.add(statistics)
        self.record.uncovered.update(meter.uncovered)
        self.record.batches += 1

    def _refuse_broken_reference(
        self, outputs: list[Pair], measured: list[MeasuredValue], number: int
    ) -> None:
        if not any(is_broken(reference) for reference, _ in outputs):
            return
        first = next((row.site for row in measured if row.fields["ref_bad"] > 0), None)
        site = self.sites[first] if first else None
        where = f" at {site.id}" if site else ""
        line = f" ({site.source.file}:{site.source.line})" if site and site.source else ""
        raise ReferenceBroken(
            f"the FP32 model itself gives NaN or infinity in batch {number}; the first is{where}{line}"
        )

    def _add_seconds(self, phase: str, started: float) -> None:
        elapsed = time.perf_counter() - started
        self.record.seconds[phase] = self.record.seconds.get(phase, 0.0) + elapsed
