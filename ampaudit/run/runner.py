"""Runs the batches of one configuration, repairs faults, and merges the measurements."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx, nn

from ampaudit.core.errors import InputError, ReferenceBroken
from ampaudit.core.sites import SiteId
from ampaudit.policy import Measurement, RuleSet, plain_fp32
from ampaudit.run.attribution import MAX_OUTPUTS, Attribution
from ampaudit.run.backends import choose_backend
from ampaudit.run.config import RunConfig
from ampaudit.run.device import guarded, refuse_broken_inputs, refuse_larger_than_memory
from ampaudit.run.fp32_check import EagerModel, Fp32Check, is_broken
from ampaudit.run.lockstep import CarriedState, LockStep, Observer, Pair
from ampaudit.run.measure import fetch, finite_peak
from ampaudit.run.meter import DecisionStats, MeasuredValue, Meter
from ampaudit.run.outputs import OutputComparison, compare_outputs, merge_outputs
from ampaudit.run.program import NodeOrMemory, Program, Step, compile_program
from ampaudit.run.propagation import FaultPropagation, HiddenErrors, RepairingMeter
from ampaudit.run.record import RunRecord, buffer_updates, takes_path
from ampaudit.source.interface import Batch
from ampaudit.trace import Site, trace
from ampaudit.trace.converted import ConvertedModel, Release, attach_weights
from ampaudit.trace.entry import names_of_tensors, tensor_leaves
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.flow import slices_taken
from ampaudit.trace.functional import functionalized
from ampaudit.trace.graph import Slot, TracedModel
from ampaudit.trace.isolation import structural_copy
from ampaudit.trace.opnames import converts
from ampaudit.trace.path.recorder import PathInputs, PathTracing, with_known_casts
from ampaudit.trace.state import PythonState, TraceCache, apply_changes, call_key
from ampaudit.trace.values import widened_tensor


class Runner:
    """Runs a model batch by batch and merges the results into one record."""

    def __init__(self, model: nn.Module, config: RunConfig, eager: EagerModel | None = None) -> None:
        self.config = config
        # record of the current batch; at the end, of all batches
        self.record = record = RunRecord(device=config.device.type, backend="")
        # executors of the model's graphs, with their sites
        self.executors = ExecutorCache(model, config, record)
        self._outputs: dict[str, OutputComparison] = {}  # of each output, in its worst batch so far
        self._worst: dict[str, Attribution] = {}  # to attribute the error in that batch
        self._elsewhere: dict[int, tuple[LockStep, Batch]] = {}  # batches that other machines run
        record.backend = self.executors.backend.name
        # recorders that watch the runs besides the meters
        self.recorders = tuple(make(config) for make in config.recorders)
        self._eager = eager or EagerModel(config.device, config.seed, config.release)
        self._fp32 = Fp32Check(config, self._eager, record)

    def run(self, batch: Batch, number: int) -> None:
        """Trace if necessary, run, and run again with repairs if something broke."""
        call = self.prepare(batch, number)
        with self.record.timing("run"):
            outputs = self.execute(call, call.meter)
        self.finish(call, outputs)

    def skip(self, batch: Batch, number: int) -> LockStep:
        """Trace a batch that another machine runs, so that sites and graphs are the same on all."""
        executor = self.executors.get(batch, number)
        self.pass_on(batch, number, executor)
        return executor

    def pass_on(self, batch: Batch, number: int, executor: LockStep) -> None:
        """Record that a traced batch ends on another machine."""
        self._elsewhere[number] = executor, batch
        for recorder in self.recorders:
            recorder.skip(executor)

    def end_batch(self) -> RunRecord:
        """Return the record of the batch, and start a new one."""
        for recorder in self.recorders:
            recorder.take(self.record)
        return self.record.drain()

    def prepare(
        self,
        batch: Batch,
        number: int,
        low_batch: Batch | None = None,
        buffers: Mapping[str, Pair] | None = None,
    ) -> BatchRun:
        """Trace if necessary, and check the inputs.

        Args:
            batch: Inputs of the FP32 run.
            number: Number of the call.
            low_batch: Inputs of the 16-bit run in its own dtypes, in later steps.
            buffers: Values that earlier steps left in the buffers of both runs, by name.
        """
        model = self.executors.model
        executor = self.executors.get(batch, number, low_batch, buffers)
        tensors = tensor_leaves(batch.args, batch.kwargs)
        names = names_of_tensors(batch.args, batch.kwargs)
        refuse_broken_inputs(dict(zip(names, tensors, strict=True)), batch.title(number))
        ops = {site.twin.op for site in executor.program.traced.sites if site.twin is not None}
        if ops:  # for each batch, so that the result is the same whichever batches this machine runs
            reasons = self._eager.check_twins(ops, model, batch, number)
            self.record.twins |= {op: self.record.twins.get(op) or why for op, why in reasons.items()}
        carried, local = CarriedState(tensors), not self.config.fp32_only
        if low_batch is not None:
            carried = CarriedState(tensor_leaves(low_batch.args, low_batch.kwargs), buffers or {})
            pairs = zip(tensors, carried.inputs, strict=True)
            floats = (first for first, second in pairs if first is not second and first.numel())
            limit = self.config.number_format.max  # local errors of inputs beyond it would be meaningless
            local = local and not any(float(tensor.abs().amax()) > limit for tensor in floats)
        meter = Meter(self.config.number_format, self.executors.backend, local=local)
        return BatchRun(executor, tensors, meter, batch, number, self.config.seed + number, model, carried)

    def execute(self, call: BatchRun, observer: Observer) -> list[Pair]:
        """Run a prepared batch under an observer, and return the outputs."""
        for recorder in self.recorders:
            observer = recorder.following(observer, call.executor.program)
        return self._run(call, observer)

    def _run(self, call: BatchRun, observer: Observer) -> list[Pair]:
        with guarded(self.config.device, call.batch):
            torch.manual_seed(call.seed)
            return call.executor.run(call.tensors, observer, call.carried)

    def finish(self, call: BatchRun, outputs: list[Pair]) -> list[Pair]:
        """Read the measurements of a run, run again with repairs if something broke, and merge.

        Returns:
            The outputs of the last run.
        """
        unrepaired, repairing = outputs, None
        with self.record.timing("run"):
            faults = self.analyze(call, outputs)
            if faults.need_repair:
                self._narrow(call, faults)
                repairing = self.repairing(call, faults.masks)
                outputs = self.execute(call, repairing)
            self.conclude(call, repairing)
        if self.recorders:
            title = call.batch.title(call.number)
            with self.record.timing("backward"), guarded(self.config.device):
                for recorder in self.recorders:
                    recorder.finish(call.executor, outputs, unrepaired, call.number, title)
        return outputs

    def analyze(self, call: BatchRun, outputs: list[Pair]) -> FaultPropagation:
        """Read the measurements of a run without repairs, compare its outputs, and trace its faults."""
        executor, tensors, traced = call.executor, call.tensors, call.executor.program.traced
        call.measured = list(call.meter.results())
        if self.config.rules is not None and self.config.rules.measured:
            programs = enumerate(self.executors.programs)
            graph = next(graph for graph, program in programs if program is executor.program)
            peaks = self.record.input_peaks.setdefault(graph, {})
            for node, place in zip(executor.program.inputs, traced.placeholders, strict=True):
                floats = place.dtype is not None and place.dtype.is_floating_point
                if place.slot is Slot.INPUT and floats:
                    peak = finite_peak(executor.placeholder(node, tensors))
                    peaks[node.name] = max(peaks.get(node.name, 0.0), peak)
        fp32 = self._fp32_outputs(call, outputs)
        if fp32 is None:
            self._refuse_broken_reference(call, outputs)
        pairs = dict(zip(traced.outputs, outputs, strict=True))
        if self.config.keep_outputs is not None:
            self.config.keep_outputs(call.number, pairs)
        if not self.config.fp32_only:
            self._compare(call, pairs, fp32)
        call.faults = FaultPropagation(
            executor.program,
            call.measured,
            self.config.number_format.max,
            lambda node: executor.placeholder(node, tensors),
        )
        self.record.masks |= call.faults.masks
        self.record.by_design |= call.faults.by_design
        return call.faults

    def _narrow(self, call: BatchRun, faults: FaultPropagation) -> None:
        """Run without repairs again where it is open whether inf or NaN makes the next values inaccurate."""
        if faults.doubtful:
            observer = HiddenErrors(faults.doubtful)
            self._run(call, observer)
            faults.narrow(observer.errors)

    def repairing(self, call: BatchRun, masks: Collection[str]) -> RepairingMeter:
        """Return the observer for the second, repaired run of a batch."""
        meter = Meter(self.config.number_format, self.executors.backend, local=call.meter.local)
        return RepairingMeter(meter, call.executor.program, set(map(SiteId, masks)))

    def conclude(self, call: BatchRun, repairing: RepairingMeter | None) -> None:
        """Merge the measurements of a batch: those of the repaired run, if there was one."""
        meter, repaired, number = call.meter, None, call.number
        if repairing is not None:
            assert call.faults is not None, "a run is analyzed before its repairs"
            meter, call.measured = repairing.meter, list(repairing.meter.results())
            repaired, call.origins = meter.path, tuple(repairing.origins)
            harming = {origin.site for origin in self.record.origins if origin.harms}
            self.record.add_origins(call.faults.origins(set(call.origins), number, harming))
        self.record.path.add(call.meter.path, call.executor.program.traced, number, repaired)
        merge_measured(self.record, meter, call.measured, number)
        if call.batch.name and self.config.steps is None:
            self.record.names[number] = call.batch.name

    def _compare(self, call: BatchRun, pairs: dict[str, Pair], fp32: dict[str, torch.Tensor] | None) -> None:
        """Compare the outputs with those of the FP32 model, and keep the worst batch of each.

        Edited code, in 16 bits and in FP32, is compared with the user's unedited model.
        """
        against: Mapping[str, Pair] = pairs
        if fp32 is not None:  # without the outputs that only the 16-bit run returns
            against = {name: (fp32.get(name), value) for name, (_, value) in pairs.items()}
            if self.config.edits:
                edited = {name: (fp32.get(name), reference) for name, (reference, _) in pairs.items()}
                merge_outputs(self.record.edited, compare_outputs(edited, call.number))
        comparisons = compare_outputs(against, call.number)
        buffers = {name: (pair[0], pair[0]) for name, pair in call.carried.buffers.items()}
        fp32_state = CarriedState(call.tensors, buffers)
        attribution = Attribution(call.executor, call.seed, fp32_state)
        merge_outputs(self.record.outputs, comparisons)
        for name in merge_outputs(self._outputs, comparisons):
            self._worst[name] = attribution
        self.record.buffers |= {update.name: update for update in buffer_updates(call.executor)}

    def attribute(self) -> None:
        """Find where the errors of inaccurate outputs enter, each in its worst batch, the worst first."""
        least, comparison = self.config.min_sqnr, self.record.comparison
        if least is None or any(origin.harms for origin in self.record.origins):
            return
        if comparison is not None and comparison.wrong:
            return  # no rounding is to blame
        started = time.perf_counter()
        accuracies = {name: output.accuracy_db for name, output in self.record.outputs.items()}
        wrong = {name: db for name, db in accuracies.items() if db is not None and db < least}
        batches: dict[int, list[str]] = {}
        for name in sorted(wrong, key=wrong.__getitem__):
            batches.setdefault(self.record.outputs[name].batch, []).append(name)
        for number, names in batches.items():
            if number in self._elsewhere:
                executor, batch = self._elsewhere[number]
                inputs = CarriedState(tensor_leaves(batch.args, batch.kwargs))
                attribution = Attribution(executor, self.config.seed + number, inputs)
            else:
                attribution = self._worst[names[0]]
            self.record.culprits += attribution.culprits(names[:MAX_OUTPUTS], least)
        if batches:
            self.record.add_seconds("attribution", time.perf_counter() - started)

    def _fp32_outputs(self, call: BatchRun, outputs: list[Pair]) -> dict[str, torch.Tensor] | None:
        """Return the outputs of the FP32 model, or of that of ``--against``, by name.

        Outputs without a counterpart in FP32 are left out.

        Returns:
            ``None`` if the lock-step reference is that model.
        """
        program = call.executor.program
        if self.config.against is not None:
            with self.record.timing("comparison"):
                comparison = self.config.against(call.executor, call.tensors, call.number)
                worst = self.record.comparison
                if worst is None or (comparison.wrong and not worst.wrong):
                    self.record.comparison = comparison
            return dict(comparison.outputs)
        if call.carried.buffers:
            return None  # the eager model does not have the buffers of earlier steps
        if program.traced.reads or self.config.edits:
            if self.config.fp32_only:
                return None
            with self.record.timing("fp32"):
                if self.config.edits:  # the reference contains the edits, unlike the user's model
                    return self._fp32.unedited(call.model, call.batch, call.number)
                return self._fp32.outputs(call.model, program, call.batch, call.number, outputs)
        if program.traced.path is not None:
            self._fp32.refuse_other_path(call.model, program, call.batch, call.number, outputs)
        return None

    def measurements(self) -> dict[SiteId, Measurement]:
        """Return the measurements so far, for the policy's measured rules."""
        by_site: dict[SiteId, Measurement] = {}
        for number, program in enumerate(self.executors.programs):
            weights = weight_peaks(program, self.config.release)
            input_peaks = self.record.input_peaks.get(number, {})
            for site, measurement in measurements(program, self.record, input_peaks, weights).items():
                by_site[site] = measurement.joined(by_site[site]) if site in by_site else measurement
        return by_site

    def _refuse_broken_reference(self, call: BatchRun, outputs: list[Pair]) -> None:
        if not any(is_broken(reference) for reference, _ in outputs):
            return
        first = next(_broken_before_outputs(call.executor.program, call.measured), None)
        site = self.executors.sites[first] if first else None
        where = f" at {site.id}" if site else ""
        line = f" ({site.source.file}:{site.source.line})" if site and site.source else ""
        title = call.batch.title(call.number)
        raise ReferenceBroken(
            f"the FP32 model itself gives NaN or infinity in {title}; the first is{where}{line}"
        )


