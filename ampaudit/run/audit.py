"""Traces, converts and runs a model over all batches, and merges what was seen into one record."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ampaudit.convert import ConvertedModel, convert
from ampaudit.errors import InputError, ReferenceBroken, RunFailed, first_line
from ampaudit.formats import NumberFormat
from ampaudit.policy import Measurement, RuleSet, plain_fp32
from ampaudit.run.backends import Backend, choose_backend
from ampaudit.run.blame import Faults
from ampaudit.run.evidence import measurements, weight_peaks
from ampaudit.run.lockstep import LockStep, Pair
from ampaudit.run.meter import Measured, Meter
from ampaudit.run.program import compile_program
from ampaudit.run.record import Origin, RunRecord
from ampaudit.run.repair import RepairingMeter
from ampaudit.sites import SiteId
from ampaudit.source.interface import Batch
from ampaudit.trace import Site, trace
from ampaudit.trace.capture import input_signature
from ampaudit.trace.entry import tensor_leaves

__all__ = ["Audit", "Plan", "Runner", "measure", "raised_sites", "run_audit"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        rules: the policy, ``None`` for the FP32 run alone (``--ranges``).
        author_rules: the meaning of the author's own autocast regions.
        number_format: the 16-bit format.
        device: where to run.
        seed: of every random number drawn during the run.
        backend: overrides the device's usual backend.
        measured: what an earlier run saw, for the policy's second phase.
        reference_only: run FP32 alone, on the graph that the policy makes.
    """

    rules: RuleSet | None
    author_rules: RuleSet
    number_format: NumberFormat
    device: torch.device
    seed: int = 0
    backend: Backend | None = None
    measured: Mapping[SiteId, Measurement] = field(default_factory=dict)
    reference_only: bool = False


@dataclass(frozen=True, slots=True)
class Audit:
    """The record of a run with the sites it is about, in graph order.

    ``raised`` are the sites where the policy's measured rules decided, after a first pass had measured them.
    """

    record: RunRecord
    sites: tuple[Site, ...]
    converted: ConvertedModel
    parameter_free: frozenset[str]
    raised: tuple[SiteId, ...] = ()


class Runner:
    """Keeps one executor per input signature: a batch of another shape is traced anew."""

    def __init__(self, model: nn.Module, plan: Plan, record: RunRecord) -> None:
        self._model = model
        self._plan = plan
        self.record = record
        self._backend = plan.backend or choose_backend(plan.device)
        self._executors: dict[tuple[Any, ...], LockStep] = {}
        self.sites: dict[str, Site] = {}
        self.parameter_free: set[str] = set()
        self._given: dict[tuple[Any, ...], dict[str, float]] = {}
        self.converted: ConvertedModel | None = None
        record.backend = self._backend.name

    def run(self, batch: Batch, number: int) -> None:
        """Trace if need be, run, and run again with repairs if something went wrong."""
        executor = self.executor(batch)
        tensors = tensor_leaves(batch.args, batch.kwargs)
        _refuse_broken_inputs(tensors, number)
        started = time.perf_counter()
        meter = self._meter()
        outputs = self._pass(executor, tensors, meter, number)
        measured = list(meter.results())
        self._note_inputs(executor, tensors, batch)
        self._refuse_broken_reference(outputs, measured, number)
        faults = Faults(
            executor.program,
            measured,
            self._plan.number_format.max,
            lambda node: executor.given_peak(node, tensors),
        )
        self.record.masks |= faults.masks
        self.record.by_design |= faults.by_design
        if faults.need_repair:
            repairing = RepairingMeter(self._meter(), faults.masks)
            self._pass(executor, tensors, repairing, number)
            meter, measured = repairing.meter, list(repairing.meter.results())
            self._note_origins(repairing.origins, faults, number)
        self._merge(meter, measured)
        self._add_seconds("run", started)

    def executor(self, batch: Batch) -> LockStep:
        """The executor for batches of this signature, traced on first use."""
        signature = input_signature(batch.args, batch.kwargs)
        if signature in self._executors:
            return self._executors[signature]
        started = time.perf_counter()
        plan = self._plan
        rules = plan.rules or plain_fp32()
        author_rules = plan.author_rules if plan.rules else plain_fp32()
        traced = trace(
            self._model, batch.args, batch.kwargs, rules, author_rules, plan.number_format, plan.measured
        )
        converted = convert(traced)
        self._add_seconds("trace", started)
        program = compile_program(traced, plan.device)
        executor = LockStep(
            program, converted, self._backend, plan.device, reference_only=self._reference_only
        )
        self._executors[signature] = executor
        self.converted = self.converted or converted
        for site in traced.sites:
            self.sites.setdefault(site.id, site)
        free = {node.name for node in program.parameter_free}
        self.parameter_free |= {site.id for site in traced.sites if site.node in free}
        return executor

    def _meter(self) -> Meter:
        return Meter(self._plan.number_format, self._backend, local=not self._reference_only)

    @property
    def _reference_only(self) -> bool:
        return self._plan.rules is None or self._plan.reference_only

    def _pass(
        self, executor: LockStep, tensors: list[torch.Tensor], watch: Meter | RepairingMeter, number: int
    ) -> list[Pair]:
        devices = [self._plan.device] if self._plan.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), exact_float32(), memory_errors(self._plan.device):
            torch.manual_seed(self._plan.seed + number)
            return executor.run(tensors, watch)

    def _note_inputs(self, executor: LockStep, tensors: list[torch.Tensor], batch: Batch) -> None:
        if self._plan.rules is None or not self._plan.rules.measured:
            return
        seen = self._given.setdefault(input_signature(batch.args, batch.kwargs), {})
        floats = [node for node in executor.program.inputs if executor.is_given_float(node)]
        for node in floats:
            seen[node.name] = max(seen.get(node.name, 0.0), executor.given_peak(node, tensors))

    def measurements(self) -> dict[SiteId, Measurement]:
        """What the batches so far have shown, for the policy's second phase."""
        found: dict[SiteId, Measurement] = {}
        for signature, executor in self._executors.items():
            weights = weight_peaks(executor.program)
            found |= measurements(executor.program, self.record, self._given.get(signature, {}), weights)
        return found

    def _note_origins(self, origins: Sequence[SiteId], faults: Faults, number: int) -> None:
        known = {origin.site for origin in self.record.origins}
        for site in origins:
            if site not in known:
                self.record.origins.append(Origin(site, number, faults.poisoned_by(site)))

    def _merge(self, meter: Meter, measured: Sequence[Measured]) -> None:
        for row in measured:
            self.record.observation(row.site).merge(row.fields, row.elements)
        for site, error, signal, elements in meter.local_results():
            observation = self.record.observation(site)
            observation.local_err_sq += error
            observation.local_ref_sq += signal
            observation.local_elements += elements
        for name, statistics in meter.samples.results.items():
            self.record.observation(self.sites[name].id).samples.add(statistics)
        self.record.uncovered.update(meter.uncovered)
        self.record.batches += 1

    def _refuse_broken_reference(self, outputs: list[Pair], measured: list[Measured], number: int) -> None:
        if not any(_is_broken(reference) for reference, _ in outputs):
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