def _broken_before_outputs(program: Program, measured: Sequence[MeasuredValue]) -> Iterator[SiteId]:
    """Yield the sites whose FP32 values are not finite, nor is anything from there to the outputs.

    An infinite mask, for example, becomes finite in its softmax.
    """
    broken = {row.site for row in measured if row.fields["ref_bad"] > 0}
    finite = {s.node for s in program.steps if s.makes_values and s.site and s.site.id not in broken}
    reached: set[NodeOrMemory] = {program.traced.graph.output_node()}
    frontier = list(reached)
    while frontier:
        sources = set(program.sources(frontier.pop())) - finite - reached
        reached |= sources
        frontier += sources
    sites = (step.site.id for step in program.steps if step.site and step.node in reached)
    return (site for site in sites if site in broken)


def measurements(
    program: Program, record: RunRecord, input_peaks: Mapping[str, float], weights: Mapping[str, float]
) -> dict[SiteId, Measurement]:
    """Return the FP32 peaks at every op that a rule decided about.

    ``input_peaks`` holds peaks by placeholder, ``weights`` by name.
    """
    peaks = dict.fromkeys(program.inputs, None) | {
        n: input_peaks[n.name] for n in program.inputs if n.name in input_peaks
    }
    for step in program.steps:
        peaks[step.node] = _output_peak(step, record, peaks)
    masks = _mask_nodes(program, record)
    stored = _stored_nodes(program)
    by_site: dict[SiteId, Measurement] = {}
    for step in program.steps:
        if step.site is None or step.site.facts is None:
            continue
        facts, sources = step.site.facts, step.node.all_input_nodes
        by_site[step.site.id] = Measurement(
            weight_peak=max((weights[n] for n in facts.parameters if n in weights), default=None),
            input_peak=_largest(peaks[n] for n in sources if n not in stored),
            output_peak=peaks[step.node],
            consumer_peak=_largest(peaks[n] for n in _users(step.node) if n in peaks),
            mask=step.node in masks or any(n in masks for n in sources) or _is_attention_mask(step, peaks),
        )
    return by_site


def weight_peaks(program: Program, release: Release | None) -> dict[str, float]:
    """Return the largest finite magnitude of each stored float tensor, fetched in one transfer.

    ``release`` frees the memory of each once it has been read.
    """
    places = [p for p in program.traced.placeholders if p.slot is not Slot.INPUT]
    tensors = {p.name: program.traced.tensors[p.node].detach() for p in places}
    floats = {name: t for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    ends = []
    for tensor in floats.values():
        ends.append(torch.aminmax(tensor if tensor.element_size() > 1 else tensor.float()))
        if release is not None:
            release(tensor)
    peaks = fetch(torch.maximum(-low, high).double().cpu() for low, high in ends)
    return {
        name: peak if math.isfinite(peak) else float(floats[name].nan_to_num(0.0, 0.0, 0.0).abs().amax())
        for name, peak in zip(floats, peaks, strict=True)
    }


def _output_peak(step: Step, record: RunRecord, peaks: Mapping[fx.Node, float | None]) -> float | None:
    """Return the measured peak of a step; for a view, that of its source."""
    observation = record.observations.get(step.site.id) if step.site else None
    if observation is not None:
        return observation.ref_peak
    return None if step.makes_values else _largest(peaks[n] for n in step.node.all_input_nodes)


def _stored_nodes(program: Program) -> set[fx.Node]:
    """Return parameters, buffers and constants, and their casts and views."""
    names = {p.node for p in program.traced.placeholders if p.slot is not Slot.INPUT}
    stored = {node for node in program.inputs if node.name in names}
    for step in program.steps:
        site = step.site
        transparent = not step.makes_values or (site is not None and site.role.converts)
        if transparent and step.node.all_input_nodes and all(n in stored for n in step.node.all_input_nodes):
            stored.add(step.node)
    return stored


def _mask_nodes(program: Program, record: RunRecord) -> set[fx.Node]:
    """Return nodes whose value is or contains a mask, including views of one."""
    by_design = record.masks | record.by_design
    masks: set[fx.Node] = set()
    for step in program.steps:
        transparent = not step.makes_values and any(n in masks for n in step.node.all_input_nodes)
        if transparent or (step.site is not None and step.site.id in by_design):
            masks.add(step.node)
    return masks


def _is_attention_mask(step: Step, peaks: Mapping[fx.Node, float | None]) -> bool:
    """Return whether a fused attention is called with an explicit mask."""
    if not str(step.target).startswith("aten.scaled_dot_product_attention"):
        return False
    args = step.node.args
    mask = step.node.kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    return isinstance(mask, fx.Node) and peaks.get(mask) is not None


def _users(node: fx.Node) -> Iterable[fx.Node]:
    """Return the users of a value, looking through casts and tuple access."""
    for user in node.users:
        if user.target is operator.getitem or converts(user.target):
            yield from _users(user)
        else:
            yield user


def _largest(peaks: Iterable[float | None]) -> float | None:
    return max((peak for peak in peaks if peak is not None), default=None)


def merge_measured(record: RunRecord, meter: Meter, measured: Sequence[MeasuredValue], number: int) -> None:
    """Merge the measurements of a batch into the record."""
    for row in measured:
        record.observation(row.site).merge(row.fields, row.elements, number)
    for site, error, signal, elements in meter.local_results():
        observation = record.observation(site)
        observation.local_err_sq += error
        observation.local_ref_sq += signal
        observation.local_elements += elements
    for site, peak in meter.inside_results():
        observation = record.observation(site)
        observation.inside_peak = max(observation.inside_peak, peak)
    for site, elements, differing in meter.choices():
        record.decisions.setdefault(site, DecisionStats()).add(elements, differing)
    for stack, numbers in meter.chosen():
        record.chosen.setdefault(stack, set()).update(numbers)
    for name, statistics in meter.samples.results.items():
        record.observation(SiteId(name)).samples.add(statistics)
    record.gaps |= meter.gaps
    record.batches += 1


@dataclass(slots=True)
class BatchRun:
    """A batch that is ready to run, and what its runs have measured."""

    executor: LockStep  # executor of its program
    tensors: list[torch.Tensor]  # inputs of the FP32 run
    meter: Meter  # observer of the run without repairs
    batch: Batch  # the batch
    number: int  # number of the call
    seed: int  # seed of its random numbers
    model: nn.Module  # the user's model in the state before the batch
    carried: CarriedState  # inputs of the 16-bit run, and buffers, as earlier steps left them
    measured: list[MeasuredValue] = field(default_factory=list)  # measurements of the last run
    faults: FaultPropagation | None = None  # faults of the run without repairs, once it is analyzed
    origins: tuple[SiteId, ...] = ()  # sites that broke by their own fault


class ExecutorCache:
    """Traces a model for each kind of call and compiles the trace.

    Models that count their calls, or draw random numbers in Python, are traced for each batch, on a copy
    that goes through the same Python states as the user's model would.
    """

    def __init__(self, model: nn.Module, config: RunConfig, record: RunRecord) -> None:
        self.model = model  # the user's model, or its copy in the state before the next batch
        self.backend = config.backend or choose_backend(config.device)  # backend of all executors
        self.sites: dict[str, Site] = {}  # sites of all graphs, by id
        # graphs that add sites or slices of parameters, or all graphs (``keep_graphs``)
        self.converted: list[ConvertedModel] = []
        self.programs: list[Program] = []  # programs traced for a policy with measured rules
        self._config = config
        self._record = record
        self._is_copy = False
        self._path = PathTracing.FALLBACK
        self._executors: TraceCache[LockStep] = TraceCache()
        self._slices: set[tuple[str, int | None]] = set()
        self._data: set[SiteId] = set()

    @property
    def constants(self) -> frozenset[SiteId]:
        """Sites that no parameter and no floating-point input reaches: masks, positions, tables."""
        return frozenset(site.id for site in self.sites.values() if site.id not in self._data)

    def get(
        self,
        batch: Batch,
        number: int,
        low_batch: Batch | None = None,
        buffers: Mapping[str, Pair] | None = None,
    ) -> LockStep:
        """Return the executor for a batch, traced on first use; arguments as for ``Runner.prepare``."""
        rules = usual = self._config.rules or plain_fp32()
        carried = CarriedState(tensor_leaves(batch.args, batch.kwargs), buffers or {})
        if low_batch is not None:
            rules, batch = _for_carried_inputs(rules, low_batch)
        key = (rules is usual, *call_key(batch.args, batch.kwargs))
        seed = self._config.seed + number
        executor = self._executors.find(  # the graph of a path is valid for batches that take it
            key, lambda known: known.program.traced.path is None or takes_path(known, carried, seed)
        )
        if executor is None:
            state = PythonState(self.model)
            executor = self._trace(batch, number, rules, carried)
            self._record.traces += 1
            if not executor.program.traced.random_constants:
                self._executors.keep(key, state, executor)
        self._follow(executor.program.traced)
        return executor

    def _trace(self, batch: Batch, number: int, rules: RuleSet, carried: CarriedState) -> LockStep:
        started = time.perf_counter()
        config = self._config
        author_rules = config.author_rules if config.rules else plain_fp32()
        sites = tuple(self.sites.values())
        values = PathInputs(carried.inputs, {name: pair[0] for name, pair in carried.buffers.items()})
        settings = config.trace_config(rules, author_rules, number, self._path)
        settings = replace(settings, measured=config.measured, known=sites, values=values)
        traced = trace(self.model, batch.args, batch.kwargs, settings)
        if traced.path is not None:
            self._path = PathTracing.ON  # skip the general trace from now on
            traced = with_known_casts(traced, sites)
        refuse_larger_than_memory(traced.graph, config.device)
        if not traced.outputs:
            raise InputError(
                f"{type(self.model).__name__} returns no tensor: there is nothing to compare",
                hint="return the tensors that are used; None, generators and numbers have no dtype to audit",
            )
        traced = functionalized(traced) if config.functionalize else traced
        converted = attach_weights(traced, config.release)
        self._record.add_seconds("trace", time.perf_counter() - started)
        program = compile_program(traced, config.device)
        executor = LockStep(
            program,
            converted,
            self.backend,
            config.device,
            reference_only=config.fp32_only,
            by_segment=config.memory is not None,
        )
        if rules.measured:
            self.programs.append(program)
        slices = slices_taken(traced)
        new = not self._slices >= slices or any(site.id not in self.sites for site in traced.sites)
        if config.keep_graphs or new or not self.converted:
            self.converted.append(converted)
        self._slices |= slices
        for site in traced.sites:
            self.sites.setdefault(site.id, site)
        constants = {value.name for value in program.free_of(program.data) if isinstance(value, fx.Node)}
        self._data |= {site.id for site in traced.sites if site.node not in constants}
        return executor

    def _follow(self, traced: TracedModel) -> None:
        """Apply the effects of a call on Python state to a copy of the user's model."""
        if not any(change.plain for change in traced.changes):
            return
        if not self._is_copy or traced.reads:  # with reads, the model also runs in its earlier state
            tensors = named_tensors(self.model).values()
            self.model = structural_copy(self.model, {id(t): t for t in tensors})
            self._executors, self._is_copy = TraceCache(), True
        apply_changes(traced.changes, PythonState(self.model))


def _for_carried_inputs(rules: RuleSet, batch: Batch) -> tuple[RuleSet, Batch]:
    """Return the rules and inputs of a call whose inputs come from an earlier call.

    Such inputs keep their dtype where the user casts the inputs once, as for ``model.half()``. A policy that
    also casts outputs casts the inputs of each call. A policy that acts on the FP32 graph traces the model
    with FP32 inputs.
    """
    weights = rules.file.weights
    if rules.file.level == "graph":
        return rules, batch.mapped(widened_tensor)
    if weights.inputs == "lower" and weights.outputs == "unchanged":
        weights = weights.model_copy(update={"inputs": "unchanged"})
        file = rules.file.model_copy(update={"weights": weights})
        rules = RuleSet(file, rules.ops, rules.environment, rules.location)
    return rules, batch