def run_audit(model: nn.Module, batches: Sequence[Batch], plan: Plan, progress: Progress) -> Audit:
    """Audit a model over batches.

    Raises:
        TraceFailed: the model cannot be exported.
        RunFailed: it cannot be run, for lack of memory or of a kernel.
        ReferenceBroken: FP32 is not finite either.
        InputError: an input holds NaN or infinity, or there is no batch.
    """
    if not batches:
        raise InputError("there is no batch to run", hint="make batches() yield at least one batch")
    runner = _run_all(model, batches, plan, progress, "auditing")
    raised: tuple[SiteId, ...] = ()
    if plan.rules is not None and plan.rules.measured:
        seen = runner.measurements()
        raised = raised_sites(plan.rules, runner.sites.values(), seen)
        if raised:
            spent = sum(runner.record.seconds.values())
            del runner  # its working copies
            runner = _run_all(model, batches, replace(plan, measured=seen), progress, "auditing again")
            runner.record.seconds = {"first pass": spent, **runner.record.seconds}
    assert runner.converted is not None
    sites = tuple(runner.sites.values())
    return Audit(runner.record, sites, runner.converted, frozenset(runner.parameter_free), raised)


def _run_all(
    model: nn.Module, batches: Sequence[Batch], plan: Plan, progress: Progress, phase: str
) -> Runner:
    runner = Runner(model, plan, RunRecord(device=plan.device.type, backend=""))
    for number, batch in enumerate(batches):
        progress(phase, number, len(batches))
        runner.run(batch, number)
    progress(phase, len(batches), len(batches))
    return runner


def measure(
    model: nn.Module, batches: Sequence[Batch], plan: Plan, progress: Progress
) -> tuple[dict[SiteId, Measurement], tuple[Site, ...]]:
    """What the batches show to the policy's measured rules, and the sites that it is about.

    Raises:
        AuditError: the same as ``run_audit``.
    """
    runner = _run_all(model, batches, plan, progress, "measuring")
    return runner.measurements(), tuple(runner.sites.values())


def raised_sites(
    rules: RuleSet, sites: Iterable[Site], seen: Mapping[SiteId, Measurement]
) -> tuple[SiteId, ...]:
    """Sites where what was measured changes the policy's decision."""
    ours = (s for s in sites if s.facts and s.id in seen and s.decision.reason != "author")
    facts = [(s.id, replace(s.facts, measurement=seen[s.id])) for s in ours if s.facts]
    return tuple(site for site, fact in facts if rules.raises(fact))


def _is_broken(output: object) -> bool:
    """NaN, +inf, or nothing but -inf; some -inf is how masked scores and log-probabilities look."""
    if not isinstance(output, torch.Tensor) or not output.is_floating_point() or output.numel() == 0:
        return False
    return bool((output.isnan() | (output == torch.inf)).any() or (output == -torch.inf).all())


def _refuse_broken_inputs(tensors: list[torch.Tensor], number: int) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.is_floating_point() and bool((tensor.isnan() | (tensor == torch.inf)).any()):
            raise InputError(
                f"input[{index}] of batch {number} holds NaN or infinity", hint="clean the input"
            )


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Switch TF32 off: the reference is float32."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn
    torch.backends.cuda.matmul.allow_tf32 = False
    # cudnn.flags also works where somebody has locked the global flags
    kept = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
    try:
        with cudnn.flags(allow_tf32=False, benchmark_limit=cudnn.benchmark_limit, **kept):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul


@contextlib.contextmanager
def memory_errors(device: torch.device) -> Iterator[None]:
    """Out of memory, and ops that the device has no kernel for, as errors with a next step."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunFailed(
            f"out of memory on {device}: the audit holds the FP32 and the 16-bit run at once",
            hint="use a smaller batch, --ranges (one FP32 run), or --device cpu",
        ) from error
    except (RuntimeError, NotImplementedError) as error:
        text = first_line(error)
        if "allocate memory" in text:
            raise RunFailed(f"out of memory: {text}", hint="use a smaller batch, or --ranges") from error
        raise RunFailed(f"the converted model could not be run on {device}: {text}") from error
